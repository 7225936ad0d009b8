"""Programs with experts: what is wrong with them is refused at their line."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from shardlab.language import Mesh, Rank, Sizes, Value, trace
from shardlab.language.rules.spec import Space
from tests.support.refusing import Told, refuses, told


def traced(what: Callable[[Rank], Awaitable[object]]) -> None:
    async def strategy(rank: Rank) -> None:
        await what(rank)

    trace(strategy, Mesh(ep=2), 1, 2)


async def dispatched(rank: Rank) -> Value:
    rank.weights[0] = rank.load_weight(0)
    tokens = rank.load_batch([rank.index])
    made, rank.residuals[2] = rank.forward(0, (tokens,), rank.weights[0])
    return made


async def with_anothers_experts(rank: Rank) -> None:
    x = await rank.all_to_all(await dispatched(rank), axis="ep")
    rank.forward(1, x, rank.load_weight(1, 1 - rank.index, 2))


async def without_exchange(rank: Rank) -> None:
    rank.forward(1, await dispatched(rank), rank.load_weight(1, rank.index, 2))


async def without_return(rank: Rank) -> None:
    x = await rank.all_to_all(await dispatched(rank), axis="ep")
    made = rank.forward(1, x, rank.load_weight(1, rank.index, 2))
    rank.forward(2, (made, rank.residuals[2]), rank.load_weight(2))


async def without_residual(rank: Rank) -> None:
    x = await rank.all_to_all(await dispatched(rank), axis="ep")
    made = await rank.all_to_all(rank.forward(1, x, rank.load_weight(1, rank.index, 2)), axis="ep")
    rank.forward(2, (made,), rank.load_weight(2))


async def with_the_wrong_verb(rank: Rank) -> None:
    rank.forward(0, rank.load_batch([rank.index]), rank.load_weight(0))


async def backward_with_the_wrong_verb(rank: Rank) -> None:
    """The last dense layer takes a residual as well; one gradient is given, and of two that are made one is lost."""
    x = await rank.all_to_all(await dispatched(rank), axis="ep")
    made = await rank.all_to_all(rank.forward(1, x, rank.load_weight(1, rank.index, 2)), axis="ep")
    rank.activations[2], rank.weights[2] = made, rank.load_weight(2)
    (logits,) = rank.forward(2, (made, rank.residuals[2]), rank.weights[2])
    rank.backward(2, rank.activations[2], rank.loss(logits), rank.weights[2])


async def with_a_sum(rank: Rank) -> None:
    x = await rank.all_to_all(await dispatched(rank), axis="ep")
    await rank.all_reduce(rank.forward(1, x, rank.load_weight(1, rank.index, 2)), axis="ep")


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (
            with_anothers_experts,
            told("other pieces", layer=1),
        ),
        (without_exchange, told("other pieces", layer=1)),
        (
            without_return,
            told("missing pieces", layer=2, missing=(0,)),
        ),
        (without_residual, told("wrong number", layer=2)),
        (with_the_wrong_verb, told("wrong number", layer=0)),
        (
            backward_with_the_wrong_verb,
            told("wrong number", layer=2),
        ),
        (with_a_sum, told("no term", layer=2)),
    ],
)
def test_mistakes_of_programs_are_refused_at_their_line(
    program: Callable[[Rank], Awaitable[object]], said: Told
) -> None:
    with refuses(said):
        traced(program)


def test_only_experts_are_counted_in_slices() -> None:
    sizes = Sizes.mixture(1)
    assert sizes.space(Mesh(ep=4), 2) == Space(2, 1, (("expert", 4),))
    assert [layer.cut for layer in sizes.signatures] == [(), ("expert",), ()]
    assert [layer.carries for layer in sizes.signatures] == [True, False, True]
