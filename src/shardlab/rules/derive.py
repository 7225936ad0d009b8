"""What a layer makes, derived from its nodes: each is an einsum, and its backward pass is the same einsum with the
gradient as an operand (compare GSPMD, arXiv 2105.04663; OneFlow's SBP, arXiv 2110.15032; DTensor).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from shardlab.errors import Refused
from shardlab.rules.node import Layer, Node
from shardlab.rules.pieces import bits, listed, mask_of
from shardlab.rules.spec import Slices, Space, Term


class Held(NamedTuple):
    """What a tensor holds of each index that is not whole, and which term of a sum it is (None: it is complete)."""

    slices: Mapping[str, int]
    term: Term | None = None


def forward(layer: Layer, given: Mapping[str, Held], cut: Mapping[str, int], space: Space) -> dict[str, Held]:
    """What every tensor of a layer holds; `cut` has the pieces of the weight's indices that are not whole.

    Raises:
        Refused: when operands do not fit.
    """
    held = dict(given)
    for node in layer.nodes:
        joint = _joint(node, held, cut)
        for made, indices in node.makes.items():
            own = indices.split()
            held[made] = Held({i: joint[i] for i in own if i in joint}, _contracted(joint, own, space))
    return held


def backward(
    layer: Layer, held: Mapping[str, Held], given: Mapping[str, Held], cut: Mapping[str, int], space: Space
) -> dict[str, Held]:
    """The gradient of every tensor of a layer, from what `forward` says of them and the gradients of its results.

    Raises:
        Refused: when a gradient does not fit what was computed.
    """
    gradients = dict(given)
    for node in reversed(layer.nodes):
        joint = _joint(node, held, cut)
        for made, indices in node.makes.items():
            if made in gradients:
                _want_gradient(node, made, indices, gradients[made], joint, space)
        for read, indices in node.reads.items():
            own = indices.split()
            gradients[read] = Held({i: joint[i] for i in own if i in joint}, _contracted(joint, own, space))
    return gradients


def _joint(node: Node, held: Mapping[str, Held], cut: Mapping[str, int]) -> dict[str, int]:
    """The pieces of every index that the operands share and do not hold whole."""
    joint: dict[str, int] = {}
    seen: dict[str, str] = {}
    for name, indices in node.reads.items():
        _want_known(node, name, indices, held[name])
    operands = [(name, indices, held[name].slices) for name, indices in node.reads.items()]
    operands += [(name, indices, cut) for name, indices in node.weights.items()]
    for name, indices, slices in operands:
        for index in indices.split():
            mine = slices.get(index)
            if mine is not None and index in node.whole:
                raise Refused(f"{name} has {index} {listed(bits(mine))} alone, but {node.name} wants all of it")
            if index in seen and joint.get(index) != mine:
                raise Refused(
                    f"{name} has {_pieces(index, mine)}, but {seen[index]} has {_pieces(index, joint.get(index))}"
                )
            seen.setdefault(index, name)
            if mine is not None:
                joint[index] = mine
    return joint


def _want_known(node: Node, name: str, indices: str, given: Held) -> None:
    """A tensor is cut along its own indices alone."""
    for index, mask in given.slices.items():
        if index not in indices.split():
            raise Refused(f"{name} has {index} {listed(bits(mask))} alone, but {node.name} wants all of it")


def _pieces(index: str, mask: int | None) -> str:
    return f"all of {index}" if mask is None else f"{index} {listed(bits(mask))}"


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


def _want_gradient(node: Node, made: str, indices: str, gradient: Held, joint: Mapping[str, int], space: Space) -> None:
    _want_known(node, f"the gradient of {made}", indices, gradient)
    for index in indices.split():
        mine, theirs = joint.get(index), gradient.slices.get(index)
        if mine != theirs and not (node.takes_own and theirs is None):
            raise Refused(f"the gradient of {made} has {_pieces(index, theirs)}, but {made} has {_pieces(index, mine)}")


def sorted_slices(slices: Mapping[str, int]) -> Slices:
    """As a form has them."""
    return tuple(sorted(slices.items()))
