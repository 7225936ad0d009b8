"""Slicing and concatenation of tensors, as ops of a tape and for collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import torch
from torch import Tensor

from shardlab.execute.state import State
from shardlab.execute.tape_analysis import Shapes
from shardlab.language import Kind, Op, Spec
from shardlab.language.rules.kinds import ROW_KINDS, bits
from shardlab.models.tensors.attention import index_tensor, select_rows

Cut = Callable[[Tensor], Tensor]
Join = Callable[[Sequence[Tensor]], Tensor]


def slice_(state: State, index: int, op: Op) -> Callable[[], None]:
    """Prepare a SLICE. It gives a part of the value's tensor; for an optimizer state, the optimizer of the slice."""
    (operand,), (output,), values = op.inputs, op.outputs, state.values
    whole, part = state.specs[operand], state.specs[output]
    if part.kind is Kind.OPT_STATE:
        optimizer = state.optimizer(part.layer, part.holds)
        return lambda: values.__setitem__(output, optimizer)
    cut = cut_of(state.shapes, whole, part)
    return lambda: values.__setitem__(output, cut(values[operand]))


def concatenate(state: State, index: int, op: Op) -> Callable[[], None]:
    """Prepare a CONCATENATE, into new memory or into the buffer of a weight."""
    operands, (output,), values = op.inputs, op.outputs, state.values
    whole = state.specs[output]
    if whole.kind is Kind.OPT_STATE:
        optimizer = state.optimizer(whole.layer, whole.holds)
        return lambda: values.__setitem__(output, optimizer)
    join, slot = join_of(state.shapes, [state.specs[number] for number in operands]), state.analysis.slot.get(output)

    def run() -> None:
        result = join([values[number] for number in operands])
        values[output] = result if slot is None else state.fill_buffer(slot, len(result)).copy_(result)

    return run


def cut_of(shapes: Shapes, whole: Spec, part: Spec) -> Cut:
    """Return a function that cuts a part out of a value's tensor, as a view if the part is contiguous."""
    if whole.kind not in ROW_KINDS:
        places = shapes.places(whole.layer, whole.holds, part.holds)
        start, stop = places[0][0], places[-1][1]
        return lambda tensor: tensor[start:stop]
    microbatches = list(bits(whole.microbatches))
    part_rows = [microbatches.index(microbatch) for microbatch in bits(part.microbatches)]
    count, tokens = len(shapes.tokens(whole)), shapes.positions(whole, part)

    def cut(tensor: Tensor) -> Tensor:
        rows = tensor
        if len(part_rows) < len(microbatches):
            rows = select_rows(tensor.reshape(len(microbatches), -1, *tensor.shape[1:]), part_rows).flatten(0, 1)
        return rows if len(tokens) == count else select_rows(rows.transpose(0, 1), tokens).transpose(0, 1)

    return cut


def join_of(shapes: Shapes, members: Sequence[Spec]) -> Join:
    """Return a function that joins the members' tensors: pieces of parameters, features, sequences or microbatches."""
    first = members[0]
    if first.kind not in ROW_KINDS:
        return _of_parameters(shapes, members)
    if (index := index_apart(members)) is not None:
        return _of_pieces([list(bits(member.pieces(index))) for member in members], -1)
    if along_sequence(members):
        return _of_tokens([shapes.tokens(member) for member in members])
    return _of_pieces([list(bits(member.microbatches)) for member in members], 0)


def index_apart(members: Sequence[Spec]) -> str | None:
    """Return the name of an index by whose pieces the members differ (None: they differ only in rows or tokens)."""
    indices = {index for member in members for index, _ in member.form.slices}
    return next((index for index in indices if len({member.pieces(index) for member in members}) > 1), None)


def along_sequence(members: Sequence[Spec]) -> bool:
    """Return whether the members are different slices of the same sequences."""
    first = members[0]
    if first.kind not in ROW_KINDS or first.whole_sequences:
        return False
    return all(member.microbatches == first.microbatches for member in members)


def _of_pieces(numbers: Sequence[Sequence[int]], dim: int) -> Join:
    """Return a function that joins pieces of equal size along a dim, in ascending order of their numbers.

    Args:
        numbers: numbers of the pieces in each tensor.
    """
    order = _ascending(list(chain(*numbers)))

    def join(tensors: Sequence[Tensor]) -> Tensor:
        cuts = [piece for tensor, part in zip(tensors, numbers, strict=True) for piece in tensor.chunk(len(part), dim)]
        return torch.cat([cuts[place] for place in order], dim)

    return join


def _of_tokens(tokens: Sequence[Sequence[int]]) -> Join:
    order = tuple(_ascending(list(chain(*tokens))))

    def join(tensors: Sequence[Tensor]) -> Tensor:
        joined = torch.cat(list(tensors), 1)
        return joined if order == tuple(sorted(order)) else joined[:, index_tensor(joined.device, order)]

    return join


def _of_parameters(shapes: Shapes, members: Sequence[Spec]) -> Join:
    """Return a function that joins ranges of a layer's flat buffer, which may differ in length."""
    runs = [(*run, number) for number, spec in enumerate(members) for run in shapes.ranges(spec.layer, spec.holds)]

    def join(tensors: Sequence[Tensor]) -> Tensor:
        offsets = [0] * len(tensors)
        pieces: dict[int, Tensor] = {}
        for start, stop, number in runs:
            pieces[start] = tensors[number][offsets[number] : offsets[number] + stop - start]
            offsets[number] += stop - start
        return torch.cat([pieces[start] for start in sorted(pieces)])

    return join


def _ascending(numbers: Sequence[int]) -> list[int]:
    return sorted(range(len(numbers)), key=numbers.__getitem__)
