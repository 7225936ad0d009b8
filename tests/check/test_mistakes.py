"""Programs with one mistake each are refused in a sentence with the place, the value found and the value expected."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from shardlab.check import check
from shardlab.language import Deadlock, Holds, Mesh, Op, OpKind, Program, Rank, Strategy, Value, trace
from shardlab.simulate.timeline.timeline import traffic
from shardlab.strategies.ddp import ddp
from shardlab.strategies.expert_parallel import expert_parallel
from tests.check.casting_programs import RIGHT, gradients_in_half
from tests.check.expert_programs import combined_apart, combined_apart_mesh
from tests.language.tapes import Lines, refused
from tests.support.interpreter import judge
from tests.support.passing import is_right_everywhere
from tests.support.random_plans import routed
from tests.support.refusing import ExpectedRefusal, refusal_by, refuses

LAYERS, MICROBATCHES = 2, 2


def load(rank: Rank, shard: int = 0, of: int = 1) -> None:
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l, shard, of)


def ahead(rank: Rank, microbatches: list[int]) -> None:
    """Run all layers forward, and the loss."""
    rank.activations[0] = rank.load_batch(microbatches)
    for l in rank.layers:
        rank.activations[l + 1] = rank.forward(l, rank.activations[l], rank.weights[l])
    rank.grad_activations[LAYERS] = rank.loss(rank.activations.pop(LAYERS))


def back(rank: Rank, l: int) -> None:
    rank.grad_weights[l], rank.grad_activations[l] = rank.backward(
        l, rank.activations[l], rank.grad_activations[l + 1], rank.weights[l]
    )


def update(rank: Rank, l: int) -> None:
    rank.weights[l], rank.opt_states[l] = rank.update(l, rank.grad_weights[l], rank.weights[l], rank.opt_states[l])


def gradients(rank: Rank, microbatches: list[int]) -> None:
    load(rank)
    ahead(rank, microbatches)
    for l in reversed(rank.layers):
        back(rank, l)


async def right(rank: Rank) -> None:
    gradients(rank, [0, 1])
    for l in rank.layers:
        update(rank, l)


async def right_on_two(rank: Rank) -> None:
    gradients(rank, [rank.index])
    for l in rank.layers:
        rank.grad_weights[l] = await rank.all_reduce(rank.grad_weights[l])
        update(rank, l)


async def dropped_microbatch(rank: Rank) -> None:
    gradients(rank, [0])
    update(rank, 1)


async def dropped_update(rank: Rank) -> None:
    gradients(rank, [0, 1])
    update(rank, 0)


async def dropped_forward(rank: Rank) -> None:
    load(rank)
    rank.activations[0] = rank.load_batch([0, 1])
    rank.loss(rank.forward(0, rank.activations[0], rank.weights[0]))


async def dropped_send(rank: Rank) -> None:
    gradients(rank, [rank.index])
    if rank.index == 0:
        await rank.recv(source=1, expect=("grad_weights", 1, 1))


async def dropped_recv(rank: Rank) -> None:
    await right_on_two(rank)
    if rank.index == 1:
        rank.send(rank.weights[0], to=0)


async def duplicated_gradient(rank: Rank) -> None:
    gradients(rank, [0, 1])
    rank.grad_weights[1] + rank.grad_weights[1]


async def duplicated_load(rank: Rank) -> None:
    load(rank)
    load(rank)


async def duplicated_microbatch(rank: Rank) -> None:
    gradients(rank, [0, 1] if rank.index else [0])
    await rank.all_reduce(rank.grad_weights[0])


async def swapped_layers(rank: Rank) -> None:
    load(rank)
    rank.activations[0] = rank.load_batch([0, 1])
    rank.forward(1, rank.activations[0], rank.weights[1])


async def swapped_backward(rank: Rank) -> None:
    load(rank)
    ahead(rank, [0, 1])
    rank.backward(0, rank.activations[0], rank.grad_activations[2], rank.weights[0])


async def wrong_layers_weight(rank: Rank) -> None:
    load(rank)
    rank.activations[0] = rank.load_batch([0, 1])
    rank.forward(0, rank.activations[0], rank.weights[1])


async def wrong_layers_gradient(rank: Rank) -> None:
    gradients(rank, [0, 1])
    rank.update(0, rank.grad_weights[1], rank.weights[0], rank.opt_states[0])


async def wrong_layers_sum(rank: Rank) -> None:
    gradients(rank, [0, 1])
    rank.grad_weights[0] + rank.grad_weights[1]


async def wrong_microbatch(rank: Rank) -> None:
    load(rank)
    ahead(rank, [0])
    first = rank.activations[1]
    rank.activations["kept"] = first
    ahead(rank, [1])
    rank.backward(1, first, rank.grad_activations[2], rank.weights[1])


async def early_free(rank: Rank) -> None:
    load(rank)
    ahead(rank, [0, 1])
    weight = rank.weights[1]
    del rank.weights[1]
    rank.backward(1, rank.activations[1], rank.grad_activations[2], weight)


async def missing_reduce(rank: Rank) -> None:
    gradients(rank, [rank.index])
    update(rank, 1)


async def missing_gather(rank: Rank) -> None:
    load(rank, rank.index, rank.world)
    rank.activations[0] = rank.load_batch([rank.index])
    rank.forward(0, rank.activations[0], rank.weights[0])


async def double_reduce(rank: Rank) -> None:
    gradients(rank, [rank.index])
    rank.grad_weights[1] = await rank.all_reduce(rank.grad_weights[1])
    rank.grad_weights[1] = await rank.all_reduce(rank.grad_weights[1])


async def early_update(rank: Rank) -> None:
    gradients(rank, [0])
    update(rank, 0)
    gradients(rank, [1])


async def update_before_the_reduction_has_come(rank: Rank) -> None:
    gradients(rank, [rank.index])
    handle = rank.all_reduce(rank.grad_weights[0])
    rank.update(0, handle, rank.weights[0], rank.opt_states[0])  # pyright: ignore[reportArgumentType]


async def stale_weight(rank: Rank) -> None:
    gradients(rank, [0, 1])
    update(rank, 1)
    back(rank, 1)


async def stale_weight_after_its_update(rank: Rank) -> None:
    gradients(rank, [0, 1])
    old = rank.weights[1]
    update(rank, 1)
    rank.backward(1, rank.activations[1], rank.grad_activations[2], old)


async def second_update(rank: Rank) -> None:
    gradients(rank, [0, 1])
    update(rank, 0)
    update(rank, 0)


async def shards_update_the_wrong_slice(rank: Rank) -> None:
    gradients(rank, [rank.index])
    rank.grad_weights[0] = await rank.reduce_scatter(rank.grad_weights[0])
    update(rank, 0)


async def swapped_sends(rank: Rank) -> None:
    load(rank)
    if rank.index == 0:
        for m in (0, 1):
            rank.activations[0] = rank.load_batch([m])
            rank.activations[1, m] = rank.forward(0, rank.activations[0], rank.weights[0])
        for m in (1, 0):
            await rank.send(rank.activations[1, m], to=1)
    else:
        for m in (0, 1):
            rank.activations[1, m] = await rank.recv(source=0, expect=("activations", 1, m))


async def collectives_of_two_kinds(rank: Rank) -> None:
    gradients(rank, [rank.index])
    await (rank.all_reduce if rank.index else rank.reduce_scatter)(rank.grad_weights[1])


async def collectives_of_two_layers(rank: Rank) -> None:
    gradients(rank, [rank.index])
    await rank.all_reduce(rank.grad_weights[rank.index])


async def collective_left_out(rank: Rank) -> None:
    gradients(rank, [rank.index])
    if rank.index == 0:
        await rank.all_reduce(rank.grad_weights[1])


PLACES = r"rank \d, op \d+ "


@pytest.mark.parametrize(
    ("program", "ranks", "words"),
    [
        (
            dropped_microbatch,
            1,
            refusal_by("missing microbatches", rank=0, layer=1, missing=(1,)),
        ),
        (
            dropped_update,
            1,
            refusal_by("never updated", rank=0, layer=1),
        ),
        (
            dropped_forward,
            1,
            refusal_by("wrong layer", layer=2),
        ),
        (dropped_recv, 2, refusal_by("not received", layer=0)),
        (duplicated_gradient, 1, refusal_by("counted twice", layer=1, doubled=(0, 1))),
        (duplicated_load, 1, refusal_by("loaded twice", rank=0, layer=0)),
        (
            duplicated_microbatch,
            2,
            refusal_by("counted twice", layer=0, doubled=(0,)),
        ),
        (swapped_layers, 1, refusal_by("wrong layer", rank=0, layer=1)),
        (swapped_backward, 1, refusal_by("wrong layer", layer=0)),
        (wrong_layers_weight, 1, refusal_by("wrong layer", layer=0)),
        (wrong_layers_gradient, 1, refusal_by("wrong layer", layer=0)),
        (wrong_layers_sum, 1, refusal_by("other values", layer=0)),
        (wrong_microbatch, 1, refusal_by("other tokens", layer=1)),
        (early_free, 1, refusal_by("freed", layer=1)),
        (missing_reduce, 2, refusal_by("missing microbatches", layer=1, missing=(1,))),
        (
            missing_gather,
            2,
            refusal_by("partial weight", layer=0, missing=(1,)),
        ),
        (
            double_reduce,
            2,
            refusal_by("counted twice", layer=1, doubled=(0, 1)),
        ),
        (early_update, 1, refusal_by("missing microbatches", layer=0, missing=(1,))),
        (
            update_before_the_reduction_has_come,
            2,
            refusal_by("not awaited", layer=0),
        ),
        (
            stale_weight,
            1,
            refusal_by("stale weight", layer=1),
        ),
        (stale_weight_after_its_update, 1, refusal_by("replaced", layer=1)),
        (second_update, 1, refusal_by("wrong step", layer=0)),
        (
            shards_update_the_wrong_slice,
            2,
            refusal_by("missing slices", layer=0, missing=(0,)),
        ),
        (
            swapped_sends,
            2,
            refusal_by("other message", rank=1, layer=1),
        ),
        (
            collectives_of_two_kinds,
            2,
            refusal_by("other order", rank=1, layer=1),
        ),
        (
            collectives_of_two_layers,
            2,
            refusal_by("other order", rank=1, layer=1),
        ),
    ],
)
def test_one_mistake_is_refused_by_name(program: Strategy, ranks: int, words: ExpectedRefusal) -> None:
    with refuses(words) as refused:
        check(trace(program, ranks, LAYERS, MICROBATCHES))
    assert re.match(PLACES, str(refused.value))
    assert (refused.value.rank, refused.value.op) == tuple(map(int, re.findall(r"\d+", str(refused.value))[:2]))


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (dropped_send, "recv of grad_weights[1] of microbatch 1 from rank 1"),
        (collective_left_out, "all_reduce(grad_weights[1] (microbatch 0)) on world for rank 1"),
    ],
)
def test_a_part_left_out_is_a_deadlock_that_names_who_ended(program: Strategy, words: str) -> None:
    with pytest.raises(Deadlock) as deadlock:
        trace(program, 2, LAYERS, MICROBATCHES)
    assert deadlock.value.given == f"rank 0 waits in {words}; rank 1 has ended without it"


def test_slices_that_nobody_loads_are_named() -> None:
    async def half(rank: Rank) -> None:
        rank.weights[0], rank.opt_states[0] = rank.load_weights(0)
        rank.activations[0] = rank.load_batch([0, 1])
        rank.activations[1] = rank.forward(0, rank.activations[0], rank.weights[0])
        gradient = rank.loss(rank.activations[1])
        rank.grad_weights[0], _ = rank.backward(0, rank.activations[0], gradient, rank.weights[0])
        weight, state = rank.load_weights(0, 0, 2)
        update = rank.update(0, rank.grad_weights[0], weight, state)
        del rank.weights[0], rank.opt_states[0]
        rank.weights[0], rank.opt_states[0] = update

    with refuses("not kept", layer=0):
        check(trace(half, 1, 1, MICROBATCHES))

    async def idle(rank: Rank) -> None:
        rank.load_batch([0, 1])

    with refuses("not loaded", layer=0, missing=(0,)):
        check(trace(idle, 1, 1, MICROBATCHES))


@pytest.mark.parametrize(("program", "ranks"), [(right, 1), (right_on_two, 2)])
def test_the_same_programs_without_a_mistake_pass(program: Strategy, ranks: int) -> None:
    assert check(trace(program, ranks, LAYERS, MICROBATCHES)).backends() == ["gloo", "nccl"]


# Mistakes that expert parallelism invites are refused, whether a program makes them or a tape has them.


def program_of(strategy: Callable[[Rank], Awaitable[Any]] = expert_parallel) -> Program:
    async def program(rank: Rank) -> None:
        await strategy(rank)

    return trace(program, Mesh(ep=2), 2, 4)


async def without_reduction(rank: Rank) -> None:
    """Every rank keeps the gradient of its own microbatches, as if dense layers were experts."""

    async def as_it_is(value: Value) -> Value:
        return value

    rank.all_reduce = as_it_is  # pyright: ignore[reportAttributeAccessIssue]
    await expert_parallel(rank)


async def reducing_experts_too(rank: Rank) -> None:
    """Experts' gradients are reduced over all ranks, as if they were replicas."""
    backward = rank.backward

    def then_reduce(layer: int, *arguments: Any) -> tuple[Value, ...]:
        grad_weight, *gradients = backward(layer, *arguments)
        if "expert" in rank.sizes.signatures[layer].cut:
            rank.grad_weights[layer, "sum"] = grad_weight
            rank.all_reduce(grad_weight)
        return grad_weight, *gradients

    rank.backward = then_reduce  # pyright: ignore[reportAttributeAccessIssue]
    await expert_parallel(rank)


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (without_reduction, refusal_by("missing microbatches", layer=0, missing=(2, 3))),
        (reducing_experts_too, refusal_by("other slices", layer=3)),
    ],
)
def test_a_program_that_reduces_the_wrong_gradients_is_refused(
    strategy: Callable[[Rank], Awaitable[Any]], expected: ExpectedRefusal
) -> None:
    with refuses(expected):
        program_of(strategy)


def changed(change: Callable[[Program, int, Op], Op]) -> Program:
    """The program with every op replaced."""
    program = program_of()
    for rank, tape in enumerate(program.tapes):
        tape[:] = [change(program, rank, op) for op in tape]
    return program


def summed(program: Program, rank: int, op: Op) -> Op:
    return op._replace(kind=OpKind.ALL_REDUCE) if op.kind is OpKind.ALL_TO_ALL else op


def swapped(program: Program, rank: int, op: Op) -> Op:
    """Every rank loads the other one's experts."""
    loads = op.kind in (OpKind.LOAD_WEIGHT, OpKind.LOAD_OPT_STATE)
    if loads and program.sizes.signatures[op.layer].cut:
        return op._replace(holds=Holds(1 << 1 - rank, 2))
    return op


def all_on_one(program: Program, rank: int, op: Op) -> Op:
    """Two ranks read the same microbatches."""
    return op._replace(holds=Holds(0b0011, 4)) if op.kind is OpKind.LOAD_BATCH else op


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (summed, refusal_by("no term", layer=1)),
        (swapped, refusal_by("other pieces", layer=1)),
        (all_on_one, refusal_by("pieces overlap", layer=1, doubled=(0, 1))),
    ],
)
def test_a_tape_that_exchanges_the_wrong_buffers_is_refused(
    change: Callable[[Program, int, Op], Op], expected: ExpectedRefusal
) -> None:
    check(program_of())
    with refuses(expected):
        check(changed(change))


def test_parts_of_the_experts_that_lie_apart_may_be_combined() -> None:
    is_right_everywhere(trace(combined_apart, combined_apart_mesh(4), routed(2), 4))


# Values in other numbers than layers compute in: how they move and sum, and what they are refused for.


@pytest.mark.parametrize("program_of", RIGHT)
def test_values_cast_for_a_transfer_are_accepted_and_right(program_of: Strategy) -> None:
    program = trace(program_of, 2, 2, 4)
    assert check(program).backends() == ["gloo", "nccl"]
    assert judge(program).right


def test_a_value_has_the_bytes_of_what_it_was_cast_to() -> None:
    whole, half = (traffic(check(trace(program, 2, 2, 2)))[0].weights for program in (ddp, gradients_in_half))
    assert half == whole / 2


def load_layer(rank: Rank) -> None:
    rank.weights[0], rank.opt_states[0] = rank.load_weights(0)
    rank.activations[0] = rank.load_batch([0])


def run_forward(rank: Rank) -> None:
    load_layer(rank)
    rank.activations[1] = rank.forward(0, rank.activations[0], rank.weights[0])


def computed_in_half(rank: Rank) -> None:
    load_layer(rank)
    rank.forward(0, rank.activations[0], rank.cast(rank.weights[0], "bfloat16"))


def loss_in_half(rank: Rank) -> None:
    run_forward(rank)
    rank.loss(rank.cast(rank.activations[1], "float16"))


def unequal_sum(rank: Rank) -> None:
    run_forward(rank)
    grad = rank.loss(rank.activations[1])
    grad_weight, _ = rank.backward(0, rank.activations[0], grad, rank.weights[0])
    rank.add(rank.cast(grad_weight, "float64"), rank.zero_gradient(0))


def tokens(rank: Rank) -> None:
    load_layer(rank)
    rank.cast(rank.activations[0], "bfloat16")


def state(rank: Rank) -> None:
    load_layer(rank)
    rank.cast(rank.opt_states[0], "bfloat16")


def updated(rank: Rank) -> None:
    rank.weights[0], rank.opt_states[0] = rank.load_weights(0)
    rank.activations[0] = rank.load_batch(rank.microbatches)
    grad = rank.loss(rank.forward(0, rank.activations[0], rank.weights[0]))
    total, _ = rank.backward(0, rank.activations[0], grad, rank.weights[0])
    weight, _ = rank.update(0, total, rank.weights[0], rank.opt_states[0])
    rank.cast(weight, "bfloat16")


def unknown(rank: Rank) -> None:
    load_layer(rank)
    rank.cast(rank.weights[0], "bf16")


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (computed_in_half, refusal_by("other dtypes", layer=0)),
        (loss_in_half, refusal_by("other dtypes", layer=1)),
        (unequal_sum, refusal_by("other dtypes", layer=0)),
        (tokens, refusal_by("wrong kind", layer=0)),
        (state, refusal_by("wrong kind", layer=0)),
        (updated, refusal_by("wrong step", layer=0)),
        (unknown, refusal_by("other dtypes", layer=0)),
    ],
)
def test_casts_that_round_kept_values_or_mix_dtypes_are_refused(lines: Lines, expected: ExpectedRefusal) -> None:
    refused(lines, expected, layers=1)
