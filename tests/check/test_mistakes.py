"""Programs with one mistake each, refused in a sentence that says where, what was found and what was wanted."""

from __future__ import annotations

import re

import pytest

from shardlab.check import check
from shardlab.program import Deadlock, Rank, Refused, Strategy, trace

LAYERS, MICROBATCHES = 2, 2


def load(rank: Rank, shard: int = 0, of: int = 1) -> None:
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l, shard, of)


def ahead(rank: Rank, microbatches: list[int]) -> None:
    """Both layers forward, and the loss."""
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
            "rank 0, op 11 update(layer 1): microbatch 1 is missing from grad_weights[1] (microbatch 0); an update "
            "wants every microbatch exactly once",
        ),
        (
            dropped_update,
            1,
            "rank 0, op 2 load_weight(layer 1): the step ends without weights[1] (step 1); every slice that is loaded "
            "must be updated once",
        ),
        (
            dropped_forward,
            1,
            "loss: the activation given is activations[1] (microbatches 0-1); the loss reads the last",
        ),
        (dropped_recv, 2, "send(weights[0] (step 1)) to rank 0: no receive on rank 0 takes this message"),
        (duplicated_gradient, 1, "add(grad_weights[1]): microbatches 0-1 would be counted twice"),
        (duplicated_load, 1, "rank 0, op 4 load_weight(layer 0): the same slice was loaded by op 0 already"),
        (
            duplicated_microbatch,
            2,
            "all_reduce(grad_weights[0]): microbatch 0 would be counted twice (rank 0 and rank 1 both summed it)",
        ),
        (swapped_layers, 1, "rank 0, op 5 forward(layer 1): the activation given is activations[0] (microbatches 0-1)"),
        (swapped_backward, 1, "backward(layer 0): the gradient given is grad_activations[2] (microbatches 0-1)"),
        (wrong_layers_weight, 1, "forward(layer 0): the weight given is weights[1]; layer 0 computes with weights[0]"),
        (wrong_layers_gradient, 1, "update(layer 0): grad_weights[1] (microbatches 0-1) was given; layer 0 is updated"),
        (wrong_layers_sum, 1, "only gradients of one layer are summed"),
        (wrong_microbatch, 1, "the activation is of microbatch 0 and the gradient of microbatch 1; both must be of"),
        (early_free, 1, "weights[1] is used after it was freed (its last key was deleted"),
        (
            early_free_of_an_unstored_value,
            1,
            "activations[0] (microbatches 0-1) is used after it was freed (it was never",
        ),
        (missing_reduce, 2, "update(layer 1): microbatch 1 is missing from grad_weights[1] (microbatch 0)"),
        (
            missing_gather,
            2,
            "the weight given is partial, weights[0] (shard 0 of 2); slices 1 of 2 are missing. Gather",
        ),
        (
            double_reduce,
            2,
            "all_reduce(grad_weights[1]): microbatches 0-1 would be counted twice (rank 0 and rank 1 both summed it)",
        ),
        (early_update, 1, "update(layer 0): microbatch 1 is missing from grad_weights[0] (microbatch 0)"),
        (
            update_before_the_reduction_has_come,
            2,
            "was given where a value is wanted: await it first",
        ),
        (
            stale_weight,
            1,
            "backward(layer 1): the weight given is weights[1] (step 1), of optimizer step 1, but the batch belongs to "
            "step 0: it was already updated",
        ),
        (stale_weight_after_its_update, 1, "weights[1] is used after it was freed (an update replaced it in place"),
        (second_update, 1, "update(layer 0): the weight is of step 1, the optimizer state of step 1 and the gradient"),
        (
            shards_update_the_wrong_slice,
            2,
            "update(layer 0): the gradient holds slices 1 of 2, but the optimizer state holds 0 of 1; the"
            " gradient must contain",
        ),
        (
            swapped_sends,
            2,
            "rank 1, op 4 recv from rank 0: expected activations[1] of microbatch 0, but the next message on this "
            "channel is activations[1] of microbatch 1",
        ),
        (
            collectives_of_two_kinds,
            2,
            "all_reduce(grad_weights[1] (microbatch 1)) on world: rank 0 meets it with reduce_scatter(grad_weights[1] "
            "(microbatch 0)) (its op 11)",
        ),
        (
            collectives_of_two_layers,
            2,
            "all_reduce(grad_weights[1] (microbatch 1)) on world: rank 0 meets it with all_reduce(grad_weights[0] "
            "(microbatch 0)) (its op 11); all members of a group must issue its collectives in one order",
        ),
    ],
)
def test_one_mistake_is_refused_by_name(program: Strategy, ranks: int, words: str) -> None:
    with pytest.raises(Refused, match=re.escape(words)) as refused:
        check(trace(program, ranks, LAYERS, MICROBATCHES))
    assert re.match(PLACES, str(refused.value))
    assert (refused.value.rank, refused.value.op) == tuple(map(int, re.findall(r"\d+", str(refused.value))[:2]))


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (
            dropped_send,
            "deadlock: rank 0 waits in recv of grad_weights[1] of microbatch 1 from rank 1; rank 1 has ended "
            "without it.",
        ),
        (
            collective_left_out,
            "deadlock: rank 0 waits in all_reduce(grad_weights[1] (microbatch 0)) on world for rank 1; rank 1 has "
            "ended without it.",
        ),
    ],
)
def test_a_part_left_out_is_a_deadlock_that_names_who_ended(program: Strategy, words: str) -> None:
    with pytest.raises(Deadlock) as deadlock:
        trace(program, 2, LAYERS, MICROBATCHES)
    assert str(deadlock.value) == words


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

    with pytest.raises(Refused, match=r"the step ends without weights\[0\] \(step 1\)"):
        check(trace(half, 1, 1, MICROBATCHES))

    async def nothing(rank: Rank) -> None:
        rank.load_batch([0, 1])

    with pytest.raises(Refused, match=r"weights\[0\]: no rank loads slice 0 of 1, so it is never updated"):
        check(trace(nothing, 1, 1, MICROBATCHES))


@pytest.mark.parametrize(("program", "ranks"), [(right, 1), (right_on_two, 2)])
def test_the_same_programs_without_a_mistake_pass(program: Strategy, ranks: int) -> None:
    assert check(trace(program, ranks, LAYERS, MICROBATCHES)).backends() == ["gloo", "nccl"]
