"""The rules: what each op makes of the specs it is given, and why it refuses others."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.program import Holds, Kind, Message, OpKind, Refused, Spec, transfer
from shardlab.rules.pieces import WHOLE
from shardlab.rules.spec import ONE  # FIXME
from tests.program.tapes import says

ALL = 0b1111
"""The step's four microbatches."""


LAYERS = 2
"""Of the model that the values belong to."""


def weight(layer: int = 1, holds: Holds = WHOLE, step: int = 0) -> Spec:
    return Spec(Kind.WEIGHT, layer, holds, 0, step)


def state(layer: int = 1, holds: Holds = WHOLE, step: int = 0) -> Spec:
    return Spec(Kind.OPT_STATE, layer, holds, 0, step)


def activation(layer: int = 1, microbatches: int = 0b11, step: int = 0) -> Spec:
    return Spec(Kind.ACTIVATION, layer, Holds(microbatches, 4), 0, step)


def grad_activation(layer: int = 2, microbatches: int = 0b11, step: int = 0) -> Spec:
    return Spec(Kind.GRAD_ACTIVATION, layer, Holds(microbatches, 4), 0, step)


def grad_weight(sums: int = ALL, holds: Holds = WHOLE, layer: int = 1, step: int = 0) -> Spec:
    return Spec(Kind.GRAD_WEIGHT, layer, holds, sums, step)


def scalar(parts: int, of: int = 4, step: int = 0) -> Spec:
    return Spec(Kind.SCALAR, 0, Holds(parts, of), 0, step)


def shard(n: int, of: int) -> Holds:
    return Holds(1 << n, of)


# Results.


def test_forward_makes_the_next_activation_of_the_same_rows() -> None:
    assert transfer.forward(1, activation(), weight()) == activation(2)
    assert transfer.forward(1, activation(), weight(holds=Holds(0b111, 3))) == activation(2)
    assert transfer.forward(1, activation(step=1), weight(step=1)) == activation(2, step=1)


def test_autograd_keeps_something_of_the_same_rows() -> None:
    assert transfer.saved(1, activation()) == Spec(Kind.SAVED, 1, Holds(0b11, 4))


def test_loss_makes_the_gradient_of_the_last_activation() -> None:
    assert transfer.loss(2, activation(2)) == grad_activation(2)


def test_backward_makes_the_weights_gradient_and_the_inputs() -> None:
    made = transfer.backward(1, activation(), grad_activation(), weight())
    assert made == (grad_weight(0b11), grad_activation(1))


def test_backward_weight_makes_the_weights_gradient_as_backward_does() -> None:
    assert transfer.backward_weight(1, activation(), grad_activation()) == grad_weight(0b11)
    whole = transfer.backward(1, activation(step=1), grad_activation(step=1), weight(step=1))
    assert transfer.backward_weight(1, activation(step=1), grad_activation(step=1)) == whole[0]


def test_what_is_kept_between_the_halves_is_of_the_same_rows() -> None:
    assert transfer.saved(1, activation(), 0, Kind.SAVED_FOR_WEIGHT) == Spec(Kind.SAVED_FOR_WEIGHT, 1, Holds(0b11, 4))


def test_add_unites_sums() -> None:
    assert transfer.add(grad_weight(0b01), grad_weight(0b100)) == grad_weight(0b101)
    half, quarters = Holds(0b1, 2), Holds(0b11, 4)
    assert transfer.add(grad_weight(0b01, half), grad_weight(0b100, quarters)) == grad_weight(0b101, half)


@pytest.mark.parametrize("gradient", [WHOLE, shard(1, 4)])
def test_update_moves_weight_and_state_one_step_on(gradient: Holds) -> None:
    mine = shard(1, 4)
    made = transfer.update(1, grad_weight(holds=gradient), weight(holds=mine), state(holds=mine), ALL)
    assert made == (weight(holds=mine, step=1), state(holds=mine, step=1))


def test_update_compares_slices_whatever_they_are_counted_in() -> None:
    made = transfer.update(1, grad_weight(), weight(holds=Holds(0b1, 2)), state(holds=Holds(0b11, 4)), ALL)
    assert made == (weight(holds=Holds(0b11, 4), step=1), state(holds=Holds(0b11, 4), step=1))


@pytest.mark.parametrize("gradient", [WHOLE, shard(1, 2), shard(3, 4)])
@pytest.mark.parametrize("held", [WHOLE, shard(1, 2), shard(3, 4)])
def test_update_makes_the_states_slice_of_a_weight_that_holds_more(held: Holds, gradient: Holds) -> None:
    mine = shard(3, 4)
    made = transfer.update(1, grad_weight(holds=gradient), weight(holds=held), state(holds=mine), ALL)
    assert made == (weight(holds=mine, step=1), state(holds=mine, step=1))


def test_the_new_slices_gathered_are_the_weight_that_was_loaded() -> None:
    """Four states of two slices each hold; the gather counts in the slices that there were before."""
    new = [weight(holds=shard(n, 8), step=1) for n in (2, 3)]
    assert transfer.collective(OpKind.ALL_GATHER, new, [0, 1], LAYERS) == [weight(holds=shard(1, 4), step=1)] * 2


def test_update_takes_the_norm_of_the_whole_model() -> None:
    assert transfer.update(1, grad_weight(), weight(), state(), ALL, scalar(0b1111)) == (weight(step=1), state(step=1))


@pytest.mark.parametrize(
    ("holds", "parts"),
    [(WHOLE, Holds(0b010, 3)), (shard(1, 2), Holds(0b001000, 6)), (Holds(0b11, 2), Holds(0b1100, 6))],
)
def test_norm_is_of_the_layers_part_of_the_model(holds: Holds, parts: Holds) -> None:
    made = transfer.norm(1, 3, grad_weight(holds=holds), ALL)
    assert (made.kind, made.holds, made.step) == (Kind.SCALAR, parts, 0)


def test_scalars_are_summed_part_by_part() -> None:
    assert transfer.add(scalar(0b0001), scalar(0b0110)) == scalar(0b0111)
    assert transfer.add(scalar(0b01, 2), scalar(0b0100, 4)) == scalar(0b0111)
    parts = [scalar(0b1000), scalar(0b0001), scalar(0b0110)]
    assert transfer.collective(OpKind.ALL_REDUCE, parts, range(3), LAYERS) == [scalar(0b1111)] * 3


@given(st.integers(1, 3), st.integers(1, 4), st.data())
def test_the_norms_of_all_slices_of_all_layers_are_the_whole_models(layers: int, of: int, data: st.DataObject) -> None:
    """In any order, and never before the last of them."""
    cells = [(layer, n) for layer in range(layers) for n in range(of)]
    order = data.draw(st.permutations(cells))
    total: Spec | None = None
    for layer, n in order:
        assert total is None or not total.holds.complete
        part = transfer.norm(layer, layers, grad_weight(holds=shard(n, of), layer=layer), ALL)
        total = part if total is None else transfer.add(total, part)
    assert total is not None
    assert total.holds.complete


def test_all_gather_unites_holds() -> None:
    pieces = [weight(holds=shard(n, 3)) for n in (2, 0, 1)]
    assert transfer.collective(OpKind.ALL_GATHER, pieces, [0, 1, 2], LAYERS) == [weight()] * 3
    assert (
        transfer.collective(OpKind.ALL_GATHER, [activation(1, 0b01), activation(1, 0b10)], [0, 1], LAYERS)
        == [activation(1, 0b11)] * 2
    )
    mixed = [weight(holds=Holds(0b1, 2)), weight(holds=Holds(0b1000, 4)), weight(holds=Holds(0b0100, 4))]
    assert transfer.collective(OpKind.ALL_GATHER, mixed, [0, 1, 2], LAYERS)[0].holds.complete


def test_all_reduce_unites_sums() -> None:
    pieces = [grad_weight(1 << n) for n in range(4)]
    assert transfer.collective(OpKind.ALL_REDUCE, pieces, range(4), LAYERS) == [grad_weight(ALL)] * 4


def test_reduce_scatter_unites_sums_and_splits_holds() -> None:
    pieces = [grad_weight(1 << n) for n in range(4)]
    assert transfer.collective(OpKind.REDUCE_SCATTER, pieces, range(4), LAYERS) == [
        grad_weight(ALL, shard(n, 4)) for n in range(4)
    ]


@given(st.permutations(range(6)), st.integers(1, 6))
def test_gathering_what_was_scattered_gives_the_reduced_gradient(order: list[int], members: int) -> None:
    pieces = [grad_weight(1 << n) for n in order[:members]]
    ranks = range(members)
    scattered = transfer.collective(OpKind.REDUCE_SCATTER, pieces, ranks, LAYERS)
    gathered = transfer.collective(OpKind.ALL_GATHER, scattered, ranks, LAYERS)[0]
    reduced = transfer.collective(OpKind.ALL_REDUCE, pieces, ranks, LAYERS)[0]
    assert gathered.sums == reduced.sums
    assert gathered.holds.same(reduced.holds)


specs = st.builds(
    Spec,
    st.sampled_from([Kind.WEIGHT, Kind.GRAD_WEIGHT]),
    st.integers(0, 1),
    st.integers(1, 3).flatmap(lambda of: st.integers(1, (1 << of) - 1).map(lambda mask: Holds(mask, of))),
    st.integers(0, 7),
    st.integers(0, 1),
    st.just(ONE),
)
alike = specs.flatmap(
    lambda first: st.lists(
        st.one_of(
            st.just(first),
            st.integers(0, 7).map(lambda sums: first._replace(sums=sums)),
            st.integers(1, (1 << first.holds.of) - 1).map(lambda m: first._replace(holds=Holds(m, first.holds.of))),
            specs,
        ),
        max_size=2,
    ).map(lambda rest: [first, *rest])
)


@given(st.sampled_from([OpKind.ALL_REDUCE, OpKind.ALL_GATHER]), alike)
def test_a_collective_says_what_the_rule_for_its_members_says(kind: OpKind, members: list[Spec]) -> None:
    names = [f"rank {rank}" for rank in range(len(members))]
    rule = transfer.unite_holds if kind is OpKind.ALL_GATHER else transfer.unite_sums
    name = f"{kind.value}({members[0].kind.value}[{members[0].layer}])"
    assert outcome(lambda: [rule(name, members, names)] * len(members)) == outcome(
        lambda: transfer.collective(kind, members, range(len(members)), LAYERS)
    )


def outcome(call: Callable[[], list[Spec]]) -> list[Spec] | str:
    try:
        return call()
    except Refused as refusal:
        return str(refusal)


@given(alike)
def test_a_sum_counts_every_contribution_once(members: list[Spec]) -> None:
    try:
        total = transfer.collective(OpKind.ALL_REDUCE, members, range(len(members)), LAYERS)[0]
    except Refused:
        return
    assert total.sums == sum(member.sums for member in members), "a sum of disjoint bit sets is their union"
    assert all(member.holds.same(total.holds) for member in members)


@given(alike)
def test_a_gathered_value_holds_every_piece_once(members: list[Spec]) -> None:
    try:
        total = transfer.collective(OpKind.ALL_GATHER, members, range(len(members)), LAYERS)[0]
    except Refused:
        return
    shares = sum(Fraction(member.holds.pieces, member.holds.of) for member in members)
    assert Fraction(total.holds.pieces, total.holds.of) == shares
    assert all(total.holds.contains(member.holds) for member in members)


def test_a_message_is_named_by_kind_layer_and_microbatches() -> None:
    assert transfer.message_of(activation()) == Message(Kind.ACTIVATION, 1, 0b11)
    assert transfer.message_of(grad_weight(0b101, shard(0, 2))) == Message(Kind.GRAD_WEIGHT, 1, 0b101)
    assert transfer.message_of(weight()) == Message(Kind.WEIGHT, 1, 0)
    transfer.delivered(3, Message(Kind.ACTIVATION, 1, 0b11), activation())


# Refusals.

PARTIAL = weight(holds=Holds(0b0101, 4))

REFUSALS: dict[str, tuple[Callable[[], object], list[str]]] = {
    "forward, kind": (
        lambda: transfer.forward(1, grad_activation(1), weight()),
        ["forward(layer 1)", "activation given is grad_activations[1] (microbatches 0-1)", "a value of activations"],
    ),
    "forward, layer": (
        lambda: transfer.forward(1, activation(2), weight()),
        ["forward(layer 1)", "activations[2] (microbatches 0-1)", "layer 1 reads activations[1]"],
    ),
    "forward, weight's kind": (
        lambda: transfer.forward(1, activation(), state()),
        ["the weight given is opt_states[1]", "a value of weights"],
    ),
    "forward, weight's layer": (
        lambda: transfer.forward(1, activation(), weight(0)),
        ["the weight given is weights[0]", "layer 1 computes with weights[1]"],
    ),
    "forward, partial weight": (
        lambda: transfer.forward(1, activation(), PARTIAL),
        ["partial", "weights[1] (shard 0, 2 of 4)", "slices 1, 3 of 4 are missing", "all_gather"],
    ),
    "forward, updated weight": (
        lambda: transfer.forward(1, activation(), weight(step=1)),
        ["weights[1] (step 1)", "of optimizer step 1", "batch belongs to step 0", "already updated"],
    ),
    "loss, kind": (
        lambda: transfer.loss(2, grad_activation()),
        ["loss: the activation given is grad_activations[2]", "a value of activations"],
    ),
    "loss, layer": (
        lambda: transfer.loss(2, activation(1)),
        ["loss: the activation given is activations[1]", "reads the last one, activations[2]"],
    ),
    "backward, activation's kind": (
        lambda: transfer.backward(1, grad_activation(1), grad_activation(), weight()),
        ["backward(layer 1)", "the activation given is grad_activations[1]", "a value of activations"],
    ),
    "backward, gradient's kind": (
        lambda: transfer.backward(1, activation(), activation(2), weight()),
        ["the gradient given is activations[2]", "a value of grad_activations"],
    ),
    "backward, activation's layer": (
        lambda: transfer.backward(1, activation(2), grad_activation(), weight()),
        ["activations[2] (microbatches 0-1)", "was fed activations[1]"],
    ),
    "backward, gradient's layer": (
        lambda: transfer.backward(1, activation(), grad_activation(1), weight()),
        ["grad_activations[1] (microbatches 0-1)", "turns grad_activations[2] into grad_activations[1]"],
    ),
    "backward, microbatches": (
        lambda: transfer.backward(1, activation(1, 0b1), grad_activation(2, 0b110), weight()),
        ["activation is of microbatch 0", "gradient of microbatches 1-2", "the same microbatches"],
    ),
    "backward, partial weight": (
        lambda: transfer.backward(1, activation(), grad_activation(), PARTIAL),
        ["backward(layer 1)", "partial", "slices 1, 3 of 4 are missing"],
    ),
    "backward, updated weight": (
        lambda: transfer.backward(1, activation(), grad_activation(), weight(step=1)),
        ["backward(layer 1)", "weights[1] (step 1)", "already updated"],
    ),
    "add, kind": (
        lambda: transfer.add(grad_weight(), weight()),
        ["add(grad_weights[1])", "the second value gave weights[1]", "only weight gradients"],
    ),
    "add, layer": (
        lambda: transfer.add(grad_weight(0b1), grad_weight(0b10, layer=2)),
        ["the first value gave grad_weights[1]", "the second value grad_weights[2]", "of one layer"],
    ),
    "add, slices": (
        lambda: transfer.add(grad_weight(0b1, shard(0, 2)), grad_weight(0b10, shard(1, 2))),
        ["gave slices 0 of 2 and the second value 1 of 2", "only equal slices"],
    ),
    "add, twice": (
        lambda: transfer.add(grad_weight(0b11), grad_weight(0b110)),
        ["microbatch 1 would be counted twice", "the first value and the second value both summed it"],
    ),
    "update, gradient's kind": (
        lambda: transfer.update(1, weight(), weight(), state(), ALL),
        ["update(layer 1)", "the gradient given is weights[1]", "a value of grad_weights"],
    ),
    "update, weight's kind": (
        lambda: transfer.update(1, grad_weight(), state(), state(), ALL),
        ["the weight given is opt_states[1]", "a value of weights"],
    ),
    "update, state's kind": (
        lambda: transfer.update(1, grad_weight(), weight(), weight(), ALL),
        ["the optimizer state given is weights[1]", "a value of opt_states"],
    ),
    "update, layer": (
        lambda: transfer.update(1, grad_weight(), weight(), state(0), ALL),
        ["update(layer 1)", "opt_states[0] was given", "layer 1 is updated from its own"],
    ),
    "update, twice": (
        lambda: transfer.update(1, grad_weight(), weight(step=1), state(step=1), ALL),
        ["weight is of step 1", "optimizer state of step 1", "gradient of step 0", "exactly once a step"],
    ),
    "update, stale state": (
        lambda: transfer.update(1, grad_weight(step=1), weight(step=1), state(), ALL),
        ["weight is of step 1, the optimizer state of step 0", "of one step"],
    ),
    "update, microbatches": (
        lambda: transfer.update(1, grad_weight(0b0101), weight(), state(), ALL),
        ["microbatches 1, 3 are missing from grad_weights[1] (microbatches 0, 2)", "exactly once", "Add or reduce"],
    ),
    "update, one microbatch": (
        lambda: transfer.update(1, grad_weight(0b0111), weight(), state(), ALL),
        ["microbatch 3 is missing from grad_weights[1] (microbatches 0-2)"],
    ),
    "update, gradient's slices": (
        lambda: transfer.update(1, grad_weight(holds=shard(0, 2)), weight(), state(), ALL),
        ["the gradient holds slices 0 of 2, but the optimizer state holds 0 of 1", "must contain every slice"],
    ),
    "update, state's slices": (
        lambda: transfer.update(1, grad_weight(), weight(holds=shard(0, 2)), state(holds=shard(1, 2)), ALL),
        ["the weight holds slices 0 of 2, but the optimizer state holds 1 of 2", "must contain every slice"],
    ),
    "backward_weight, activation's layer": (
        lambda: transfer.backward_weight(1, activation(2), grad_activation()),
        ["backward_weight(layer 1)", "activations[2] (microbatches 0-1)", "was fed activations[1]"],
    ),
    "backward_weight, gradient's kind": (
        lambda: transfer.backward_weight(1, activation(), grad_weight()),
        ["backward_weight(layer 1)", "the gradient given is grad_weights[1]", "a value of grad_activations"],
    ),
    "backward_weight, gradient's layer": (
        lambda: transfer.backward_weight(1, activation(), grad_activation(1)),
        ["backward_weight(layer 1)", "turns grad_activations[2] into grad_activations[1]"],
    ),
    "backward_weight, microbatches": (
        lambda: transfer.backward_weight(1, activation(1, 0b1), grad_activation(2, 0b10)),
        ["backward_weight(layer 1)", "activation is of microbatch 0 and the gradient of microbatch 1"],
    ),
    "norm, kind": (
        lambda: transfer.norm(1, 2, weight(), ALL),
        ["norm(layer 1)", "the gradient given is weights[1]", "a value of grad_weights"],
    ),
    "norm, layer": (
        lambda: transfer.norm(0, 2, grad_weight(), ALL),
        ["norm(layer 0)", "grad_weights[1] (microbatches 0-3) was given", "a gradient of layer 0"],
    ),
    "norm, microbatches": (
        lambda: transfer.norm(1, 2, grad_weight(0b0101), ALL),
        ["norm(layer 1): microbatches 1, 3 missing from", "squares do not add up", "Add or reduce the missing"],
    ),
    "update, part of the norm": (
        lambda: transfer.update(1, grad_weight(), weight(), state(), ALL, scalar(0b0110)),
        ["update(layer 1): the norm given lacks parts 0, 3 of 4 of the model's parameters", "each once"],
    ),
    "update, norm's kind": (
        lambda: transfer.update(1, grad_weight(), weight(), state(), ALL, grad_weight()),
        ["update(layer 1): the norm given is grad_weights[1]", "a value of scalars"],
    ),
    "update, norm's step": (
        lambda: transfer.update(1, grad_weight(), weight(), state(), ALL, scalar(0b1111, step=1)),
        ["update(layer 1): the norm given is of step 1, the gradient of step 0"],
    ),
    "update, a slice that the weight lacks": (
        lambda: transfer.update(1, grad_weight(), weight(holds=shard(0, 2)), state(), ALL),
        ["the weight holds slices 0 of 2, but the optimizer state holds 0 of 1", "every slice that is updated"],
    ),
    "add, a scalar and a gradient": (
        lambda: transfer.add(scalar(0b1), grad_weight()),
        ["add(scalars): the first value gave scalars", "only scalars of one step are summed"],
    ),
    "add, a replica's squares": (
        lambda: transfer.add(scalar(0b0011), scalar(0b0110)),
        ["add(scalars): parts 1 of 4 of the model come from the second value", "each parameter's square counts once"],
    ),
    "all_reduce, replicas' squares": (
        lambda: transfer.collective(OpKind.ALL_REDUCE, [scalar(0b1, 2)] * 2, [4, 6], LAYERS),
        ["all_reduce(scalars): parts 0 of 2 of the model come from rank 6 and from an earlier one", "Sum replicas on"],
    ),
    "all_gather, scalars": (
        lambda: transfer.collective(OpKind.ALL_GATHER, [scalar(0b01, 2), scalar(0b10, 2)], [0, 1], LAYERS),
        ["all_gather(scalars): a scalar has no slices; all_reduce it"],
    ),
    "reduce_scatter, scalars": (
        lambda: transfer.collective(OpKind.REDUCE_SCATTER, [scalar(0b01, 2)], [0], LAYERS),
        ["reduce_scatter(scalars): a scalar has no slices"],
    ),
    "all_reduce, twice": (
        lambda: transfer.collective(
            OpKind.ALL_REDUCE, [grad_weight(0b1), grad_weight(2), grad_weight(3)], [0, 2, 4], LAYERS
        ),
        ["all_reduce(grad_weights[1])", "would be counted twice", "rank 4 both summed it"],
    ),
    "all_reduce, kind": (
        lambda: transfer.collective(OpKind.ALL_REDUCE, [activation(1, 1), activation(1, 2)], [0, 1], LAYERS),
        ["all_reduce(activations[1])", "rank 0 gave activations[1] (microbatch 0)", "only weight gradients"],
    ),
    "reduce_scatter, twice": (
        lambda: transfer.collective(OpKind.REDUCE_SCATTER, [grad_weight(), grad_weight()], [3, 5], LAYERS),
        ["reduce_scatter(grad_weights[1])", "microbatches 0-3 would be counted twice (rank 3 and rank 5 both"],
    ),
    "all_gather, slices overlap": (
        lambda: transfer.collective(OpKind.ALL_GATHER, [weight(holds=shard(1, 2))] * 2, [0, 1], LAYERS),
        ["all_gather(weights[1])", "slice 1 of 2 comes from rank 1", "must not overlap"],
    ),
    "all_gather, rows overlap": (
        lambda: transfer.collective(OpKind.ALL_GATHER, [activation()] * 2, [0, 1], LAYERS),
        ["all_gather(activations[1])", "microbatch 0-1 of 4 comes from rank 1", "must not overlap"],
    ),
    "all_gather, steps": (
        lambda: transfer.collective(
            OpKind.ALL_GATHER, [weight(holds=shard(0, 2)), weight(holds=shard(1, 2), step=1)], [0, 1], LAYERS
        ),
        ["rank 0 gave weights[1] (shard 0 of 2)", "rank 1 weights[1] (shard 1 of 2, step 1)", "pieces of one value"],
    ),
    "all_gather, sums": (
        lambda: transfer.collective(
            OpKind.ALL_GATHER, [grad_weight(0b1, shard(0, 2)), grad_weight(0b10, shard(1, 2))], [0, 1], LAYERS
        ),
        ["the pieces sum different microbatches", "Reduce before gathering"],
    ),
    "recv, another message": (
        lambda: transfer.delivered(3, Message(Kind.ACTIVATION, 1, 0b1), activation(1, 0b10)),
        [
            "recv from rank 3: expected activations[1] of microbatch 0",
            "next message on this channel is activations[1] of microbatch 1",
            "Make rank 3's sends and this rank's receives agree",
        ],
    ),
}


@pytest.mark.parametrize("case", list(REFUSALS))
def test_what_breaks_a_rule_is_refused_with_what_was_given_and_wanted(case: str) -> None:
    call, said = REFUSALS[case]
    with pytest.raises(Refused) as caught:
        call()
    says(caught.value, *said)
    assert str(caught.value).startswith(case.split(",")[0]), "a refusal begins with the op's name"
    assert str(caught.value).endswith(".")
