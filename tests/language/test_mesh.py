"""The ranks as a grid: along every axis, groups part the world."""

from __future__ import annotations

import itertools
import math
import pickle
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardlab.language import AXES, Mesh, UserError
from shardlab.language.mesh import axes_between

small_sizes = st.lists(st.integers(1, 3), min_size=len(AXES), max_size=len(AXES)).filter(lambda s: math.prod(s) <= 64)
meshes = small_sizes.map(lambda sizes: Mesh(**dict(zip(AXES, sizes, strict=True))))


@given(meshes, st.sampled_from(AXES))
def test_the_groups_of_an_axis_part_the_world(mesh: Mesh, axis: str) -> None:
    groups = {mesh.group(rank, axis) for rank in range(mesh.world)}
    members = [rank for group in groups for rank in group.ranks]
    assert sorted(members) == list(range(mesh.world))
    assert {len(group.ranks) for group in groups} == {mesh.sizes()[axis]}


@given(meshes, st.sampled_from(AXES))
def test_a_group_differs_only_along_its_axis_and_stands_in_its_order(mesh: Mesh, axis: str) -> None:
    for rank in range(mesh.world):
        group = mesh.group(rank, axis)
        assert group.ranks[mesh.coordinate(rank, axis)] == rank
        assert [mesh.coordinate(member, axis) for member in group.ranks] == list(range(len(group.ranks)))
        for other in AXES:
            if other != axis:
                assert {mesh.coordinate(member, other) for member in group.ranks} == {mesh.coordinate(rank, other)}


@given(meshes)
def test_rank_numbers_count_through_the_grid_with_the_last_axis_fastest(mesh: Mesh) -> None:
    grid = itertools.product(*(range(size) for size in mesh.sizes().values()))
    for rank, place in enumerate(grid):
        assert tuple(mesh.coordinate(rank, axis) for axis in AXES) == place


def test_axes_stand_outermost_first() -> None:
    assert AXES == ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
    mesh = Mesh(pp=2, dp_shard=3)
    assert mesh.world == 6
    assert mesh.group(4, "dp_shard").ranks == (3, 4, 5)
    assert mesh.group(4, "pp").ranks == (1, 4)
    assert mesh.group(4, "tp").ranks == (4,)


class Size(IntEnum):
    """Number with a name."""

    TWO = 2


@pytest.mark.parametrize("two", [np.int64(2), np.uint8(2), np.array(2), torch.tensor(2), Size.TWO])
def test_a_size_may_be_any_integer_and_is_an_int(two: Any) -> None:
    mesh = Mesh(dp_shard=two)
    assert mesh == Mesh(dp_shard=2)
    assert type(mesh.dp_shard) is int


@pytest.mark.parametrize("size", [True, np.bool_(True), 2.0, np.float64(2), "2", None, np.array([2]), [2]])
def test_a_size_that_is_no_integer_is_refused(size: Any) -> None:
    with pytest.raises(UserError, match=r"^axis tp has .* ranks; give a whole number$"):
        Mesh(tp=size)


def test_an_unknown_axis_is_refused() -> None:
    with pytest.raises(UserError, match=r"there is no argument 'dp'; did you mean dp_shard\?"):
        Mesh(**{"dp": 2})


def test_equal_groups_are_one_object_also_after_pickling() -> None:
    group = Mesh(pp=2, dp_shard=2).group(1, "pp")
    assert group is Mesh(pp=2, dp_shard=2).group(3, "pp")
    assert pickle.loads(pickle.dumps(group)) is group
    assert str(group) == "pp"


def test_groups_of_other_axes_are_other_groups_even_with_the_same_ranks() -> None:
    assert Mesh(pp=2).group(0, "pp") != Mesh(dp_shard=2).group(0, "dp_shard")


@pytest.mark.parametrize("size", [0, -1])
def test_an_axis_without_ranks_is_refused_by_name(size: int) -> None:
    with pytest.raises(UserError, match=f"axis tp has {size} ranks; every axis of a mesh has at least 1"):
        Mesh(tp=size)


@pytest.mark.parametrize("ask", [Mesh().coordinate, Mesh().group])
def test_an_unknown_axis_is_refused_with_the_axes_there_are(ask: object) -> None:
    assert callable(ask)
    with pytest.raises(UserError, match=r"axis 'dp' is not an axis of a mesh; the axes are pp, dp_replicate, .*, ep"):
        ask(0, "dp")


@given(small_sizes, st.data())
def test_ranks_are_in_one_group_along_exactly_the_axis_between_them(sizes: list[int], data: st.DataObject) -> None:
    mesh = Mesh(*sizes)
    rank, other = (data.draw(st.integers(0, mesh.world - 1)) for _ in range(2))
    axes = axes_between(mesh, rank, other)
    assert all(mesh.coordinate(rank, axis) != mesh.coordinate(other, axis) for axis in axes)
    shared = [axis for axis in AXES if rank != other and other in mesh.group(rank, axis).ranks]
    assert shared == ([*axes] if len(axes) == 1 else [])
