"""A right program that no backend can carry out is said to run on none, with the reason."""

from __future__ import annotations

import pytest

from shardlab.check import check
from shardlab.program import Rank, Strategy, trace


async def train(rank: Rank) -> None:
    """One layer, data parallel."""
    rank.weights[0], rank.opt_states[0] = rank.load_weights(0)
    rank.activations[0] = rank.load_batch(rank.share())
    rank.activations[1] = rank.forward(0, rank.activations[0], rank.weights[0])
    gradient = rank.loss(rank.activations.pop(1))
    grad_weight, rank.grad_activations[0] = rank.backward(0, rank.activations[0], gradient, rank.weights[0])
    total = await rank.all_reduce(grad_weight)
    rank.weights[0], rank.opt_states[0] = rank.update(0, total, rank.weights[0], rank.opt_states[0])


def sends(store: str) -> Strategy:
    async def strategy(rank: Rank) -> None:
        await train(rank)
        if rank.index == 0:
            await rank.send(getattr(rank, store)[0], to=1)
        else:
            await rank.recv(source=0)

    return strategy


async def gathers_uneven_batches(rank: Rank) -> None:
    await train(rank)
    await rank.all_gather(rank.load_batch([0, 1, 2] if rank.index else [3]))


@pytest.mark.parametrize(
    ("strategy", "why"),
    [
        (sends("opt_states"), "an optimizer state stays where it was loaded"),
        (sends("grad_activations"), "the model's input is tokens, which have no gradient"),
        (gathers_uneven_batches, "the members give 1/4, 3/4 of the whole; only equal pieces are gathered"),
    ],
)
def test_what_cannot_be_communicated_runs_on_no_backend(strategy: Strategy, why: str) -> None:
    checked = check(trace(strategy, 2, 1, 4))
    assert checked.backends() == []
    for backend in ("gloo", "nccl"):
        said = checked.why_not(backend)
        assert said is not None
        assert said.startswith("rank 0, op ")
        assert why in said


def test_what_can_be_communicated_runs_on_both() -> None:
    checked = check(trace(sends("activations"), 2, 1, 4))
    assert checked.why_not("gloo") is None
    assert checked.backends() == ["gloo", "nccl"]
