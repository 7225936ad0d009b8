"""When a plan's weights are gathered and freed: from the order in which they are used, and counted on the tape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from shardlab.program import Mesh, OpKind, Program, Sizes, trace
from shardlab.strategies.gathering import Use, uses
from shardlab.strategies.plan import Plan, Reshard
from shardlab.strategies.planned import planned
from shardlab.strategies.resolve import resolve
from shardlab.strategies.schedules import Action, Backward, BackwardInput, BackwardWeight, Forward

SHARD = ("dp_shard",)


def used(
    steps: Sequence[Action],
    reshard_after: Reshard,
    model: Sizes | None = None,
) -> list[Use]:
    """The uses of one rank, whose stage 0 has layers 0 and 1, and stage 1 layer 2; or, of another model, all layers."""
    plan = Plan(schedule="interleaved-1f1b", stages_per_rank=2, layers_per_stage=(2, 1), reshard_after=reshard_after)
    if model is not None:
        plan = Plan(reshard_after=reshard_after)
    return uses(resolve(plan, model or Sizes.puzzle(3), 1, 0), steps)


def kept(
    steps: Sequence[Action],
    reshard_after: Reshard,
    model: Sizes | None = None,
) -> str:
    """The layers in the order of their uses, each with + where it stays for the next one."""
    return " ".join(f"{layer}{'+' * keep}" for layer, keep, _ in used(steps, reshard_after, model))


TURNS = [Forward(0, 0), Forward(0, 1), Forward(1, 0), Backward(1, 0), Backward(0, 0), Backward(0, 1)]


@pytest.mark.parametrize(
    ("reshard_after", "expected"),
    [
        ("layer", "0 1 0 1 2+ 2 1 0 1 0"),
        ("stage", "0+ 1+ 0 1 2+ 2 1+ 0+ 1 0"),
        ("step", "0+ 1+ 0+ 1+ 2+ 2 1+ 0+ 1 0"),
    ],
)
def test_a_weight_stays_until_the_layers_the_stages_or_the_steps_end(reshard_after: Reshard, expected: str) -> None:
    assert kept(list(TURNS), reshard_after) == expected


def test_the_last_layer_of_a_forward_pass_stays_for_the_backward_pass_that_follows_at_once() -> None:
    assert kept([Forward(0, 0), Backward(0, 0)], "layer") == "0 1+ 1 0"


def test_the_weights_half_of_a_backward_pass_uses_no_weight() -> None:
    steps = [Forward(1, 0), BackwardInput(1, 0), BackwardWeight(1, 0)]
    assert used(steps, "step") == [Use(2, True, 0), Use(2, False, 0)]


def test_a_tied_head_uses_the_embeddings_weight() -> None:
    embedding_norm_head = Sizes.half_blocks(0, tied=True)
    assert kept([Forward(0, 0), Backward(0, 0)], "step", embedding_norm_head) == "0+ 1+ 0+ 0+ 1 0"


def fsdp(reshard_after: Reshard, schedule: str = "gpipe") -> Program:
    mesh = Mesh(pp=2, dp_shard=2)
    plan = Plan(mesh, schedule, None, (), SHARD, SHARD, SHARD, reshard_after=reshard_after)
    return trace(planned(plan), mesh, 4, 6)


def gathers(program: Program) -> set[int]:
    """How often a rank gathers a layer's weight, over all ranks and layers."""
    counts = [Counter(op.layer for op in tape if op.kind is OpKind.ALL_GATHER) for tape in program.tapes]
    return {count for of_layers in counts for count in of_layers.values()}


def test_gathers_on_the_tape_are_as_many_as_the_plan_says() -> None:
    """Three microbatches, forward and backward; the last layer's forward and backward follow each other only once."""
    assert gathers(fsdp("step")) == {1}
    assert max(gathers(fsdp("layer"))) == 6
    assert gathers(fsdp("stage")) == {1}, "GPipe never leaves the only stage of a rank"
    assert 1 < max(gathers(fsdp("stage", "breadth-first"))) < 6
