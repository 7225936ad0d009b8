"""The norm of the gradient: each layer's part, their sum over layers and ranks, and the update that takes it."""

from __future__ import annotations

import pytest

from shardlab.language import OpKind, Rank, Strategy, Value, trace
from tests.language.tapes import live_at_end, refusal, sentence, together, words
from tests.support.passes import gradients
from tests.support.refusing import refuses, tells


def keep_gradients(rank: Rank, microbatches: range) -> None:
    """Every layer's, of some microbatches, in rank.grad_weights."""
    for l, made in gradients(rank, microbatches):
        rank.grad_weights[l] = made


async def reduced(rank: Rank) -> None:
    keep_gradients(rank, rank.share())
    for l in rank.layers:
        rank.grad_weights[l] = await rank.all_reduce(rank.grad_weights[l])


def update(rank: Rank, norm: Value) -> None:
    for l in rank.layers:
        made = rank.update(l, rank.grad_weights.pop(l), rank.weights[l], rank.opt_states[l], norm)
        rank.weights[l], rank.opt_states[l] = made


async def clips(rank: Rank) -> None:
    """Replicas: each rank has the whole norm itself."""
    await reduced(rank)
    rank.scalars["norm"] = rank.norm(0, rank.grad_weights[0]) + rank.norm(1, rank.grad_weights[1])
    update(rank, rank.scalars["norm"])


async def clips_by_slices(rank: Rank) -> None:
    """Each rank has the squares of its slices; their sum is all-reduced."""
    keep_gradients(rank, rank.share())
    for l in rank.layers:
        rank.grad_weights["slice", l] = await rank.reduce_scatter(rank.grad_weights[l])
    part = rank.norm(0, rank.grad_weights["slice", 0]) + rank.norm(1, rank.grad_weights["slice", 1])
    rank.scalars["norm"] = await rank.all_reduce(part)
    for l in rank.layers:
        rank.grad_weights[l] = await rank.all_gather(rank.grad_weights["slice", l])
    update(rank, rank.scalars["norm"])


@pytest.mark.parametrize("strategy", [clips, clips_by_slices])
def test_a_norm_is_an_op_and_the_updates_fourth_input(strategy: Strategy) -> None:
    for tape in trace(strategy, 2, 2, 2).tapes:
        updates = [op for op in tape if op.kind is OpKind.UPDATE]
        (norm,) = {op.inputs[3] for op in updates}
        assert len(updates) == sum(op.kind is OpKind.NORM for op in tape) == 2
        assert norm in {number for op in tape for number in op.outputs}


@pytest.mark.parametrize("strategy", [clips, clips_by_slices])
def test_no_scalar_outlives_the_step(strategy: Strategy) -> None:
    program = trace(strategy, 2, 2, 2)
    for rank, tape in enumerate(program.tapes):
        assert live_at_end(program, rank) == {n for op in tape if op.kind is OpKind.UPDATE for n in op.outputs}


def test_a_scalar_never_stored_lives_until_the_update_that_takes_it() -> None:
    async def strategy(rank: Rank) -> None:
        keep_gradients(rank, rank.microbatches)
        update(rank, rank.norm(0, rank.grad_weights[0]))

    (tape,) = together(strategy, ranks=1, layers=1)
    norm = next(at for at, word in enumerate(tape) if word.startswith("norm"))
    number = tape[norm].split()[-1]
    assert tape[norm + 1].startswith("update")
    assert f"free {number}" in tape[norm + 2 : norm + 4]


def test_a_scalar_travels_by_message() -> None:
    async def strategy(rank: Rank) -> None:
        await reduced(rank)
        if rank.index == 0:
            rank.scalars[0] = rank.norm(0, rank.grad_weights[0])
            await rank.send(rank.scalars[0], to=1)
        else:
            rank.scalars[0] = await rank.recv(source=0, expect=("scalars", 0, None))
        update(rank, rank.scalars[0])

    for tape in trace(strategy, 2, 1, 2).tapes:
        assert "update" in [word.split()[0] for word in words(tape)]


def test_the_norm_of_an_unfinished_gradient_is_refused() -> None:
    async def strategy(rank: Rank) -> None:
        keep_gradients(rank, rank.share())
        rank.norm(0, rank.grad_weights[0])

    error = refusal(strategy)
    assert sentence(error)
    tells(error, "missing microbatches", layer=0, missing=(1,))


def test_a_norm_that_lacks_a_layer_is_refused() -> None:
    async def strategy(rank: Rank) -> None:
        await reduced(rank)
        update(rank, rank.norm(1, rank.grad_weights[1]))

    tells(refusal(strategy), "partial norm", layer=0, missing=(0,))


def test_a_norm_that_lacks_the_other_ranks_slices_is_refused() -> None:
    async def strategy(rank: Rank) -> None:
        keep_gradients(rank, rank.share())
        rank.grad_weights["slice"] = await rank.reduce_scatter(rank.grad_weights[0])
        update(rank, rank.norm(0, rank.grad_weights["slice"]))

    tells(refusal(strategy, layers=1), "partial norm", layer=0, missing=(0,))


def test_replicas_squares_must_not_be_added_up() -> None:
    async def strategy(rank: Rank) -> None:
        await reduced(rank)
        await rank.all_reduce(rank.norm(0, rank.grad_weights[0]))

    tells(refusal(strategy), "counted twice", doubled=(0,))


def test_a_layers_squares_count_once() -> None:
    async def strategy(rank: Rank) -> None:
        await reduced(rank)
        part = rank.scalars[0] = rank.norm(0, rank.grad_weights[0])
        part + rank.norm(0, rank.grad_weights[0])

    tells(refusal(strategy), "counted twice", doubled=(0,))


@pytest.mark.parametrize("verb", ["all_gather", "reduce_scatter"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_scalars_are_reduced_and_nothing_else(verb: str, ranks: int) -> None:
    async def strategy(rank: Rank) -> None:
        keep_gradients(rank, rank.share())
        rank.grad_weights["slice"] = await rank.reduce_scatter(rank.grad_weights[0])
        await getattr(rank, verb)(rank.norm(0, rank.grad_weights["slice"]))

    tells(refusal(strategy, ranks), "wrong kind")


def test_a_scalar_belongs_into_its_own_store() -> None:
    async def strategy(rank: Rank) -> None:
        await reduced(rank)
        rank.grad_weights["norm"] = rank.norm(0, rank.grad_weights[0])

    tells(refusal(strategy), "wrong store")


def test_a_gradient_is_no_norm() -> None:
    async def strategy(rank: Rank) -> None:
        await reduced(rank)
        update(rank, rank.grad_weights[1])

    with refuses("wrong kind", layer=0):
        trace(strategy, 2, 2, 2)
