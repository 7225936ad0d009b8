"""Weights of layers: initialization, views of flat buffers, and conversion between blocks and cut layers.

- `initial_weights` draws the initial weights of a layer, independent of the strategy.
- `parameter_views` views a flat buffer as parameters.
- `to_layers` and `to_blocks` convert between whole blocks and the layers of a cut model.
- `read_range` reads a range of a layer's flat buffer from any source of whole parameters (`Matrices`).
- `TensorFiles` reads parts of tensors in safetensors files. Pickles are never opened.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# safetensors leaves its annotations out.

from __future__ import annotations

import json
import math
import mmap
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, cast
from weakref import WeakSet

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shardlab.common.errors import UserError
from shardlab.common.files import read_file
from shardlab.models.cutting import CutModel
from shardlab.models.layer import Run
from shardlab.models.layout import Cut, LayerLayout, Parameter
from shardlab.models.model import Model
from shardlab.models.named import index_of, weights_at
from shardlab.models.tensors.dropout import make_generator

Initial = Callable[[int, int, Sequence[tuple[int, int]], torch.dtype], Tensor]
"""Function that reads initial weights. Arguments: layer, length of its flat buffer (layout.numel or more, see
`pad_runs`), ranges (start, stop) of the buffer, dtype. It returns the elements of these ranges, concatenated; gaps of
the layout are zero."""

DEVIATION = 0.02
"""Standard deviation of a matrix's initial elements (GPT-2; nanoGPT)."""


def initial_weights(model: Model, layer: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Draw the initial weights of a layer (layout.numel,), a function of seed and layer; zero in the gaps.

    As in nanoGPT, matrices are normal, the last matrix of a residual branch is smaller by sqrt(2 layers), biases are 0
    and norms are 1. Elements are drawn in float64 and rounded, so that runs in two dtypes have the same weights. A cut
    model has the weights of the whole one.
    """
    if isinstance(model, CutModel):
        blocks = {block for block, _ in model.run(layer).parameters()} or {0}
        wholes = {block: initial_weights(model.whole, block, seed, dtype) for block in blocks}
        return layer_weights(model, layer, wholes)
    layout = model.layout(layer)
    generator = make_generator("weights", seed, layer)
    flat = torch.zeros(layout.numel, dtype=dtype)
    for parameter, view in zip(layout.parameters, parameter_views(layout, flat), strict=True):
        if parameter.decayed:
            scale = math.sqrt(2 * model.layers) if parameter.name.endswith("c_proj.weight") else 1
            exact = torch.empty(parameter.shape, dtype=torch.float64)
            view.copy_(exact.normal_(0, DEVIATION / scale, generator=generator))
        elif parameter.name.endswith("weight"):
            view.fill_(1)
    return flat


def parameter_views(layout: LayerLayout, flat: Tensor) -> list[Tensor]:
    """View a flat buffer as its parameters, in the layout's order.

    Let the views require gradients, not `flat`: otherwise each view would get a gradient of the size of `flat`.

    Args:
        layout: layout of the layer.
        flat: the flat buffer, (numel,) or longer. For a sliced layer, one slice's run, (run_numel,) or longer.
    """
    first = flat.storage_offset()
    return [flat.as_strided(shape, strides, first + offset) for shape, strides, offset in layout.places]


def named_views(layout: LayerLayout, flat: Tensor) -> dict[str, Tensor]:
    """Return the `parameter_views` by name."""
    names = [parameter.name for parameter in layout.parameters]
    return dict(zip(names, parameter_views(layout, flat), strict=True))


def add_borrowed(model: Model, parameters: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """Append to each layer's parameters those that it borrows from the first layer."""
    first = dict(zip((p.name for p in model.layout(0).parameters), parameters[0], strict=True))
    return [
        [*layer_parameters, *(first[name] for name in model.borrowed(layer))]
        for layer, layer_parameters in enumerate(parameters)
    ]


def pad_runs(layout: LayerLayout, flat: Tensor, length: int) -> Tensor:
    """Copy a flat buffer to one of `length` elements, with each slice's run padded by zeros (see `layout.padded`)."""
    longer = flat.new_zeros(length)
    longer.view(layout.slices, -1)[:, : layout.run_numel] = flat.view(layout.slices, -1)[:, : layout.run_numel]
    return longer


def to_layers(model: CutModel, wholes: Sequence[Tensor]) -> list[Tensor]:
    """Copy the flat buffers of whole blocks to those of the cut layers, (layout.numel,), zero in the gaps."""
    by_block = dict(enumerate(wholes))
    return [layer_weights(model, layer, by_block) for layer in range(model.layers)]


def to_blocks(model: CutModel, layers: Sequence[Tensor]) -> list[Tensor]:
    """Copy the flat buffers of cut layers to those of whole blocks, zero in the gaps.

    A layer's buffer may be longer than its layout, with equally long runs of slices: the start of each run is read.
    """
    layouts = [model.whole.layout(block) for block in range(model.whole.layers)]
    wholes = [torch.zeros(layout.numel, dtype=layers[0].dtype, device=layers[0].device) for layout in layouts]
    views = [named_views(layout, flat) for layout, flat in zip(layouts, wholes, strict=True)]
    for layer, flat in enumerate(layers):
        for block, parameter, whole in whole_parameters(model, layer, flat):
            views[block][parameter.name].copy_(whole)
    return wholes


def whole_parameters(model: Model, layer: int, flat: Tensor) -> Iterator[tuple[int, Parameter, Tensor]]:
    """Yield (block, parameter, whole tensor) for each parameter of a layer; a view if the layer is not sliced."""
    layout, run = model.layout(layer), model.run(layer)
    slices = [named_views(layout, run_of_slice) for run_of_slice in flat.chunk(layout.slices)]
    for block, parameter in run.parameters():
        if layout.slices == 1:
            yield block, parameter, slices[0][parameter.name]
            continue
        whole = flat.new_empty(parameter.shape)
        for slice, mine in enumerate(slices):
            _put(whole, mine[parameter.name], cuts_of(run, parameter, slice))
        yield block, parameter, whole


def layer_weights(model: CutModel, layer: int, wholes: Mapping[int, Tensor]) -> Tensor:
    """Copy one cut layer's flat buffer from `wholes`: by number, the flat buffers of the blocks with its parameters."""
    layout, run = model.layout(layer), model.run(layer)
    views = {block: named_views(model.whole.layout(block), flat) for block, flat in wholes.items()}
    like = next(iter(wholes.values()))
    flat = torch.zeros(layout.numel, dtype=like.dtype, device=like.device)
    for slice, run_of_slice in enumerate(flat.chunk(layout.slices)):
        slice_views = named_views(layout, run_of_slice)
        for block, parameter in run.parameters():
            _take(slice_views[parameter.name], views[block][parameter.name], cuts_of(run, parameter, slice))
    return flat


def cuts_of(run: Run, parameter: Parameter, slice: int) -> list[tuple[Cut, int]]:
    """Return the cuts of a parameter, each with the number of the piece that slice `slice` of the layer has."""
    numbers = run.numbers(slice)
    return [(cut, numbers[parameter.indices[cut.dim]]) for cut in parameter.cuts(run.pieces)]


def cut_positions(length: int, cut: Cut, number: int) -> Tensor:
    """Return the positions of piece `number` along the cut dim."""
    places: list[Tensor] = []
    start = 0
    for section in cut.sections or (length,):
        size = -(-section // cut.pieces)
        places.append(start + torch.arange(min(number * size, section), min((number + 1) * size, section)))
        start += section
    return torch.cat(places)


class Matrix(NamedTuple):
    """Shape of a parameter as one matrix for each expert (a single matrix if there are no experts)."""

    experts: int
    rows: int
    columns: int


def matrix_of(parameter: Parameter) -> Matrix:
    """Return how many matrices a parameter has (one for each expert), and their rows and columns.

    >>> matrix_of(Parameter("b", (3,), False, ("out",))), matrix_of(Parameter("w", (2, 3, 4), True, ("e", "out", "in")))
    (Matrix(experts=1, rows=3, columns=1), Matrix(experts=2, rows=3, columns=4))
    """
    *first, rows, columns = (*parameter.shape, 1) if len(parameter.shape) == 1 else parameter.shape
    return Matrix(first[0] if first else 1, rows, columns)


class Matrices(Protocol):
    """Source of whole blocks' parameters. It can read any rows and columns."""

    def dtype(self, block: int, parameter: Parameter) -> torch.dtype:
        """Return the dtype of a parameter."""
        ...

    def read(self, block: int, parameter: Parameter, matrix: int, rows: Tensor, columns: Tensor) -> Tensor:
        """Read ascending rows and consecutive columns of one matrix of a parameter: (rows, columns)."""
        ...


def read_range(
    source: Matrices, model: Model, layer: int, length: int, start: int, stop: int, dtype: torch.dtype
) -> Tensor:
    """Return elements `start` to `stop` of a layer's buffer of `length` elements, zero in gaps.

    Few other elements of the source are read.
    """
    layout, run = model.layout(layer), model.run(layer)
    elements, whole = torch.zeros(stop - start, dtype=dtype), {p.name: (block, p) for block, p in run.parameters()}
    for slice in range(layout.slices):
        for piece, offset in zip(layout.parameters, layout.offsets, strict=True):
            begin = slice * (length // layout.slices) + offset
            first, last = max(start, begin), min(stop, begin + piece.numel)
            if first < last:
                part = _piece(source, run, slice, *whole[piece.name], piece, first - begin, last - begin)
                elements[first - start : last - start] = part
    return elements


DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Supported dtypes of weights, by safetensors' names."""

RELEASED_BYTES = 2**24
"""Bytes of reads after which the pages of all files are released. Releasing them after each small read is slow."""

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class TensorFiles:
    """Tensors of safetensors files by name. Only the requested parts are read.

    Files are mapped read-only, because RLIMIT_DATA (`ulimit -d`) counts private writable mappings. After every
    `RELEASED_BYTES` that are read, the pages of all open files are released, so that they do not count as memory of the
    process.

    Args:
        paths: the files.
    """

    _all: ClassVar[WeakSet[TensorFiles]] = WeakSet()
    _read_bytes: ClassVar[int] = 0

    def __init__(self, paths: list[Path]) -> None:
        self._opened = {path: _open(path) for path in paths}
        self._file = {name: file for file in self._opened.values() for name in cast(list[str], file.keys())}
        self._mapped = {path: _map(path) for path in paths}
        self._bytes = {name: bytes for mapped in self._mapped.values() for name, bytes in _tensors(mapped)}
        self._all.add(self)

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._file)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return tuple(self._file[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor.

        Raises:
            UserError: if it is not a floating-point dtype of 16 bits or more.
        """
        name_in_file = self._file[name].get_slice(name).get_dtype()
        if name_in_file not in DTYPES:
            raise UserError(f"tensor {name} is in {name_in_file}; weights are exchanged in {', '.join(DTYPES)}")
        return DTYPES[name_in_file]

    def read(self, name: str, *selection: slice | int) -> Tensor:
        """Read the part `selection` of a tensor, or all of it if `selection` is empty."""
        dtype = self.dtype(name)
        whole = self._bytes[name].view(f"u{dtype.itemsize}").reshape(self.shape(name))
        part = np.array(whole[selection] if selection else whole)
        TensorFiles._read_bytes += part.nbytes
        if TensorFiles._read_bytes >= RELEASED_BYTES:
            TensorFiles._read_bytes = 0
            for mapped in [mapping for files in self._all for mapping in files._mapped.values()]:
                mapped.madvise(mmap.MADV_DONTNEED)
        return torch.from_numpy(part).view(dtype)


def weight_files(single: Path) -> list[Path]:
    """Return the files of a folder's weights: the single file, or those that its index names.

    Raises:
        UserError: if there are none, or a file of the index is missing.
    """
    folder, path = single.parent, weights_at(single)
    if path == single:
        return [single]
    if path is not None:
        index = read_file(path, "JSON")
        names = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(names, Mapping) or not all(isinstance(name, str) for name in names.values()):
            raise UserError(f"{path} has no weight_map from tensors to files")
        paths = [folder / Path(name).name for name in sorted(set(cast(Mapping[str, str], names).values()))]
        if missing := [path.name for path in paths if not path.is_file()]:
            raise UserError(f"{folder} lacks {', '.join(missing)}, which {path.name} names; copy the whole folder")
        return paths
    if pickles := sorted(path.name for pattern in PICKLES for path in folder.glob(pattern)):
        raise UserError(
            f"{folder} has its weights in {pickles[0]}, a pickle, which could run any code and is not read; convert it "
            "to safetensors first, with save_pretrained of transformers"
        )
    raise UserError(
        f"{folder} has no {single.name} or {index_of(single).name}; name a folder with weights in safetensors"
    )


def reason(error: OSError | SafetensorError) -> str:
    """Return the operating system's text for an error. safetensors gives only its number."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    number = re.search(r"os error (\d+)", str(error))
    return os.strerror(int(number[1])) if number else str(error)


def _take(piece: Tensor, whole: Tensor, cuts: Sequence[tuple[Cut, int]]) -> None:
    """Copy a piece out of the whole. If the last piece is longer than the rest of the whole, its end stays zero."""
    for cut, number in cuts:
        whole = whole.index_select(cut.dim, cut_positions(whole.shape[cut.dim], cut, number))
    piece[tuple(slice(length) for length in whole.shape)] = whole


def _put(whole: Tensor, piece: Tensor, cuts: Sequence[tuple[Cut, int]]) -> None:
    """Copy a piece to its position in the whole."""
    places = {cut.dim: cut_positions(whole.shape[cut.dim], cut, number) for cut, number in cuts}
    index_lists = [places.get(dim, torch.arange(length)) for dim, length in enumerate(whole.shape)]
    real = tuple(slice(len(indices)) for indices in index_lists)
    whole[torch.meshgrid(*index_lists, indexing="ij")] = piece[real]


def _piece(
    source: Matrices, run: Run, slice: int, block: int, whole: Parameter, piece: Parameter, first: int, last: int
) -> Tensor:
    """Read elements `first` to `last` of one slice of a parameter; zero in the padding of the last slice."""
    places = [torch.arange(length) for length in whole.shape]
    for cut, number in cuts_of(run, whole, slice):
        places[cut.dim] = cut_positions(whole.shape[cut.dim], cut, number)
    *experts, rows, columns = places if len(places) > 1 else (*places, torch.arange(1))
    _, length, width = matrix_of(piece)
    parts: list[Tensor] = []
    for matrix in range(first // (length * width), -(-last // (length * width))):
        low, high = (min(max(end - matrix * length * width, 0), length * width) for end in (first, last))
        top, bottom = low // width, -(-high // width)
        part = torch.zeros(bottom - top, width, dtype=source.dtype(block, whole))
        own_rows = rows[top:bottom]
        expert = int(experts[0][matrix]) if experts else 0
        part[: len(own_rows), : len(columns)] = source.read(block, whole, expert, own_rows, columns)
        parts.append(part.flatten()[low - top * width : high - top * width])
    return torch.cat(parts)


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="numpy")
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read as safetensors ({reason(error)})") from None


def _map(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _tensors(mapped: mmap.mmap) -> Iterator[tuple[str, np.ndarray[Any, np.dtype[np.uint8]]]]:
    """Yield the name and the bytes of each tensor in a file."""
    start = 8 + int.from_bytes(mapped[:8], "little")
    header: dict[str, dict[str, Any]] = json.loads(mapped[8:start])
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            yield name, np.frombuffer(mapped, np.uint8, end - begin, start + begin)
