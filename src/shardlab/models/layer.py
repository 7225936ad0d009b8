"""Layer of a program: a run of primitives between two points at which a program may communicate.

`Run` derives all properties of a layer: its inputs and outputs, its parameters, its kernels, and the tensors that it
keeps for its backward pass. `runs` divides a model's primitives into layers. The functions after it refuse users'
primitives whose descriptions are incomplete or do not fit together.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from shardlab.common.errors import UserError
from shardlab.language.rules.kinds import Kind
from shardlab.language.rules.layer_graph import PORT_ORDER, boundaries, carried_tensors, is_attention
from shardlab.models.layout import Kernel, LayerLayout, Parameter
from shardlab.models.primitives import RECOMPUTED_FROM, Add, Linear, Primitive, Step

INPUT = -1
"""Step of a `Made` that is an input of the layer, because no step of the layer makes it."""


class Made(NamedTuple):
    """Tensor of a layer, given by its name and by the number of the step that makes it."""

    name: str
    step: int


@dataclass(frozen=True)
class Run:
    """One layer of a program.

    Attributes:
        steps: the layer's primitives, in order.
        inputs, outputs: names of the tensors that the layer reads from other layers, and that it outputs to them. The
            activation comes first.
        pieces: number of pieces of each index along which the parameters are cut, the outermost index first.
        attend: the attention between this layer and the next, if attention is a separate op.
        name: kind of layer, for messages.
    """

    steps: tuple[Step, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    pieces: Mapping[str, int] = field(default_factory=dict[str, int], hash=False)
    attend: Step | None = None
    name: str = "whole"

    @cached_property
    def carried_inputs(self) -> dict[Kind, tuple[str, ...]]:
        """Input tensors beside the activation, by the kind of value that carries them."""
        return carried_tensors(self.inputs)

    @cached_property
    def carried_outputs(self) -> dict[Kind, tuple[str, ...]]:
        """Output tensors beside the activation, by the kind of value that carries them."""
        return {} if self.attend else carried_tensors(self.outputs)

    @property
    def all_steps(self) -> tuple[Step, ...]:
        """Primitives of the layer, then the attention after it, if there is one."""
        return self.steps if self.attend is None else (*self.steps, self.attend)

    @cached_property
    def slices(self) -> int:
        """Number of slices of the layer's parameters."""
        return math.prod(self.pieces.values())

    @cached_property
    def cut(self) -> tuple[str, ...]:
        """Indices along which the parameters are cut, outermost first."""
        return tuple(self.pieces)

    @cached_property
    def affine(self) -> bool:
        """Whether the backward pass adds a gradient that does not depend on the outputs' gradients."""
        return any(primitive.affine for primitive in self.primitives)

    @cached_property
    def primitives(self) -> tuple[Primitive, ...]:
        """Primitives of the layer, without their positions in the model."""
        return tuple(step.primitive for step in self.steps)

    def parameters(self) -> list[tuple[int, Parameter]]:
        """Whole parameters, each with the number of the block that holds it in the whole model."""
        return [(step.block, parameter) for step in self.steps for parameter in step.primitive.parameters()]

    @cached_property
    def layout(self) -> LayerLayout:
        """Layout of the parameters in the layer's flat buffer."""
        return LayerLayout((parameter.sliced(self.pieces) for _, parameter in self.parameters()), self.slices)

    @cached_property
    def borrows(self) -> tuple[str, ...]:
        """Names of parameters of the first layer that this layer uses as well."""
        own_names = {parameter.name for _, parameter in self.parameters()}
        return tuple(name for primitive in self.primitives for name in primitive.borrows if name not in own_names)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the layer's parameters in the layout's order, then of those that it borrows (`borrows`)."""
        return (*(parameter.name for parameter in self.layout.parameters), *self.borrows)

    def shape(self, output: str, rows: int) -> tuple[int, ...]:
        """Return the shape of an output for `rows` sequences. Its features are padded to a multiple of their pieces."""
        *dims, features = self._maker(output).shape(output, rows)
        index = self.indices(output)[-1:]
        count = self.pieces.get(index[0], 1) if index else 1
        return (*dims, -(-features // count) * count)

    def indices(self, output: str) -> list[str]:
        """Return the indices of an output."""
        return self._maker(output).makes[output].split()

    def flops(self) -> int:
        """FLOPs of the forward pass on one sequence."""
        return sum(primitive.flops() for primitive in self.primitives)

    def kernels(
        self, sequences: int, tokens: int, slices: int = 1, among: Container[int] | None = None
    ) -> tuple[Kernel, ...]:
        """Return the kernels of the forward pass, for one of `slices` equal slices of the layer.

        Args:
            sequences, tokens, slices: as in `Model.kernels`.
            among: numbers of the primitives that are computed (None: all).
        """
        pieces = self.pieces if slices > 1 else dict[str, int]()
        computed = (candidate for number, candidate in enumerate(self.primitives) if among is None or number in among)
        return tuple(kernel for primitive in computed for kernel in primitive.kernels(sequences, tokens, pieces))

    def numbers(self, slice: int) -> dict[str, int]:
        """Return, for each cut index, the number of the piece that a slice of the parameters has.

        From one slice to the next, the last index changes fastest.
        """
        numbers: dict[str, int] = {}
        for index in reversed(self.cut):
            slice, numbers[index] = divmod(slice, self.pieces[index])
        return numbers

    def saved(self, rows: int, made_again: bool = True) -> int:
        """Return how many elements are kept between the forward and the backward pass, beside inputs and parameters.

        The number equals the measured one on a CPU. Elements have the compute dtype, except the log-sum-exp of an
        attention without dropout, which is float32 in half precision. A GPU keeps more: other statistics, and T x T
        matrices if there is no fused attention (float64).

        Args:
            rows: number of sequences.
            made_again: whether inputs of products are recomputed if that is cheap, as by Shardlab's executor. Autograd
                keeps them.
        """
        kept_tensors = self.saved_tensors
        if made_again:
            inputs = {self.read(name, step) for _, step in self.made_again for name in self.primitives[step].reads}
            kept_tensors = kept_tensors - self.made_again | inputs
        return sum(primitive.keeps_beside(rows) for primitive in self.primitives) + self.elements(kept_tensors, rows)

    @cached_property
    def saved_tensors(self) -> frozenset[Made]:
        """Tensors that the backward passes of the layer's primitives read."""
        return frozenset(tensor for number in range(len(self.steps)) for tensor in needed(self.primitives, number))

    @cached_property
    def made_again(self) -> frozenset[Made]:
        """Tensors that are recomputed instead of kept: in the backward pass, only large products read them."""
        tensors = {Made(name, n) for n, maker in enumerate(self.primitives) if maker.made_again for name in maker.makes}
        for number, primitive in enumerate(self.primitives):
            if not (primitive.product and self._large(primitive)):
                tensors -= {*needed(self.primitives, number)}
        return frozenset(tensors - {self._last(name) for name in self.outputs})

    @property
    def keeps_input(self) -> bool:
        """Whether the layer keeps its input activation for the backward pass: not if it only adds it to another
        tensor.
        """
        return self.keeps_inputs[0]

    @cached_property
    def keeps_inputs(self) -> tuple[bool, ...]:
        """Whether each input is kept: the activation, then any other inputs, such as a router's outputs."""
        values = (self.inputs[:1], *self.carried_inputs.values())
        return tuple(any(Made(name, INPUT) in self.saved_tensors for name in names) for names in values)

    @property
    def saves_residual(self) -> bool:
        """Whether the layer keeps the residual stream that it passes on beside its activation."""
        residual = self._last("s")
        return Kind.RESIDUAL in self.carried_outputs and residual.step != INPUT and residual in self.saved_tensors

    def saved_for_weight(self, rows: int) -> int:
        """Return the number of elements kept between the halves of a split backward pass, for `rows` sequences.

        These are the elements of `saved` that the second half reads, and the gradients that the first half leaves for
        the second. Gradients of the layer's outputs do not count, because its caller keeps them, and neither do those
        of vector parameters, because the first half computes them.
        """
        kept_tensors: set[Made] = set()
        gradients: set[Made] = set()
        other_elements = 0
        for number, primitive in enumerate(self.primitives):
            kept_tensors |= {self.read(name, number) for name in primitive.keeps_for_weight()}
            gradients |= {self._gradient(name, number) for name in primitive.gradients_for_weight()}
            other_elements += primitive.keeps_beside_for_weight(rows)
        output_tensors = {self._last(name) for name in self.outputs}
        own_gradients = {tensor for tensor in gradients if tensor not in output_tensors or self._readers(tensor)}
        return other_elements + self.elements(kept_tensors, rows) + self.elements(own_gradients, rows)

    def read(self, name: str, number: int) -> Made:
        """Return the tensor that step `number` reads under a name."""
        return source(self.primitives, name, number)

    def elements(self, tensors: Iterable[Made], rows: int) -> int:
        """Return the elements of tensors that the layer makes. Its inputs do not count."""
        made_here = [tensor for tensor in tensors if tensor.step != INPUT]
        return sum(math.prod(self.primitives[tensor.step].shape(tensor.name, rows)) for tensor in made_here)

    def _maker(self, output: str) -> Primitive:
        """Return the primitive that makes the last tensor of this name."""
        return self.primitives[self._last(output).step]

    def _large(self, product: Primitive) -> bool:
        """Return whether a product, in one slice, is so large that recomputing its input pays off."""
        return any(parameter.sliced(self.pieces).numel >= RECOMPUTED_FROM for parameter in product.parameters())

    def _last(self, name: str) -> Made:
        return self.read(name, len(self.steps))

    def _readers(self, tensor: Made) -> list[int]:
        """Return the steps that read a tensor."""
        return [
            k
            for k, primitive in enumerate(self.primitives)
            if tensor.name in primitive.reads and self.read(tensor.name, k) == tensor
        ]

    def _gradient(self, name: str, number: int) -> Made:
        """Return a tensor with the same gradient as tensor `name` of step `number`: the last sum that includes it."""
        tensor = Made(name, number) if name in self.primitives[number].makes else self.read(name, number)
        for reader in self._readers(tensor):
            if total := self.primitives[reader].adds_to:
                return self._summed(Made(total, reader))
        if tensor.step == INPUT:  # dropout precedes this sum, so this step computes the addend's gradient
            return Made(next(iter(self.primitives[number].makes)), number)
        return tensor

    def _summed(self, tensor: Made) -> Made:
        """Return the last of a chain of sums that starts at a tensor. All of them have the same gradient."""
        readers = self._readers(tensor)
        total = self.primitives[readers[0]].adds_to if len(readers) == 1 else ""
        return self._summed(Made(total, readers[0])) if total else tensor


def source(primitives: Sequence[Primitive], name: str, number: int) -> Made:
    """Return the tensor that a primitive reads under a name: the last one made before it, or else an input."""
    makers = (k for k in range(number - 1, INPUT, -1) if name in primitives[k].makes)
    return Made(name, next(makers, INPUT))


def needed(primitives: Sequence[Primitive], number: int) -> Iterator[Made]:
    """Yield the tensors that the backward pass of a primitive reads."""
    for name in primitives[number].keeps():
        yield source(primitives, name, number) if name in primitives[number].reads else Made(name, number)


def runs(steps: Sequence[Step], breaks: Sequence[int]) -> list[Run]:
    """Return the layers between `breaks`, the steps that begin a layer. A lone attention is an op, not a layer."""
    parts = [tuple(steps[start:stop]) for start, stop in pairwise([0, *breaks, len(steps)])]
    layers: list[Run] = []
    crossing_names = boundaries([[(step.primitive.reads, step.primitive.makes) for step in part] for part in parts])
    for part, (inputs, outputs) in zip(parts, crossing_names, strict=True):
        if is_attention([step.primitive.reads for step in part]):
            layers[-1] = replace(layers[-1], attend=part[0])
        else:
            layers.append(Run(_fused(part), inputs, outputs))
    return layers


def want_sound(steps: Sequence[Step]) -> None:
    """Refuse primitives that do not fit together.

    Args:
        steps: the steps of a whole model, in order.

    Raises:
        UserError: if a primitive reads a tensor that none before it makes, or that has other indices; if a primitive is
            incomplete; if two parameters of a block have one name.
    """
    makers = {"x": ("the text", "")}
    owned: set[tuple[int, str]] = set()
    for step in steps:
        primitive, name = step.primitive, type(step.primitive).__name__
        location = f"{step.place}: {name}"
        try:
            reads, makes = primitive.reads, primitive.makes
        except (KeyError, ValueError, IndexError) as error:
            raise UserError(
                f"{location} has the einsum {primitive.einsum!r}, which cannot be read: {error!r}"
            ) from None
        for tensor, indices in reads.items():
            if tensor not in makers:
                raise UserError(
                    f"{location} reads {tensor}, which nothing before it makes; there are {', '.join(sorted(makers))}"
                )
            maker, made_indices = makers[tensor]
            if indices and indices != made_indices:
                raise UserError(
                    f"{location} reads {tensor}({indices}), but {maker} made {tensor}({made_indices}); they "
                    "must be the same"
                )
        makers |= {tensor: (name, indices) for tensor, indices in makes.items()}
        _want_said(location, primitive)
        for parameter in primitive.parameters():
            if (step.block, parameter.name) in owned:
                raise UserError(
                    f"{location} has a parameter {parameter.name}, and block {step.block} has one of that name; give "
                    "it another name"
                )
            owned.add((step.block, parameter.name))


def want_carried(layers: Sequence[Run]) -> None:
    """Refuse a tensor that one layer makes and another reads, unless it is in `PORT_ORDER`.

    Raises:
        UserError: for the first such tensor.
    """
    for run in layers:
        for tensor in run.inputs:
            if tensor not in PORT_ORDER:
                raise UserError(
                    f"{run.steps[0].place} reads {tensor}, which is made in an earlier layer, where the model is cut "
                    f"so; only {', '.join(PORT_ORDER)} go from layer to layer: read {tensor} where it is made"
                )


def want_cuttable(steps: Sequence[Step], pieces: Mapping[str, int]) -> None:
    """Refuse parameters of which every slice of a layer would have a copy: their gradients would be terms of a sum.

    Args:
        steps: the steps of a model that is cut.
        pieces: number of pieces of each index.

    Raises:
        UserError: for the first such parameter.
    """
    for step in steps:
        for index in cut_indices(step.primitive, {index for index, count in pieces.items() if count > 1}):
            for parameter in step.primitive.parameters():
                if index not in parameter.indices:
                    raise UserError(
                        f"{step.place}: {parameter.name} has no index {index}, along which "
                        f"{type(step.primitive).__name__} is cut into {pieces[index]} slices, each with a copy of it; "
                        "give it to a primitive of its own after these, or do not cut this model"
                    )


def cut_indices(primitive: Primitive, among: set[str]) -> set[str]:
    """Return the indices of `among` along which a primitive may be cut."""
    node = primitive.node
    tensors = [*node.reads.values(), *node.makes.values(), *node.weights.values()]
    return {index for indices in tensors for index in indices.split()} & among - node.whole - node.deals


def opens(primitive: Primitive, among: set[str]) -> bool:
    """Return whether all slices of a primitive read the same tensor, whose gradient is then a sum over the slices."""
    cut = cut_indices(primitive, among)
    return any(indices and not cut <= {*indices.split()} for indices in primitive.reads.values())


def closes(primitive: Primitive, among: set[str]) -> bool:
    """Return whether the results of a primitive's slices are terms that must be summed."""
    cut = cut_indices(primitive, among)
    return any(not cut <= {*indices.split()} for indices in primitive.makes.values())


def _fused(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """Return the steps, with each bias moved from the residual sum to its linear map if both are in these steps."""
    fused: list[Step] = []
    for step in steps:
        previous, primitive = fused[-1] if fused else None, step.primitive
        if previous and isinstance(primitive, Add) and primitive.bias and isinstance(previous.primitive, Linear):
            fused[-1] = previous._replace(primitive=replace(previous.primitive, bias=True))
            step = step._replace(primitive=replace(primitive, bias=""))
        fused.append(step)
    return tuple(fused)


def _want_said(location: str, primitive: Primitive) -> None:
    """Refuse a primitive whose fields and methods do not fit its einsum, or do not fit together."""
    tensors = [*primitive.reads, *primitive.makes]
    for tensor in (*primitive.keeps(), *primitive.keeps_for_weight(), *primitive.gradients_for_weight()):
        if tensor not in tensors:
            raise UserError(f"{location} keeps {tensor}, which it neither reads nor makes; it has {', '.join(tensors)}")
    if primitive.made_again and (primitive.parameters() or len(primitive.makes) > 1):
        raise UserError(f"{location} says made_again, but has parameters or makes several tensors; leave it out")
    for tensor in primitive.makes:
        try:
            primitive.shape(tensor, 1)
        except AssertionError:
            raise UserError(
                f"{location} makes {tensor}, but does not say how many features it has; define features(tensor)"
            ) from None
    for parameter in primitive.parameters():
        if len(parameter.indices) != len(parameter.shape):
            raise UserError(
                f"{location}: {parameter.name} has the shape {parameter.shape} and the indices {parameter.indices}; "
                "give an index for each dim"
            )
