"""The rules of the loss, of sums, of norms and of the optimizer's step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.program import Holds, Kind, OpKind, Reduction, Sizes, Spec
from shardlab.rules import update
from shardlab.rules.pieces import WHOLE
from shardlab.rules.spec import Space, form_of
from tests.rules.toys import Refusals, Toy, is_refused, shard

TOY = Toy(Sizes.puzzle(2))
ALL = 0b1111
"""The step's four microbatches."""

LAYERS = 2


def weight(layer: int = 1, holds: Holds = WHOLE, step: int = 0) -> Spec:
    return TOY.spec_of(Kind.WEIGHT, layer, 0, holds, step)


def state(layer: int = 1, holds: Holds = WHOLE, step: int = 0) -> Spec:
    return TOY.spec_of(Kind.OPT_STATE, layer, 0, holds, step)


def activation(layer: int) -> Spec:
    return TOY.spec_of(Kind.ACTIVATION, layer, 0b11)


def grad_activation(layer: int) -> Spec:
    return TOY.spec_of(Kind.GRAD_ACTIVATION, layer, 0b11)


def grad_weight(cells: int = ALL, holds: Holds = WHOLE, layer: int = 1, step: int = 0) -> Spec:
    return TOY.spec_of(Kind.GRAD_WEIGHT, layer, cells, holds, step)


def scalar(parts: int, of: int = 4, step: int = 0, reduction: Reduction = Reduction.SUM) -> Spec:
    return TOY.spec_of(Kind.SCALAR, 0, 0, Holds(parts, of), step, reduction=reduction)


def add(*specs: Spec) -> Spec:
    return update.add(f"add({specs[0].name})", specs, ("the first value", "the second value"))


def norm(layer: int, gradient: Spec) -> Spec:
    return update.norm(LAYERS, layer, gradient)


def test_loss_makes_the_gradient_of_the_last_activation() -> None:
    assert update.loss(2, activation(2)) == grad_activation(2)


def test_add_unites_sums() -> None:
    assert add(grad_weight(0b01), grad_weight(0b100)) == grad_weight(0b101)
    half, quarters = Holds(0b1, 2), Holds(0b11, 4)
    assert add(grad_weight(0b01, half), grad_weight(0b100, quarters)) == grad_weight(0b101, half)


@pytest.mark.parametrize("gradient", [WHOLE, shard(1, 4)])
def test_update_moves_weight_and_state_one_step_on(gradient: Holds) -> None:
    mine = shard(1, 4)
    made = update.update(1, grad_weight(holds=gradient), weight(holds=mine), state(holds=mine))
    assert made == (weight(holds=mine, step=1), state(holds=mine, step=1))


def test_update_compares_slices_whatever_they_are_counted_in() -> None:
    made = update.update(1, grad_weight(), weight(holds=Holds(0b1, 2)), state(holds=Holds(0b11, 4)))
    assert made == (weight(holds=Holds(0b11, 4), step=1), state(holds=Holds(0b11, 4), step=1))


@pytest.mark.parametrize("gradient", [WHOLE, shard(1, 2), shard(3, 4)])
@pytest.mark.parametrize("held", [WHOLE, shard(1, 2), shard(3, 4)])
def test_update_makes_the_states_slice_of_a_weight_that_holds_more(held: Holds, gradient: Holds) -> None:
    mine = shard(3, 4)
    made = update.update(1, grad_weight(holds=gradient), weight(holds=held), state(holds=mine))
    assert made == (weight(holds=mine, step=1), state(holds=mine, step=1))


def test_a_program_asks_for_every_microbatch_in_every_update() -> None:
    """What was found of one gradient is not said of another one of the same form."""
    given = (weight(), state())
    assert TOY.rules.update(1, (grad_weight(), *given), 0b11) == (weight(step=1), state(step=1))
    is_refused((lambda: TOY.rules.update(1, (grad_weight(0b111), *given), 0b11), ["microbatch 3 is missing"]))
    is_refused((lambda: TOY.rules.update(0, (grad_weight(), *given), 0b11), ["layer 0 is updated from its own"]))


def test_the_new_slices_gathered_are_the_weight_that_was_loaded() -> None:
    """Four states of two slices each hold; the gather counts in the slices that there were before."""
    new = [weight(holds=shard(n, 8), step=1) for n in (2, 3)]
    assert TOY.meet(OpKind.ALL_GATHER, *new) == [weight(holds=shard(1, 4), step=1)] * 2


def test_update_takes_the_norm_of_the_whole_model() -> None:
    made = update.update(1, grad_weight(), weight(), state(), scalar(0b1111))
    assert made == (weight(step=1), state(step=1))


@pytest.mark.parametrize(
    ("holds", "parts"),
    [(WHOLE, Holds(0b010, 3)), (shard(1, 2), Holds(0b001000, 6)), (Holds(0b11, 2), Holds(0b1100, 6))],
)
def test_norm_is_of_the_layers_part_of_the_model(holds: Holds, parts: Holds) -> None:
    made = update.norm(3, 1, grad_weight(holds=holds))
    assert (made.kind, made.holds, made.step) == (Kind.SCALAR, parts, 0)


def test_the_norm_of_a_tied_weight_stands_for_both_layers() -> None:
    form = form_of(Kind.GRAD_WEIGHT, 0, 0, Space(2, uses=2))
    assert update.norm(3, 0, Spec(form, 0b1111)).holds == Holds(0b101, 3)
    is_refused((lambda: update.norm(3, 0, Spec(form, 0b0011)), ["microbatches 0-1 as the head missing"]))


def test_scalars_are_summed_part_by_part() -> None:
    assert add(scalar(0b0001), scalar(0b0110)) == scalar(0b0111)
    assert add(scalar(0b01, 2), scalar(0b0100, 4)) == scalar(0b0111)
    parts = [scalar(0b1000), scalar(0b0001), scalar(0b0110)]
    assert TOY.meet(OpKind.ALL_REDUCE, *parts) == [scalar(0b1111)] * 3


@given(st.integers(1, 3), st.integers(1, 4), st.data())
def test_the_norms_of_all_slices_of_all_layers_are_the_whole_models(layers: int, of: int, data: st.DataObject) -> None:
    """In any order, and never before the last of them."""
    cells = [(layer, n) for layer in range(layers) for n in range(of)]
    order = data.draw(st.permutations(cells))
    total: Spec | None = None
    for layer, n in order:
        assert total is None or not total.holds.complete
        part = update.norm(layers, layer, grad_weight(holds=shard(n, of), layer=layer))
        total = part if total is None else add(total, part)
    assert total is not None
    assert total.holds.complete


REFUSALS: Refusals = {
    "loss, kind": (
        lambda: update.loss(2, grad_activation(2)),
        ["loss: the activation given is grad_activations[2]", "a value of activations"],
    ),
    "loss, layer": (
        lambda: update.loss(2, activation(1)),
        ["loss: the activation given is activations[1]", "reads the last one, activations[2]"],
    ),
    "add, kind": (
        lambda: add(grad_weight(), weight()),
        ["add(grad_weights[1])", "the second value weights[1]", "only gradients of one layer are summed"],
    ),
    "add, weights": (
        lambda: add(weight(), weight()),
        ["add(weights[1])", "the first value gave weights[1]", "only weight gradients are sums of contributions"],
    ),
    "add, layer": (
        lambda: add(grad_weight(0b1), grad_weight(0b10, layer=0)),
        ["the first value gave grad_weights[1]", "the second value grad_weights[0]", "of one layer"],
    ),
    "add, slices": (
        lambda: add(grad_weight(0b1, shard(0, 2)), grad_weight(0b10, shard(1, 2))),
        ["gave slices 0 of 2 and the second value 1 of 2", "only equal slices"],
    ),
    "add, twice": (
        lambda: add(grad_weight(0b11), grad_weight(0b110)),
        ["microbatch 1 would be counted twice", "the first value and the second value both summed it"],
    ),
    "update, gradient's kind": (
        lambda: update.update(1, weight(), weight(), state()),
        ["update(layer 1)", "the gradient given is weights[1]", "a value of grad_weights"],
    ),
    "update, weight's kind": (
        lambda: update.update(1, grad_weight(), state(), state()),
        ["the weight given is opt_states[1]", "a value of weights"],
    ),
    "update, state's kind": (
        lambda: update.update(1, grad_weight(), weight(), weight()),
        ["the optimizer state given is weights[1]", "a value of opt_states"],
    ),
    "update, layer": (
        lambda: update.update(1, grad_weight(), weight(), state(0)),
        ["update(layer 1)", "opt_states[0] was given", "layer 1 is updated from its own"],
    ),
    "update, twice": (
        lambda: update.update(1, grad_weight(), weight(step=1), state(step=1)),
        ["weight is of step 1", "optimizer state of step 1", "gradient of step 0", "exactly once a step"],
    ),
    "update, stale state": (
        lambda: update.update(1, grad_weight(step=1), weight(step=1), state()),
        ["weight is of step 1, the optimizer state of step 0", "of one step"],
    ),
    "update, microbatches": (
        lambda: update.update(1, grad_weight(0b0101), weight(), state()),
        ["microbatches 1, 3 are missing from grad_weights[1] (microbatches 0, 2)", "exactly once", "Add or reduce"],
    ),
    "update, one microbatch": (
        lambda: update.update(1, grad_weight(0b0111), weight(), state()),
        ["microbatch 3 is missing from grad_weights[1] (microbatches 0-2)"],
    ),
    "update, gradient's slices": (
        lambda: update.update(1, grad_weight(holds=shard(0, 2)), weight(), state()),
        ["the gradient holds slices 0 of 2, but the optimizer state holds 0 of 1", "must contain every slice"],
    ),
    "update, state's slices": (
        lambda: update.update(1, grad_weight(), weight(holds=shard(0, 2)), state(holds=shard(1, 2))),
        ["the weight holds slices 0 of 2, but the optimizer state holds 1 of 2", "must contain every slice"],
    ),
    "update, a slice that the weight lacks": (
        lambda: update.update(1, grad_weight(), weight(holds=shard(0, 2)), state()),
        ["the weight holds slices 0 of 2, but the optimizer state holds 0 of 1", "every slice that is updated"],
    ),
    "update, part of the norm": (
        lambda: update.update(1, grad_weight(), weight(), state(), scalar(0b0110)),
        ["update(layer 1): the norm given lacks parts 0, 3 of 4 of the model's parameters", "each once"],
    ),
    "update, norm's kind": (
        lambda: update.update(1, grad_weight(), weight(), state(), grad_weight()),
        ["update(layer 1): the norm given is grad_weights[1]", "a value of scalars"],
    ),
    "update, norm's step": (
        lambda: update.update(1, grad_weight(), weight(), state(), scalar(0b1111, step=1)),
        ["update(layer 1): the norm given is of step 1, the gradient of step 0"],
    ),
    "update, the largest of norms": (
        lambda: update.update(1, grad_weight(), weight(), state(), scalar(0b1111, reduction=Reduction.MAX)),
        ["update(layer 1): the norm given is scalars (the max of several ranks')", "only the sum of all squares"],
    ),
    "norm, kind": (
        lambda: norm(1, weight()),
        ["norm(layer 1)", "the gradient given is weights[1]", "a value of grad_weights"],
    ),
    "norm, layer": (
        lambda: norm(0, grad_weight()),
        ["norm(layer 0)", "grad_weights[1] (microbatches 0-3) was given", "a gradient of layer 0"],
    ),
    "norm, microbatches": (
        lambda: norm(1, grad_weight(0b0101)),
        ["norm(layer 1): microbatches 1, 3 missing from", "squares do not add up", "Add or reduce the missing"],
    ),
    "add, a scalar and a gradient": (
        lambda: add(scalar(0b1), grad_weight()),
        ["add(scalars): the first value gave scalars", "only scalars of one step are summed"],
    ),
    "add, a replica's squares": (
        lambda: add(scalar(0b0011), scalar(0b0110)),
        ["add(scalars): parts 1 of 4 of the model come from the second value", "each parameter's square counts once"],
    ),
    "add, the mean of norms": (
        lambda: add(scalar(0b1), scalar(0b10, reduction=Reduction.MEAN)),
        ["add(scalars): the second value gave scalars", "only sums of squares add up to a norm"],
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_breaks_a_rule_is_refused_with_what_was_given_and_wanted(case: str) -> None:
    assert is_refused(REFUSALS[case]).startswith(case.split(",")[0]), "a refusal begins with the op's name"
