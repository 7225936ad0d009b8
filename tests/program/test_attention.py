"""Programs with attention over cut sequences: what is wrong with them is said at their line."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shardlab.program import Holds, Kind, Mesh, Rank, Sizes, Spec, Strategy, Value, trace
from shardlab.rules.pieces import mask_of
from shardlab.rules.spec import Space, form_of
from shardlab.strategies.context import balanced
from tests.program.tapes import refusal, says

# Programs with one mistake each, on two ranks that have slices (0, 3) and (1, 2).


def start(rank: Rank) -> tuple[Value, Value]:
    """Up to the first queries, keys and values, which are kept as well."""
    rank.activations[0] = rank.load_batch([0], balanced(rank.index, 2))
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
    ("lines", "said"),
    [
        (met_twice, "add(activations[3]): keys and values 0, 3 of 4 alone would be counted twice"),
        (
            not_all_met,
            "the keys and values of slices 1-2 of the sequence are missing in it. Let it meet",
        ),
        (added_to_what_is_complete, "keys and values 0, 3 of 4 alone); it belongs into rank.activations"),
        (
            queries_for_keys,
            "the keys and values given is queries[2] (sequence slices 0, 3 of microbatch 0); give a value of",
        ),
        (
            another_layer,
            "the queries given is queries[2] (sequence slices 0, 3 of microbatch 0); this op reads queries[3]",
        ),
        (forward_of_a_projection, "forward(layer 2): this layer makes 2 values; give its inputs as a tuple"),
        (no_such_slice, "load_batch([0], [0, 4]): give one or more of the slices 0-3, each once"),
        (the_same_slice_twice, "load_batch([0], [1, 1]): give one or more of the slices 0-3, each once"),
    ],
    ids=lambda given: getattr(given, "__name__", ""),
)
def test_what_is_wrong_with_attention_is_said_at_the_line(lines: Callable[[Rank], None], said: str) -> None:
    async def strategy(rank: Rank) -> None:
        lines(rank)

    says(refusal(strategy, Mesh(cp=2), 1, 1), said)


def test_what_queries_have_met_is_not_summed_over_ranks() -> None:
    async def strategy(rank: Rank) -> None:
        await rank.all_reduce(rank.attend(2, *start(rank)), axis="cp")

    says(refusal(strategy, Mesh(cp=2), 1, 1), "is no term of a sum, since each rank has its own queries")


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
    (own, gradient), (other, _) = await met_again(rank)
    rank.backward(2, rank.activations[2], (own + other, gradient), rank.weights[2])


async def one_block_left_out(rank: Rank) -> None:
    (own, gradient), (_, away) = await met_again(rank)
    home = rank.exchange(away, to=1 - rank.index, source=1 - rank.index)
    rank.backward(2, rank.activations[2], (own, gradient + await home), rank.weights[2])


async def another_blocks_gradient(rank: Rank) -> None:
    (_, gradient), (_, away) = await met_again(rank)
    gradient + away


async def forgotten_on_the_way(rank: Rank) -> None:
    (own, _), (other, away) = await met_again(rank)
    home = await rank.exchange(away, to=1 - rank.index, source=1 - rank.index)
    rank.backward(2, rank.activations[2], (own + other, home), rank.weights[2])


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        (came_home_early, "queries 1-2 of 4 alone); the queries of slice 3 of the sequence are missing in it"),
        (one_block_left_out, "keys and values 0, 3 of 4 alone); the keys and values of slices 1-2 of the sequence are"),
        (another_blocks_gradient, "only terms of one value, for the same tokens, are put together"),
        (forgotten_on_the_way, "queries 1-2 of 4 alone); the queries of slices 0, 3 of the sequence are missing in it"),
    ],
)
def test_gradients_that_lack_something_are_refused(strategy: Strategy, said: str) -> None:
    says(refusal(strategy, Mesh(cp=2), 1, 1), said)


def test_other_tokens_are_refused() -> None:
    async def strategy(rank: Rank) -> None:
        queries, _ = start(rank)
        whole = rank.load_batch([1], balanced(rank.index, 2))
        rank.activations["other"] = rank.forward(0, whole, rank.weights[0])
        x, _ = rank.forward(1, (rank.activations["other"],), rank.weights[1])
        rank.attend(2, queries, rank.forward(2, (x,), rank.weights[2])[1])

    says(refusal(strategy, Mesh(cp=2), 1, 2), "cannot meet", "both must be of the same microbatches and step")


def test_what_is_loaded_is_told_by_its_slices() -> None:
    async def strategy(rank: Rank) -> None:
        rank.load_batch([1], balanced(rank.index, 2))

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
