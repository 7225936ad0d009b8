"""Mistakes in programs with attention over cut sequences are refused at their line."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shardlab.language import Holds, Kind, Mesh, Rank, Sizes, Spec, Strategy, Value, trace
from shardlab.language.rules.kinds import mask_of
from shardlab.language.rules.spec import Space, form_of
from shardlab.strategies.plan.context_parallel import slices_of_rank
from tests.language.tapes import refusal
from tests.support.refusing import ExpectedRefusal, refusal_by, require_refusal

# Programs with one mistake each, on two ranks that have slices (0, 3) and (1, 2).


def start(rank: Rank) -> tuple[Value, Value]:
    """Up to the first queries, keys and values, which are kept as well."""
    rank.activations[0] = rank.load_batch([0], slices_of_rank(rank.index, 2))
    for l in range(4):
        rank.weights[l] = rank.load_weight(l)
    rank.activations[1] = rank.forward(0, rank.activations[0], rank.weights[0])
    rank.activations[2], rank.residuals[0] = rank.forward(1, (rank.activations[1],), rank.weights[1])
    rank.queries[0], rank.keys_values[0] = rank.forward(2, (rank.activations[2],), rank.weights[2])
    return rank.queries[0], rank.keys_values[0]


def met_twice(rank: Rank) -> None:
    queries, block = start(rank)
    rank.attend(2, queries, block) + rank.attend(2, queries, block)


def not_all_met(rank: Rank) -> None:
    rank.forward(3, rank.attend(2, *start(rank)), rank.weights[3])


def added_to_what_is_complete(rank: Rank) -> None:
    queries, block = start(rank)
    rank.grad_queries[0] = rank.attend(2, queries, block)


def queries_for_keys(rank: Rank) -> None:
    queries, _ = start(rank)
    rank.attend(2, queries, queries)


def another_layer(rank: Rank) -> None:
    rank.attend(3, *start(rank))


def forward_of_a_projection(rank: Rank) -> None:
    start(rank)
    rank.forward(2, rank.activations[2], rank.weights[2])


def no_such_slice(rank: Rank) -> None:
    rank.load_batch([0], [0, 4])


def the_same_slice_twice(rank: Rank) -> None:
    rank.load_batch([0], [1, 1])


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (met_twice, refusal_by("counted twice", layer=3, doubled=(0, 3))),
        (
            not_all_met,
            refusal_by("missing terms", layer=3, missing=(1, 2)),
        ),
        (added_to_what_is_complete, refusal_by("wrong store")),
        (
            queries_for_keys,
            refusal_by("wrong kind", layer=2),
        ),
        (
            another_layer,
            refusal_by("wrong layer", layer=3),
        ),
        (forward_of_a_projection, refusal_by("wrong number", layer=2)),
        (no_such_slice, refusal_by("unknown slice")),
        (the_same_slice_twice, refusal_by("unknown slice")),
    ],
    ids=lambda case: getattr(case, "__name__", ""),
)
def test_mistakes_with_attention_are_refused_at_their_line(
    lines: Callable[[Rank], None], expected: ExpectedRefusal
) -> None:
    async def strategy(rank: Rank) -> None:
        lines(rank)

    require_refusal(refusal(strategy, Mesh(cp=2), 1, 1), expected)


def test_partial_attention_is_not_summed_over_ranks() -> None:
    async def strategy(rank: Rank) -> None:
        await rank.all_reduce(rank.attend(2, *start(rank)), axis="cp")

    require_refusal(refusal(strategy, Mesh(cp=2), 1, 1), "merged terms", layer=3)


async def met_again(rank: Rank) -> list[tuple[Value, Value]]:
    """Forward and back to the first attention; what its own block gives to the two gradients, and the other's."""
    queries, block = start(rank)
    other = rank.keys_values[1] = await rank.exchange(block, to=1 - rank.index, source=1 - rank.index)
    x, w = rank.activations, rank.weights
    w[4], w[5] = rank.load_weight(4), rank.load_weight(5)
    x[3] = rank.attend(2, queries, block) + rank.attend(2, queries, other)
    x[4] = rank.forward(3, x[3], w[3])
    (x[5],) = rank.forward(4, (x[4], rank.residuals[0]), w[4])
    x[6] = rank.forward(5, x[5], w[5])
    _, gradient = rank.backward(5, x[5], rank.loss(x[6]), w[5])
    _, gradient, _ = rank.backward(4, x[4], (gradient,), w[4])
    _, rank.grad_activations[3] = rank.backward(3, x[3], gradient, w[3])
    gradient = rank.grad_activations[3]
    return [rank.attend_backward(2, queries, keys, x[3], gradient) for keys in (block, other)]


async def came_home_early(rank: Rank) -> None:
    (own_term, gradient), (other_term, _) = await met_again(rank)
    rank.backward(2, rank.activations[2], (own_term + other_term, gradient), rank.weights[2])


async def one_block_left_out(rank: Rank) -> None:
    (own_term, gradient), (_, away) = await met_again(rank)
    home = rank.exchange(away, to=1 - rank.index, source=1 - rank.index)
    rank.backward(2, rank.activations[2], (own_term, gradient + await home), rank.weights[2])


async def another_blocks_gradient(rank: Rank) -> None:
    (_, gradient), (_, away) = await met_again(rank)
    gradient + away


async def forgotten_on_the_way(rank: Rank) -> None:
    (own_term, _), (other_term, away) = await met_again(rank)
    home = await rank.exchange(away, to=1 - rank.index, source=1 - rank.index)
    rank.backward(2, rank.activations[2], (own_term + other_term, home), rank.weights[2])


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (came_home_early, refusal_by("missing terms", layer=2, missing=(3,))),
        (one_block_left_out, refusal_by("missing terms", layer=2, missing=(1, 2))),
        (another_blocks_gradient, refusal_by("other values", layer=2)),
        (forgotten_on_the_way, refusal_by("missing terms", layer=2, missing=(0, 3))),
    ],
)
def test_gradients_that_lack_something_are_refused(strategy: Strategy, expected: ExpectedRefusal) -> None:
    require_refusal(refusal(strategy, Mesh(cp=2), 1, 1), expected)


def test_other_tokens_are_refused() -> None:
    async def strategy(rank: Rank) -> None:
        queries, _ = start(rank)
        whole = rank.load_batch([1], slices_of_rank(rank.index, 2))
        rank.activations["other"] = rank.forward(0, whole, rank.weights[0])
        x, _ = rank.forward(1, (rank.activations["other"],), rank.weights[1])
        rank.attend(2, queries, rank.forward(2, (x,), rank.weights[2])[1])

    require_refusal(refusal(strategy, Mesh(cp=2), 1, 2), "other tokens", layer=2)


def test_a_loaded_batch_names_its_slices() -> None:
    async def strategy(rank: Rank) -> None:
        rank.load_batch([1], slices_of_rank(rank.index, 2))

    ops = [tape[0] for tape in trace(strategy, Mesh(cp=2), 1, 2).tapes]
    assert [op.holds for op in ops] == [Holds(0b1001_0000, 8), Holds(0b0110_0000, 8)]


def test_sizes_of_the_model_for_context_parallelism() -> None:
    sizes = Sizes.context_blocks(2)
    norms = [sizes.signatures[layer] for layer in (1, 4, 7)]
    assert [port.layer for norm in norms for port in norm.outputs[1:]] == [4, 7]
    assert [port.layer for norm in norms for port in norm.inputs[1:]] == [4, 7]
    assert sizes.space(Mesh(cp=3), 2) == Space(2, 6, (("head", 3), ("vocab", 1)))
    assert sizes.space(Mesh(), 2) == Space(2, 1, (("head", 1), ("vocab", 1)))
    cells = mask_of(4 + s for s in (0, 3))
    part = Spec(form_of(Kind.KEYS_VALUES, 2, 0, Space(2, 4)), cells)
    assert sizes.elements(part) == sizes.keys_values // 2
    assert sizes.elements(Spec(part.form.but(kind=Kind.GRAD_QUERIES), cells)) == sizes.queries // 2
