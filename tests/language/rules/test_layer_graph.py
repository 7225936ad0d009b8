"""Duality of passes: the backward pass sums what the forward pass holds, and is the transposed layer's forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.language import Kind, Mesh, OpKind, Sizes, Spec
from shardlab.language.rules import layer_graph, optimizer_step
from shardlab.language.rules.collectives import slice_of
from shardlab.language.rules.kinds import INDICES, WHOLE, Holds
from shardlab.language.rules.layer_graph import Extent, Layer, Node, build_layers
from shardlab.language.rules.layer_rules import GRADIENT_OF, LayerRules
from shardlab.language.rules.spec import Space, Term, form_of
from shardlab.models import GPT, MLP, MoE, cut
from tests.language.rules.toys import Refusals, Toy, is_refused, matrices
from tests.support.refusing import refusal_by, refuses

MODELS: Sequence[Sequence[Layer]] = (
    Sizes.puzzle(1).signatures,
    Sizes.half_blocks(1).signatures,
    Sizes.context_blocks(1).signatures,
    Sizes.mixture(2).signatures,
    Sizes.columns(3).signatures,
    matrices(["column", "row", "column", "column"]),
    GPT(layers=1).signatures,
    cut(GPT(layers=1)).signatures,
    cut(GPT(layers=1), attention_apart=True).signatures,
    cut(MLP(layers=2), columns=True).signatures,
    cut(MoE(layers=2)).signatures,
)
LAYERS = [layer for layers in MODELS for layer in layers]
CELLS = 0b01


def transposed(layer: Layer) -> Layer:
    """The layer read from its end: every primitive makes what it read."""
    nodes = tuple(replace(node, reads=node.makes, makes=node.reads) for node in reversed(layer.nodes))
    return replace(layer, nodes=nodes, inputs=layer.outputs, outputs=layer.inputs)


def space_of(pieces: int) -> Space:
    return Space(2, 1, tuple((index, pieces) for index in sorted(INDICES)))


def indices_of(layer: Layer, tensor: str) -> set[str]:
    tables = [table for node in layer.nodes for table in (node.reads, node.makes)]
    return {index for table in tables for index in table.get(tensor, "").split()}


def passes(layer: Layer, pieces: int, mask: int) -> tuple[list[Spec], list[Spec], list[Spec], list[Spec]]:
    """Inputs, outputs, gradients of outputs and of inputs, computed with some slices of the weight.

    Of an index that its parameters have too, a layer is given the same pieces.
    """
    space, rules = space_of(pieces), LayerRules(layer, space_of(pieces))
    cut = {index: mask for index in layer.cut if mask != space.full(index)}
    weight = Spec(form_of(Kind.WEIGHT, layer.weight, 0, space, Holds(mask, pieces) if layer.cut else Holds(1, 1)))
    inputs: list[Spec] = []
    for port in layer.inputs:
        indices = indices_of(layer, port.tensor)
        slices = tuple((index, held_slices) for index, held_slices in cut.items() if index in indices)
        inputs.append(Spec(form_of(port.kind, port.layer, 0, space, slices=slices), CELLS))
    outputs, _ = rules.forward(inputs, weight)
    gradients = [spec._replace(form=spec.form.but(kind=GRADIENT_OF[spec.kind], term=None)) for spec in outputs]
    (grad_weight, *grad_inputs), _ = rules.backward(inputs[0], gradients, weight)
    assert grad_weight == Spec(form_of(Kind.GRAD_WEIGHT, layer.weight, 0, space, weight.holds), CELLS)
    return inputs, outputs, gradients, grad_inputs


some_layers = st.sampled_from(LAYERS)
some_pieces = st.integers(2, 4).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, (1 << n) - 1)))


@given(some_layers, some_pieces)
def test_gradients_of_inputs_are_what_the_transposed_layer_makes(layer: Layer, cut: tuple[int, int]) -> None:
    pieces, mask = cut
    inputs, _, gradients, grad_inputs = passes(layer, pieces, mask)
    other, space = transposed(layer), space_of(pieces)
    extents = {port.tensor: Extent(dict(spec.form.slices)) for spec, port in zip(gradients, other.inputs, strict=True)}
    computed = layer_graph.forward(
        other, extents, {index: mask for index in layer.cut if mask != space.full(index)}, space
    )
    for read, gradient, port in zip(inputs, grad_inputs, other.outputs, strict=True):
        assert gradient.kind is GRADIENT_OF[read.kind]
        assert gradient.layer == read.layer
        assert gradient.form.slices == read.form.slices, "a gradient lies as its value does"
        assert computed[port.tensor] == Extent(dict(gradient.form.slices), gradient.form.term)


@given(some_layers, some_pieces)
def test_every_slice_of_the_weight_is_held_or_summed_on_either_side(layer: Layer, cut: tuple[int, int]) -> None:
    """A side that has the index holds these pieces of it; one that has not is these terms of a sum."""
    pieces, mask = cut
    inputs, outputs, _, grad_inputs = passes(layer, pieces, mask)
    sides = [(spec, port.tensor) for spec, port in zip(outputs, layer.outputs, strict=True)]
    sides += [(spec, port.tensor) for spec, port in zip(grad_inputs, layer.inputs, strict=True)]
    for spec, tensor in sides:
        whole = not layer.cut or mask == (1 << pieces) - 1
        if whole:
            assert (spec.form.slices, spec.form.term) == ((), None)
        elif layer.cut[0] in indices_of(layer, tensor):
            assert (spec.form.slices, spec.form.term) == (((layer.cut[0], mask),), None)
        else:
            assert spec.form.term is not None
            assert (spec.form.slices, spec.form.term.indices, spec.form.term.bits) == ((), layer.cut, mask)
    assert all(spec.cells == CELLS for spec in (*inputs, *outputs, *grad_inputs))


def test_a_term_reaches_no_primitive_that_adds_a_gradient_of_its_own() -> None:
    x, up = Node("own", {"x": "width"}, {"x": "width"}), Node("up", {"x": "width"}, {"x": "ffn"}, {"w": "ffn width"})
    for affine in (False, True):
        (layer,) = build_layers([("toy", (replace(x, affine=affine), up), ("ffn",))])
        if affine:
            with refuses("missing pieces", layer=0, missing=(1,)):
                passes(layer, 2, 0b01)
        else:
            passes(layer, 2, 0b01)


COLUMNS = [layer for layer in LAYERS if layer.cut and any(node.takes_own for node in layer.nodes)]


@given(st.sampled_from(COLUMNS), some_pieces)
def test_columns_take_their_own_of_a_complete_gradient(layer: Layer, cut: tuple[int, int]) -> None:
    pieces, mask = cut
    inputs, _, (sliced,), expected = passes(layer, pieces, mask)
    space = space_of(pieces)
    weight = Spec(form_of(Kind.WEIGHT, layer.weight, 0, space, Holds(mask, pieces)))
    complete = sliced._replace(form=sliced.form.but(slices=()))
    (_, *grad_inputs), _ = LayerRules(layer, space).backward(inputs[0], [complete], weight)
    assert grad_inputs == expected


@pytest.mark.parametrize(
    ("layers", "number", "forward", "backward"),
    [
        (matrices(["column", "row"]), 0, "held", "summed"),
        (matrices(["column", "row"]), 1, "summed", "held"),
        (Sizes.half_blocks(1).signatures, 0, "summed", "summed"),
        (Sizes.half_blocks(1).signatures, 2, "summed", "summed"),
        (Sizes.half_blocks(1).signatures, 4, "summed", "summed"),
        (Sizes.half_blocks(1).signatures, 6, "held", "summed"),
        (Sizes.context_blocks(1).signatures, 2, "held", "summed"),
        (Sizes.context_blocks(1).signatures, 3, "summed", "held"),
        (Sizes.mixture(1).signatures, 1, "held", "held"),
    ],
)
def test_each_sort_of_layer_holds_and_sums_as_its_table_says(
    layers: Sequence[Layer], number: int, forward: str, backward: str
) -> None:
    _, outputs, _, grad_inputs = passes(layers[number], 2, 0b10)
    assert {"held" if spec.form.term is None else "summed" for spec in outputs} == {forward}
    assert {"held" if spec.form.term is None else "summed" for spec in grad_inputs} == {backward}


# The rules of half-blocks: each op's result, and each refusal once, by its words.


TOY = Toy(Sizes.half_blocks(1), Mesh(tp=2), 2)
"""Bodies 0, 2, 4, 6 and norms 1, 3, 5, on two tensor-parallel ranks."""

HALF_BLOCKS_LAYERS = TOY.sizes.layers

FIRST, SECOND = 0b0001, 0b0010
"""The two slices of microbatch 0's sequences, of two microbatches."""

SEQUENCE = 0b0011
BOTH = 0b1111
ONE_SLICE, OTHER_SLICE = Holds(0b01, 2), Holds(0b10, 2)


def value(kind: Kind, layer: int, cells: int = SEQUENCE, term: int = 0, slices: int = 0) -> Spec:
    """A value that the layer before makes and this one reads: of these two one is a body, and cut."""
    (index,) = (index for neighbour in TOY.sizes.signatures[max(0, layer - 1) : layer + 1] for index in neighbour.cut)
    held_slices = {index: slices} if slices else {}
    return TOY.spec_of(kind, layer, cells, slices=held_slices, term=Term((index,), term) if term else None)


def x(layer: int, cells: int = SEQUENCE, term: int = 0, slices: int = 0) -> Spec:
    return value(Kind.ACTIVATION, layer, cells, term, slices)


def dx(layer: int, cells: int = SEQUENCE, term: int = 0, slices: int = 0) -> Spec:
    return value(Kind.GRAD_ACTIVATION, layer, cells, term, slices)


def r(layer: int, cells: int = SEQUENCE) -> Spec:
    return value(Kind.RESIDUAL, layer, cells)


def dr(layer: int, cells: int = SEQUENCE) -> Spec:
    return value(Kind.GRAD_RESIDUAL, layer, cells)


def stats(slices: int = 0, cells: int = SEQUENCE) -> Spec:
    return value(Kind.STATS, HALF_BLOCKS_LAYERS, cells, slices=slices)


def weight(layer: int, holds: Holds = WHOLE, step: int = 0) -> Spec:
    return TOY.spec_of(Kind.WEIGHT, layer, 0, holds, step)


def grad_weight(layer: int, cells: int = SEQUENCE, holds: Holds = WHOLE) -> Spec:
    return TOY.spec_of(Kind.GRAD_WEIGHT, layer, cells, holds)


def forward(layer: int, weight: Spec, *inputs: Spec) -> list[Spec]:
    return TOY.layer(layer).forward(inputs, weight)


def backward(layer: int, weight: Spec, first: Spec, *gradients: Spec) -> list[Spec]:
    return TOY.layer(layer).backward(first, gradients, weight)


def backward_weight(layer: int, weight: Spec, first: Spec, gradient: Spec) -> Spec:
    half = TOY.layer(layer).saved(first, weight, Kind.SAVED_FOR_WEIGHT)
    return TOY.layer(layer).backward_weight(first, [gradient], half)


meet = TOY.meet


def test_a_slice_of_a_body_makes_its_term_and_the_whole_of_it_everything() -> None:
    assert forward(2, weight(2, OTHER_SLICE), x(2)) == [x(3, term=0b10)]
    assert forward(2, weight(2), x(2)) == [x(3)]


def test_a_slice_may_be_counted_in_any_pieces() -> None:
    assert forward(2, weight(2, Holds(0b1100, 4)), x(2)) == [x(3, term=0b10)]


def test_backward_makes_the_slices_gradient_and_its_term_of_the_inputs() -> None:
    gradients = backward(2, weight(2, ONE_SLICE), x(2), dx(3))
    assert gradients == [grad_weight(2, holds=ONE_SLICE), dx(2, term=0b01)]
    assert backward_weight(2, weight(2, ONE_SLICE), x(2), dx(3)) == gradients[0]


def test_the_head_makes_slices_of_the_logits_and_takes_these_slices_of_their_gradient() -> None:
    assert forward(6, weight(6, OTHER_SLICE), x(6)) == [x(7, slices=0b10)]
    gradients = backward(6, weight(6, OTHER_SLICE), x(6), dx(7, slices=0b10))
    assert gradients == backward(6, weight(6, OTHER_SLICE), x(6), dx(7)), "its own of the gradient of gathered logits"
    assert gradients == [grad_weight(6, holds=OTHER_SLICE), dx(6, term=0b10)]


def test_a_norm_works_on_any_slice_of_a_sequence() -> None:
    assert forward(3, weight(3), x(3, SECOND), r(3, SECOND)) == [x(4, SECOND), r(5, SECOND)]
    gradients = backward(3, weight(3), x(3, SECOND), dx(4, SECOND), dr(5, SECOND))
    assert gradients == [grad_weight(3, SECOND), dx(3, SECOND), dr(3, SECOND)]


def test_the_first_norm_is_given_no_residual_and_the_last_hands_none_on() -> None:
    assert forward(1, weight(1), x(1)) == [x(2), r(3)]
    assert forward(5, weight(5), x(5), r(5)) == [x(6)]
    assert len(backward(1, weight(1), x(1), dx(2), dr(3))) == 2
    assert len(backward(5, weight(5), x(5), dx(6))) == 3


def test_terms_are_reduced_and_scattered_along_the_sequence() -> None:
    terms = [x(3, term=0b01), x(3, term=0b10)]
    assert meet(OpKind.ALL_REDUCE, *terms) == [x(3)] * 2
    scattered = meet(OpKind.REDUCE_SCATTER, *terms)
    assert scattered == [x(3, FIRST), x(3, SECOND)]
    gathered = meet(OpKind.ALL_GATHER, *scattered)
    assert gathered == [x(3)._replace(joined=((FIRST, ()), (SECOND, ())))] * 2


def test_results_of_gathered_slices_are_scattered_to_their_owners() -> None:
    """Whichever rank had the first slice of the sequence has it again."""
    gathered, _ = meet(OpKind.ALL_GATHER, x(2, SECOND), x(2, FIRST))
    terms = [forward(2, weight(2, holds), gathered)[0] for holds in (ONE_SLICE, OTHER_SLICE)]
    assert meet(OpKind.REDUCE_SCATTER, *terms) == [x(3, SECOND), x(3, FIRST)]


def test_every_microbatchs_sequences_are_cut() -> None:
    scattered = meet(OpKind.REDUCE_SCATTER, x(3, BOTH, term=0b01), x(3, BOTH, term=0b10))
    assert [spec.cells for spec in scattered] == [0b0101, 0b1010]


def test_the_loss_of_slices_of_the_logits_takes_the_stats_of_all() -> None:
    parts = [optimizer_step.loss_stats(HALF_BLOCKS_LAYERS, x(7, slices=mask)) for mask in (0b01, 0b10)]
    assert parts == [stats(0b01), stats(0b10)]
    gathered = meet(OpKind.ALL_GATHER, *parts)
    assert gathered == [stats()] * 2
    assert optimizer_step.loss(HALF_BLOCKS_LAYERS, x(7, slices=0b10), gathered[0]) == dx(7, slices=0b10)
    assert optimizer_step.loss(HALF_BLOCKS_LAYERS, x(7)) == dx(7)


OTHER_MICROBATCH = 0b1100


def test_stats_of_other_tokens_are_put_together_before_those_of_other_slices_or_after() -> None:
    whole = stats(cells=BOTH)
    slices = [meet(OpKind.ALL_GATHER, stats(mask), stats(mask, OTHER_MICROBATCH))[0] for mask in (0b01, 0b10)]
    assert [gathered._replace(joined=()) for gathered in slices] == [stats(0b01, BOTH), stats(0b10, BOTH)]
    assert meet(OpKind.ALL_GATHER, *slices)[0]._replace(joined=()) == whole
    gathered, _ = meet(OpKind.ALL_GATHER, stats(), stats(cells=OTHER_MICROBATCH))
    assert gathered._replace(joined=()) == whole
    assert [slice_of(gathered, place, 2) for place in (0, 1)] == [stats(), stats(cells=OTHER_MICROBATCH)]


REFUSED: Refusals = {
    "forward, kind": (
        lambda: forward(2, weight(2), dx(2)),
        refusal_by("wrong kind", layer=2),
    ),
    "forward, layer": (lambda: forward(2, weight(2), x(4)), refusal_by("wrong layer", layer=2)),
    "forward, terms": (
        lambda: forward(2, weight(2), x(2, term=0b01)),
        refusal_by("missing terms", layer=2, missing=(1,)),
    ),
    "forward, slices": (
        lambda: forward(2, weight(2), x(2, slices=0b01)),
        refusal_by("missing pieces", layer=2, missing=(1,)),
    ),
    "forward, sequence": (
        lambda: forward(2, weight(2), x(2, SECOND)),
        refusal_by("cut sequences", layer=2),
    ),
    "forward, weight cut finer": (
        lambda: forward(2, weight(2, Holds(0b1, 4)), x(2)),
        refusal_by("part of a slice", layer=2),
    ),
    "forward, weight across slices": (
        lambda: forward(2, weight(2, Holds(0b0110, 4)), x(2)),
        refusal_by("part of a slice", layer=2),
    ),
    "forward, weight's layer": (lambda: forward(2, weight(4), x(2)), refusal_by("wrong layer", layer=2)),
    "forward, weight's step": (lambda: forward(2, weight(2, step=1), x(2)), refusal_by("stale weight", layer=2)),
    "backward, gradient's kind": (
        lambda: backward(2, weight(2), x(2), x(3)),
        refusal_by("wrong kind", layer=2),
    ),
    "backward, gradient's layer": (
        lambda: backward(2, weight(2), x(2), dx(2)),
        refusal_by("wrong layer", layer=2),
    ),
    "backward, gradient's terms": (
        lambda: backward(2, weight(2, ONE_SLICE), x(2), dx(3, term=0b10)),
        refusal_by("missing terms", layer=2, missing=(0,)),
    ),
    "backward, gradient's slices": (
        lambda: backward(2, weight(2, ONE_SLICE), x(2), dx(3, slices=0b01)),
        refusal_by("missing pieces", layer=2, missing=(1,)),
    ),
    "backward, head's gradient of another slice": (
        lambda: backward(6, weight(6, ONE_SLICE), x(6), dx(7, slices=0b10)),
        refusal_by("other pieces", layer=6),
    ),
    "backward, whole head's gradient of a slice": (
        lambda: backward(6, weight(6), x(6), dx(7, slices=0b01)),
        refusal_by("missing pieces", layer=6, missing=(1,)),
    ),
    "backward, gradient's tokens": (
        lambda: backward(2, weight(2), x(2), dx(3, BOTH)),
        refusal_by("other tokens", layer=2),
    ),
    "backward, sequence": (
        lambda: backward(2, weight(2), x(2, FIRST), dx(3, FIRST)),
        refusal_by("cut sequences", layer=2),
    ),
    "backward_weight, other slices": (
        lambda: backward_weight(6, weight(6, ONE_SLICE), x(6), dx(7, slices=0b10)),
        refusal_by("other pieces", layer=6),
    ),
    "norm, terms of a branch": (
        lambda: forward(3, weight(3), x(3, term=0b01), r(3)),
        refusal_by("missing terms", layer=3, missing=(1,)),
    ),
    "norm, no residual": (
        lambda: forward(3, weight(3), x(3)),
        refusal_by("wrong number", layer=3),
    ),
    "norm, a residual too many": (
        lambda: forward(1, weight(1), x(1), r(1)),
        refusal_by("wrong number", layer=1),
    ),
    "norm, another norm's residual": (
        lambda: forward(3, weight(3), x(3), r(5)),
        refusal_by("wrong layer", layer=3),
    ),
    "norm, the branch as residual": (
        lambda: forward(3, weight(3), x(3), x(3)),
        refusal_by("wrong kind", layer=3),
    ),
    "norm, other tokens": (
        lambda: forward(3, weight(3), x(3, FIRST), r(3, SECOND)),
        refusal_by("other tokens", layer=3),
    ),
    "norm, sliced weight": (
        lambda: forward(3, weight(3, ONE_SLICE), x(3), r(3)),
        refusal_by("partial weight", layer=3, missing=(1,)),
    ),
    "norm backward, no gradient of the residual": (
        lambda: backward(3, weight(3), x(3), dx(4)),
        refusal_by("wrong number", layer=3),
    ),
    "norm backward, a gradient too many": (
        lambda: backward(5, weight(5), x(5), dx(6), dr(7)),
        refusal_by("wrong number", layer=5),
    ),
    "norm backward, the branch's gradient for the residual's": (
        lambda: backward(3, weight(3), x(3), dx(4), dx(5)),
        refusal_by("wrong kind", layer=3),
    ),
    "norm backward, other tokens": (
        lambda: backward(3, weight(3), x(3, FIRST), dx(4, FIRST), dr(5, SECOND)),
        refusal_by("other tokens", layer=3),
    ),
    "norm backward, terms": (
        lambda: backward(3, weight(3), x(3), dx(4, term=0b10), dr(5)),
        refusal_by("missing terms", layer=3, missing=(0,)),
    ),
    "loss_stats, all logits": (
        lambda: optimizer_step.loss_stats(HALF_BLOCKS_LAYERS, x(7)),
        refusal_by("other pieces", layer=7),
    ),
    "loss_stats, another activation": (
        lambda: optimizer_step.loss_stats(HALF_BLOCKS_LAYERS, x(6, slices=0b01)),
        refusal_by("wrong layer", layer=7),
    ),
    "loss, no logits": (lambda: optimizer_step.loss(HALF_BLOCKS_LAYERS, x(6)), refusal_by("wrong layer", layer=7)),
    "loss, a term": (
        lambda: optimizer_step.loss(HALF_BLOCKS_LAYERS, x(7, term=0b1)),
        refusal_by("missing terms", layer=7),
    ),
    "loss, no stats": (
        lambda: optimizer_step.loss(HALF_BLOCKS_LAYERS, x(7, slices=0b01)),
        refusal_by("wrong number", layer=7),
    ),
    "loss, needless stats": (
        lambda: optimizer_step.loss(HALF_BLOCKS_LAYERS, x(7), stats()),
        refusal_by("wrong number", layer=7),
    ),
    "loss, no stats at all": (
        lambda: optimizer_step.loss(HALF_BLOCKS_LAYERS, x(7, slices=0b01), x(7)),
        refusal_by("missing pieces", layer=7),
    ),
    "loss, own stats": (
        lambda: optimizer_step.loss(HALF_BLOCKS_LAYERS, x(7, slices=0b01), stats(0b01)),
        refusal_by("missing pieces", layer=7),
    ),
    "loss, other tokens": (
        lambda: optimizer_step.loss(HALF_BLOCKS_LAYERS, x(7, slices=0b01), stats(0, BOTH)),
        refusal_by("other tokens", layer=7),
    ),
    "reduce, logits": (
        lambda: meet(OpKind.ALL_REDUCE, x(7, slices=0b01), x(7, slices=0b10)),
        refusal_by("no term", layer=7),
    ),
    "reduce, other tokens": (
        lambda: meet(OpKind.ALL_REDUCE, x(3, term=0b01), x(3, BOTH, term=0b10)),
        refusal_by("other values", layer=3),
    ),
    "reduce, complete": (
        lambda: meet(OpKind.ALL_REDUCE, x(3), x(3)),
        refusal_by("no term", layer=3),
    ),
    "reduce, a term and what is complete": (
        lambda: meet(OpKind.ALL_REDUCE, x(3, term=0b01), x(3)),
        refusal_by("no term", layer=3),
    ),
    "reduce, twice": (
        lambda: meet(OpKind.REDUCE_SCATTER, x(3, term=0b01), x(3, term=0b01)),
        refusal_by("counted twice", layer=3, doubled=(0,)),
    ),
    "reduce, a residual": (
        lambda: meet(OpKind.ALL_REDUCE, r(3, FIRST), r(3, FIRST)),
        refusal_by("no term", layer=3),
    ),
    "scatter, sequences that do not divide": (
        lambda: meet(OpKind.REDUCE_SCATTER, x(3, FIRST, term=0b01), x(3, FIRST, term=0b10)),
        refusal_by("does not divide", layer=3),
    ),
    "gather, terms": (
        lambda: meet(OpKind.ALL_GATHER, x(3, FIRST, term=0b01), x(3, SECOND, term=0b10)),
        refusal_by("a term", layer=3),
    ),
    "gather, one sequence slice twice": (
        lambda: meet(OpKind.ALL_GATHER, x(3, FIRST), x(3, FIRST)),
        refusal_by("pieces overlap", layer=3, doubled=(0,)),
    ),
    "gather, stats of other slices and other tokens": (
        lambda: meet(OpKind.ALL_GATHER, stats(0b01), stats(0b10, OTHER_MICROBATCH)),
        refusal_by("other values", layer=HALF_BLOCKS_LAYERS),
    ),
    "gather, one slice's stats twice": (
        lambda: meet(OpKind.ALL_GATHER, stats(0b01), stats(0b01)),
        refusal_by("pieces overlap", layer=7, doubled=(0,)),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_broken_rule_of_half_blocks_is_refused_with_the_given_and_the_expected_value(case: str) -> None:
    is_refused(REFUSED[case])
