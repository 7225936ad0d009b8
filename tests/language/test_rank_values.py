"""Slices and concatenation as calls: what they put on the tape, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest

from shardlab.language import OpKind, Rank, Value, trace
from tests.language.tapes import alone
from tests.support.refusing import ExpectedRefusal, refusal_by, refuses


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


REFUSED: list[tuple[Callable[[Rank], Value], ExpectedRefusal]] = [
    (lambda rank: rank.slice(rank.weights[0], 2, 2), refusal_by("unknown slice", layer=0)),
    (lambda rank: rank.slice(rank.weights[0], 0, 10**9), refusal_by("unknown slice", layer=0)),
    (lambda rank: rank.slice(rank.weights[0], 0, 10**5000), refusal_by("unknown slice", layer=0)),
    (lambda rank: rank.load_weight(0, 0, 10**12), refusal_by("unknown slice", layer=0)),
    (lambda rank: rank.load_weight(0, 10**5000, 10**5000 + 1), refusal_by("unknown slice", layer=0)),
    (lambda rank: rank.slice(rank.weights[0], 0, 0), refusal_by("unknown slice", layer=0)),
    (lambda rank: rank.slice(rank.weights[0], cast(int, 0.5), 2), refusal_by("unknown slice", layer=0)),
    (
        lambda rank: rank.slice(rank.load_batch([0, 1]), 0, 3),
        refusal_by("does not divide", layer=0),
    ),
    (lambda rank: rank.concatenate([]), refusal_by("wrong number")),
    (
        lambda rank: rank.concatenate([rank.weights[0], rank.weights[0]]),
        refusal_by("pieces overlap", layer=0, doubled=(0,)),
    ),
    (
        lambda rank: rank.concatenate([rank.weights[0], rank.load_weight(1)]),
        refusal_by("other values", layer=0),
    ),
]


@pytest.mark.parametrize(("lines", "words"), REFUSED)
def test_invalid_slices_are_refused(lines: Callable[[Rank], Value], words: ExpectedRefusal) -> None:
    async def strategy(rank: Rank) -> None:
        load(rank)
        lines(rank)

    with refuses(words):
        trace(strategy, 1, 2, 2)


def test_scalars_have_no_slices() -> None:
    def lines(rank: Rank) -> None:
        load(rank)
        rank.activations[0] = rank.load_batch([0])
        grad = rank.loss(rank.forward(0, rank.activations[0], rank.weights[0]))
        gradient, _ = rank.backward(0, rank.activations[0], grad, rank.weights[0])
        rank.slice(rank.norm(0, gradient), 0, 2)

    with refuses("wrong kind"):
        alone(lines, 1, 1)
