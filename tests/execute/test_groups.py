"""Process groups are made in rounds in which all ranks count alike, however unequally many a rank is a member of."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardlab.execute.groups import rounds
from shardlab.program import Mesh, Op, OpKind, Program, Sizes
from shardlab.program.mesh import group_among


@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True), max_size=8))
def test_every_group_is_made_once_and_no_rank_is_in_two_of_a_round(ranks: list[list[int]]) -> None:
    groups = {group_among(tuple(each)) for each in ranks}
    tapes = [[Op(OpKind.ALL_REDUCE, 0, (0,), (1,), 0, group) for group in groups if r in group.ranks] for r in range(6)]
    made = rounds(Program(Mesh(dp_shard=6), 1, Sizes.puzzle(1), tapes))
    assert sorted(map(str, (group for each in made for group in each))) == sorted(map(str, groups))
    for each in made:
        members = [rank for group in each for rank in group.ranks]
        assert len(set(members)) == len(members)
