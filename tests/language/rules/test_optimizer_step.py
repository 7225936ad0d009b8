"""The rules of the loss, of sums, of norms and of the optimizer's step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.language import Holds, Kind, OpKind, Reduction, Sizes, Spec
from shardlab.language.rules import arithmetic, optimizer_step
from shardlab.language.rules.kinds import WHOLE
from shardlab.language.rules.spec import Space, form_of
from tests.language.rules.toys import Refusals, Toy, is_refused, shard
from tests.support.refusing import refusal_by

TOY = Toy(Sizes.puzzle(2))
ALL = 0b1111
"""The step's four microbatches."""

LAYERS = 2


def weight(layer: int = 1, holds: Holds = WHOLE, step: int = 0) -> Spec:
    return TOY.spec_of(Kind.WEIGHT, layer, 0, holds, step)


def state(layer: int = 1, holds: Holds = WHOLE, step: int = 0) -> Spec:
    return TOY.spec_of(Kind.OPT_STATE, layer, 0, holds, step)


def direction(layer: int = 1, holds: Holds = WHOLE, step: int = 0) -> Spec:
    return TOY.spec_of(Kind.DIRECTION, layer, 0, holds, step)


def activation(layer: int) -> Spec:
    return TOY.spec_of(Kind.ACTIVATION, layer, 0b11)


def grad_activation(layer: int) -> Spec:
    return TOY.spec_of(Kind.GRAD_ACTIVATION, layer, 0b11)


def grad_weight(cells: int = ALL, holds: Holds = WHOLE, layer: int = 1, step: int = 0) -> Spec:
    return TOY.spec_of(Kind.GRAD_WEIGHT, layer, cells, holds, step)


def scalar(parts: int, of: int = 4, step: int = 0, reduction: Reduction = Reduction.SUM) -> Spec:
    return TOY.spec_of(Kind.SCALAR, 0, 0, Holds(parts, of), step, reduction=reduction)


def add(*specs: Spec) -> Spec:
    return arithmetic.add(specs[0].about("add"), specs, ("the first value", "the second value"))


def norm(layer: int, gradient: Spec) -> Spec:
    return optimizer_step.norm(LAYERS, layer, gradient)


def test_a_direction_is_of_the_state_s_slices_and_the_whole_updates_a_slice() -> None:
    mine = shard(1, 4)
    assert optimizer_step.direction(1, grad_weight(), state(holds=mine)) == direction(holds=mine)
    updated = optimizer_step.update(
        1, grad_weight(holds=mine), weight(), state(holds=mine), None, direction(), pieces=1
    )
    assert updated == (weight(holds=mine, step=1), state(holds=mine, step=1))


def test_each_piece_of_experts_has_matrices_of_its_own() -> None:
    mine, expert = shard(1, 4), Holds(0b0011, 4)
    updated = optimizer_step.update(
        1, grad_weight(), weight(), state(holds=mine), None, direction(holds=expert), pieces=2
    )
    assert updated[1] == state(holds=mine, step=1)
    assert optimizer_step.update(1, grad_weight(), weight(), state(holds=expert), pieces=2)[1].holds == expert


def test_loss_makes_the_gradient_of_the_last_activation() -> None:
    assert optimizer_step.loss(2, activation(2)) == grad_activation(2)


def test_add_unites_sums() -> None:
    assert add(grad_weight(0b01), grad_weight(0b100)) == grad_weight(0b101)
    half, quarters = Holds(0b1, 2), Holds(0b11, 4)
    assert add(grad_weight(0b01, half), grad_weight(0b100, quarters)) == grad_weight(0b101, half)


@pytest.mark.parametrize("gradient", [WHOLE, shard(1, 4)])
def test_update_moves_weight_and_state_one_step_on(gradient: Holds) -> None:
    mine = shard(1, 4)
    updated = optimizer_step.update(1, grad_weight(holds=gradient), weight(holds=mine), state(holds=mine))
    assert updated == (weight(holds=mine, step=1), state(holds=mine, step=1))


def test_update_compares_slices_whatever_they_are_counted_in() -> None:
    updated = optimizer_step.update(1, grad_weight(), weight(holds=Holds(0b1, 2)), state(holds=Holds(0b11, 4)))
    assert updated == (weight(holds=Holds(0b11, 4), step=1), state(holds=Holds(0b11, 4), step=1))


@pytest.mark.parametrize("gradient", [WHOLE, shard(1, 2), shard(3, 4)])
@pytest.mark.parametrize("weight_holds", [WHOLE, shard(1, 2), shard(3, 4)])
def test_update_makes_the_states_slice_of_a_weight_that_holds_more(weight_holds: Holds, gradient: Holds) -> None:
    mine = shard(3, 4)
    updated = optimizer_step.update(1, grad_weight(holds=gradient), weight(holds=weight_holds), state(holds=mine))
    assert updated == (weight(holds=mine, step=1), state(holds=mine, step=1))


def test_a_program_asks_for_every_microbatch_in_every_update() -> None:
    """A cached result for one gradient does not apply to another one of the same form."""
    others = (weight(), state())
    assert TOY.rules.update(1, (grad_weight(), *others), 0b11) == (weight(step=1), state(step=1))
    is_refused(
        (
            lambda: TOY.rules.update(1, (grad_weight(0b111), *others), 0b11),
            refusal_by("missing microbatches", layer=1, missing=(3,)),
        )
    )
    is_refused((lambda: TOY.rules.update(0, (grad_weight(), *others), 0b11), refusal_by("wrong layer", layer=0)))


def test_the_new_slices_gathered_are_the_weight_that_was_loaded() -> None:
    """Four states of two slices each hold; the gather counts in the slices that there were before."""
    new = [weight(holds=shard(n, 8), step=1) for n in (2, 3)]
    assert TOY.meet(OpKind.ALL_GATHER, *new) == [weight(holds=shard(1, 4), step=1)] * 2


def test_update_takes_the_norm_of_the_whole_model() -> None:
    updated = optimizer_step.update(1, grad_weight(), weight(), state(), scalar(0b1111))
    assert updated == (weight(step=1), state(step=1))


@pytest.mark.parametrize(
    ("holds", "parts"),
    [(WHOLE, Holds(0b010, 3)), (shard(1, 2), Holds(0b001000, 6)), (Holds(0b11, 2), Holds(0b1100, 6))],
)
def test_norm_is_of_the_layers_part_of_the_model(holds: Holds, parts: Holds) -> None:
    part = optimizer_step.norm(3, 1, grad_weight(holds=holds))
    assert (part.kind, part.holds, part.step) == (Kind.SCALAR, parts, 0)


def test_the_norm_of_a_tied_weight_stands_for_both_layers() -> None:
    form = form_of(Kind.GRAD_WEIGHT, 0, 0, Space(2, uses=2))
    assert optimizer_step.norm(3, 0, Spec(form, 0b1111)).holds == Holds(0b101, 3)
    is_refused(
        (
            lambda: optimizer_step.norm(3, 0, Spec(form, 0b0011)),
            refusal_by("missing microbatches", layer=0, missing=(2, 3)),
        )
    )


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
        part = optimizer_step.norm(layers, layer, grad_weight(holds=shard(n, of), layer=layer))
        total = part if total is None else add(total, part)
    assert total is not None
    assert total.holds.complete


REFUSALS: Refusals = {
    "loss, kind": (
        lambda: optimizer_step.loss(2, grad_activation(2)),
        refusal_by("wrong kind", layer=2),
    ),
    "loss, layer": (
        lambda: optimizer_step.loss(2, activation(1)),
        refusal_by("wrong layer", layer=2),
    ),
    "add, kind": (
        lambda: add(grad_weight(), weight()),
        refusal_by("other values"),
    ),
    "add, weights": (
        lambda: add(weight(), weight()),
        refusal_by("no term"),
    ),
    "add, layer": (
        lambda: add(grad_weight(0b1), grad_weight(0b10, layer=0)),
        refusal_by("other values"),
    ),
    "add, slices": (
        lambda: add(grad_weight(0b1, shard(0, 2)), grad_weight(0b10, shard(1, 2))),
        refusal_by("other slices"),
    ),
    "add, twice": (
        lambda: add(grad_weight(0b11), grad_weight(0b110)),
        refusal_by("counted twice", doubled=(1,)),
    ),
    "update, gradient's kind": (
        lambda: optimizer_step.update(1, weight(), weight(), state()),
        refusal_by("wrong kind", layer=1),
    ),
    "update, weight's kind": (
        lambda: optimizer_step.update(1, grad_weight(), state(), state()),
        refusal_by("wrong kind", layer=1),
    ),
    "update, state's kind": (
        lambda: optimizer_step.update(1, grad_weight(), weight(), weight()),
        refusal_by("wrong kind", layer=1),
    ),
    "update, layer": (
        lambda: optimizer_step.update(1, grad_weight(), weight(), state(0)),
        refusal_by("wrong layer", layer=1),
    ),
    "update, twice": (
        lambda: optimizer_step.update(1, grad_weight(), weight(step=1), state(step=1)),
        refusal_by("wrong step", layer=1),
    ),
    "update, stale state": (
        lambda: optimizer_step.update(1, grad_weight(step=1), weight(step=1), state()),
        refusal_by("wrong step", layer=1),
    ),
    "update, microbatches": (
        lambda: optimizer_step.update(1, grad_weight(0b0101), weight(), state()),
        refusal_by("missing microbatches", layer=1, missing=(1, 3)),
    ),
    "update, one microbatch": (
        lambda: optimizer_step.update(1, grad_weight(0b0111), weight(), state()),
        refusal_by("missing microbatches", layer=1, missing=(3,)),
    ),
    "update, gradient's slices": (
        lambda: optimizer_step.update(1, grad_weight(holds=shard(0, 2)), weight(), state()),
        refusal_by("missing slices", layer=1, missing=(1,)),
    ),
    "update, state's slices": (
        lambda: optimizer_step.update(1, grad_weight(), weight(holds=shard(0, 2)), state(holds=shard(1, 2))),
        refusal_by("missing slices", layer=1, missing=(1,)),
    ),
    "update, a slice that the weight lacks": (
        lambda: optimizer_step.update(1, grad_weight(), weight(holds=shard(0, 2)), state()),
        refusal_by("missing slices", layer=1, missing=(1,)),
    ),
    "update, part of the norm": (
        lambda: optimizer_step.update(1, grad_weight(), weight(), state(), scalar(0b0110)),
        refusal_by("partial norm", layer=1, missing=(0, 3)),
    ),
    "update, norm's kind": (
        lambda: optimizer_step.update(1, grad_weight(), weight(), state(), grad_weight()),
        refusal_by("wrong kind", layer=1),
    ),
    "update, norm's step": (
        lambda: optimizer_step.update(1, grad_weight(), weight(), state(), scalar(0b1111, step=1)),
        refusal_by("wrong step", layer=1),
    ),
    "update, the largest of norms": (
        lambda: optimizer_step.update(1, grad_weight(), weight(), state(), scalar(0b1111, reduction=Reduction.MAX)),
        refusal_by("no sum of squares", layer=1),
    ),
    "update, a part of a matrix": (
        lambda: optimizer_step.update(1, grad_weight(), weight(), state(holds=shard(0, 2)), pieces=1),
        refusal_by("cut matrices", layer=1, missing=(1,)),
    ),
    "update, a direction of a part": (
        lambda: optimizer_step.update(
            1, grad_weight(), weight(), state(holds=shard(0, 4)), None, direction(holds=Holds(0b0011, 4)), pieces=1
        ),
        refusal_by("cut matrices", layer=1, missing=(2, 3)),
    ),
    "update, another layer's direction": (
        lambda: optimizer_step.update(1, grad_weight(), weight(), state(), None, direction(0), pieces=1),
        refusal_by("wrong layer", layer=1),
    ),
    "update, an old direction": (
        lambda: optimizer_step.update(1, grad_weight(), weight(), state(), None, direction(step=1), pieces=1),
        refusal_by("wrong step", layer=1),
    ),
    "direction, elements": (
        lambda: optimizer_step.direction(1, grad_weight(), state(), pieces=None),
        refusal_by("cut matrices", layer=1),
    ),
    "direction, microbatches": (
        lambda: optimizer_step.direction(1, grad_weight(0b0101), state()),
        refusal_by("missing microbatches", layer=1, missing=(1, 3)),
    ),
    "direction, stale state": (
        lambda: optimizer_step.direction(1, grad_weight(), state(step=1)),
        refusal_by("wrong step", layer=1),
    ),
    "direction, slices": (
        lambda: optimizer_step.direction(1, grad_weight(holds=shard(0, 2)), state()),
        refusal_by("missing slices", layer=1, missing=(1,)),
    ),
    "norm, kind": (
        lambda: norm(1, weight()),
        refusal_by("wrong kind", layer=1),
    ),
    "norm, layer": (
        lambda: norm(0, grad_weight()),
        refusal_by("wrong layer", layer=0),
    ),
    "norm, microbatches": (
        lambda: norm(1, grad_weight(0b0101)),
        refusal_by("missing microbatches", layer=1, missing=(1, 3)),
    ),
    "add, a scalar and a gradient": (
        lambda: add(scalar(0b1), grad_weight()),
        refusal_by("other values"),
    ),
    "add, a replica's squares": (
        lambda: add(scalar(0b0011), scalar(0b0110)),
        refusal_by("counted twice", doubled=(1,)),
    ),
    "add, the mean of norms": (
        lambda: add(scalar(0b1), scalar(0b10, reduction=Reduction.MEAN)),
        refusal_by("no sum of squares"),
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_broken_rule_is_refused_with_the_given_and_the_expected_value(case: str) -> None:
    assert is_refused(REFUSALS[case]).about.startswith(case.split(",")[0]), "a refusal begins with the op's name"
