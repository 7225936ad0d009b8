"""The rules of collectives: a gather unites what is held, a reduction what is summed, each piece once."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.common.errors import About
from shardlab.language import Holds, Kind, OpKind, Refused, Sizes, Spec
from shardlab.language.rules import collectives
from shardlab.language.rules.kinds import WHOLE
from tests.language.rules.toys import Refusals, Toy, is_refused, shard
from tests.support.refusing import told

TOY = Toy(Sizes.puzzle(2))
ALL = 0b1111
"""The step's four microbatches."""

GATHER, REDUCE, SCATTER = OpKind.ALL_GATHER, OpKind.ALL_REDUCE, OpKind.REDUCE_SCATTER
meet = TOY.meet


def weight(holds: Holds = WHOLE, step: int = 0) -> Spec:
    return TOY.spec_of(Kind.WEIGHT, 1, 0, holds, step)


def activation(cells: int) -> Spec:
    return TOY.spec_of(Kind.ACTIVATION, 1, cells)


def gradient(cells: int = ALL, holds: Holds = WHOLE) -> Spec:
    return TOY.spec_of(Kind.GRAD_WEIGHT, 1, cells, holds)


def scalar(parts: int, of: int) -> Spec:
    return TOY.spec_of(Kind.SCALAR, 0, 0, Holds(parts, of))


def test_all_gather_unites_holds() -> None:
    assert meet(GATHER, *[weight(shard(n, 3)) for n in (2, 0, 1)]) == [weight()] * 3
    mixed = [weight(Holds(0b1, 2)), weight(Holds(0b1000, 4)), weight(Holds(0b0100, 4))]
    assert meet(GATHER, *mixed)[0].holds.complete


def test_all_gather_of_rows_remembers_whose_they_were() -> None:
    for first, second in ((0b01, 0b10), (0b10, 0b01), (0b1001, 0b0110)):
        made = meet(GATHER, activation(first), activation(second))
        assert made == [activation(first | second)._replace(joined=((first, ()), (second, ())))] * 2
        assert collectives.deal(made[0], 2) == [(first, ()), (second, ())]


def test_rows_that_nobody_put_together_are_dealt_in_even_runs() -> None:
    assert collectives.deal(activation(0b1111), 2) == [(0b0011, ()), (0b1100, ())]
    assert collectives.deal(activation(0b0111), 2) is None


def test_all_reduce_unites_sums() -> None:
    assert meet(REDUCE, *[gradient(1 << n) for n in range(4)]) == [gradient()] * 4


def test_reduce_scatter_unites_sums_and_splits_holds() -> None:
    made = meet(SCATTER, *[gradient(1 << n) for n in range(4)])
    assert made == [gradient(ALL, shard(n, 4)) for n in range(4)]


@given(st.permutations(range(4)), st.integers(1, 4))
def test_gathering_what_was_scattered_gives_the_reduced_gradient(order: list[int], members: int) -> None:
    pieces = [gradient(1 << n) for n in order[:members]]
    gathered = meet(GATHER, *meet(SCATTER, *pieces))[0]
    reduced = meet(REDUCE, *pieces)[0]
    assert gathered.cells == reduced.cells
    assert gathered.holds.same(reduced.holds)


def some_specs() -> st.SearchStrategy[Spec]:
    return st.builds(
        TOY.spec_of,
        st.sampled_from([Kind.WEIGHT, Kind.GRAD_WEIGHT]),
        st.integers(0, 1),
        st.integers(0, 7),
        st.integers(1, 3).flatmap(lambda of: st.integers(1, (1 << of) - 1).map(lambda mask: Holds(mask, of))),
        st.integers(0, 1),
    )


def with_holds(spec: Spec, mask: int) -> Spec:
    return spec._replace(form=spec.form.but(holds=Holds(mask, spec.holds.of)))


alike = some_specs().flatmap(
    lambda first: st.lists(
        st.one_of(
            st.just(first),
            st.integers(0, 7).map(lambda cells: first._replace(cells=cells)),
            st.integers(1, (1 << first.holds.of) - 1).map(lambda mask: with_holds(first, mask)),
            some_specs(),
        ),
        max_size=2,
    ).map(lambda rest: [first, *rest])
)


@given(st.sampled_from([REDUCE, GATHER]), alike)
def test_a_collective_says_what_the_rule_for_its_members_says(kind: OpKind, members: list[Spec]) -> None:
    names = [f"rank {rank}" for rank in range(len(members))]
    rule = collectives.gather if kind is GATHER else collectives.reduce
    name = members[0].about(kind.value)
    assert outcome(lambda: [rule(name, members, names)] * len(members)) == outcome(lambda: meet(kind, *members))


def outcome(call: Callable[[], list[Spec]]) -> list[Spec] | str:
    try:
        return call()
    except Refused as refusal:
        return str(refusal)


@given(alike)
def test_a_sum_counts_every_contribution_once(members: list[Spec]) -> None:
    try:
        total = meet(REDUCE, *members)[0]
    except Refused:
        return
    assert total.cells == sum(member.cells for member in members), "a sum of disjoint bit sets is their union"
    assert all(member.holds.same(total.holds) for member in members)


@given(alike)
def test_a_gathered_value_holds_every_piece_once(members: list[Spec]) -> None:
    try:
        total = meet(GATHER, *members)[0]
    except Refused:
        return
    shares = sum(Fraction(member.holds.pieces, member.holds.of) for member in members)
    assert Fraction(total.holds.pieces, total.holds.of) == shares
    assert all(total.holds.contains(member.holds) for member in members)


@given(st.permutations([1, 2, 4, 8]), st.integers(1, 4))
def test_rows_put_together_and_dealt_again_are_each_ones_own(order: list[int], members: int) -> None:
    pieces = [activation(cells) for cells in order[:members]]
    whole = meet(GATHER, *pieces)[0]
    assert collectives.scatter(About("scatter"), whole, members) == pieces


REFUSALS: Refusals = {
    "all_reduce, replicas' squares": (
        lambda: meet(REDUCE, *[scalar(0b1, 2)] * 2, ranks=[4, 6]),
        told("counted twice", doubled=(0,)),
    ),
    "all_gather, scalars": (
        lambda: meet(GATHER, scalar(0b01, 2), scalar(0b10, 2)),
        told("wrong kind"),
    ),
    "reduce_scatter, scalars": (
        lambda: meet(SCATTER, scalar(0b01, 2)),
        told("wrong kind"),
    ),
    "all_reduce, twice": (
        lambda: meet(REDUCE, gradient(0b1), gradient(2), gradient(3), ranks=[0, 2, 4]),
        told("counted twice", layer=1, doubled=(0, 1)),
    ),
    "all_reduce, kind": (
        lambda: meet(REDUCE, activation(1), activation(2)),
        told("no term", layer=1),
    ),
    "all_reduce, weights": (
        lambda: meet(REDUCE, weight(), weight()),
        told("no term", layer=1),
    ),
    "reduce_scatter, twice": (
        lambda: meet(SCATTER, gradient(), gradient(), ranks=[3, 5]),
        told("counted twice", layer=1, doubled=(0, 1, 2, 3)),
    ),
    "all_gather, slices overlap": (
        lambda: meet(GATHER, *[weight(shard(1, 2))] * 2),
        told("pieces overlap", layer=1, doubled=(1,)),
    ),
    "all_gather, rows overlap": (
        lambda: meet(GATHER, *[activation(0b11)] * 2),
        told("pieces overlap", layer=1, doubled=(0, 1)),
    ),
    "all_gather, steps": (
        lambda: meet(GATHER, weight(shard(0, 2)), weight(shard(1, 2), step=1)),
        told("other values", layer=1),
    ),
    "all_gather, sums": (
        lambda: meet(GATHER, gradient(0b1, shard(0, 2)), gradient(0b10, shard(1, 2))),
        told("other sums", layer=1),
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_breaks_a_rule_is_refused_with_what_was_given_and_wanted(case: str) -> None:
    assert is_refused(REFUSALS[case]).about.startswith(case.split(",")[0]), "a refusal begins with the op's name"
