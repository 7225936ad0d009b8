"""A refusal names the verb that was called, and its layer, wherever in the verb the value is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest

from shardlab.program import Rank
from shardlab.program.values import Value
from tests.program.tapes import refusal
from tests.support.refusing import tells

CALLS: dict[str, Callable[[Rank, Value, Value], object]] = {
    "forward(layer 1)": lambda rank, bad, x: [rank.forward(layer, x, bad) for layer in [1]],
    "loss": lambda rank, bad, x: rank.loss(bad),
    "loss_stats": lambda rank, bad, x: rank.loss_stats(bad),
    "norm(layer 1)": lambda rank, bad, x: rank.norm(1, bad),
    "backward(layer 1)": lambda rank, bad, x: rank.backward(1, x, bad, x),
    "backward_input(layer 0)": lambda rank, bad, x: rank.backward_input(0, x, bad, x),
    "backward_weight(layer 1)": lambda rank, bad, x: rank.backward_weight(1, x, bad),
    "attend(layer 0)": lambda rank, bad, x: rank.attend(0, x, bad),
    "attend_backward(layer 1)": lambda rank, bad, x: rank.attend_backward(1, x, x, x, bad),
    "update(layer 1)": lambda rank, bad, x: rank.update(1, x, bad, x),
    "add": lambda rank, bad, x: x + bad,
    "scale": lambda rank, bad, x: rank.scale(bad, 2),
    "slice": lambda rank, bad, x: rank.slice(bad, 0, 2),
    "concatenate": lambda rank, bad, x: rank.concatenate([x, bad]),
    "all_reduce": lambda rank, bad, x: rank.all_reduce(bad),
    "broadcast": lambda rank, bad, x: rank.broadcast(bad, root=rank.index),
    "send": lambda rank, bad, x: rank.send(bad, to=1 - rank.index),
    "exchange": lambda rank, bad, x: rank.exchange(bad, to=1 - rank.index, source=1 - rank.index),
}


@pytest.mark.parametrize("verb", CALLS)
def test_a_verb_that_is_given_a_handle_is_named_with_its_layer(verb: str) -> None:
    async def strategy(rank: Rank) -> None:
        rank.weights[0] = rank.load_weight(0)
        rank.activations[0] = rank.load_batch(rank.share())
        handle = cast("Value", rank.all_gather(rank.weights[0]))
        CALLS[verb](rank, handle, rank.activations[0])

    tells(refusal(strategy), "not awaited", rank=0, op=3)
