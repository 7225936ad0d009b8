"""The rules of a whole layer: what it makes of its input, and why it refuses other values."""

from __future__ import annotations

import pytest

from shardlab.language import Holds, Kind, Sizes, Spec
from shardlab.language.rules.arithmetic import scale
from shardlab.language.rules.kinds import WHOLE, factor_of
from tests.language.rules.toys import Refusals, Toy, is_refused
from tests.support.refusing import refusal_by

TOY = Toy(Sizes.puzzle(2))
LAYER = TOY.layer(1)


def weight(layer: int = 1, holds: Holds = WHOLE, step: int = 0) -> Spec:
    return TOY.spec_of(Kind.WEIGHT, layer, 0, holds, step)


def activation(layer: int = 1, cells: int = 0b11, step: int = 0) -> Spec:
    return TOY.spec_of(Kind.ACTIVATION, layer, cells, step=step)


def gradient(layer: int = 2, cells: int = 0b11, step: int = 0) -> Spec:
    return TOY.spec_of(Kind.GRAD_ACTIVATION, layer, cells, step=step)


def grad_weight(cells: int = 0b11, step: int = 0) -> Spec:
    return TOY.spec_of(Kind.GRAD_WEIGHT, 1, cells, step=step)


def half(step: int = 0) -> Spec:
    """Return the value that the first half of a backward pass leaves for the second."""
    return LAYER.saved(activation(step=step), weight(step=step), Kind.SAVED_FOR_WEIGHT)


def test_forward_makes_the_next_activation_of_the_same_rows() -> None:
    assert LAYER.forward([activation()], weight()) == [activation(2)]
    assert LAYER.forward([activation()], weight(holds=Holds(0b111, 3))) == [activation(2)]
    assert LAYER.forward([activation(step=1)], weight(step=1)) == [activation(2, step=1)]


def test_a_rule_that_was_asked_before_says_the_same_of_other_rows() -> None:
    for cells in (0b1, 0b1010, 0b1):
        assert LAYER.forward([activation(cells=cells)], weight()) == [activation(2, cells)]
        gradients = LAYER.backward(activation(cells=cells), [gradient(cells=cells)], weight())
        assert gradients == [grad_weight(cells), gradient(1, cells)]


@pytest.mark.parametrize("kind", [Kind.SAVED, Kind.SAVED_FOR_WEIGHT])
def test_saved_values_have_the_same_rows(kind: Kind) -> None:
    assert LAYER.saved(activation(), weight(), kind) == TOY.spec_of(kind, 1, 0b11)


def test_backward_makes_the_weights_gradient_and_the_inputs() -> None:
    assert LAYER.backward(activation(), [gradient()], weight()) == [grad_weight(), gradient(1)]


@pytest.mark.parametrize("step", [0, 1])
def test_backward_weight_makes_the_weights_gradient_as_backward_does(step: int) -> None:
    whole = LAYER.backward(activation(step=step), [gradient(step=step)], weight(step=step))
    assert LAYER.backward_weight(activation(step=step), [gradient(step=step)], half(step)) == whole[0]
    assert whole[0] == grad_weight(step=step)


PARTIAL = weight(holds=Holds(0b0101, 4))

REFUSALS: Refusals = {
    "forward, kind": (
        lambda: LAYER.forward([gradient(1)], weight()),
        refusal_by("wrong kind", layer=1),
    ),
    "forward, layer": (
        lambda: LAYER.forward([activation(2)], weight()),
        refusal_by("wrong layer", layer=1),
    ),
    "forward, weight's kind": (
        lambda: LAYER.forward([activation()], TOY.spec_of(Kind.OPT_STATE, 1)),
        refusal_by("wrong kind", layer=1),
    ),
    "forward, weight's layer": (
        lambda: LAYER.forward([activation()], weight(0)),
        refusal_by("wrong layer", layer=1),
    ),
    "forward, partial weight": (
        lambda: LAYER.forward([activation()], PARTIAL),
        refusal_by("partial weight", layer=1, missing=(1, 3)),
    ),
    "forward, updated weight": (
        lambda: LAYER.forward([activation()], weight(step=1)),
        refusal_by("stale weight", layer=1),
    ),
    "forward, too many values": (
        lambda: LAYER.forward([activation()] * 2, weight()),
        refusal_by("wrong number", layer=1),
    ),
    "backward, activation's kind": (
        lambda: LAYER.backward(gradient(1), [gradient()], weight()),
        refusal_by("wrong kind", layer=1),
    ),
    "backward, gradient's kind": (
        lambda: LAYER.backward(activation(), [activation(2)], weight()),
        refusal_by("wrong kind", layer=1),
    ),
    "backward, activation's layer": (
        lambda: LAYER.backward(activation(2), [gradient()], weight()),
        refusal_by("wrong layer", layer=1),
    ),
    "backward, gradient's layer": (
        lambda: LAYER.backward(activation(), [gradient(1)], weight()),
        refusal_by("wrong layer", layer=1),
    ),
    "backward, gradient's step": (
        lambda: LAYER.backward(activation(), [gradient(step=1)], weight()),
        refusal_by("wrong step", layer=1),
    ),
    "backward, microbatches": (
        lambda: LAYER.backward(activation(cells=0b1), [gradient(cells=0b110)], weight()),
        refusal_by("other tokens", layer=1),
    ),
    "backward, partial weight": (
        lambda: LAYER.backward(activation(), [gradient()], PARTIAL),
        refusal_by("partial weight", layer=1, missing=(1, 3)),
    ),
    "backward, updated weight": (
        lambda: LAYER.backward(activation(), [gradient()], weight(step=1)),
        refusal_by("stale weight", layer=1),
    ),
    "backward, no gradient": (
        lambda: LAYER.backward(activation(), [], weight()),
        refusal_by("wrong number", layer=1),
    ),
    "backward_weight, activation's layer": (
        lambda: LAYER.backward_weight(activation(2), [gradient()], half()),
        refusal_by("wrong layer", layer=1),
    ),
    "backward_weight, gradient's kind": (
        lambda: LAYER.backward_weight(activation(), [grad_weight()], half()),
        refusal_by("wrong kind", layer=1),
    ),
    "backward_weight, gradient's layer": (
        lambda: LAYER.backward_weight(activation(), [gradient(1)], half()),
        refusal_by("wrong layer", layer=1),
    ),
    "backward_weight, gradient's factor": (
        lambda: LAYER.backward_weight(activation(), [scale(gradient(), factor_of(2))], half()),
        refusal_by("other factors", layer=1),
    ),
    "backward_weight, microbatches": (
        lambda: LAYER.backward_weight(activation(cells=0b1), [gradient(cells=0b10)], half()),
        refusal_by("other tokens", layer=1),
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_broken_rule_is_refused_with_the_given_and_the_expected_value(case: str) -> None:
    assert is_refused(REFUSALS[case]).about.startswith(case.split(",")[0]), "a refusal begins with the op's name"
