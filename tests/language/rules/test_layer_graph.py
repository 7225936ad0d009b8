"""What forward holds backward sums, and the other way round: a backward pass is the transposed layer's forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.language import Kind, Sizes, Spec
from shardlab.language.rules import layer_graph
from shardlab.language.rules.kinds import INDICES, Holds
from shardlab.language.rules.layer_graph import Held, Layer, Node, layers_of
from shardlab.language.rules.layer_rules import GRADIENT_OF, LayerRules
from shardlab.language.rules.spec import Space, form_of
from shardlab.models import GPT, MLP, MoE, cut
from tests.language.rules.toys import matrices
from tests.support.refusing import refuses

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
        own = indices_of(layer, port.tensor)
        slices = tuple((index, held) for index, held in cut.items() if index in own)
        inputs.append(Spec(form_of(port.kind, port.layer, 0, space, slices=slices), CELLS))
    outputs, _ = rules.forward(inputs, weight)
    gradients = [spec._replace(form=spec.form.but(kind=GRADIENT_OF[spec.kind], term=None)) for spec in outputs]
    (grad_weight, *made), _ = rules.backward(inputs[0], gradients, weight)
    assert grad_weight == Spec(form_of(Kind.GRAD_WEIGHT, layer.weight, 0, space, weight.holds), CELLS)
    return inputs, outputs, gradients, made


some_layers = st.sampled_from(LAYERS)
some_pieces = st.integers(2, 4).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, (1 << n) - 1)))


@given(some_layers, some_pieces)
def test_gradients_of_inputs_are_what_the_transposed_layer_makes(layer: Layer, cut: tuple[int, int]) -> None:
    pieces, mask = cut
    inputs, _, gradients, made = passes(layer, pieces, mask)
    other, space = transposed(layer), space_of(pieces)
    given = {port.tensor: Held(dict(spec.form.slices)) for spec, port in zip(gradients, other.inputs, strict=True)}
    held = layer_graph.forward(other, given, {index: mask for index in layer.cut if mask != space.full(index)}, space)
    for read, gradient, port in zip(inputs, made, other.outputs, strict=True):
        assert gradient.kind is GRADIENT_OF[read.kind]
        assert gradient.layer == read.layer
        assert gradient.form.slices == read.form.slices, "a gradient lies as its value does"
        assert held[port.tensor] == Held(dict(gradient.form.slices), gradient.form.term)


@given(some_layers, some_pieces)
def test_every_slice_of_the_weight_is_held_or_summed_on_either_side(layer: Layer, cut: tuple[int, int]) -> None:
    """A side that has the index holds these pieces of it; one that has not is these terms of a sum."""
    pieces, mask = cut
    inputs, outputs, _, made = passes(layer, pieces, mask)
    sides = [(spec, port.tensor) for spec, port in zip(outputs, layer.outputs, strict=True)]
    sides += [(spec, port.tensor) for spec, port in zip(made, layer.inputs, strict=True)]
    for spec, tensor in sides:
        whole = not layer.cut or mask == (1 << pieces) - 1
        if whole:
            assert (spec.form.slices, spec.form.term) == ((), None)
        elif layer.cut[0] in indices_of(layer, tensor):
            assert (spec.form.slices, spec.form.term) == (((layer.cut[0], mask),), None)
        else:
            assert spec.form.term is not None
            assert (spec.form.slices, spec.form.term.over, spec.form.term.bits) == ((), layer.cut, mask)
    assert all(spec.cells == CELLS for spec in (*inputs, *outputs, *made))


def test_a_term_reaches_no_primitive_that_adds_a_gradient_of_its_own() -> None:
    x, up = Node("own", {"x": "width"}, {"x": "width"}), Node("up", {"x": "width"}, {"x": "ffn"}, {"w": "ffn width"})
    for affine in (False, True):
        (layer,) = layers_of([("toy", (replace(x, affine=affine), up), ("ffn",))])
        if affine:
            with refuses("missing pieces", layer=0, missing=(1,)):
                passes(layer, 2, 0b01)
        else:
            passes(layer, 2, 0b01)


COLUMNS = [layer for layer in LAYERS if layer.cut and any(node.takes_own for node in layer.nodes)]


@given(st.sampled_from(COLUMNS), some_pieces)
def test_columns_take_their_own_of_a_complete_gradient(layer: Layer, cut: tuple[int, int]) -> None:
    pieces, mask = cut
    inputs, _, (own,), made = passes(layer, pieces, mask)
    space = space_of(pieces)
    weight = Spec(form_of(Kind.WEIGHT, layer.weight, 0, space, Holds(mask, pieces)))
    complete = own._replace(form=own.form.but(slices=()))
    (_, *below), _ = LayerRules(layer, space).backward(inputs[0], [complete], weight)
    assert below == made


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
def test_what_each_sort_of_layer_holds_and_sums(
    layers: Sequence[Layer], number: int, forward: str, backward: str
) -> None:
    _, outputs, _, made = passes(layers[number], 2, 0b10)
    assert {"held" if spec.form.term is None else "summed" for spec in outputs} == {forward}
    assert {"held" if spec.form.term is None else "summed" for spec in made} == {backward}
