"""A primitive: an einsum over named indices, and what of it must be whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from shardlab.language.rules.kinds import Kind, bits, mask_of
from shardlab.language.rules.spec import Slices, Space, Term


@dataclass(frozen=True)
class Node:
    """One step of a layer's arithmetic.

    Tensors and parameters have names; each has indices, separated by blanks. The cells are left out: every tensor of a
    layer has them and no parameter does.

    Attributes:
        name: of the primitive, for messages.
        reads, makes, weights: the indices of each tensor read, of each made, and of each parameter.
        whole: indices that must be held whole, since the primitive mixes them.
        mixes_tokens: whether tokens of a sequence are mixed, so that sequences must be whole.
        takes_own: whether of a complete gradient of its result it takes what belongs to its own slices.
        deals: indices of its result of which it may make some pieces alone, as the program says.
        atomic: whether a device may add in any order, so that two ranks round alike only by chance.
        affine: whether its backward pass adds a gradient of its own to what follows from that of its results.
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
        return hash((self.name, *(pair for each in tensors for pair in each.items()), self.whole))


class Port(NamedTuple):
    """A tensor by which a layer meets others.

    Attributes:
        tensor: its name among the layer's nodes.
        kind, layer: of the values that come and go there.
    """

    tensor: str
    kind: Kind
    layer: int


@dataclass(frozen=True)
class Layer:
    """A run of primitives between two places where a program may communicate.

    Attributes:
        name: for messages: what sort of layer this is.
        nodes: in order.
        inputs, outputs: the first of each is the activation; others are carried beside it.
        cut: the indices along which its parameters are cut, outermost first.
        weight: the layer whose weight it computes with.
        use: which of that weight's uses this is.
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

    @cached_property
    def _hash(self) -> int:
        return hash((self.name, self.nodes, self.inputs, self.outputs, self.cut, self.weight, self.use))

    @property
    def recomputed(self) -> bool:
        """Whether it can be computed again from its one input, for what layers keep alone."""
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
        """The indices of its output of which it may make some pieces alone: the experts that tokens are sent to."""
        return frozenset[str]().union(*(node.deals for node in self.nodes))

    @property
    def routes(self) -> bool:
        """Whether tokens are routed to experts, or come back from them, here."""
        return any(port.kind is Kind.ROUTING for port in (*self.inputs, *self.outputs))

    @property
    def projects(self) -> bool:
        """Whether it makes queries, keys and values for an attention that is an op of its own."""
        return self.outputs[0].kind is Kind.QUERIES

    @property
    def mixes_tokens(self) -> bool:
        """Whether it mixes the tokens of a sequence."""
        return any(node.mixes_tokens for node in self.nodes)


# Layers composed of nodes: what crosses from one layer to another is what one makes and another reads.


ORDER = ("x", "q", "kv", "s", "gates", "choices", "slots")
"""The tensors by which layers meet, in the order in which a layer takes and makes them: the activation first."""

Written = tuple[str, Sequence[Node], tuple[str, ...]]
"""A layer's name for a reader, its nodes, and the indices that its parameters are cut along."""


Tensors = Iterable[str]
"""Names of tensors."""


def crossing(layers: Sequence[Sequence[tuple[Tensors, Tensors]]]) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """The tensors that each layer is given, and those that it makes for others, from what each node reads and makes.

    A tensor's name is used again and again, and stands for the last one that was made.
    """
    inputs: list[set[str]] = [set() for _ in layers]
    outputs: list[set[str]] = [set() for _ in layers]
    made: dict[str, int] = {}
    for number, layer in enumerate(layers):
        for reads, makes in layer:
            for name in reads:
                maker = made.get(name)
                if maker != number:
                    inputs[number].add(name)
                    if maker is not None:
                        outputs[maker].add(name)
            made |= dict.fromkeys(makes, number)
    outputs[-1] = {"x"}
    return [(_ordered(taken), _ordered(given)) for taken, given in zip(inputs, outputs, strict=True)]


def is_attention(reads: Sequence[Tensors]) -> bool:
    """Whether nodes that read these tensors are an attention alone, which is an op of its own and no layer."""
    return len(reads) == 1 and set(reads[0]) == {"q", "kv"}


def _ordered(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(names, key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), name)))


def layers_of(written: Sequence[Written], *, tied: bool = False) -> tuple[Layer, ...]:
    """A model's layers, composed of nodes; an attention alone between two is none.

    Args:
        tied: whether the last layer computes with the first one's weight.
    """
    crossed = crossing([[(node.reads, node.makes) for node in nodes] for _, nodes, _ in written])
    layers = [
        (each, *met)
        for each, met in zip(written, crossed, strict=True)
        if not is_attention([node.reads for node in each[1]])
    ]
    made: list[Layer] = []
    for l, ((name, nodes, cut), taken, given) in enumerate(layers):
        readers = {
            tensor: next((r for r in range(l + 1, len(layers)) if tensor in layers[r][1]), -1) for tensor in given
        }
        last = tied and l == len(layers) - 1
        inputs, outputs = _ports(taken, l, dict.fromkeys(taken, l)), _ports(given, l + 1, readers)
        made.append(_numbered(Layer(name, tuple(nodes), inputs, outputs, cut, 0 if last else l, int(last))))
    return tuple(made)


CARRIED = {"s": Kind.RESIDUAL, "gates": Kind.ROUTING, "choices": Kind.ROUTING}
"""Kind of value in which a tensor is carried beside the activation."""


def carried_of(names: Sequence[str]) -> dict[Kind, tuple[str, ...]]:
    """The tensors that are carried beside the first of those by which layers meet, by kind, in order."""
    kinds = dict.fromkeys(CARRIED[name] for name in names[1:])
    return {kind: tuple(name for name in names[1:] if CARRIED[name] is kind) for kind in kinds}


def _ports(names: Sequence[str], activation: int, readers: Mapping[str, int]) -> tuple[Port, ...]:
    """The ports of some tensors: the first is the activation of that number, others go to the layers that read them."""
    first = names[0]
    if first == "q":
        return Port("q", Kind.QUERIES, activation - 1), Port("kv", Kind.KEYS_VALUES, activation - 1)
    carried = [Port(tensors[0], kind, readers[tensors[0]]) for kind, tensors in carried_of(names).items()]
    return (Port(first, Kind.ACTIVATION, activation), *carried)


def _numbered(layer: Layer) -> Layer:
    """The layer with a name of its own for every tensor."""
    now = {port.tensor: port.tensor for port in layer.inputs}
    nodes: list[Node] = []
    for number, node in enumerate(layer.nodes):
        reads = {now.get(name, name): indices for name, indices in node.reads.items()}
        now |= {name: f"{name}{number}" for name in node.makes}
        nodes.append(replace(node, reads=reads, makes={now[name]: indices for name, indices in node.makes.items()}))
    outputs = tuple(port._replace(tensor=now[port.tensor]) for port in layer.outputs)
    return replace(layer, nodes=tuple(nodes), outputs=outputs)


# What a layer makes, derived from its nodes: each is an einsum, and its backward pass is the same einsum with the
# gradient as an operand (compare GSPMD, arXiv 2105.04663; OneFlow's SBP, arXiv 2110.15032; DTensor).


class Misfit(Exception):
    """Operands that do not fit.

    Attributes:
        tensor: the name of the one at fault.
        of_gradient: whether it is that tensor's gradient.
        index: along which they do not fit.
        wanted: the pieces of the index that it must have (None: all).
        given: those that it has (None: all).
    """

    def __init__(self, tensor: str, index: str, wanted: int | None, given: int | None, of_gradient: bool) -> None:
        super().__init__(tensor, index)
        self.tensor, self.index, self.wanted, self.given = tensor, index, wanted, given
        self.of_gradient = of_gradient


class Held(NamedTuple):
    """What a tensor holds of each index that is not whole, and which term of a sum it is (None: it is complete)."""

    slices: Mapping[str, int]
    term: Term | None = None


def forward(layer: Layer, given: Mapping[str, Held], cut: Mapping[str, int], space: Space) -> dict[str, Held]:
    """What every tensor of a layer holds; `cut` has the pieces of indices of weights, or dealt, that are not whole.

    Raises:
        Misfit: when operands do not fit.
    """
    held = dict(given)
    for node in layer.nodes:
        joint = _joint(node, held, cut)
        for name in node.reads:
            if (term := held[name].term) is not None:  # what was not whole when the layer was given it
                index = term.over[0]
                first = layer.inputs[0].tensor
                raise Misfit(first, index, None, given[first].slices.get(index, term.bits), of_gradient=False)
        for made, indices in node.makes.items():
            own = indices.split()
            held[made] = Held({i: joint[i] for i in own if i in joint}, _contracted(joint, own, space))
    return held


class Gradients(NamedTuple):
    """What a backward pass makes.

    Attributes:
        of_tensors: the gradient of every tensor of the layer, by name.
        of_weights: which term of a sum the weights' gradient is (None: it is complete).
    """

    of_tensors: Mapping[str, Held]
    of_weights: Term | None


def backward(
    layer: Layer, held: Mapping[str, Held], given: Mapping[str, Held], cut: Mapping[str, int], space: Space
) -> Gradients:
    """The gradients of a layer, from what `forward` says of its tensors and the gradients of its results.

    A linear backward pass makes terms of a term. An affine one adds a gradient of its own: of a term over an index that
    the layer deals it adds what belongs to these pieces, and no other term may reach it.

    Raises:
        Misfit: when a gradient does not fit what was computed.
    """
    gradients = dict(given)
    of_weights: Term | None = None
    for node in reversed(layer.nodes):
        joint = _joint(node, held, cut)
        given_term: Term | None = None
        for made, indices in node.makes.items():
            if made in gradients:
                _want_gradient(node, made, indices, gradients[made], joint)
                given_term = gradients[made].term or given_term
        if node.affine and given_term is not None and not layer.deals.issuperset(given_term.over):
            raise Misfit(layer.outputs[0].tensor, given_term.over[0], None, given_term.bits, of_gradient=True)
        if node.weights:
            of_weights = given_term
        for read, indices in node.reads.items():
            own = indices.split()
            gradient = Held({i: joint[i] for i in own if i in joint}, _contracted(joint, own, space) or given_term)
            if read in gradients and gradients[read].term != gradient.term:
                raise _of_a_part(given, gradients[read].term or gradient.term)
            gradients[read] = gradient
    return Gradients(gradients, of_weights)


def _of_a_part(given: Mapping[str, Held], term: Term | None) -> Misfit:
    """The gradient of some pieces of a result, where others flow back to the same tensor whole."""
    assert term is not None
    index = term.over[0]
    tensor = next(name for name, gradient in given.items() if index in gradient.slices)
    return Misfit(tensor, index, None, given[tensor].slices[index], of_gradient=True)


def _joint(node: Node, held: Mapping[str, Held], cut: Mapping[str, int]) -> dict[str, int]:
    """The pieces of every index that the operands share and do not hold whole."""
    joint = {index: cut.get(index) for indices in node.weights.values() for index in indices.split()}
    joint.update({index: cut.get(index) for index in node.deals})
    joint.update(dict.fromkeys(node.whole))
    for name, indices in node.reads.items():
        _want_known(name, indices, held[name])
        for index in indices.split():
            mine = held[name].slices.get(index)
            if joint.setdefault(index, mine) != mine:
                raise Misfit(name, index, joint[index], mine, of_gradient=False)
    return {index: mask for index, mask in joint.items() if mask is not None}


def _want_known(name: str, indices: str, given: Held, *, of_gradient: bool = False) -> None:
    """A tensor is cut along its own indices alone."""
    for index, mask in given.slices.items():
        if index not in indices.split():
            raise Misfit(name, index, None, mask, of_gradient)


def _contracted(joint: Mapping[str, int], own: Iterable[str], space: Space) -> Term | None:
    """The term of a sum that remains when the indices that a result does not have are summed away."""
    own = set(own)
    gone = sorted(index for index in joint if index not in own)
    if not gone:
        return None
    tuples = [0]
    for index in gone:
        count = space.count(index)
        tuples = [base * count + piece for base in tuples for piece in bits(joint[index])]
    return Term(tuple(gone), mask_of(tuples))


def _want_gradient(node: Node, made: str, indices: str, gradient: Held, joint: Mapping[str, int]) -> None:
    _want_known(made, indices, gradient, of_gradient=True)
    for index in indices.split():
        mine, theirs = joint.get(index), gradient.slices.get(index)
        if mine != theirs and not (node.takes_own and theirs is None):
            raise Misfit(made, index, mine, theirs, of_gradient=True)


def sorted_slices(slices: Mapping[str, int]) -> Slices:
    """Slices by name, sorted as a form has them."""
    return tuple(sorted(slices.items()))
