"""A layer: a run of primitives between two places where a program may communicate."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
"""In place of the step that made a tensor: the layer was given it."""


class Made(NamedTuple):
    """A tensor of a layer: the last one made under its name before some step, by the step of this number."""

    name: str
    step: int


@dataclass(frozen=True)
class Run:
    """One layer of a program.

    Attributes:
        steps: its primitives, in order.
        inputs, outputs: names of the tensors that it is given and makes for others; the activation comes first.
        cut: the indices along which its parameters are cut, outermost first.
        pieces: into how many.
        attend: the attention that lies between it and the next layer, as an op of its own.
        name: what sort of layer it is, for messages.
    """

    steps: tuple[Step, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    cut: tuple[str, ...] = ()
    pieces: Mapping[str, int] = field(default_factory=dict[str, int], hash=False)
    attend: Step | None = None
    name: str = "whole"

    @cached_property
    def carried_inputs(self) -> dict[Kind, tuple[str, ...]]:
        """The tensors that it is given beside the activation, by the kind of value in which they come."""
        return carried_tensors(self.inputs)

    @cached_property
    def carried_outputs(self) -> dict[Kind, tuple[str, ...]]:
        """The tensors that it makes for others beside the activation, by the kind of value in which they go."""
        return {} if self.attend else carried_tensors(self.outputs)

    @cached_property
    def slices(self) -> int:
        """How many slices its parameters have."""
        return math.prod(self.pieces.get(index, 1) for index in self.cut)

    @cached_property
    def own_pieces(self) -> dict[str, int]:
        """The pieces of the indices that its parameters are cut along."""
        return {index: self.pieces.get(index, 1) for index in self.cut}

    @cached_property
    def affine(self) -> bool:
        """Whether its backward pass adds a gradient of its own to what follows from the gradients that it is given."""
        return any(step.primitive.affine for step in self.steps)

    def parameters(self) -> list[tuple[int, Parameter]]:
        """Its parameters, whole, each with the block that holds it in the whole model."""
        return [(step.block, parameter) for step in self.steps for parameter in step.primitive.parameters()]

    @cached_property
    def layout(self) -> LayerLayout:
        """Where its parameters lie in its flat buffer."""
        return LayerLayout((each.sliced(self.own_pieces) for _, each in self.parameters()), self.slices)

    @cached_property
    def borrows(self) -> tuple[str, ...]:
        """Names of parameters of the first layer that it computes with as well, and does not hold itself."""
        own = {parameter.name for _, parameter in self.parameters()}
        return tuple(name for step in self.steps for name in step.primitive.borrows if name not in own)

    def shape(self, output: str, rows: int) -> tuple[int, ...]:
        """Shape of a tensor that it makes of `rows` sequences, all slices together; the last piece is filled up."""
        *dims, features = self._maker(output).shape(output, rows)
        index = self.indices(output)[-1:]
        count = self.own_pieces.get(index[0], 1) if index else 1
        return (*dims, -(-features // count) * count)

    def indices(self, output: str) -> list[str]:
        """The indices of a tensor that it makes."""
        return self._maker(output).makes[output].split()

    def flops(self) -> int:
        """FLOPs of the forward pass on one sequence."""
        return sum(step.primitive.flops() for step in self.steps)

    def kernels(self, sequences: int, tokens: int, slices: int = 1) -> tuple[Kernel, ...]:
        """What the forward pass asks of a device: one of `slices` slices."""
        pieces = self.own_pieces if slices > 1 else {}
        return tuple(kernel for step in self.steps for kernel in step.primitive.kernels(sequences, tokens, pieces))

    def numbers(self, slice: int) -> dict[str, int]:
        """The piece of each index that a slice of the parameters is; the last index counts fastest."""
        numbers: dict[str, int] = {}
        for index in reversed(self.cut):
            slice, numbers[index] = divmod(slice, self.pieces[index])
        return numbers

    def saved(self, rows: int, made_again: bool = True) -> int:
        """Elements that are kept beyond the layer's inputs and parameters, for `rows` sequences.

        Args:
            rows: sequences.
            made_again: what products can be given again is not kept for them; autograd keeps it.
        """
        kept = {self._read_or_made(name, n) for n, primitive in self._primitives() for name in primitive.keeps()}
        if made_again:
            kept -= self.made_again
            kept |= {self._read(name, each.step) for each in self.made_again for name in self._at(each.step).reads}
        return sum(each.keeps_beside(rows) for _, each in self._primitives()) + self._elements(kept, rows)

    @cached_property
    def made_again(self) -> frozenset[Made]:
        """The tensors that are kept for large products alone, and made again for these instead."""
        found = {Made(name, n) for n, each in self._primitives() if each.made_again for name in each.makes}
        for number, primitive in self._primitives():
            if not (primitive.product and self._large(primitive)):
                found -= {self._read_or_made(name, number) for name in primitive.keeps()}
        return frozenset(found - {self._last(name) for name in self.outputs})

    @property
    def keeps_input(self) -> bool:
        """Whether the activation that enters it is kept: not where that is only added to something."""
        return self.keeps_inputs[0]

    @cached_property
    def keeps_inputs(self) -> tuple[bool, ...]:
        """Whether the activation is kept, and each value that is carried beside it, as they enter."""
        kept = {self._read_or_made(name, n) for n, primitive in self._primitives() for name in primitive.keeps()}
        values = (self.inputs[:1], *self.carried_inputs.values())
        return tuple(any(Made(name, INPUT) in kept for name in names) for names in values)

    @property
    def saves_residual(self) -> bool:
        """Whether the layer keeps the residual stream that it hands on beside its activation."""
        made = self._last("s")
        kept = {self._read_or_made(name, n) for n, primitive in self._primitives() for name in primitive.keeps()}
        return Kind.RESIDUAL in self.carried_outputs and made.step != INPUT and made in kept

    def saved_for_weight(self, rows: int) -> int:
        """Elements left of that between the halves of a split backward pass, with the gradients that the first half
        leaves for the second, beyond those of the layer's outputs and of its vectors.
        """
        kept: set[Made] = set()
        gradients: set[Made] = set()
        beside = 0
        for number, primitive in self._primitives():
            kept |= {self._read(name, number) for name in primitive.keeps_for_weight()}
            gradients |= {self._gradient(name, number) for name in primitive.gradients_for_weight()}
            beside += primitive.keeps_beside_for_weight(rows)
        given = {self._last(name) for name in self.outputs}
        mine = {each for each in gradients if each not in given or self._readers(each)}
        return beside + self._elements(kept, rows) + self._elements(mine, rows)

    def _maker(self, output: str) -> Primitive:
        """The primitive that makes a tensor, the last one under this name."""
        return self.steps[self._last(output).step].primitive

    def _large(self, product: Primitive) -> bool:
        """Whether a slice's product takes so long that its operand may be computed again beside it."""
        return any(each.sliced(self.own_pieces).numel >= RECOMPUTED_FROM for each in product.parameters())

    def _at(self, number: int) -> Primitive:
        return self.steps[number].primitive

    def _primitives(self) -> Iterator[tuple[int, Primitive]]:
        return ((number, step.primitive) for number, step in enumerate(self.steps))

    def _read(self, name: str, number: int) -> Made:
        """The tensor that step `number` reads under a name."""
        earlier = (k for k in range(number - 1, INPUT, -1) if name in self.steps[k].primitive.makes)
        return Made(name, next(earlier, INPUT))

    def _read_or_made(self, name: str, number: int) -> Made:
        return self._read(name, number) if name in self.steps[number].primitive.reads else Made(name, number)

    def _last(self, name: str) -> Made:
        return self._read(name, len(self.steps))

    def _readers(self, made: Made) -> list[int]:
        """The steps that read a tensor."""
        return [
            k
            for k, primitive in self._primitives()
            if made.name in primitive.reads and self._read(made.name, k) == made
        ]

    def _gradient(self, name: str, number: int) -> Made:
        """The tensor whose gradient is that of what step `number` makes under a name, or reads: a sum passes it on."""
        made = Made(name, number) if name in self.steps[number].primitive.makes else self._read(name, number)
        for reader in self._readers(made):
            if total := self.steps[reader].primitive.adds_to:
                return self._summed(Made(total, reader))
        if made.step == INPUT:  # what is added here is dropped first, so that its gradient is made here
            return Made(next(iter(self.steps[number].primitive.makes)), number)
        return made

    def _summed(self, made: Made) -> Made:
        """The last of sums that one after the other add to a tensor, and read no earlier one: all have one gradient."""
        readers = self._readers(made)
        total = self.steps[readers[0]].primitive.adds_to if len(readers) == 1 else ""
        return self._summed(Made(total, readers[0])) if total else made

    def _elements(self, tensors: Iterable[Made], rows: int) -> int:
        """Elements of tensors that the layer makes; those of its inputs are not its own."""
        own = [each for each in tensors if each.step != INPUT]
        return sum(math.prod(self.steps[each.step].primitive.shape(each.name, rows)) for each in own)


def runs(steps: Sequence[Step], breaks: Sequence[int]) -> list[Run]:
    """The layers between `breaks`, numbers of steps that begin a layer; an attention alone between two is no layer."""
    parts = [tuple(steps[start:stop]) for start, stop in pairwise([0, *breaks, len(steps)])]
    found: list[Run] = []
    crossed = boundaries([[(step.primitive.reads, step.primitive.makes) for step in part] for part in parts])
    for part, (taken, given) in zip(parts, crossed, strict=True):
        if is_attention([step.primitive.reads for step in part]):
            found[-1] = replace(found[-1], attend=part[0])
        else:
            found.append(Run(_fused(part), taken, given))
    return found


def _fused(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """A linear map adds its own bias, if the sum with the residual that would add it comes in the same layer."""
    fused: list[Step] = []
    for step in steps:
        before, primitive = fused[-1] if fused else None, step.primitive
        if before and isinstance(primitive, Add) and primitive.bias and isinstance(before.primitive, Linear):
            fused[-1] = before._replace(primitive=replace(before.primitive, bias=True))
            step = step._replace(primitive=replace(primitive, bias=""))
        fused.append(step)
    return tuple(fused)


# What the primitives of a model must say so that its rules follow: refusals for models that users write.


def want_sound(steps: Sequence[Step]) -> None:
    """Refuse primitives that do not fit together.

    Args:
        steps: of a whole model, in order.

    Raises:
        UserError: for a tensor that nobody made or that has other indices, and for what a primitive leaves out.
    """
    made = {"x": ("the text", "")}
    owned: set[tuple[int, str]] = set()
    for step in steps:
        primitive, name = step.primitive, type(step.primitive).__name__
        where = f"{step.place}: {name}"
        try:
            reads, makes = primitive.reads, primitive.makes
        except (KeyError, ValueError, IndexError) as error:
            raise UserError(f"{where} has the einsum {primitive.einsum!r}, which cannot be read: {error!r}") from None
        for tensor, indices in reads.items():
            if tensor not in made:
                raise UserError(
                    f"{where} reads {tensor}, which nothing before it makes; there are {', '.join(sorted(made))}"
                )
            maker, theirs = made[tensor]
            if indices and indices != theirs:
                raise UserError(
                    f"{where} reads {tensor}({indices}), but {maker} made {tensor}({theirs}); they must be the same"
                )
        made |= {tensor: (name, indices) for tensor, indices in makes.items()}
        _want_said(where, primitive)
        for parameter in primitive.parameters():
            if (step.block, parameter.name) in owned:
                raise UserError(
                    f"{where} has a parameter {parameter.name}, and block {step.block} has one of that name; give it "
                    "another name"
                )
            owned.add((step.block, parameter.name))


def _want_said(where: str, primitive: Primitive) -> None:
    """Refuse what does not fit a primitive's own einsum."""
    tensors = [*primitive.reads, *primitive.makes]
    for tensor in (*primitive.keeps(), *primitive.keeps_for_weight(), *primitive.gradients_for_weight()):
        if tensor not in tensors:
            raise UserError(f"{where} keeps {tensor}, which it neither reads nor makes; it has {', '.join(tensors)}")
    if primitive.made_again and (primitive.parameters() or len(primitive.makes) > 1):
        raise UserError(f"{where} says made_again, but has parameters or makes several tensors; leave it out")
    for tensor in primitive.makes:
        try:
            primitive.shape(tensor, 1)
        except AssertionError:
            raise UserError(
                f"{where} makes {tensor}, but does not say how many features it has; define features(tensor)"
            ) from None
    for parameter in primitive.parameters():
        if len(parameter.indices) != len(parameter.shape):
            raise UserError(
                f"{where}: {parameter.name} has the shape {parameter.shape} and the indices {parameter.indices}; give "
                "an index for each dim"
            )


def want_carried(layers: Sequence[Run]) -> None:
    """Refuse a tensor that one layer makes and another reads, where its name is none of those that are carried.

    Raises:
        UserError: for the first of them.
    """
    for run in layers:
        for tensor in run.inputs:
            if tensor not in PORT_ORDER:
                raise UserError(
                    f"{run.steps[0].place} reads {tensor}, which is made in an earlier layer, where the model is cut "
                    f"so; only {', '.join(PORT_ORDER)} go from layer to layer: read {tensor} where it is made"
                )


def want_cuttable(steps: Sequence[Step], pieces: Mapping[str, int]) -> None:
    """Refuse parameters that every slice of a layer would have whole: their gradients would be parts of a sum.

    Args:
        steps: of a model that is cut.
        pieces: into how many pieces each index is cut.

    Raises:
        UserError: for the first of them.
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
    """The indices of a primitive along which it may be cut."""
    node = primitive.node
    tensors = [*node.reads.values(), *node.makes.values(), *node.weights.values()]
    return {index for indices in tensors for index in indices.split()} & among - node.whole - node.deals


def opens(primitive: Primitive, among: set[str]) -> bool:
    """Whether slices of a primitive read one tensor together: its gradient is a sum over them."""
    cut = cut_indices(primitive, among)
    return any(indices and not cut <= {*indices.split()} for indices in primitive.reads.values())


def closes(primitive: Primitive, among: set[str]) -> bool:
    """Whether what slices of a primitive make must be summed."""
    cut = cut_indices(primitive, among)
    return any(not cut <= {*indices.split()} for indices in primitive.makes.values())
