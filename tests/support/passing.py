"""Requirements on a right program."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from shardlab.check import Checked, check
from shardlab.language import Program, Rank, Value
from tests.support.interpreter import judge


def is_right(program: Program) -> Checked:
    """Require that a program passes the check and computes the right numbers."""
    checked, verdict = check(program), judge(program)
    assert verdict.right, verdict.reason
    return checked


def is_right_everywhere(program: Program) -> None:
    """Require that a program is right, hangs under no channel model, and runs on processes."""
    checked = is_right(program)
    assert set(checked.models.values()) == {None}
    assert checked.not_runnable is None


# A data-parallel step up to its gradients, for programs that do something of their own with these.


def gradients(rank: Rank, microbatches: Iterable[int] | None = None) -> Iterator[tuple[int, Value]]:
    """Yield each layer and its weight's gradient for some microbatches (None: the rank's share), last layer first.

    Weights and states that a program has not loaded are loaded unsliced.
    """
    for l in rank.layers:
        if l not in rank.weights:
            rank.weights[l], rank.opt_states[l] = rank.load_weights(l)
    rank.activations[0] = rank.load_batch(rank.share() if microbatches is None else microbatches)
    for l in rank.layers:
        rank.activations[l + 1] = rank.forward(l, rank.activations[l], rank.weights[l])
    gradient = rank.loss(rank.activations.pop(len(rank.layers)))
    for l in reversed(rank.layers):
        grad_weight, gradient = rank.backward(l, rank.activations.pop(l), gradient, rank.weights[l])
        yield l, grad_weight
