"""Both passes of a layer, which run the passes of its primitives in order.

`prepare_layer` numbers the layer's tensors and prepares each primitive once. `PreparedLayer` then runs the forward
pass, and later the backward pass, and frees each tensor after the last primitive that reads it.
"""

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
from shardlab.models.primitives import INTEGERS
from shardlab.models.tensors.backward.autograd import autograd_passes
from shardlab.models.tensors.backward.workspace import (
    Accumulate,
    BothPasses,
    Context,
    TensorPlaces,
    Weights,
    is_buffer,
    make_passes,
)
from shardlab.models.tensors.dropout import Dropout
from shardlab.models.tensors.share import WHOLE_LAYER, Share


class _Step(NamedTuple):
    """Passes of one primitive, with the tensors to free after each.

    Attributes:
        forward: the forward pass.
        backward: the backward pass.
        free_after_forward: indices of tensors that no later pass reads, if a backward pass follows.
        free_without_backward: indices of tensors that no later forward pass reads, if no backward pass follows.
        free_after_backward: indices of tensors that no later backward pass reads.
    """

    forward: Callable[[Context], None]
    backward: Callable[[Context], None]
    free_after_forward: Sequence[int]
    free_without_backward: Sequence[int]
    free_after_backward: Sequence[int]


class _Port(NamedTuple):
    """Input or output of a layer: a value of one or more tensors, concatenated along the features.

    Attributes:
        places: indices of the tensors in the context's lists.
        integers: the places of tensors of integers, which have no gradient.
        buffers: whether the value is an experts' buffer, (experts, capacity, features).
    """

    places: tuple[int, ...]
    integers: tuple[int, ...]
    buffers: bool

    def spread(self, value: Tensor, tensors: list[Any]) -> None:
        """Split a value into its tensors, or a gradient into their gradients, and store each at its index."""
        flat = value if self.buffers else value.flatten(0, 1)
        if len(self.places) == 1:
            tensors[self.places[0]] = flat
            return
        for place, part in zip(self.places, flat.chunk(len(self.places), -1), strict=True):
            tensors[place] = part


class PreparedLayer:
    """Both passes of one layer of a model. It stores no tensors.

    Args:
        prepared: the passes of the layer's primitives, in order.
        last: for each tensor, the number of the last primitive that reads or writes it.
        inputs: values that the layer reads.
        outputs: values that the layer passes to other layers.
        copies: whether the outputs are views of one tensor and must be copied.
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
        for number, passes in enumerate(prepared):
            for place in passes.keeps:
                first_keeper.setdefault(place, number)
        output_places = {place for port in outputs for place in port.places}
        self._inputs, self._outputs, self._copies = inputs, outputs, copies
        self._count = len(last)
        self._free_at_end = [place for place in output_places if place not in first_keeper]
        self._steps = [
            _Step(
                passes.forward,
                passes.backward,
                [place for place in last_used if place not in first_keeper],
                last_used,
                [place for place, keeper in first_keeper.items() if keeper == number],
            )
            for number, passes in enumerate(prepared)
            for last_used in [
                [place for place, last_step in last.items() if last_step == number and place not in output_places]
            ]
        ]

    def forward(
        self,
        inputs: Sequence[Tensor],
        weights: Weights,
        share: Share = WHOLE_LAYER,
        dropout: Dropout | None = None,
        *,
        keeps: bool = True,
    ) -> tuple[list[Tensor], Context]:
        """Compute the layer's outputs.

        Args:
            inputs: activation l, (rows, *shape), then any other inputs, such as a router's outputs. No input requires
                a gradient.
            weights: the layer's parameters; those of one slice if the layer is sliced.
            share: the slice of the layer, or the tokens, to compute.
            dropout: source of this step's dropout masks. If the layer spans several blocks, each has its own masks.
            keeps: whether a backward pass follows.

        Returns:
            The outputs, each in separate memory, and the context for the backward pass.
        """
        shape = inputs[-1].shape  # the first input may be experts' buffers
        tensors: list[Any] = [None] * self._count
        ctx = Context(tensors, weights, share, dropout, shape[0], shape[1], keeps)
        for port, x in zip(self._inputs, inputs, strict=True):
            port.spread(x, tensors)
        for step in self._steps:
            step.forward(ctx)
            for place in step.free_after_forward if keeps else step.free_without_backward:
                tensors[place] = None
        outputs = [self._output(ctx, port) for port in self._outputs]
        for place in self._free_at_end:
            tensors[place] = None
        ctx.end()
        return outputs, ctx

    def backward(
        self, ctx: Context, gradients: Sequence[Tensor], weights: Weights, accumulate: Accumulate
    ) -> list[Tensor | None]:
        """Turn the gradients of the outputs into those of the inputs (None for tokens), and empty the context.

        A sum passes its gradient on unchanged, so the gradients of outputs, inputs and parameters may be the same
        tensor.
        """
        by_place: list[Any] = [None] * self._count
        ctx.weights, ctx.accumulate, ctx.gradients = weights, accumulate, by_place
        tensors = ctx.tensors
        for port, gradient in zip(self._outputs, gradients, strict=True):
            port.spread(gradient, by_place)
            for place in port.integers:
                by_place[place] = None
        for step in reversed(self._steps):
            step.backward(ctx)
            for place in step.free_after_backward:
                tensors[place] = None
        ctx.end()
        return [self._gradient(ctx, port) for port in self._inputs]

    def _output(self, ctx: Context, port: _Port) -> Tensor:
        """Return an output. Several tensors are concatenated in the dtype of the activation."""
        tensors = ctx.tensors
        output: Tensor = tensors[port.places[0]]
        if len(port.places) > 1:
            dtype = tensors[self._outputs[0].places[0]].dtype
            output = torch.cat([tensors[place].to(dtype) for place in port.places], -1)
        if self._copies:
            output = output.clone()
        return output if port.buffers else ctx.of_sequences(output)

    def _gradient(self, ctx: Context, port: _Port) -> Tensor | None:
        """Return the gradient of an input; zeros for its tensors without a gradient."""
        gradient: Tensor | None = ctx.gradients[port.places[0]]  # no integers come first
        if gradient is None:
            return None
        if len(port.places) > 1:
            others: list[Tensor | None] = [ctx.gradients[place] for place in port.places[1:]]
            zeros = (torch.zeros_like(gradient) if part is None else part for part in others)
            gradient = torch.cat([gradient, *zeros], -1)
        return gradient if port.buffers else ctx.of_sequences(gradient)


def prepare_layer(run: Run, device: str, *, attended: bool = False) -> PreparedLayer:
    """Prepare both passes of a layer.

    Args:
        run: the layer's primitives.
        device: type of the device that computes the layer, such as "cpu".
        attended: whether the layer's input comes from attention as a separate op.
    """
    places = TensorPlaces({name: place for place, name in enumerate(run.names)}, device)
    input_names = [run.inputs[:1], *run.carried_inputs.values()]
    readers = {
        name: primitive.reads[name] for primitive in reversed(run.primitives) for name in primitive.reads
    }  # the first ones
    inputs = [_port(tuple(map(places.make, names)), names, readers.get(names[0], "")) for names in input_names]
    prepared: list[BothPasses] = []
    last = dict.fromkeys(chain(*(port.places for port in inputs)), -1)
    recomputed = {tensor.step for tensor in run.made_again}
    shift = int(attended)
    if attended:
        prepared.append(_mixed(run.inputs[0], places))
        last |= dict.fromkeys(range(places.count), 0)
    for number, (primitive, block, _) in enumerate(run.steps, shift):
        last |= {places.tensors[name]: number for name in primitive.reads}
        first_place, places.block = places.count, block
        has_rule = type(primitive) in make_passes.registry  # a subclass of a primitive may compute something else
        passes = (make_passes(primitive, places) if has_rule else None) or autograd_passes(primitive, places)
        prepared.append(passes)
        last |= dict.fromkeys(range(first_place, places.count), number)
        if number - shift in recomputed:
            places.recompute[places.tensors[next(iter(primitive.makes))]] = passes.forward
    carried = ((name,) for name in run.outputs[1:]) if run.attend else run.carried_outputs.values()
    makers = {name: primitive.makes[name] for primitive in run.primitives for name in primitive.makes}
    output_names = (run.outputs[:1], *carried)
    outputs = [_port(tuple(places.tensors[name] for name in names), names, makers[names[0]]) for names in output_names]
    return PreparedLayer(prepared, last, inputs, outputs, run.attend is not None)


def _port(places: tuple[int, ...], names: Sequence[str], indices: str) -> _Port:
    integers = tuple(place for place, name in zip(places, names, strict=True) if name in INTEGERS)
    return _Port(places, integers, is_buffer(indices))


def _mixed(name: str, places: TensorPlaces) -> BothPasses:
    """Prepare the passes that extract the mixed values from an attention output.

    That output is in float32 or float64: the mixed values, then each head's log-sum-exp, which the layer does not read.
    The layer begins with a linear map of the mixed values, whose weight is the layer's first parameter.
    """
    attention_output, mixed, kind = places.tensors[name], places.make(name), places.make()

    def forward(ctx: Context) -> None:
        x, matrix = ctx.tensors[attention_output], ctx.weights[0]
        ctx.tensors[mixed] = x[:, : matrix.shape[1]].to(matrix.dtype)
        ctx.tensors[kind] = x.shape[1], x.dtype

    def backward(ctx: Context) -> None:
        gradient, (features, dtype) = ctx.pop_gradient(mixed), ctx.tensors[kind]
        ctx.add_gradient(attention_output, F.pad(gradient.to(dtype), (0, features - gradient.shape[1])))

    return BothPasses(forward, backward, (kind,))
