"""What a layer makes, derived from its nodes: each is an einsum, and its backward pass is the same einsum with the
gradient as an operand (compare GSPMD, arXiv 2105.04663; OneFlow's SBP, arXiv 2110.15032; DTensor).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from shardlab.rules.node import Layer, Node
from shardlab.rules.pieces import bits, mask_of
from shardlab.rules.spec import Slices, Space, Term


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
