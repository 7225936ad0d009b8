"""The first weights of a training that goes on from a folder: every rank reads what it holds, and no more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import torch
from torch import Tensor

from shardlab.errors import UserError
from shardlab.exchange.source import open_source
from shardlab.models import GPT, Blocks, CutModel, Model
from shardlab.models.tensors import Initial
from shardlab.models.tensors.ranges import read_range

Ranges = Sequence[tuple[int, int]]


def initial_from(folder: Path, model: Model) -> Initial:
    """A function that reads parts of a layer's flat buffer from a folder.

    Args:
        folder: of a run, of a checkpoint, or in Hugging Face's form.
        model: whose layers are asked for, whole or cut.

    Raises:
        UserError: when the folder has no weights of such a model.
    """
    source = open_source(folder)
    want_same(source.model, model.whole if isinstance(model, CutModel) else model, folder)

    def initial(layer: int, length: int, ranges: Ranges, dtype: torch.dtype) -> Tensor:
        return torch.cat([read_range(source, model, layer, length, *each, dtype) for each in ranges])

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
