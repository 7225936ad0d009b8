"""Slices and concatenation as calls: what they put on the tape, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest

from shardlab.program import OpKind, Rank, Refused, Value, trace
from tests.program.tapes import alone, says


def load(rank: Rank) -> None:
    rank.weights[0] = rank.load_weight(0)


def test_slices_of_slices_are_put_together_in_any_order() -> None:
    def lines(rank: Rank) -> None:
        load(rank)
        half = rank.weights["half"] = rank.slice(rank.weights[0], 1, 2)
        pieces = [rank.slice(half, i, 3) for i in (2, 0, 1)]
        assert str(pieces[0].spec) == "weights[0] (shard 5 of 6)"
        assert rank.concatenate(pieces).spec == half.spec

    assert alone(lines)[1:6] == [
        "slice 0 -> 1",
        "slice 1 -> 2",
        "slice 1 -> 3",
        "slice 1 -> 4",
        "concatenate 2 3 4 -> 5",
    ]


def test_a_slice_says_on_the_tape_which_it_is() -> None:
    def lines(rank: Rank) -> None:
        load(rank)
        rank.slice(rank.weights[0], 2, 3)
        assert next(op for op in rank.ops if op.kind is OpKind.SLICE).holds == (0b100, 3)

    alone(lines)


def test_batches_are_cut_into_microbatches() -> None:
    def lines(rank: Rank) -> None:
        batch = rank.load_batch([0, 1, 3, 2])
        assert str(rank.slice(batch, 1, 2).spec) == "activations[0] (microbatches 2-3)"

    alone(lines, 2, 4)


REFUSED: list[tuple[Callable[[Rank], Value], str]] = [
    (lambda rank: rank.slice(rank.weights[0], 2, 2), "slice 2 of 2 was asked for; there are 1,048,576 at most"),
    (lambda rank: rank.slice(rank.weights[0], 0, 10**9), "slice 0 of 1000000000 was asked for; there are 1,048,5"),
    (lambda rank: rank.slice(rank.weights[0], 0, 0), "slice 0 of 0 was asked for"),
    (lambda rank: rank.slice(rank.weights[0], cast(int, 0.5), 2), "slice 0.5 of 2 was asked for; give whole numbers"),
    (
        lambda rank: rank.slice(rank.load_batch([0, 1]), 0, 3),
        "has 2 microbatches, which do not divide into 3",
    ),
    (lambda rank: rank.concatenate([]), "concatenate: no value was given; give the pieces"),
    (
        lambda rank: rank.concatenate([rank.weights[0], rank.weights[0]]),
        "concatenate(weights[0]): slice 0 of 1 comes from piece 1 and from an earlier piece as well",
    ),
    (
        lambda rank: rank.concatenate([rank.weights[0], rank.load_weight(1)]),
        "piece 0 gave weights[0] and piece 1 weights[1]; only pieces of one value can be gathered",
    ),
]


@pytest.mark.parametrize(("lines", "words"), REFUSED)
def test_what_is_no_slice_is_refused(lines: Callable[[Rank], Value], words: str) -> None:
    async def strategy(rank: Rank) -> None:
        load(rank)
        lines(rank)

    with pytest.raises(Refused) as refusal:
        trace(strategy, 1, 2, 2)
    says(refusal.value, words)


def test_scalars_have_no_slices() -> None:
    def lines(rank: Rank) -> None:
        load(rank)
        rank.activations[0] = rank.load_batch([0])
        grad = rank.loss(rank.forward(0, rank.activations[0], rank.weights[0]))
        gradient, _ = rank.backward(0, rank.activations[0], grad, rank.weights[0])
        rank.slice(rank.norm(0, gradient), 0, 2)

    with pytest.raises(Refused, match="slice weights, optimizer states, activations or gradients"):
        alone(lines, 1, 1)
