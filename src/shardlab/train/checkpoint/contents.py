"""What a rank keeps from step to step, as ranges of its layers' flat buffers, and which rank writes each of them."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from shardlab.check import Checked
from shardlab.check.in_place import Kept
from shardlab.execute.offload import tensor_at
from shardlab.execute.optimizers.flat_slice import Slice
from shardlab.execute.state import State
from shardlab.execute.tape_analysis import Shapes
from shardlab.language import Holds, OpKind
from shardlab.language.rules.kinds import bits
from shardlab.language.rules.refusals import DISK, HOST
from shardlab.models import Model
from shardlab.models.layout import Cut
from shardlab.models.tensors.weights import DTYPES, cut_positions, cuts_of

Key = tuple[int, Holds]
"""(layer, slices)."""

WEIGHTS, EXACT = "weights", "exact"


class KeptRange(NamedTuple):
    """A range of a layer's flat buffer, in memory that outlives the step.

    Attributes:
        kind: what it is: weights, their exact copies, or a moment by the optimizer's name for it.
        layer: whose.
        start: its first element.
        tensor: (elements,), a view of the memory itself, wherever that is.
        key: the slices that it is a range of.
        place: where it is.
    """

    kind: str
    layer: int
    start: int
    tensor: Tensor
    key: Key
    place: str = ""

    @property
    def stop(self) -> int:
        """The element after its last."""
        return self.start + len(self.tensor)


def held(state: State) -> Iterator[KeptRange]:
    """Everything that a rank keeps; whatever a run is to have again when it is resumed stands here."""
    for key, tensor in state.kept.items():
        yield from _runs(state, WEIGHTS, key, [tensor], state.analysis.kept.places[key])
    homes = {(op.layer, op.holds): op.place for op in state.tape if op.kind is OpKind.LOAD_OPT_STATE}
    for key in stepped(state.checked, state.rank):
        part, place = optimizer_of(state, key), homes.get(key, "")
        if state.analysis.kept.owner(*key) is None:
            yield from _runs(state, WEIGHTS, key, part.weights)
        yield from _runs(state, EXACT, key, [part.lying(exact) for exact in part.exact], place)
        yield from _moments(state, key, part, place)


class Snapshot:
    """A copy of the ranges that a rank writes; every range has one writer among the ranks.

    What lies on the disk is copied there, all else into the host's memory. The copy's room is kept from one checkpoint
    to the next, since taking it would be most of the time.
    """

    def __init__(self, state: State) -> None:
        checked, every = state.checked, range(len(state.checked.program.tapes))
        self._state = state
        self._weights = _mine(state, [weight_keys(checked, rank) for rank in every])
        self._stepped = _mine(state, [stepped(checked, rank) for rank in every])
        self._buffers: dict[str, Tensor] = {}

    def take(self) -> dict[str, Tensor]:
        """Copy the ranges as they are now; each by its name in the rank's file: kind, layer, first element."""
        taken: dict[str, Tensor] = {}
        for each in held(self._state):
            ranges = self._weights if each.kind == WEIGHTS else self._stepped
            for start, stop in ranges.get(each.key, ()):
                first, last = max(start, each.start), min(stop, each.stop)
                if first < last:
                    name, part = (
                        f"{each.kind}.{each.layer}.{first}",
                        each.tensor[first - each.start : last - each.start],
                    )
                    if name not in self._buffers:
                        where = DISK if each.place == DISK else HOST
                        self._buffers[name] = tensor_at(where, part.shape, part.dtype, torch.device("cpu"))
                    taken[name] = self._buffers[name].copy_(part)
        return taken


def weight_keys(checked: Checked, rank: int) -> list[Key]:
    """The slices of weights that a rank keeps: those that it loads, and those that only its optimizer has."""
    tape = checked.program.tapes[rank]
    loaded = [(op.layer, op.holds) for op in tape if op.kind is OpKind.LOAD_WEIGHT and op.holds is not None]
    kept = Kept(tape, checked.specs[rank])
    return [*dict.fromkeys(loaded), *(key for key in stepped(checked, rank) if kept.owner(*key) is None)]


def stepped(checked: Checked, rank: int) -> list[Key]:
    """The slices that a rank's updates step, each by an optimizer of its own."""
    specs = checked.specs[rank]
    updates = (op for op in checked.program.tapes[rank] if op.kind is OpKind.UPDATE)
    return list(dict.fromkeys((op.layer, specs[op.inputs[2]].holds) for op in updates))


def optimizer_of(state: State, key: Key) -> Slice:
    """The optimizer of some slices that this rank steps."""
    if key in state.opt_states:
        return state.opt_states[key]
    specs = state.specs
    updates = (op for op in state.tape if op.kind is OpKind.UPDATE)
    return state.optimizer(next(specs[op.inputs[2]] for op in updates if (op.layer, specs[op.inputs[2]].holds) == key))


def updates_of(state: State) -> int:
    """How many updates the optimizers of this rank have made: a step that is left out is none."""
    counts = [
        int(cast(float, kept["step"]))
        for key in stepped(state.checked, state.rank)
        for optimizer in optimizer_of(state, key).optimizers
        for kept in optimizer.state.values()
        if "step" in kept
    ]
    return max(counts, default=0)


def _runs(state: State, kind: str, key: Key, tensors: Iterable[Tensor], place: str = "") -> Iterator[KeptRange]:
    """The ranges of some slices, whose elements lie in tensors one after the other."""
    ranges = iter(state.shapes.ranges(*key))
    for tensor in tensors:
        while len(tensor):
            start, stop = next(ranges)
            yield KeptRange(kind, key[0], start, tensor[: stop - start], key, place)
            tensor = tensor[stop - start :]


def _moments(state: State, key: Key, part: Slice, place: str) -> Iterator[KeptRange]:
    """What the optimizers of a slice keep of each leaf, as long as the leaf."""
    starts = {leaf: start for start, leaf in part.leaves}
    for optimizer in part.optimizers:
        for leaf, kept in optimizer.state.items():
            for name, moment in kept.items():
                if isinstance(moment, Tensor) and moment.shape == leaf.shape:
                    yield KeptRange(name, key[0], starts[leaf], part.lying(moment).view(-1), key, place)


def _mine(state: State, keys: list[list[Key]]) -> dict[Key, list[tuple[int, int]]]:
    """For the slices of each key of this rank, the ranges that it writes of all that the ranks have.

    Of a piece that several ranks have, one of them writes: in turn, by the numbers of layer and piece.
    """
    mine: dict[Key, list[tuple[int, int]]] = {}
    for layer in range(state.model.layers):
        holders = [(rank, holds) for rank, theirs in enumerate(keys) for of, holds in theirs if of == layer]
        pieces = math.lcm(*(holds.of for _, holds in holders))
        having: list[list[tuple[int, Holds]]] = [[] for _ in range(pieces)]
        for rank, holds in holders:
            for piece in bits(holds.refined(pieces).mask):
                having[piece].append((rank, holds))
        size = state.shapes.flat[layer] // pieces
        for piece, those in enumerate(having):
            if those:
                rank, holds = those[(layer + piece) % len(those)]
                if rank == state.rank:
                    mine.setdefault((layer, holds), []).append((piece * size, (piece + 1) * size))
    return mine


# Where each parameter of a whole model lies in the flat buffers of a plan's layers, written down and read again.
#
# A checkpoint has this of the plan that wrote it, so that no other plan, and no later version, has to make that
# plan's layers again in order to read it.


def written_pieces(model: Model, shapes: Shapes) -> list[dict[str, Any]]:
    """Describe the layers of a model, whole or cut, for a JSON file: how long each is, and the pieces in it."""
    return [
        {"length": shapes.flat[layer], "pieces": list(_pieces(model, layer, shapes.flat[layer]))}
        for layer in range(model.layers)
    ]


def _pieces(model: Model, layer: int, length: int) -> Sequence[dict[str, Any]]:
    layout, run = model.layout(layer), model.run(layer)
    wholes = {whole.name: (block, whole) for block, whole in run.parameters()}
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for slice in range(layout.slices):
        for piece, offset in zip(layout.parameters, layout.offsets, strict=True):
            block, whole = wholes[piece.name]
            cuts = [(*cut, number) for cut, number in cuts_of(run, whole, slice)]
            found.setdefault(  # slices that have the same of a parameter have the same numbers
                (piece.name, *cuts),
                {
                    "block": block,
                    "name": piece.name,
                    "whole": whole.shape,
                    "shape": piece.shape,
                    "start": slice * (length // layout.slices) + offset,
                    "cuts": cuts,
                },
            )
    return list(found.values())


class ParameterPiece(NamedTuple):
    """A part of a parameter in a layer's buffer, row after row.

    Attributes:
        layer, start: the buffer, and the element at which it begins.
        rows, columns: of each matrix here, with those that fill it up.
        numbers: of the whole parameter's matrices, rows and columns that are here, ascending.
    """

    layer: int
    start: int
    rows: int
    columns: int
    numbers: tuple[Tensor, Tensor, Tensor]


def read_pieces(layers: Sequence[Mapping[str, Any]]) -> dict[tuple[int, str], list[ParameterPiece]]:
    """The pieces of each parameter, by block and name."""
    found: dict[tuple[int, str], list[ParameterPiece]] = defaultdict(list)
    for layer, written in enumerate(layers):
        for piece in written["pieces"]:
            numbers = [torch.arange(length) for length in piece["whole"]]
            for dim, pieces, sections, number in piece["cuts"]:
                numbers[dim] = cut_positions(piece["whole"][dim], Cut(dim, pieces, tuple(sections)), number)
            one, vector = torch.arange(1), len(numbers) == 1
            shape = [*piece["shape"], 1] if vector else piece["shape"]
            numbers = [*numbers, one] if vector else numbers
            experts, rows, columns = [one, *numbers] if len(numbers) == 2 else numbers
            at = ParameterPiece(layer, piece["start"], shape[-2], shape[-1], (experts, rows, columns))
            found[piece["block"], piece["name"]].append(at)
    return found


# Tensors as the bytes of a safetensors file, one after the other.
#
# The library's own writer wants them all at once, holds Python's lock while it writes, and tells no checksum. It is
# what reads these files.


ALIGNMENT = 8
"""Bytes; a header is filled up with spaces, so that tensors are aligned when the file is mapped."""

NAMES = {dtype: name for name, dtype in DTYPES.items()}


def chunks_of(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """The chunks of a file with contiguous tensors of the CPU, by name."""
    yield header_of({name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()})
    yield from map(bytes_of, tensors.values())


def header_of(tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> bytes:
    """What stands before the bytes of tensors, which follow in this order: for each name its dtype and shape."""
    header: dict[str, Any] = {}
    at = 0
    for name, (dtype, shape) in tensors.items():
        end = at + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    written = json.dumps(header).encode()
    written += b" " * (-len(written) % ALIGNMENT)
    return len(written).to_bytes(8, "little") + written


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor of the CPU."""
    return memoryview(cast(Any, tensor.flatten().view(torch.uint8).numpy()))
