"""What tracing believes of a value is what the check derives from the tapes alone, on larger meshes as well."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from shardlab.check import check
from shardlab.language import Spec, World
from tests.support.passing import is_right
from tests.support.random_programs import Shape, program_of, random_program, shapes
from tests.support.thorough import examples


@settings(max_examples=examples(100))
@given(shapes())
def test_tracing_and_the_check_give_every_value_one_spec(shape: Shape) -> None:
    world = World(shape.mesh, shape.layers, shape.microbatches)
    checked = check(world.run(program_of(shape)))
    for rank, specs in zip(world.ranks, checked.specs, strict=True):
        values = enumerate(rank._values)
        believed = {number: value if isinstance(value, Spec) else value.spec for number, value in values if value}
        assert believed == {number: specs[number] for number in believed}


@pytest.mark.parametrize("mesh", [(8, 1, 1), (2, 2, 2), (1, 2, 4), (4, 2, 2), (1, 4, 4)])
@pytest.mark.parametrize("seed", range(5))
def test_programs_of_8_to_16_ranks_pass_and_are_right(mesh: tuple[int, int, int], seed: int) -> None:
    pp, replicate, shard = mesh
    program = random_program(Shape(pp, replicate, shard, pp + seed, replicate * shard * 2 + seed, seed))
    is_right(program)
