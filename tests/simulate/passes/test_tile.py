"""Layers in tiles: only one is gathered at a time, and the numbers stay."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlab.check import Checked, check
from shardlab.common.errors import UserError
from shardlab.language import Kind, Mesh, OpKind, Sizes, trace
from shardlab.language.pass_names import tiles_of
from shardlab.language.rules.spec import Spec
from shardlab.simulate.passes import PASSES, run_named, run_passes
from shardlab.simulate.passes.tile import TiledTape
from shardlab.strategies.load import load
from shardlab.strategies.plan.plan import Plan
from shardlab.strategies.plan.program import program_from_plan
from tests.support.passing import is_right, is_right_everywhere
from tests.support.random_plans import MODELS, Planned, random_plan
from tests.support.thorough import examples

SHARDED = Plan(
    Mesh(dp_shard=2), shard_parameters=("dp_shard",), shard_gradients=("dp_shard",), shard_optimizer=("dp_shard",)
)


def cut(plan: Plan, tiles: int, blocks: int = 2, microbatches: int = 2) -> Checked:
    """A plan's program on half-blocks that are cut into tiles."""
    sizes = replace(Sizes.half_blocks(blocks), tiles=tiles)
    return check(trace(program_from_plan(plan), plan.mesh, sizes, microbatches))


def in_tiles(subject: Planned, tiles: int) -> Checked:
    sizes = subject.plan.counted(MODELS[subject.model](subject.layers))
    sizes = replace(sizes, whole_matrices=subject.muon, tiles=tiles)
    return check(trace(program_from_plan(subject.plan), subject.plan.mesh, sizes, subject.microbatches))


@settings(max_examples=examples(30))
@given(st.integers(0, 10**6))
def test_any_plan_in_half_blocks_is_right_in_tiles_and_after_other_passes(seed: int) -> None:
    """Whether weights are gathered or kept whole, and whatever is computed again or in two halves."""
    random = Random(seed)
    tiles = random.choice([2, 3])
    subject = random_plan(seed, random.choice(["halves", "tied"]), ranks=4 if seed % 2 else 2)
    if subject.plan.mesh.tp * tiles > 6:
        return  # the judge's layers have fewer columns
    program = in_tiles(subject, tiles)
    tapes = [TiledTape(tape, program.specs[rank], program.program) for rank, tape in enumerate(program.program.tapes)]
    tiled = is_right(replace(program.program, tapes=[tape.tape for tape in tapes]))
    others = [listed_pass for listed_pass in PASSES.values() if listed_pass.name != "tile"]
    results = run_passes(tiled, random.choices(others, k=2))
    is_right(results[-1].checked.program)


def largest(program: Checked, kind: Kind) -> int:
    """The most elements of a layer's value of a kind that any op makes."""
    sizes = program.program.sizes
    return max(sizes.elements(spec) for specs in program.specs for spec in specs.values() if spec.kind is kind)


@pytest.mark.parametrize("tiles", [2, 3, 4])
def test_no_op_makes_more_than_a_tile_of_a_weight_or_a_gradient(tiles: int) -> None:
    program = cut(SHARDED, tiles)
    original, result = run_named(program, f"tile={tiles}")
    is_right_everywhere(result.checked.program)
    for kind in (Kind.WEIGHT, Kind.GRAD_WEIGHT):
        assert largest(result.checked, kind) == -(-largest(program, kind) // tiles)
    assert result.peak < original.peak


def alive(program: Checked, kind: Kind) -> int:
    """The most gathered weights, or gradients of weights that were not reduced, that a rank has at a time."""
    (tape, *_), (specs, *_) = program.program.tapes, program.specs

    def counts(spec: Spec) -> bool:
        return spec.kind is kind and bool(program.program.sizes.signatures[spec.layer].cut) and spec.holds.of < 8

    now = largest = 0
    for op in tape:
        ends = [op.inputs[place] for place in op.kind.row.ends]
        now += sum(counts(specs[number]) for number in op.outputs) - sum(counts(specs[number]) for number in ends)
        largest = max(largest, now)
    return largest


def test_one_tile_is_gathered_and_one_gradient_unreduced_at_a_time() -> None:
    """Of four tiles of each layer; a rank's own slice of one is an eighth."""
    (_, result) = run_named(cut(SHARDED, 4), "tile=4")
    assert (alive(result.checked, Kind.WEIGHT), alive(result.checked, Kind.GRAD_WEIGHT)) == (1, 1)


def test_a_layer_in_tiles_is_as_much_work_and_communicates_as_much() -> None:
    """Each collective is of one tile, so there are so many times as many."""
    original = cut(SHARDED, 4)
    (_, result) = run_named(original, "tile=4")

    def count(program: Checked, kind: OpKind) -> int:
        layers = program.program.sizes.signatures
        return sum(op.kind is kind and bool(layers[op.layer].cut) for op in program.program.tapes[0])

    for kind in (OpKind.FORWARD, OpKind.BACKWARD, OpKind.REDUCE_SCATTER, OpKind.UPDATE):
        assert count(result.checked, kind) == 4 * count(original, kind)


def test_gathers_ahead_are_found_again() -> None:
    _, tiled, ahead = run_named(cut(SHARDED, 2), "tile=2,prefetch")
    assert ahead.end < tiled.end


def test_where_nothing_is_gathered_or_nothing_can_be_cut_it_is_said() -> None:
    whole = check(trace(load("zero-3").program, 2, 4, 2))
    with pytest.raises(UserError, match=r"the pass tile has nothing to do: the program was not traced for .* 2 tiles"):
        run_named(whole, "tile=2")
    with pytest.raises(UserError, match=r"no layer that can be cut is gathered for its use, so ranks keep .* whole"):
        run_named(cut(Plan(Mesh(dp_shard=2)), 2), "tile=2")
    sizes = replace(Sizes.context_blocks(1), tiles=2)
    around = check(trace(program_from_plan(replace(SHARDED, recompute="selective")), SHARDED.mesh, sizes, 2))
    with pytest.raises(UserError, match="no tiles are made of experts, of layers around attention between slices"):
        run_named(around, "tile=2")


def test_activations_of_layers_in_tiles_stay() -> None:
    with pytest.raises(UserError, match="an activation that is read by several tiles cannot leave"):
        run_named(cut(SHARDED, 2), "tile=2,offload=activations:host")


def test_so_many_tiles_that_ops_are_too_many_are_refused_at_once() -> None:
    with pytest.raises(UserError, match=r"4 layers .* in 1,000,000 tiles come to .* ops or more"):
        load("zero-3", "tile=1000000").require_ops(4, 4, 4)


def test_a_pass_that_is_not_asked_for_cuts_nothing() -> None:
    assert tiles_of("all") == tiles_of("none") == 1
    assert tiles_of("defer=3,tile=4") == 4
    assert "tile" not in [result.name for result in run_named(cut(SHARDED, 2), "all")]


def test_a_program_of_whole_blocks_cannot_be_cut() -> None:
    entry = load("fsdp", "tile=2")
    with pytest.raises(UserError, match=r"the pass tile cuts blocks into half-blocks, .* take a plan, such as zero-3"):
        entry.puzzle(4)
    assert load("zero-3", "tile=2").puzzle(4).tiles == 2
