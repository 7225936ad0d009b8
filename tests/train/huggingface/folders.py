"""Folders with weights that are drawn by chance."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# torch and safetensors leave some of their annotations out.

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from shardlab.models import Blocks
from shardlab.models.named import name_of
from shardlab.train.checkpoint.contents import OutputTensor
from shardlab.train.data.prepared_folder import tokenizer_record
from shardlab.train.data.tokenizers import Tokenizer


def output_of(name: str, tensor: Tensor) -> OutputTensor:
    """A tensor that is to be written."""
    return OutputTensor(name, tuple(tensor.shape), tensor.dtype, partial(_rows, tensor))


def _rows(tensor: Tensor, start: int, stop: int) -> Tensor:
    return tensor[start:stop]


def random_run(
    folder: Path, model: Blocks, dtype: torch.dtype = torch.float32, tokenizer: Tokenizer | None = None
) -> Path:
    """A folder like that of a run, with its weights and its model, and its tokenizer if there is one."""
    generator = torch.Generator().manual_seed(0)
    folder.mkdir()
    tensors = {
        f"layers.{layer}.{parameter.name}": (torch.randn(parameter.shape, generator=generator) / 4).to(dtype)
        for layer in range(model.layers)
        for parameter in model.layout(layer).parameters
    }
    save_file(tensors, folder / "weights.safetensors")
    record: dict[str, object] = {"model": {"kind": name_of(type(model)), **asdict(model)}}
    if tokenizer is not None:
        record["tokenizer"] = tokenizer_record(tokenizer)
        for name, content in tokenizer.files().items():
            (folder / name).write_bytes(content)
    (folder / "run.json").write_text(json.dumps(record))
    return folder
