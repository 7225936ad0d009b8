"""A backward pass in two halves: what each puts on the tape, and what must still be there for the second."""

from __future__ import annotations

import pytest

from shardlab.program import OpKind, Rank, trace
from tests.program.tapes import alone, refused, sentence


def prepare(rank: Rank, *, save: bool = True) -> None:
    """One layer's weight, and one microbatch up to the gradient of its output."""
    rank.weights[0], rank.opt_states[0] = rank.load_weights(0)
    rank.activations[0] = rank.load_batch([0])
    rank.grad_activations[1] = rank.loss(rank.forward(0, rank.activations[0], rank.weights[0], save=save))


def test_the_halves_put_exactly_their_own_ops_on_the_tape() -> None:
    def lines(rank: Rank) -> None:
        prepare(rank)
        rank.backward_input(0, rank.activations[0], rank.grad_activations[1], rank.weights[0])
        gradient = rank.backward_weight(0, rank.activations.pop(0), rank.grad_activations.pop(1))
        rank.weights[0], rank.opt_states[0] = rank.update(0, gradient, rank.weights[0], rank.opt_states[0])

    assert alone(lines, layers=1, microbatches=1) == [
        "load_weight -> 0",
        "load_opt_state -> 1",
        "load_batch -> 2",
        "forward 2 0 -> 3 4",
        "loss 3 -> 5",
        "free 3",
        "backward_input 2 5 0 4 -> 6 7",
        "backward_weight 2 5 7 -> 8",
        "free 2",
        "free 5",
        "update 8 0 1 -> 9 10",
        "free 8",
        "free 6",
    ]


def test_what_the_weights_half_needs_goes_with_the_activation() -> None:
    """Nothing frees it by itself: the tape has no FREE of it."""

    def lines(rank: Rank) -> None:
        prepare(rank)
        rank.backward_input(0, rank.activations[0], rank.grad_activations[1], rank.weights[0])
        del rank.activations[0]

    tape = alone(lines, layers=1)
    assert "backward_input 2 5 0 4 -> 6 7" in tape
    assert "free 2" in tape
    assert not {"free 4", "free 7"} & set(tape)


def test_the_first_half_recomputes_what_was_not_saved() -> None:
    def lines(rank: Rank) -> None:
        prepare(rank, save=False)
        rank.backward_input(0, rank.activations[0], rank.grad_activations[1], rank.weights[0])
        rank.backward_weight(0, rank.activations[0], rank.grad_activations[1])

    passes = [word for word in alone(lines, layers=1) if word.split()[0] in {"recompute", "backward_input"}]
    assert passes == ["recompute 2 0 -> 5", "backward_input 2 4 0 5 -> 6 7"]


def test_the_weight_may_be_freed_between_the_halves() -> None:
    async def strategy(rank: Rank) -> None:
        rank.weights[0] = rank.load_weight(0, rank.index, 2)
        full = rank.weights["full"] = await rank.all_gather(rank.weights[0])
        rank.activations[0] = rank.load_batch([0])
        rank.grad_activations[1] = rank.loss(rank.forward(0, rank.activations[0], full))
        rank.backward_input(0, rank.activations[0], rank.grad_activations[1], full)
        del rank.weights["full"]
        rank.backward_weight(0, rank.activations.pop(0), rank.grad_activations.pop(1))

    for tape in trace(strategy, 2, 1, 2).tapes:
        free, half = [
            next(at for at, op in enumerate(tape) if op.kind is kind and op.inputs[0] == read)
            for kind, read in ((OpKind.FREE, 1), (OpKind.BACKWARD_WEIGHT, 2))
        ]
        assert free < half


@pytest.mark.parametrize("before", ["nothing", "backward", "backward_weight"])
def test_the_weights_half_wants_an_input_half_of_its_own(before: str) -> None:
    def lines(rank: Rank) -> None:
        prepare(rank)
        given = rank.activations[0], rank.grad_activations[1]
        if before == "backward":
            rank.backward(0, *given, rank.weights[0])
        if before == "backward_weight":
            rank.backward_input(0, *given, rank.weights[0])
            rank.backward_weight(0, *given)
        rank.backward_weight(0, *given)

    refused(lines, "no forward", layers=1, layer=0)


def test_an_activation_popped_for_the_first_half_is_gone_for_the_second() -> None:
    def lines(rank: Rank) -> None:
        prepare(rank)
        batch = rank.activations.pop(0)
        rank.backward_input(0, batch, rank.grad_activations[1], rank.weights[0])
        rank.backward_weight(0, batch, rank.grad_activations[1])

    refused(lines, "freed", layers=1, layer=0)


def test_a_gradient_popped_for_the_first_half_is_gone_for_the_second() -> None:
    def lines(rank: Rank) -> None:
        prepare(rank)
        gradient = rank.grad_activations.pop(1)
        rank.backward_input(0, rank.activations[0], gradient, rank.weights[0])
        rank.backward_weight(0, rank.activations[0], gradient)

    refused(lines, "freed", layer=0, layers=1)


def test_the_weights_half_wants_the_gradient_of_its_own_microbatch() -> None:
    def lines(rank: Rank) -> None:
        prepare(rank)
        rank.backward_input(0, rank.activations[0], rank.grad_activations[1], rank.weights[0])
        rank.activations["other"] = rank.load_batch([1])
        other = rank.loss(rank.forward(0, rank.activations["other"], rank.weights[0]))
        rank.backward_weight(0, rank.activations[0], other)

    refused(lines, "other tokens", layer=0, layers=1)


@pytest.mark.parametrize("layer", [-1, 1, 7])
@pytest.mark.parametrize("verb", ["backward_input", "backward_weight", "norm"])
def test_a_half_or_a_norm_of_a_layer_that_does_not_exist_is_refused(verb: str, layer: int) -> None:
    def lines(rank: Rank) -> None:
        value = rank.load_batch([0])
        getattr(rank, verb)(layer, *(value,) * {"backward_input": 3, "backward_weight": 2, "norm": 1}[verb])

    assert sentence(refused(lines, "unknown layer", layers=1))
