"""The rules of expert parallelism: what an ALL_TO_ALL makes of buffers, and what experts refuse."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shardlab.program.transfer import collective

from shardlab.program import Holds, Kind, LayerKind, Mesh, OpKind, Rank, Refused, Sizes, Spec, Value, experts, trace
from shardlab.rules.pieces import mask_of
from shardlab.rules.spec import Grid  # FIXME

KINDS = Sizes.mixture(2).kinds
STEP = 12
"""Microbatches of the step in these tests."""


def buffers(microbatches: set[int], sums: int = 0, kind: Kind = Kind.ACTIVATION, layer: int = 1, of: int = 2) -> Spec:
    return Spec(kind, layer, Holds(mask_of(microbatches), STEP), sums, 0, Grid(1, of))


def exchanged(*specs: Spec) -> list[Spec]:
    return collective(OpKind.ALL_TO_ALL, specs, range(len(specs)), len(KINDS), KINDS)


@given(st.sampled_from([1, 2, 3, 4]), st.integers(1, 3), st.sampled_from(list(experts.BUFFERS)))
def test_dispatch_and_combine_are_each_others_reverse(ranks: int, each: int, kind: Kind) -> None:
    given_ = [buffers(set(range(i * each, (i + 1) * each)), kind=kind, of=ranks) for i in range(ranks)]
    there = exchanged(*given_)
    assert {spec.holds for spec in there} == {Holds(mask_of(range(ranks * each)), STEP)}
    if ranks > 1:
        assert [spec.sums for spec in there] == [1 << i for i in range(ranks)]
    assert exchanged(*there) == given_


def test_experts_make_the_slices_that_they_were_given() -> None:
    weight = Spec(Kind.WEIGHT, 1, Holds(0b10, 2))
    x = buffers({0, 3}, sums=0b10)
    assert experts.forward(1, x, weight) == x._replace(layer=2)
    gradient = x._replace(kind=Kind.GRAD_ACTIVATION, layer=2)
    own, below = experts.backward(1, x, gradient, weight)
    assert (own.holds, own.sums) == (Holds(0b10, 2), mask_of({0, 3}))
    assert below == gradient._replace(layer=1)
    assert experts.backward_weight(1, x, gradient, 0b10) == own


@pytest.mark.parametrize(
    ("given_", "said"),
    [
        ([buffers({0}), buffers({0})], "microbatch 0 would come from rank 1 and from an earlier rank as well"),
        ([buffers({0}), buffers({1, 2})], "give equally many microbatches"),
        ([buffers({0}), buffers({0}, sums=1)], "all give buffers of all experts, or all give some"),
        ([buffers({0}), buffers({1}, layer=2)], "of one layer"),
        ([buffers({0, 1}, sums=2), buffers({0, 1}, sums=1)], "rank 0 gave .* must give slices 0"),
        ([buffers({0, 1}, sums=1), buffers({2, 3}, sums=2)], "give the same microbatches"),
        ([buffers({0}, sums=1), buffers({0}, sums=2)], "does not divide among 2 ranks"),
        ([buffers({0}), buffers({1}), buffers({2})], "2 slices of the experts do not divide among 3 ranks"),
        ([buffers({0}, layer=0), buffers({1}, layer=0)], "what goes into experts or comes out of them"),
        ([buffers({0}, layer=5), buffers({1}, layer=5)], "what goes into experts or comes out of them"),
        ([buffers({0}, kind=Kind.RESIDUAL, layer=2)] * 2, "what goes into experts or comes out of them"),
    ],
)
def test_what_no_all_to_all_can_exchange_is_refused(given_: list[Spec], said: str) -> None:
    with pytest.raises(Refused, match=said):
        exchanged(*given_)


@pytest.mark.parametrize("kind", [OpKind.ALL_REDUCE, OpKind.REDUCE_SCATTER])
def test_experts_buffers_are_never_summed(kind: OpKind) -> None:
    with pytest.raises(Refused, match=r"experts' buffers are no terms of a sum\. Exchange them by all_to_all"):
        collective(kind, [buffers({0}, sums=1), buffers({0}, sums=2)], range(2), len(KINDS), KINDS)


def test_without_experts_there_is_nothing_to_exchange() -> None:
    with pytest.raises(Refused, match="goes into experts"):
        collective(OpKind.ALL_TO_ALL, [buffers({0}), buffers({1})], range(2), 4)


def traced(what: Callable[[Rank], Awaitable[object]]) -> None:
    async def strategy(rank: Rank) -> None:
        await what(rank)

    trace(strategy, Mesh(ep=2), 1, 2)


async def dispatched(rank: Rank) -> Value:
    rank.weights[0] = rank.load_weight(0)
    tokens = rank.load_batch([rank.index])
    rank.residuals[2], made = rank.forward_dense(0, None, tokens, rank.weights[0])
    return made


async def with_anothers_experts(rank: Rank) -> None:
    x = await rank.all_to_all(await dispatched(rank), axis="ep")
    rank.forward(1, x, rank.load_weight(1, 1 - rank.index, 2))


async def without_exchange(rank: Rank) -> None:
    rank.forward(1, await dispatched(rank), rank.load_weight(1, rank.index, 2))


async def without_return(rank: Rank) -> None:
    x = await rank.all_to_all(await dispatched(rank), axis="ep")
    made = rank.forward(1, x, rank.load_weight(1, rank.index, 2))
    rank.forward_dense(2, rank.residuals[2], made, rank.load_weight(2))


async def without_residual(rank: Rank) -> None:
    x = await rank.all_to_all(await dispatched(rank), axis="ep")
    made = await rank.all_to_all(rank.forward(1, x, rank.load_weight(1, rank.index, 2)), axis="ep")
    rank.forward_dense(2, None, made, rank.load_weight(2))


async def with_the_wrong_verb(rank: Rank) -> None:
    rank.forward(0, rank.load_batch([rank.index]), rank.load_weight(0))


async def with_a_norm(rank: Rank) -> None:
    rank.forward_norm(0, None, rank.load_batch([rank.index]), rank.load_weight(0))


async def with_a_sum(rank: Rank) -> None:
    x = await rank.all_to_all(await dispatched(rank), axis="ep")
    await rank.all_reduce(rank.forward(1, x, rank.load_weight(1, rank.index, 2)), axis="ep")


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (with_anothers_experts, "experts compute on their own buffers and on no others"),
        (without_exchange, "experts compute on their own buffers and on no others"),
        (without_return, "slices [01] are missing.* exchange experts' buffers by all_to_all"),
        (without_residual, "a residual is missing; every dense layer but the first"),
        (with_the_wrong_verb, "this layer is dense; use forward_dense and backward_dense"),
        (with_a_norm, "this layer is dense; use forward_dense and backward_dense"),
        (with_a_sum, "no terms of a sum"),
    ],
)
def test_mistakes_of_programs_are_refused_at_their_line(
    program: Callable[[Rank], Awaitable[object]], said: str
) -> None:
    with pytest.raises(Refused, match=said):
        traced(program)


def test_only_experts_are_counted_in_slices() -> None:
    sizes = Sizes.mixture(1)
    assert sizes.grid(Mesh(ep=4), 2) == Grid(1, 4)
    assert sizes.kinds == (LayerKind.DENSE, LayerKind.EXPERTS, LayerKind.DENSE)
    assert sizes.elements(buffers({0, 1}, sums=1)) == sizes.elements(buffers({0}))
