"""How a layer's weights begin."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# safetensors leaves its annotations out.

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

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
from shardlab.models.tensors.dropout import generator_of

Initial = Callable[[int, int, Sequence[tuple[int, int]], torch.dtype], Tensor]
"""Reads first weights: given a layer, the length of its flat buffer (layout.numel, or more where runs are lengthened at
their ends), ranges (start, stop) of it and a dtype, their elements one after the other, zero in gaps."""

DEVIATION = 0.02
"""Standard deviation of a matrix's first elements (GPT-2; nanoGPT)."""


def initial_weights(model: Model, layer: int, seed: int, dtype: torch.dtype) -> Tensor:
    """The first weights of a layer (layout.numel,), a function of seed and layer; zero in the gaps.

    As nanoGPT: matrices normal, those that end a residual branch smaller by sqrt(2 layers); biases 0, norms 1.
    Drawn in float64 and rounded, so that runs in two dtypes begin alike. A cut model begins as the whole one does.
    """
    if isinstance(model, CutModel):
        blocks = {block for block, _ in model.run(layer).parameters()} or {0}
        wholes = {block: initial_weights(model.whole, block, seed, dtype) for block in blocks}
        return layer_of(model, layer, wholes)
    layout = model.layout(layer)
    generator = generator_of("weights", seed, layer)
    flat = torch.zeros(layout.numel, dtype=dtype)
    for parameter, view in zip(layout.parameters, views(layout, flat), strict=True):
        if parameter.decayed:
            scale = math.sqrt(2 * model.layers) if parameter.name.endswith("c_proj.weight") else 1
            drawn = torch.empty(parameter.shape, dtype=torch.float64)
            view.copy_(drawn.normal_(0, DEVIATION / scale, generator=generator))
        elif parameter.name.endswith("weight"):
            view.fill_(1)
    return flat


# A layer's flat buffer: the views of its parameters.


def views(layout: LayerLayout, flat: Tensor) -> list[Tensor]:
    """The parameters, in the layout's order, as views of a flat buffer (numel,) or longer.

    Of a sliced layer, give one slice's run (`run_numel` or longer): the views are of that slice's parameters.
    Ask for gradients of the views, not of `flat`: through `flat`, each view's gradient would be a whole buffer.
    """
    first = flat.storage_offset()
    return [flat.as_strided(shape, strides, first + offset) for shape, strides, offset in layout.places]


def named_views(layout: LayerLayout, flat: Tensor) -> dict[str, Tensor]:
    """The `views` by name."""
    names = [parameter.name for parameter in layout.parameters]
    return dict(zip(names, views(layout, flat), strict=True))


def with_borrowed(model: Model, parameters: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """Every layer's parameters as it computes with them: its own `views`, then those that it borrows from the first."""
    first = dict(zip((p.name for p in model.layout(0).parameters), parameters[0], strict=True))
    return [[*own, *(first[name] for name in model.borrowed(layer))] for layer, own in enumerate(parameters)]


def lengthened(layout: LayerLayout, flat: Tensor, length: int) -> Tensor:
    """A flat buffer of `length` elements with the same runs, each lengthened by zeros at its end (`layout.padded`)."""
    longer = flat.new_zeros(length)
    longer.view(layout.slices, -1)[:, : layout.run_numel] = flat.view(layout.slices, -1)[:, : layout.run_numel]
    return longer


# Weights (or gradients) in whole blocks, and the same in the layers of a cut model: copies, exact both ways.
#
# For a layer with k slices a flat buffer may be longer than its layout if its k runs are equally long: only their
# beginnings are read.


def to_layers(model: CutModel, wholes: Sequence[Tensor]) -> list[Tensor]:
    """Every layer's flat buffer (layout.numel,), zero in its gaps, from every block's of `model.whole`."""
    by_block = dict(enumerate(wholes))
    return [layer_of(model, layer, by_block) for layer in range(model.layers)]


def to_blocks(model: CutModel, layers: Sequence[Tensor]) -> list[Tensor]:
    """Every block's flat buffer of `model.whole`, zero in its gaps, from every layer's."""
    layouts = [model.whole.layout(block) for block in range(model.whole.layers)]
    wholes = [torch.zeros(layout.numel, dtype=layers[0].dtype, device=layers[0].device) for layout in layouts]
    named = [named_views(layout, flat) for layout, flat in zip(layouts, wholes, strict=True)]
    for layer, flat in enumerate(layers):
        for block, parameter, whole in whole_parameters(model, layer, flat):
            named[block][parameter.name].copy_(whole)
    return wholes


def whole_parameters(model: Model, layer: int, flat: Tensor) -> Iterator[tuple[int, Parameter, Tensor]]:
    """A layer's parameters in whole, one after the other, each with its block: views of the flat buffer of a layer that
    is not sliced.
    """
    layout, run = model.layout(layer), model.run(layer)
    slices = [named_views(layout, its) for its in flat.chunk(layout.slices)]
    for block, parameter in run.parameters():
        if layout.slices == 1:
            yield block, parameter, slices[0][parameter.name]
            continue
        whole = flat.new_empty(parameter.shape)
        for slice, mine in enumerate(slices):
            _put(whole, mine[parameter.name], cuts_of(run, parameter, slice))
        yield block, parameter, whole


def layer_of(model: CutModel, layer: int, wholes: Mapping[int, Tensor]) -> Tensor:
    """One layer's flat buffer, from those of the blocks that it takes its parameters from, by number."""
    layout, run = model.layout(layer), model.run(layer)
    named = {block: named_views(model.whole.layout(block), flat) for block, flat in wholes.items()}
    like = next(iter(wholes.values()))
    flat = torch.zeros(layout.numel, dtype=like.dtype, device=like.device)
    for slice, its in enumerate(flat.chunk(layout.slices)):
        mine = named_views(layout, its)
        for block, parameter in run.parameters():
            _take(mine[parameter.name], named[block][parameter.name], cuts_of(run, parameter, slice))
    return flat


def cuts_of(run: Run, parameter: Parameter, slice: int) -> list[tuple[Cut, int]]:
    """How a parameter is cut, each with the number of the piece that a slice of the layer has."""
    numbers = run.numbers(slice)
    return [(cut, numbers[parameter.indices[cut.dim]]) for cut in parameter.cuts(run.own_pieces)]


def _take(piece: Tensor, whole: Tensor, cuts: Sequence[tuple[Cut, int]]) -> None:
    """Copy a piece from the whole; the last one gets zeros at its end where there is nothing left."""
    for cut, number in cuts:
        whole = whole.index_select(cut.dim, places_of(whole.shape[cut.dim], cut, number))
    piece[tuple(slice(length) for length in whole.shape)] = whole


def _put(whole: Tensor, piece: Tensor, cuts: Sequence[tuple[Cut, int]]) -> None:
    """Copy a piece to its place in the whole."""
    places = {cut.dim: places_of(whole.shape[cut.dim], cut, number) for cut, number in cuts}
    every = [places.get(dim, torch.arange(length)) for dim, length in enumerate(whole.shape)]
    here = tuple(slice(len(each)) for each in every)
    whole[torch.meshgrid(*every, indexing="ij")] = piece[here]


def places_of(length: int, cut: Cut, number: int) -> Tensor:
    """Where the elements of piece `number` stand along the dim that is cut."""
    places: list[Tensor] = []
    start = 0
    for section in cut.sections or (length,):
        size = -(-section // cut.pieces)
        places.append(start + torch.arange(min(number * size, section), min((number + 1) * size, section)))
        start += section
    return torch.cat(places)


# Ranges of a layer's flat buffer, read from whatever has the whole model's parameters, in rows and columns.


class Matrix(NamedTuple):
    """Rows and columns of a parameter of one expert, or of the only one there is."""

    experts: int
    rows: int
    columns: int


def matrix_of(parameter: Parameter) -> Matrix:
    """A parameter's matrices.

    >>> matrix_of(Parameter("b", (3,), False, ("out",))), matrix_of(Parameter("w", (2, 3, 4), True, ("e", "out", "in")))
    (Matrix(experts=1, rows=3, columns=1), Matrix(experts=2, rows=3, columns=4))
    """
    *first, rows, columns = (*parameter.shape, 1) if len(parameter.shape) == 1 else parameter.shape
    return Matrix(first[0] if first else 1, rows, columns)


class Matrices(Protocol):
    """Parameters of whole blocks, each of one or several matrices, of which any rows and columns can be read."""

    def dtype(self, block: int, parameter: Parameter) -> torch.dtype:
        """The numbers that a parameter is in."""
        ...

    def read(self, block: int, parameter: Parameter, matrix: int, rows: Tensor, columns: Tensor) -> Tensor:
        """Some rows, ascending, and columns, which follow one another, of a parameter's matrix: (rows, columns)."""
        ...


def read_range(
    source: Matrices, model: Model, layer: int, length: int, start: int, stop: int, dtype: torch.dtype
) -> Tensor:
    """Elements `start` to `stop` of a layer's buffer of `length` elements, zero in gaps; hardly any other is read."""
    layout, run = model.layout(layer), model.run(layer)
    found, whole = torch.zeros(stop - start, dtype=dtype), {p.name: (block, p) for block, p in run.parameters()}
    for slice in range(layout.slices):
        for piece, offset in zip(layout.parameters, layout.offsets, strict=True):
            begin = slice * (length // layout.slices) + offset
            first, last = max(start, begin), min(stop, begin + piece.numel)
            if first < last:
                elements = _piece(source, run, slice, *whole[piece.name], piece, first - begin, last - begin)
                found[first - start : last - start] = elements
    return found


def _piece(
    source: Matrices, run: Run, slice: int, block: int, whole: Parameter, piece: Parameter, first: int, last: int
) -> Tensor:
    """Elements `first` to `last` of one slice of a parameter; zero where the last slice is filled up."""
    places = [torch.arange(length) for length in whole.shape]
    for cut, number in cuts_of(run, whole, slice):
        places[cut.dim] = places_of(whole.shape[cut.dim], cut, number)
    *experts, rows, columns = places if len(places) > 1 else (*places, torch.arange(1))
    count, length, width = matrix_of(piece)
    found: list[Tensor] = []
    for matrix in range(first // (length * width), -(-last // (length * width))):
        low, high = (min(max(end - matrix * length * width, 0), length * width) for end in (first, last))
        top, bottom = low // width, -(-high // width)
        here = torch.zeros(bottom - top, width, dtype=source.dtype(block, whole))
        mine = rows[top:bottom]
        expert = int(experts[0][matrix]) if experts else 0
        here[: len(mine), : len(columns)] = source.read(block, whole, expert, mine, columns)
        found.append(here.flatten()[low - top * width : high - top * width])
    assert count * length * width == prod(piece.shape)
    return torch.cat(found)


# Tensors of a folder's safetensors files, of which parts are read; no pickle is ever opened.


DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Numbers that weights may be in, by safetensors' names."""

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class TensorFiles:
    """Tensors by name, of which only what is asked for is read.

    Files are mapped to be read only: what a process maps to write counts as memory that it has taken.

    Args:
        files: the file that has each tensor (None: all that are in `paths`).
        paths: the files.
    """

    def __init__(self, paths: list[Path]) -> None:
        self._opened = {path: _open(path) for path in paths}
        self._file = {name: file for file in self._opened.values() for name in cast(list[str], file.keys())}
        self._bytes = {name: each for path in paths for name, each in _tensors(path)}

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._file)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return tuple(self._file[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """The numbers that a tensor is in.

        Raises:
            UserError: when they are no floating-point numbers of 16 bits or more.
        """
        written = self._file[name].get_slice(name).get_dtype()
        if written not in DTYPES:
            raise UserError(f"tensor {name} is in {written}; weights are exchanged in {', '.join(DTYPES)}")
        return DTYPES[written]

    def read(self, name: str, *where: slice | int) -> Tensor:
        """Part of a tensor, or with no `where` all of it."""
        dtype = self.dtype(name)
        whole = self._bytes[name].view(f"u{dtype.itemsize}").reshape(self.shape(name))
        return torch.from_numpy(np.array(whole[where] if where else whole)).view(dtype)


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="numpy")
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read as safetensors ({reason(error)})") from None


def _tensors(path: Path) -> Iterator[tuple[str, np.ndarray[Any, np.dtype[np.uint8]]]]:
    """The names and bytes of a file's tensors."""
    mapped = np.memmap(path, np.uint8, "r")
    start = 8 + int.from_bytes(mapped[:8].tobytes(), "little")
    header: dict[str, dict[str, Any]] = json.loads(mapped[8:start].tobytes())
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            yield name, mapped[start + begin : start + end]


def files_of(single: Path) -> list[Path]:
    """The files of a folder's weights: one, or those of its index.

    Raises:
        UserError: when there are none, or those of the index are missing.
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
    """The system's words for an error, which safetensors gives as a number."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    number = re.search(r"os error (\d+)", str(error))
    return os.strerror(int(number[1])) if number else str(error)
