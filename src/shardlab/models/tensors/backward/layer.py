"""Both passes of a layer: those of its primitives, one after the other."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch leaves some of its annotations out.

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlab.models.layer import Run
from shardlab.models.primitives import INTEGERS, Primitive
from shardlab.models.tensors.backward.autograd import by_autograd
from shardlab.models.tensors.backward.workspace import (
    BothPasses,
    Take,
    TensorPlaces,
    Weights,
    Workspace,
    are_buffers,
    passes,
)
from shardlab.models.tensors.dropout import Dropout
from shardlab.models.tensors.share import ALL, Share


class _Step(NamedTuple):
    """A primitive of a layer.

    Attributes:
        forward, backward: its passes.
        dropped: places of what nobody reads after its forward pass.
        dropped_alone: the same, if there is no backward pass.
        freed: places of what nobody reads after its backward pass.
    """

    forward: Callable[[Workspace], None]
    backward: Callable[[Workspace], None]
    dropped: Sequence[int]
    dropped_alone: Sequence[int]
    freed: Sequence[int]


class _Port(NamedTuple):
    """A value that a layer is given or makes, and the tensors that it holds side by side.

    Attributes:
        places: of the tensors.
        integers: those of them that have no gradient.
        buffers: whether it is experts' buffers, whose dims are not those of sequences.
    """

    places: tuple[int, ...]
    integers: tuple[int, ...]
    buffers: bool

    def spread(self, value: Tensor, tensors: list[Any]) -> None:
        """Put its tensors, or their gradients, where they belong."""
        flat = value if self.buffers else value.flatten(0, 1)
        if len(self.places) == 1:
            tensors[self.places[0]] = flat
            return
        for place, part in zip(self.places, flat.chunk(len(self.places), -1), strict=True):
            tensors[place] = part


class PreparedLayer:
    """Both passes of one layer of a model; it holds no tensor itself.

    Args:
        prepared: its primitives' passes.
        last: place of each tensor to the number of the last primitive that reads or makes it.
        inputs, outputs: what it is given and what it makes for others.
        copies: whether its outputs are parts of one tensor, and to be memory of their own.
    """

    def __init__(
        self,
        prepared: Sequence[BothPasses],
        last: dict[int, int],
        inputs: Sequence[_Port],
        outputs: Sequence[_Port],
        copies: bool,
    ) -> None:
        first_keeper: dict[int, int] = {}
        for number, each in enumerate(prepared):
            for place in each.keeps:
                first_keeper.setdefault(place, number)
        made = {place for port in outputs for place in port.places}
        self._inputs, self._outputs, self._copies = inputs, outputs, copies
        self._count = len(last)
        self._given_on = [place for place in made if place not in first_keeper]
        self._steps = [
            _Step(
                each.forward,
                each.backward,
                [place for place in ended if place not in first_keeper],
                ended,
                [place for place, keeper in first_keeper.items() if keeper == number],
            )
            for number, each in enumerate(prepared)
            for ended in [[place for place, seen in last.items() if seen == number and place not in made]]
        ]

    def forward(
        self,
        inputs: Sequence[Tensor],
        weights: Weights,
        share: Share = ALL,
        dropout: Dropout | None = None,
        *,
        keeps: bool = True,
    ) -> tuple[list[Tensor], Workspace]:
        """The layer's outputs, each memory of its own, and what its backward pass wants.

        Args:
            inputs: activation l, (rows, *shape), and what is carried; none of them asks for a gradient.
            weights: its parameters; of one slice where the layer is sliced.
            share: which slice or which tokens are computed.
            dropout: the step's and the microbatches'; the layer's masks are those of the blocks that it is made of.
            keeps: whether a backward pass follows.
        """
        shape = inputs[-1].shape  # the first may be experts' buffers
        tensors: list[Any] = [None] * self._count
        its = Workspace(tensors, weights, share, dropout, shape[0], shape[1], keeps)
        for port, x in zip(self._inputs, inputs, strict=True):
            port.spread(x, tensors)
        for forward, _, dropped, dropped_alone, _ in self._steps:
            forward(its)
            for place in dropped if keeps else dropped_alone:
                tensors[place] = None
        made = [self._taken(its, port) for port in self._outputs]
        for place in self._given_on:
            tensors[place] = None
        its.end()
        return made, its

    def backward(self, its: Workspace, given: Sequence[Tensor], weights: Weights, take: Take) -> list[Tensor | None]:
        """The inputs' gradients, of those of the outputs; none for tokens. Empties what was kept.

        A sum hands its gradient on: those that are given, taken and made may be the same tensor.
        """
        gradients: list[Any] = [None] * self._count
        its.weights, its.take, its.gradients = weights, take, gradients
        tensors = its.tensors
        for port, gradient in zip(self._outputs, given, strict=True):
            port.spread(gradient, gradients)
            for place in port.integers:
                gradients[place] = None
        for _, backward, _, _, freed in reversed(self._steps):
            backward(its)
            for place in freed:
                tensors[place] = None
        its.end()
        return [self._gradient(its, port) for port in self._inputs]

    def _taken(self, its: Workspace, port: _Port) -> Tensor:
        """A value that the layer makes; tensors of one value go side by side, in the numbers of the activation."""
        tensors = its.tensors
        made: Tensor = tensors[port.places[0]]
        if len(port.places) > 1:
            dtype = tensors[self._outputs[0].places[0]].dtype
            made = torch.cat([tensors[place].to(dtype) for place in port.places], -1)
        if self._copies:
            made = made.clone()
        return made if port.buffers else its.of_sequences(made)

    def _gradient(self, its: Workspace, port: _Port) -> Tensor | None:
        """The gradient of a value that the layer is given; zeros for those of its tensors that have none."""
        gradient: Tensor | None = its.gradients[port.places[0]]  # no integers come first
        if gradient is None:
            return None
        if len(port.places) > 1:
            others: list[Tensor | None] = [its.gradients[place] for place in port.places[1:]]
            zeros = (torch.zeros_like(gradient) if each is None else each for each in others)
            gradient = torch.cat([gradient, *zeros], -1)
        return gradient if port.buffers else its.of_sequences(gradient)


def prepared_layer(run: Run, names: Sequence[str], device: str, *, attended: bool = False) -> PreparedLayer:
    """Both passes of a layer.

    Args:
        run: its primitives.
        names: of its parameters, and of those that it borrows.
        device: the type of that on which it is computed.
        attended: whether it is given what attention has mixed, as an op of its own.
    """
    at = TensorPlaces({name: place for place, name in enumerate(names)}, device)
    steps = [step.primitive for step in run.steps]
    given = [run.inputs[:1], *run.carried_inputs.values()]
    inputs = [_port(tuple(at.make(name) for name in its), its, _first_reader(steps, its[0])) for its in given]
    prepared: list[BothPasses] = []
    last = dict.fromkeys(chain(*(port.places for port in inputs)), -1)
    again = {made.step for made in run.made_again}
    shift = int(attended)
    if attended:
        prepared.append(_mixed(run.inputs[0], at))
        last |= dict.fromkeys(range(at.count), 0)
    for number, (primitive, block, _) in enumerate(run.steps, shift):
        last |= {at.tensors[name]: number for name in primitive.reads}
        before, at.block = at.count, block
        own = type(primitive) in passes.registry  # a primitive that was made of another computes something else
        found = (passes(primitive, at) if own else None) or by_autograd(primitive, at)
        prepared.append(found)
        last |= dict.fromkeys(range(before, at.count), number)
        if number - shift in again:
            at.again[at.tensors[next(iter(primitive.makes))]] = found.forward
    carried = ((name,) for name in run.outputs[1:]) if run.attend else run.carried_outputs.values()
    makers = {name: primitive.makes[name] for primitive in steps for name in primitive.makes}
    outputs = [
        _port(tuple(at.tensors[name] for name in its), its, makers[its[0]]) for its in (run.outputs[:1], *carried)
    ]
    return PreparedLayer(prepared, last, inputs, outputs, run.attend is not None)


def _port(places: tuple[int, ...], names: Sequence[str], indices: str) -> _Port:
    integers = tuple(place for place, name in zip(places, names, strict=True) if name in INTEGERS)
    return _Port(places, integers, are_buffers(indices))


def _first_reader(steps: Sequence[Primitive], name: str) -> str:
    """The indices of a tensor that a layer is given."""
    return next((primitive.reads[name] for primitive in steps if name in primitive.reads), "")


def _mixed(name: str, at: TensorPlaces) -> BothPasses:
    """What attention has mixed comes in exact numbers, before each head's log-sum-exp, of which nothing is read.

    The layer begins with the linear map of it, whose weight is its first.
    """
    given, made, kind = at.tensors[name], at.make(name), at.make()

    def forward(its: Workspace) -> None:
        x, matrix = its.tensors[given], its.weights[0]
        its.tensors[made] = x[:, : matrix.shape[1]].to(matrix.dtype)
        its.tensors[kind] = x.shape[1], x.dtype

    def backward(its: Workspace) -> None:
        gradient, (features, dtype) = its.taken(made), its.tensors[kind]
        its.give(given, F.pad(gradient.to(dtype), (0, features - gradient.shape[1])))

    return BothPasses(forward, backward, (kind,))
