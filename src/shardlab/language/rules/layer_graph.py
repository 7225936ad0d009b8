"""Layers as graphs of primitives, and the pieces and terms of their outputs if inputs and weights are sliced.

A `Node` is an einsum over named indices, and a `Layer` is a run of nodes between two points at which a program may
communicate. `build_layers` composes a model's layers. `forward` and `backward` derive the pieces and terms of each
tensor of a layer: summing over a sliced index leaves a term of a sum, and the backward pass of a node is the same
einsum with the gradient as an operand (compare GSPMD, arXiv 2105.04663; OneFlow's SBP, arXiv 2110.15032; DTensor).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from shardlab.language.rules.kinds import Kind, bits, mask_of
from shardlab.language.rules.spec import Slices, Space, Term


@dataclass(frozen=True)
class Node:
    """One step of a layer's arithmetic: a primitive over tensors with named indices.

    Indices are separated by blanks. Cells are left out: every tensor of a layer has them, and no parameter does.

    Attributes:
        name: name of the primitive, for messages.
        reads, makes, weights: the indices of each input tensor, of each output tensor, and of each parameter.
        whole: indices that must be whole, since the primitive mixes them.
        mixes_tokens: whether it mixes the tokens of a sequence, so that sequences must be whole.
        takes_own: whether the backward pass accepts a complete gradient of the output, of which it takes the slices
            that the rank's output has.
        deals: indices of the output, such as experts. The program may ask for only some pieces of them (`part` of
            `Rank.forward`).
        atomic: whether a device may add in any order, so that two ranks may round differently.
        affine: whether the backward pass adds a gradient that does not depend on the gradient of the output.
    """

    name: str
    reads: Mapping[str, str]
    makes: Mapping[str, str]
    weights: Mapping[str, str] = field(default_factory=dict[str, str])
    whole: frozenset[str] = frozenset()
    mixes_tokens: bool = False
    takes_own: bool = False
    deals: frozenset[str] = frozenset()
    atomic: bool = False
    affine: bool = False

    def __hash__(self) -> int:
        tensors = (self.reads, self.makes, self.weights)
        return hash((self.name, *(pair for indices_of in tensors for pair in indices_of.items()), self.whole))


class Port(NamedTuple):
    """Tensor at the boundary of a layer.

    Attributes:
        tensor: name of the tensor in the layer's nodes.
        kind, layer: kind and layer of the values that enter or leave at the port.
    """

    tensor: str
    kind: Kind
    layer: int


@dataclass(frozen=True)
class Layer:
    """Run of primitives between two points at which a program may communicate.

    Attributes:
        name: the sort of layer, for messages.
        nodes: the primitives in order.
        inputs, outputs: ports, first the activation, then the tensors that are carried beside it.
        cut: the indices along which the parameters are cut, outermost first.
        weight: the layer whose weight it uses.
        use: number of this layer among the layers that use this weight, from 0.
    """

    name: str
    nodes: tuple[Node, ...]
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    cut: tuple[str, ...] = ()
    weight: int = 0
    use: int = 0

    def __hash__(self) -> int:
        return self._hash

    @property
    def recomputed(self) -> bool:
        """Whether RECOMPUTE can compute its saved value again: it has one input and one output."""
        return len(self.inputs) == len(self.outputs) == 1

    @property
    def sliced(self) -> bool:
        """Whether its parameters may be cut into slices."""
        return bool(self.cut)

    @property
    def carries(self) -> bool:
        """Whether it takes or makes a residual beside its activation."""
        return any(port.kind is Kind.RESIDUAL for port in (*self.inputs, *self.outputs))

    @property
    def deals(self) -> frozenset[str]:
        """Indices for which the layer may compute only some pieces of its outputs (`Node.deals`): the experts of a
        dispatch.
        """
        return frozenset[str]().union(*(node.deals for node in self.nodes))

    @property
    def routes(self) -> bool:
        """Whether it sends tokens to experts or combines their results."""
        return any(port.kind is Kind.ROUTING for port in (*self.inputs, *self.outputs))

    @property
    def projects(self) -> bool:
        """Whether it computes queries, keys and values for attention as a separate op."""
        return self.outputs[0].kind is Kind.QUERIES

    @property
    def mixes_tokens(self) -> bool:
        """Whether it mixes the tokens of a sequence."""
        return any(node.mixes_tokens for node in self.nodes)

    @cached_property
    def _hash(self) -> int:
        return hash((self.name, self.nodes, self.inputs, self.outputs, self.cut, self.weight, self.use))


PORT_ORDER = ("x", "q", "kv", "s", "gates", "choices", "slots")
"""Tensors at the boundaries of layers, in the order of a layer's inputs and outputs: the activation first."""

LayerDefinition = tuple[str, Sequence[Node], tuple[str, ...]]
"""Definition of a layer: (name, nodes, indices along which the parameters are cut)."""


Tensors = Iterable[str]
"""Names of tensors."""

Names = tuple[str, ...]


def boundaries(layers: Sequence[Sequence[tuple[Tensors, Tensors]]]) -> list[tuple[Names, Names]]:
    """Return the input and the output tensors of each layer. A layer's outputs are the tensors that later layers read.

    A name may occur several times; it refers to the last tensor of that name.

    Args:
        layers: for each layer, (tensors read, tensors made) of each node.
    """
    inputs: list[set[str]] = [set() for _ in layers]
    outputs: list[set[str]] = [set() for _ in layers]
    producers: dict[str, int] = {}
    for number, layer in enumerate(layers):
        for reads, makes in layer:
            for name in reads:
                producer = producers.get(name)
                if producer != number:
                    inputs[number].add(name)
                    if producer is not None:
                        outputs[producer].add(name)
            producers |= dict.fromkeys(makes, number)
    outputs[-1] = {"x"}
    return [(_ordered(takes), _ordered(gives)) for takes, gives in zip(inputs, outputs, strict=True)]


def is_attention(reads: Sequence[Tensors]) -> bool:
    """Return whether a definition is only an attention, which becomes an op, not a layer.

    Args:
        reads: the tensors that each of its nodes reads.
    """
    return len(reads) == 1 and set(reads[0]) == {"q", "kv"}


def build_layers(definitions: Sequence[LayerDefinition], *, tied: bool = False) -> tuple[Layer, ...]:
    """Build a model's layers from nodes. A definition with only an attention becomes an op, not a layer.

    Args:
        tied: whether the last layer uses the first layer's weight.
    """
    boundary_tensors = boundaries([[(node.reads, node.makes) for node in nodes] for _, nodes, _ in definitions])
    layers = [
        (definition, *tensors)
        for definition, tensors in zip(definitions, boundary_tensors, strict=True)
        if not is_attention([node.reads for node in definition[1]])
    ]
    result: list[Layer] = []
    for l, ((name, nodes, cut), reads, makes) in enumerate(layers):
        readers = {
            tensor: next((r for r in range(l + 1, len(layers)) if tensor in layers[r][1]), -1) for tensor in makes
        }
        last = tied and l == len(layers) - 1
        inputs, outputs = _ports(reads, l, dict.fromkeys(reads, l)), _ports(makes, l + 1, readers)
        result.append(_with_unique_names(Layer(name, tuple(nodes), inputs, outputs, cut, 0 if last else l, int(last))))
    return tuple(result)


CARRIED = {"s": Kind.RESIDUAL, "gates": Kind.ROUTING, "choices": Kind.ROUTING}
"""Kinds of the tensors that layers carry beside the activation."""


def carried_tensors(names: Sequence[str]) -> dict[Kind, tuple[str, ...]]:
    """Return the tensors that layers carry beside the activation, by kind, in order."""
    kinds = dict.fromkeys(CARRIED[name] for name in names[1:])
    return {kind: tuple(name for name in names[1:] if CARRIED[name] is kind) for kind in kinds}


class Mismatch(Exception):
    """Error about a tensor of a layer, or its gradient, that has other pieces of an index than the computation needs.

    Attributes:
        tensor: name of the tensor at fault.
        index: the index.
        expected: the pieces of the index that it must have, as a bit mask (None: all).
        actual: the pieces that it has, as a bit mask (None: all).
        of_gradient: whether the tensor's gradient is at fault, rather than the tensor.
    """

    def __init__(self, tensor: str, index: str, expected: int | None, actual: int | None, of_gradient: bool) -> None:
        super().__init__(tensor, index)
        self.tensor, self.index, self.expected, self.actual = tensor, index, expected, actual
        self.of_gradient = of_gradient


class Extent(NamedTuple):
    """Part of a tensor that a rank has.

    Attributes:
        slices: the pieces of each index that is not whole.
        term: which term of a sum the rank's part is (None: no sum is open; the part is complete).
    """

    slices: Mapping[str, int]
    term: Term | None = None


def forward(layer: Layer, inputs: Mapping[str, Extent], cut: Mapping[str, int], space: Space) -> dict[str, Extent]:
    """Return the extent of every tensor of a layer.

    Args:
        inputs: the extents of the inputs.
        cut: the pieces of each index of the weights, and of each dealt index (`Node.deals`), if that index is not
            whole.

    Raises:
        Mismatch: if operands do not fit.
    """
    extents = dict(inputs)
    for node in layer.nodes:
        pieces = _shared_pieces(node, extents, cut)
        for name in node.reads:
            if (term := extents[name].term) is not None:  # an input that was not whole
                index = term.indices[0]
                first = layer.inputs[0].tensor
                raise Mismatch(first, index, None, inputs[first].slices.get(index, term.bits), of_gradient=False)
        for output, indices in node.makes.items():
            dims = indices.split()
            extents[output] = Extent(
                {i: pieces[i] for i in dims if i in pieces}, _term_of_contraction(pieces, dims, space)
            )
    return extents


class Gradients(NamedTuple):
    """Results of a backward pass.

    Attributes:
        of_tensors: the extent of every tensor's gradient, by name.
        of_weights: which term of a sum the weights' gradient is (None: no sum is open; the gradient is complete).
    """

    of_tensors: Mapping[str, Extent]
    of_weights: Term | None


def backward(
    layer: Layer, extents: Mapping[str, Extent], out_grads: Mapping[str, Extent], cut: Mapping[str, int], space: Space
) -> Gradients:
    """Return the gradients of a layer.

    If the gradient of an output is a term of a sum, the gradients that a linear node computes from it are terms too. An
    affine node also adds a gradient of its own, which must be added once in the whole sum. If the term is over a dealt
    index (`Node.deals`), the node adds the part that belongs to the term's pieces; a term over another index is
    refused.

    Args:
        extents: the extents of the layer's tensors, from `forward`.
        out_grads: the extents of the gradients of the layer's outputs.

    Raises:
        Mismatch: if a gradient does not fit what was computed.
    """
    gradients = dict(out_grads)
    of_weights: Term | None = None
    for node in reversed(layer.nodes):
        pieces = _shared_pieces(node, extents, cut)
        term: Term | None = None
        for output, indices in node.makes.items():
            if output in gradients:
                _require_gradient(node, output, indices, gradients[output], pieces)
                term = gradients[output].term or term
        if node.affine and term is not None and not layer.deals.issuperset(term.indices):
            raise Mismatch(layer.outputs[0].tensor, term.indices[0], None, term.bits, of_gradient=True)
        if node.weights:
            of_weights = term
        for operand, indices in node.reads.items():
            dims = indices.split()
            gradient = Extent(
                {i: pieces[i] for i in dims if i in pieces}, _term_of_contraction(pieces, dims, space) or term
            )
            if operand in gradients and gradients[operand].term != gradient.term:
                raise _partial_gradient_mismatch(out_grads, gradients[operand].term or gradient.term)
            gradients[operand] = gradient
    return Gradients(gradients, of_weights)


def sorted_slices(slices: Mapping[str, int]) -> Slices:
    """Return slices sorted by index, as in a form."""
    return tuple(sorted(slices.items()))


def _ordered(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(names, key=lambda name: ((*PORT_ORDER, name).index(name), name)))


def _ports(names: Sequence[str], activation: int, readers: Mapping[str, int]) -> tuple[Port, ...]:
    """Return the ports of some tensors. The first is the activation; the others belong to the layers that read them."""
    first = names[0]
    if first == "q":
        return Port("q", Kind.QUERIES, activation - 1), Port("kv", Kind.KEYS_VALUES, activation - 1)
    carried = [Port(tensors[0], kind, readers[tensors[0]]) for kind, tensors in carried_tensors(names).items()]
    return (Port(first, Kind.ACTIVATION, activation), *carried)


def _with_unique_names(layer: Layer) -> Layer:
    """Return the layer with a unique name for every tensor."""
    names = {port.tensor: port.tensor for port in layer.inputs}
    nodes: list[Node] = []
    for number, node in enumerate(layer.nodes):
        reads = {names.get(name, name): indices for name, indices in node.reads.items()}
        names |= {name: f"{name}{number}" for name in node.makes}
        nodes.append(replace(node, reads=reads, makes={names[name]: indices for name, indices in node.makes.items()}))
    outputs = tuple(port._replace(tensor=names[port.tensor]) for port in layer.outputs)
    return replace(layer, nodes=tuple(nodes), outputs=outputs)


def _partial_gradient_mismatch(out_grads: Mapping[str, Extent], term: Term | None) -> Mismatch:
    """Return the error about a partial gradient of a tensor that also receives whole gradients."""
    assert term is not None
    index = term.indices[0]
    tensor = next(name for name, gradient in out_grads.items() if index in gradient.slices)
    return Mismatch(tensor, index, None, out_grads[tensor].slices[index], of_gradient=True)


def _shared_pieces(node: Node, extents: Mapping[str, Extent], cut: Mapping[str, int]) -> dict[str, int]:
    """Return the pieces of every index that is not whole in a node's operands, which must agree on them."""
    pieces = {index: cut.get(index) for indices in node.weights.values() for index in indices.split()}
    pieces.update({index: cut.get(index) for index in node.deals})
    pieces.update(dict.fromkeys(node.whole))
    for name, indices in node.reads.items():
        _require_known(name, indices, extents[name])
        for index in indices.split():
            tensor_mask = extents[name].slices.get(index)
            if pieces.setdefault(index, tensor_mask) != tensor_mask:
                raise Mismatch(name, index, pieces[index], tensor_mask, of_gradient=False)
    return {index: mask for index, mask in pieces.items() if mask is not None}


def _require_known(name: str, indices: str, extent: Extent, *, of_gradient: bool = False) -> None:
    """Require that a tensor is cut only along indices that it has."""
    for index, mask in extent.slices.items():
        if index not in indices.split():
            raise Mismatch(name, index, None, mask, of_gradient)


def _term_of_contraction(pieces: Mapping[str, int], output_indices: Iterable[str], space: Space) -> Term | None:
    """Return the term that results from summing over the cut indices that the output lacks."""
    output_indices = set(output_indices)
    summed_indices = sorted(index for index in pieces if index not in output_indices)
    if not summed_indices:
        return None
    tuples = [0]
    for index in summed_indices:
        count = space.count(index)
        tuples = [base * count + piece for base in tuples for piece in bits(pieces[index])]
    return Term(tuple(summed_indices), mask_of(tuples))


def _require_gradient(node: Node, output: str, indices: str, gradient: Extent, pieces: Mapping[str, int]) -> None:
    """Require that a gradient has the pieces of the output to which it belongs."""
    _require_known(output, indices, gradient, of_gradient=True)
    for index in indices.split():
        expected, actual = pieces.get(index), gradient.slices.get(index)
        if expected != actual and not (node.takes_own and actual is None):
            raise Mismatch(output, index, expected, actual, of_gradient=True)
