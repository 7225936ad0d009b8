"""A primitive: an einsum over named indices, and what of it must be whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from shardlab.rules.kind import Kind


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
