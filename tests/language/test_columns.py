"""Column and row layers: what lies side by side is gathered, what is a term is summed, and the other way is refused."""

from __future__ import annotations

import pytest

from shardlab.language import Mesh, Rank, Sizes, Strategy, Value, trace
from shardlab.language.rules.layer_graph import Node, layers_of
from tests.language.rules.toys import matrices
from tests.language.tapes import refusal
from tests.support.refusing import Told, tells, told

# Programs with one mistake each, on two ranks; layers 0 and 1 are columns, 2 is a row after one, 3 is a column.

SIZES = Sizes((8,) * 4, (8,) * 4, (16,) * 5, (0,) * 4, signatures=matrices(["column", "column", "row", "column"]))


def start(rank: Rank) -> Value:
    """What the first layer makes."""
    for l in rank.layers:
        rank.weights[l] = rank.load_weight(l, rank.index, rank.world)
    rank.activations[0] = rank.load_batch([0])
    return rank.forward(0, rank.activations[0], rank.weights[0])


async def to_the_row(rank: Rank) -> Value:
    rank.activations[1] = await rank.all_gather(start(rank), axis="tp")
    rank.activations[2] = rank.forward(1, rank.activations[1], rank.weights[1])
    return rank.activations[2]


async def to_the_end(rank: Rank) -> Value:
    """Forward; the gradient of the last activation."""
    terms = rank.forward(2, await to_the_row(rank), rank.weights[2])
    rank.activations[3] = await rank.all_reduce(terms, axis="tp")
    logits = await rank.all_gather(rank.forward(3, rank.activations[3], rank.weights[3]), axis="tp")
    return rank.loss(logits)


async def forgot_to_gather(rank: Rank) -> None:
    rank.forward(1, start(rank), rank.weights[1])


async def summed_slices(rank: Rank) -> None:
    await rank.all_reduce(start(rank), axis="tp")


async def scattered_slices(rank: Rank) -> None:
    await rank.reduce_scatter(start(rank), axis="tp")


async def gathered_terms(rank: Rank) -> None:
    await rank.all_gather(rank.forward(2, await to_the_row(rank), rank.weights[2]), axis="tp")


async def gathered_twice(rank: Rank) -> None:
    await rank.all_gather(await rank.all_gather(start(rank), axis="tp"), axis="tp")


async def a_row_given_all(rank: Rank) -> None:
    await to_the_row(rank)
    rank.forward(2, await rank.all_gather(rank.activations[2], axis="tp"), rank.weights[2])


async def a_row_given_other_slices(rank: Rank) -> None:
    await to_the_row(rank)
    rank.weights["other"] = rank.load_weight(2, 1 - rank.index, 2)
    rank.forward(2, rank.activations[2], rank.weights["other"])


async def row_terms_unreduced(rank: Rank) -> None:
    rank.forward(3, rank.forward(2, await to_the_row(rank), rank.weights[2]), rank.weights[3])


async def reduced_twice(rank: Rank) -> None:
    gradient = await to_the_end(rank)
    _, terms = rank.backward(3, rank.activations[3], gradient, rank.weights[3])
    await rank.all_reduce(await rank.all_reduce(terms, axis="tp"), axis="tp")


async def gradient_unreduced(rank: Rank) -> None:
    """A row layer wants the sum; its slice's term looks like any."""
    gradient = await to_the_end(rank)
    _, terms = rank.backward(3, rank.activations[3], gradient, rank.weights[3])
    rank.backward(2, rank.activations[2], terms, rank.weights[2])


async def gradient_unreduced_below_a_column(rank: Rank) -> None:
    """A column takes its own slices of a gradient, but a term of it is none."""
    gradient = await to_the_end(rank)
    _, terms = rank.backward(3, rank.activations[3], gradient, rank.weights[3])
    _, slices = rank.backward(2, rank.activations[2], await rank.all_reduce(terms, axis="tp"), rank.weights[2])
    _, terms = rank.backward(1, rank.activations[1], slices, rank.weights[1])
    rank.backward(0, rank.activations[0], terms, rank.weights[0])


async def summed_a_rows_gradients(rank: Rank) -> None:
    gradient = await to_the_end(rank)
    _, terms = rank.backward(3, rank.activations[3], gradient, rank.weights[3])
    _, slices = rank.backward(2, rank.activations[2], await rank.all_reduce(terms, axis="tp"), rank.weights[2])
    await rank.all_reduce(slices, axis="tp")


MISTAKES: dict[Strategy, Told] = {
    forgot_to_gather: told("missing pieces", layer=1, missing=(1,)),
    summed_slices: told("no term", layer=1),
    scattered_slices: told("no term", layer=1),
    gathered_terms: told("a term", layer=3),
    gathered_twice: told("pieces overlap", layer=1, doubled=(0, 1)),
    a_row_given_all: told("other pieces", layer=2),
    a_row_given_other_slices: told("other pieces", layer=2),
    row_terms_unreduced: told("missing terms", layer=3, missing=(0,)),
    reduced_twice: told("no term", layer=3),
    gradient_unreduced: told("missing terms", layer=2, missing=(0,)),
    gradient_unreduced_below_a_column: told("missing terms", layer=0, missing=(1,)),
    summed_a_rows_gradients: told("no term", layer=2),
}


@pytest.mark.parametrize("strategy", MISTAKES, ids=[mistake.__name__ for mistake in MISTAKES])
def test_a_mistake_with_slices_is_refused_at_its_line(strategy: Strategy) -> None:
    tells(refusal(strategy, Mesh(tp=2), SIZES, 1), MISTAKES[strategy])


@pytest.mark.parametrize(
    ("reduced", "words"),
    [
        (False, told("missing terms", layer=1, missing=(1,))),
        (True, told("other pieces", layer=1)),
    ],
)
def test_a_row_after_what_makes_no_slices_is_refused(reduced: bool, words: Told) -> None:
    """Neither its terms nor their sum are slices of it."""
    up = Node("up", {"x": "width"}, {"x": "ffn"}, {"w1": "ffn width"})
    down = Node("down", {"x": "ffn"}, {"x": "width"}, {"w2": "width ffn"})
    row = Node("row", {"x": "width"}, {"x": "head"}, {"w": "head width"})
    layers = layers_of([("feed-forward", [up, down], ("ffn",)), ("row", [row], ("width",))])
    sizes = Sizes((8,) * 2, (8,) * 2, (16,) * 3, (0,) * 2, signatures=layers)

    async def strategy(rank: Rank) -> None:
        terms = start(rank)
        given = await rank.all_reduce(terms, axis="tp") if reduced else terms
        rank.forward(1, given, rank.weights[1])

    tells(refusal(strategy, Mesh(tp=2), sizes, 1), words)


def test_whole_weights_make_what_is_complete() -> None:
    async def strategy(rank: Rank) -> None:
        rank.activations[0] = rank.load_batch([0])
        for l in rank.layers:
            rank.weights[l] = rank.load_weight(l)
            rank.activations[l + 1] = rank.forward(l, rank.activations[l], rank.weights[l])
            form = rank.activations[l + 1].spec.form
            assert (form.slices, form.term) == ((), None)

    trace(strategy, Mesh(tp=2), SIZES, 1)
