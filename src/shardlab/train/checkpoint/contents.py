"""Contents of a checkpoint: the state that ranks keep from step to step, as ranges of the layers' flat buffers.

`kept_ranges` lists everything that a rank keeps. `Snapshot` copies the ranges that this rank writes: if several ranks
keep the same range, one of them writes it. `describe_layers` records where each parameter of the whole model lies in
the buffers of the plan's layers; `parse_pieces` reads that record. A reader therefore need not construct the layers of
the plan that wrote the checkpoint. The last functions convert tensors to the bytes of a safetensors file.
"""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from shardlab.check import Checked
from shardlab.check.in_place import KeptWeights
from shardlab.execute.collect import slices_of
from shardlab.execute.offload import tensor_at
from shardlab.execute.optimizers.flat_slice import Slice
from shardlab.execute.state import State
from shardlab.language import Holds, OpKind
from shardlab.language.rules.kinds import bits
from shardlab.language.rules.refusals import DISK, HOST
from shardlab.models import Model
from shardlab.models.layout import Cut
from shardlab.models.tensors.weights import DTYPES, cut_positions, cuts_of

Key = tuple[int, Holds]
"""Key of the flat buffer in which a rank keeps some slices of a layer: (layer, slices)."""

WEIGHTS, EXACT = "weights", "exact"
"""Kinds of tensors: weights in the precision of the computation, and their exact copies (master weights)."""


class KeptRange(NamedTuple):
    """Range of a layer's flat buffer that a rank keeps from step to step.

    Attributes:
        kind: WEIGHTS, EXACT, or the name of one of the optimizer's moments, such as exp_avg.
        layer: number of the layer.
        start: first element of the range.
        tensor: view of the memory, (elements,).
        key: layer and slices of the rank's buffer that has the range.
        place: where the memory is, such as on the host or the disk; empty for the device.
    """

    kind: str
    layer: int
    start: int
    tensor: Tensor
    key: Key
    place: str = ""

    @property
    def stop(self) -> int:
        """Index after the last element of the range."""
        return self.start + len(self.tensor)


def kept_ranges(state: State) -> Iterator[KeptRange]:
    """Yield everything that a rank keeps from step to step. A resumed run restores exactly this."""
    for key, tensor in state.kept.items():
        yield from _split(state, WEIGHTS, key, [tensor], state.analysis.kept_weights.place_of[key])
    offloaded = {(op.layer, op.holds): op.place for op in state.tape if op.kind is OpKind.LOAD_OPT_STATE}
    for key in slices_of(state.checked, state.rank, OpKind.UPDATE):
        part, place = state.optimizer(*key), offloaded.get(key, "")
        if state.analysis.kept_weights.memory_of(*key) is None:
            yield from _split(state, WEIGHTS, key, part.weights)
        yield from _split(state, EXACT, key, [part.current(exact) for exact in part.exact], place)
        yield from _moments(state, key, part, place)


class Snapshot:
    """Copy of the ranges that a rank writes. Every range has one writer among the ranks.

    Ranges on the disk are copied to the disk, all others to the host's memory. The buffers are reused by the next
    checkpoint, since allocating them takes most of the time.
    """

    def __init__(self, state: State) -> None:
        checked, ranks = state.checked, range(len(state.checked.program.tapes))
        self._state = state
        self._weights = _ranges_to_write(state, [weight_keys(checked, rank) for rank in ranks])
        self._updated = _ranges_to_write(state, [slices_of(checked, rank, OpKind.UPDATE) for rank in ranks])
        self._buffers: dict[str, Tensor] = {}

    def take(self) -> dict[str, Tensor]:
        """Copy the ranges as they are now.

        Returns:
            The copies by their names in the rank's file: `kind.layer.first element`.
        """
        copies: dict[str, Tensor] = {}
        for kept_range in kept_ranges(self._state):
            ranges = self._weights if kept_range.kind == WEIGHTS else self._updated
            for start, stop in ranges.get(kept_range.key, ()):
                first, last = max(start, kept_range.start), min(stop, kept_range.stop)
                if first < last:
                    name = f"{kept_range.kind}.{kept_range.layer}.{first}"
                    part = kept_range.tensor[first - kept_range.start : last - kept_range.start]
                    if name not in self._buffers:
                        place = DISK if kept_range.place == DISK else HOST
                        self._buffers[name] = tensor_at(place, part.shape, part.dtype, torch.device("cpu"))
                    copies[name] = self._buffers[name].copy_(part)
        return copies


def weight_keys(checked: Checked, rank: int) -> list[Key]:
    """Return the slices of weights that a rank keeps: those that it loads, and those that its optimizer alone keeps."""
    weights = KeptWeights(checked.program.tapes[rank], checked.specs[rank])
    updated = slices_of(checked, rank, OpKind.UPDATE)
    return [*dict.fromkeys(weights.loads.values()), *(key for key in updated if weights.memory_of(*key) is None)]


def make_moments(state: State, updates: int) -> None:
    """Allocate the moments that this rank's optimizers have after `updates` updates. Values are filled in later."""
    for key in slices_of(state.checked, state.rank, OpKind.UPDATE):
        state.optimizer(*key)
        state.make_moments(key, updates)


def updates_of(state: State) -> int:
    """Return the number of updates that the optimizers of this rank have made. Skipped steps do not count."""
    counts = [
        int(cast(float, moments["step"]))
        for key in slices_of(state.checked, state.rank, OpKind.UPDATE)
        for optimizer in state.optimizer(*key).optimizers
        for moments in optimizer.state.values()
        if "step" in moments
    ]
    return max(counts, default=0)


def describe_layers(model: Model, lengths: Sequence[int]) -> list[dict[str, Any]]:
    """Return for each layer of a model the length of its flat buffer and the pieces in it, for a JSON file."""
    return [{"length": length, "pieces": list(_pieces(model, layer, length))} for layer, length in enumerate(lengths)]


class ParameterPiece(NamedTuple):
    """Part of a parameter in a layer's flat buffer, stored row by row.

    Attributes:
        layer, start: number of the layer, and the element of its buffer at which the part begins.
        rows, columns: rows and columns of each matrix in this part, including padding.
        numbers: indices of the matrices, rows and columns of the whole parameter that this part has, ascending.
    """

    layer: int
    start: int
    rows: int
    columns: int
    numbers: tuple[Tensor, Tensor, Tensor]


def parse_pieces(layers: Sequence[Mapping[str, Any]]) -> dict[tuple[int, str], list[ParameterPiece]]:
    """Return the pieces of each parameter, by block and name, from the result of `describe_layers`."""
    parameters: dict[tuple[int, str], list[ParameterPiece]] = defaultdict(list)
    for layer, description in enumerate(layers):
        for piece in description["pieces"]:
            numbers = [torch.arange(length) for length in piece["whole"]]
            for dim, pieces, sections, number in piece["cuts"]:
                numbers[dim] = cut_positions(piece["whole"][dim], Cut(dim, pieces, tuple(sections)), number)
            one, vector = torch.arange(1), len(numbers) == 1
            shape = [*piece["shape"], 1] if vector else piece["shape"]
            numbers = [*numbers, one] if vector else numbers
            experts, rows, columns = [one, *numbers] if len(numbers) == 2 else numbers
            parameter_piece = ParameterPiece(layer, piece["start"], shape[-2], shape[-1], (experts, rows, columns))
            parameters[piece["block"], piece["name"]].append(parameter_piece)
    return parameters


ALIGNMENT = 8
"""Alignment of tensors in bytes. A header is padded with spaces, so that the tensors of a mapped file are aligned."""

NAMES = {dtype: name for name, dtype in DTYPES.items()}
"""Names of data types in a safetensors file."""


PIECE_BYTES = 2**24
"""Approximate number of bytes of an `OutputTensor` that are read at once."""


class OutputTensor(NamedTuple):
    """Tensor of a new file, which is read from its source piece by piece while the file is written.

    Attributes:
        name: its name in the new file.
        shape: its shape.
        dtype: data type of its elements.
        read: function that reads rows `start` to `stop` (indices of its first dim).
        together: number of rows that must be read together. Each piece begins at a multiple of this number.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[int, int], Tensor]
    together: int = 1

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.numel * self.dtype.itemsize

    def pieces(self, start: int, stop: int) -> Iterator[Tensor]:
        """Yield the rows from `start` to `stop` in contiguous pieces of about PIECE_BYTES."""
        row = max(1, self.nbytes // max(1, self.shape[0]))
        step = max(1, PIECE_BYTES // (row * self.together)) * self.together
        while start < stop:
            end = min((start // step + 1) * step, stop)
            yield self.read(start, end).to(self.dtype).contiguous()
            start = end


def file_chunks(tensors: Iterable[OutputTensor], followed: Iterable[OutputTensor]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file whose tensors are read piece by piece.

    Args:
        tensors: the tensors.
        followed: the same tensors, in an iterator that shows progress.
    """
    yield header_of({tensor.name: (tensor.dtype, tensor.shape) for tensor in tensors}, {"format": "pt"})
    yield from (bytes_of(piece) for tensor in followed for piece in tensor.pieces(0, tensor.shape[0]))


def chunks_of(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file chunk by chunk.

    The library safetensors can read the file. Its own writer takes all tensors at once, holds the GIL while it writes,
    and computes no checksum.

    Args:
        tensors: contiguous tensors on the CPU, by name.
    """
    yield header_of({name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()})
    yield from map(bytes_of, tensors.values())


def header_of(
    tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Return the header of a safetensors file. The bytes of the tensors follow it in the same order.

    Args:
        tensors: data type and shape of each tensor, by name.
        metadata: further texts by name. transformers requires that "format" is "pt".
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        end = offset + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    header_bytes = json.dumps(header).encode()
    header_bytes += b" " * (-len(header_bytes) % ALIGNMENT)
    return len(header_bytes).to_bytes(8, "little") + header_bytes


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU, without a copy."""
    return memoryview(cast(Any, tensor.flatten().view(torch.uint8).numpy()))


def _split(state: State, kind: str, key: Key, tensors: Iterable[Tensor], place: str = "") -> Iterator[KeptRange]:
    """Yield the slices of `key` as contiguous ranges. The tensors have the elements of all ranges in order."""
    ranges = iter(state.shapes.ranges(*key))
    for tensor in tensors:
        while len(tensor):
            start, stop = next(ranges)
            yield KeptRange(kind, key[0], start, tensor[: stop - start], key, place)
            tensor = tensor[stop - start :]


def _moments(state: State, key: Key, part: Slice, place: str) -> Iterator[KeptRange]:
    """Yield the moments of a slice's optimizers: state tensors with the shape of the tensor that they belong to."""
    starts = {leaf: start for start, leaf in part.leaves}
    for optimizer in part.optimizers:
        for leaf, moments in optimizer.state.items():
            for name, moment in moments.items():
                if isinstance(moment, Tensor) and moment.shape == leaf.shape:
                    yield KeptRange(name, key[0], starts[leaf], part.current(moment).view(-1), key, place)


def _ranges_to_write(state: State, keys: list[list[Key]]) -> dict[Key, list[tuple[int, int]]]:
    """Return the ranges that this rank writes, by the slices to which they belong.

    If several ranks have a piece, its writer follows from the numbers of layer and piece, so that the ranks share the
    work.

    Args:
        state: this rank's tensors.
        keys: slices of each rank.
    """
    own_ranges: dict[Key, list[tuple[int, int]]] = {}
    for layer in range(state.model.layers):
        holders = [(rank, holds) for rank, slices in enumerate(keys) for number, holds in slices if number == layer]
        pieces = math.lcm(*(holds.of for _, holds in holders))
        owners: list[list[tuple[int, Holds]]] = [[] for _ in range(pieces)]
        for rank, holds in holders:
            for piece in bits(holds.refined(pieces).mask):
                owners[piece].append((rank, holds))
        size = state.shapes.flat[layer] // pieces
        for piece, candidates in enumerate(owners):
            if candidates:
                rank, holds = candidates[(layer + piece) % len(candidates)]
                if rank == state.rank:
                    own_ranges.setdefault((layer, holds), []).append((piece * size, (piece + 1) * size))
    return own_ranges


def _pieces(model: Model, layer: int, length: int) -> Sequence[dict[str, Any]]:
    layout, run = model.layout(layer), model.run(layer)
    wholes = {whole.name: (block, whole) for block, whole in run.parameters()}
    pieces: dict[tuple[Any, ...], dict[str, Any]] = {}
    for slice in range(layout.slices):
        for piece, offset in zip(layout.parameters, layout.offsets, strict=True):
            block, whole = wholes[piece.name]
            cuts = [(*cut, number) for cut, number in cuts_of(run, whole, slice)]
            pieces.setdefault(  # slices with the same part of a parameter share an entry
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
    return list(pieces.values())
