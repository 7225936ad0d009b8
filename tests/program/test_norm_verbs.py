"""The verbs of half-blocks: what they put on the tape, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shardlab.program import Mesh, Rank, Refused, Sizes, trace
from tests.program.tapes import alone, says

HALVES = Sizes.half_blocks(1)
"""Bodies 0, 2, 4 and norms 1, 3."""


def prepare(rank: Rank) -> None:
    """One microbatch, up to the first norm's branch."""
    for l in rank.layers:
        rank.weights[l] = rank.load_weight(l)
    rank.activations[0] = rank.load_batch([0])
    rank.activations[1] = rank.forward(0, rank.activations[0], rank.weights[0])


def to_the_loss(rank: Rank) -> None:
    """On to the gradient of the last norm's output."""
    prepare(rank)
    rank.residuals[3], rank.activations[2] = rank.forward_norm(1, None, rank.activations[1], rank.weights[1])
    rank.activations[3] = rank.forward(2, rank.activations[2], rank.weights[2])
    _, rank.activations[4] = rank.forward_norm(3, rank.residuals[3], rank.activations[3], rank.weights[3])
    gradient = rank.loss(rank.forward(4, rank.activations[4], rank.weights[4]))
    _, rank.grad_activations[4] = rank.backward(4, rank.activations[4], gradient, rank.weights[4])


def norms_of(lines: Callable[[Rank], object]) -> list[str]:
    """The tape's entries from the first norm on."""
    tape = alone(lines, HALVES, 1)
    return tape[tape.index("forward 5 0 -> 6 7") + 1 :]


def test_a_norm_reads_branch_weight_and_residual_and_hands_a_residual_on() -> None:
    def lines(rank: Rank) -> None:
        to_the_loss(rank)
        _, branch, residual = rank.backward_norm(
            3, rank.activations[3], rank.grad_activations[4], None, rank.weights[3]
        )
        rank.grad_activations[3], rank.grad_residuals[3] = branch, residual or branch

    tape = norms_of(lines)
    assert tape[0] == "forward 6 1 -> 8 9 10", "(branch, weight) to (normalised, residual, saved)"
    assert tape[2] == "forward 11 3 9 -> 13 14", "(branch, weight, residual) to (normalised, saved)"
    assert "backward 11 19 3 14 -> 20 21 22" in tape, "(weight's, branch's, residual's)"


def test_a_norms_backward_has_two_halves() -> None:
    def lines(rank: Rank) -> None:
        to_the_loss(rank)
        branch, residual = rank.backward_norm_input(
            3, rank.activations[3], rank.grad_activations[4], None, rank.weights[3]
        )
        rank.grad_activations[3], rank.grad_residuals[3] = branch, residual or branch
        rank.grad_weights[3] = rank.backward_weight(3, rank.activations[3], rank.grad_activations[4])

    tape = norms_of(lines)
    assert "backward_input 11 19 3 14 -> 20 21 22" in tape
    assert "backward_weight 11 19 22 -> 23" in tape


def forward_of_a_norm(rank: Rank) -> None:
    prepare(rank)
    rank.forward(1, rank.activations[1], rank.weights[1])


def norm_of_a_body(rank: Rank) -> None:
    prepare(rank)
    rank.forward_norm(0, None, rank.activations[0], rank.weights[0])


def backward_of_a_norm(rank: Rank) -> None:
    to_the_loss(rank)
    rank.backward(3, rank.activations[3], rank.grad_activations[4], rank.weights[3])


def backward_norm_of_a_body(rank: Rank) -> None:
    to_the_loss(rank)
    rank.backward_norm(2, rank.activations[2], rank.grad_activations[4], None, rank.weights[2])


def backward_without_forward(rank: Rank) -> None:
    to_the_loss(rank)
    for _ in range(2):
        rank.backward_norm(3, rank.activations[3], rank.grad_activations[4], None, rank.weights[3])


def no_residual(rank: Rank) -> None:
    to_the_loss(rank)
    rank.forward_norm(3, None, rank.activations[3], rank.weights[3])


def no_such_layer(rank: Rank) -> None:
    prepare(rank)
    rank.forward_norm(5, None, rank.activations[1], rank.weights[1])


def stats_of_whole_logits(rank: Rank) -> None:
    to_the_loss(rank)
    rank.loss_stats(rank.forward(4, rank.activations[4], rank.weights[4]))


def loss_with_something_more(rank: Rank) -> None:
    to_the_loss(rank)
    rank.loss(rank.forward(4, rank.activations[4], rank.weights[4]), rank.activations[4])


REFUSED: list[tuple[Callable[[Rank], None], list[str]]] = [
    (forward_of_a_norm, ["forward(layer 1): this layer is a norm: use forward_norm and backward_norm"]),
    (norm_of_a_body, ["forward_norm(layer 0): this layer is no norm"]),
    (backward_of_a_norm, ["backward(layer 3): this layer is a norm"]),
    (backward_norm_of_a_body, ["backward_norm(layer 2): this layer is no norm"]),
    (backward_without_forward, ["backward_norm(layer 3): no forward_norm has come before it", "is not recomputed"]),
    (no_residual, ["forward_norm(layer 3): a residual is missing"]),
    (no_such_layer, ["forward_norm: layer 5 does not exist; the model has layers 0-4"]),
    (stats_of_whole_logits, ["loss_stats: activations[5] (microbatch 0) was given; give slices of the logits"]),
    (loss_with_something_more, ["activations[5] (microbatch 0) needs no stats"]),
]


@pytest.mark.parametrize(("lines", "words"), REFUSED)
def test_what_does_not_fit_a_layers_kind_is_refused(lines: Callable[[Rank], None], words: list[str]) -> None:
    with pytest.raises(Refused) as caught:
        alone(lines, HALVES, 1)
    says(caught.value, *words)


def test_a_backward_pass_by_another_slice_than_the_forward_pass_is_refused() -> None:
    async def swapped(rank: Rank) -> None:
        rank.weights["mine"] = rank.load_weight(0, rank.index, 2)
        rank.activations[0] = rank.load_batch([0])
        terms = rank.forward(0, rank.activations[0], rank.weights["mine"])
        branch = await rank.all_reduce(terms, axis="tp")
        rank.weights[1] = rank.load_weight(1)
        rank.residuals[3], normalised = rank.forward_norm(1, None, branch, rank.weights[1])
        rank.activations[2] = normalised
        rank.weights[2] = rank.load_weight(2, rank.index, 2)
        rank.weights["theirs"] = rank.load_weight(2, 1 - rank.index, 2)
        rank.activations[3] = await rank.all_reduce(rank.forward(2, rank.activations[2], rank.weights[2]), axis="tp")
        rank.weights[3], rank.weights[4] = rank.load_weight(3), rank.load_weight(4, rank.index, 2)
        _, rank.activations[4] = rank.forward_norm(3, rank.residuals[3], rank.activations[3], rank.weights[3])
        rank.activations[5] = rank.forward(4, rank.activations[4], rank.weights[4])
        stats = await rank.all_gather(rank.loss_stats(rank.activations[5]), axis="tp")
        gradient = rank.loss(rank.activations[5], stats)
        _, terms = rank.backward(4, rank.activations[4], gradient, rank.weights[4])
        gradient = await rank.all_reduce(terms, axis="tp")
        _, rank.grad_activations[3], _ = rank.backward_norm(3, rank.activations[3], gradient, None, rank.weights[3])
        rank.backward(2, rank.activations[2], rank.grad_activations[3], rank.weights["theirs"])

    with pytest.raises(Refused) as caught:
        trace(swapped, Mesh(tp=2), HALVES, 1)
    says(caught.value, "backward(layer 2): the forward pass was by other slices of the layer than weights[2]")
