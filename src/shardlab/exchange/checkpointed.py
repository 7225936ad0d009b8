"""The weights of a checkpoint, as parameters of the whole model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from shardlab.checkpoint import CheckpointTensors
from shardlab.models import Blocks, Parameter


@dataclass(frozen=True)
class CheckpointSource:
    """A checkpoint with weights.

    Attributes:
        folder: where it is.
        model: whose weights.
        tensors: the weights.
        form: as a run has them.
        config: of Hugging Face's form; there is none.
    """

    folder: Path
    model: Blocks
    tensors: CheckpointTensors
    form: Literal["shardlab"] = "shardlab"
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def dtype(self, block: int, parameter: Parameter) -> torch.dtype:
        """The numbers that a parameter is in."""
        return self.tensors.dtype(block, parameter)

    def read(self, block: int, parameter: Parameter, matrix: int, rows: Tensor, columns: Tensor) -> Tensor:
        """Some rows and columns of a parameter's matrix, as `WeightSource.read`."""
        return self.tensors.read(block, parameter, matrix, rows, columns)

    def parameters(self) -> Iterator[tuple[int, Parameter]]:
        """Every parameter, with its block."""
        return parameters_of(self.model)


def parameters_of(model: Blocks) -> Iterator[tuple[int, Parameter]]:
    """Every parameter of a model, with its block, in the order of blocks."""
    for block in range(model.layers):
        for parameter in model.layout(block).parameters:
            yield block, parameter
