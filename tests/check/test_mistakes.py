"""Programs with one mistake each, refused in a sentence that says where, what was found and what was wanted."""

from __future__ import annotations

import re

import pytest

from shardlab.check import check
from shardlab.language import Deadlock, Rank, Strategy, trace
from tests.support.refusing import Told, refuses, told

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
    kept = rank.activations[1]
    rank.activations["kept"] = kept
    ahead(rank, [1])
    rank.backward(1, kept, rank.grad_activations[2], rank.weights[1])


async def early_free(rank: Rank) -> None:
    load(rank)
    ahead(rank, [0, 1])
    weight = rank.weights[1]
    del rank.weights[1]
    rank.backward(1, rank.activations[1], rank.grad_activations[2], weight)


async def early_free_of_an_unstored_value(rank: Rank) -> None:
    load(rank)
    batch = rank.load_batch([0, 1])
    rank.forward(0, batch, rank.weights[0])
    rank.forward(0, batch, rank.weights[0])


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
            told("missing microbatches", rank=0, layer=1, missing=(1,)),
        ),
        (
            dropped_update,
            1,
            told("not kept", rank=0, layer=1),
        ),
        (
            dropped_forward,
            1,
            told("wrong layer", layer=2),
        ),
        (dropped_recv, 2, told("not received", layer=0)),
        (duplicated_gradient, 1, told("counted twice", layer=1, doubled=(0, 1))),
        (duplicated_load, 1, told("loaded twice", rank=0, layer=0)),
        (
            duplicated_microbatch,
            2,
            told("counted twice", layer=0, doubled=(0,)),
        ),
        (swapped_layers, 1, told("wrong layer", rank=0, layer=1)),
        (swapped_backward, 1, told("wrong layer", layer=0)),
        (wrong_layers_weight, 1, told("wrong layer", layer=0)),
        (wrong_layers_gradient, 1, told("wrong layer", layer=0)),
        (wrong_layers_sum, 1, told("other values", layer=0)),
        (wrong_microbatch, 1, told("other tokens", layer=1)),
        (early_free, 1, told("freed", layer=1)),
        (
            early_free_of_an_unstored_value,
            1,
            told("never stored", layer=0),
        ),
        (missing_reduce, 2, told("missing microbatches", layer=1, missing=(1,))),
        (
            missing_gather,
            2,
            told("partial weight", layer=0, missing=(1,)),
        ),
        (
            double_reduce,
            2,
            told("counted twice", layer=1, doubled=(0, 1)),
        ),
        (early_update, 1, told("missing microbatches", layer=0, missing=(1,))),
        (
            update_before_the_reduction_has_come,
            2,
            told("not awaited", layer=0),
        ),
        (
            stale_weight,
            1,
            told("stale weight", layer=1),
        ),
        (stale_weight_after_its_update, 1, told("replaced", layer=1)),
        (second_update, 1, told("wrong step", layer=0)),
        (
            shards_update_the_wrong_slice,
            2,
            told("missing slices", layer=0, missing=(0,)),
        ),
        (
            swapped_sends,
            2,
            told("other message", rank=1, layer=1),
        ),
        (
            collectives_of_two_kinds,
            2,
            told("other order", rank=1, layer=1),
        ),
        (
            collectives_of_two_layers,
            2,
            told("other order", rank=1, layer=1),
        ),
    ],
)
def test_one_mistake_is_refused_by_name(program: Strategy, ranks: int, words: Told) -> None:
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
        made = rank.update(0, rank.grad_weights[0], weight, state)
        del rank.weights[0], rank.opt_states[0]
        rank.weights[0], rank.opt_states[0] = made

    with refuses("not kept", layer=0):
        check(trace(half, 1, 1, MICROBATCHES))

    async def nothing(rank: Rank) -> None:
        rank.load_batch([0, 1])

    with refuses("not loaded", layer=0, missing=(0,)):
        check(trace(nothing, 1, 1, MICROBATCHES))


@pytest.mark.parametrize(("program", "ranks"), [(right, 1), (right_on_two, 2)])
def test_the_same_programs_without_a_mistake_pass(program: Strategy, ranks: int) -> None:
    assert check(trace(program, ranks, LAYERS, MICROBATCHES)).backends() == ["gloo", "nccl"]
