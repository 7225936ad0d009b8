"""The first weights of a training that goes on from a folder: every rank reads what it holds, and no more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from shardlab.errors import UserError
from shardlab.exchange.parts import matrix_of
from shardlab.exchange.source import WeightSource, open_source
from shardlab.models import GPT, Blocks, CutModel, Model, Parameter
from shardlab.models.run import Run
from shardlab.models.tensors import Initial
from shardlab.models.tensors.recutting import cuts_of, places_of

Ranges = Sequence[tuple[int, int]]


def initial_from(folder: Path, model: Model) -> Initial:
    """A function that reads parts of a layer's flat buffer from a folder.

    Args:
        folder: of a run, or in Hugging Face's form.
        model: whose layers are asked for, whole or cut.

    Raises:
        UserError: when the folder has no weights of such a model.
    """
    source = open_source(folder)
    want_same(source.model, model.whole if isinstance(model, CutModel) else model, folder)

    def initial(layer: int, length: int, ranges: Ranges, dtype: torch.dtype) -> Tensor:
        return torch.cat([_range(source, model, layer, length, *each, dtype) for each in ranges])

    return initial


def want_same(given: Blocks, wanted: Model, folder: Path) -> None:
    """Refuse weights of another model: dropout and how experts are loaded may differ, and sequences may be shorter.

    Raises:
        UserError: naming every field that differs.
    """
    have, want = _said(given), _said(wanted)
    wrong = [
        f"{name} is {have.get(name)!r}, not {want.get(name)!r}"
        for name in (have | want)
        if have.get(name) != want.get(name)
    ]
    if given.seq_len < wanted.seq_len:
        wrong.append(f"seq_len is {given.seq_len}, less than {wanted.seq_len}")
    if wrong:
        raise UserError(f"{folder} has the weights of another model: {'; '.join(wrong)}")


def _said(model: Model) -> dict[str, object]:
    """The fields that two models with the same weights share, none left to a default."""
    if isinstance(model, GPT):
        model = replace(model, kv_heads=model.kv_heads or model.heads, ffn_hidden_size=model.hidden)
    free = {"dropout", "seq_len", "capacity_factor", "auxiliary"}
    return {each.name: getattr(model, each.name) for each in fields(model) if each.name not in free}


def _range(
    source: WeightSource, model: Model, layer: int, length: int, start: int, stop: int, dtype: torch.dtype
) -> Tensor:
    """Elements `start` to `stop` of a layer's buffer."""
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
    source: WeightSource, run: Run, slice: int, block: int, whole: Parameter, piece: Parameter, first: int, last: int
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
