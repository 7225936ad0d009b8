"""Settings with which a program is executed, and the interface of its batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from shardlab.execute.optimizers.settings import FIRST, OptimizerConfig
from shardlab.language import Holds
from shardlab.language.precision import FP32, Precision
from shardlab.models.tensors import Initial


class Sampler(Protocol):
    """Source of the batches. Every rank can load every microbatch."""

    @property
    def micro_batch_size(self) -> int:
        """Sequences of a microbatch."""
        ...

    def microbatch(self, step: int, microbatch: int, /) -> tuple[Tensor, Tensor]:
        """Return tokens and targets (micro_batch_size, seq_len), int64. A target of -1 does not count."""
        ...

    def counted(self, step: int, microbatches: int, /) -> int:
        """Return the number of targets that count in a step; the loss is the mean over them."""
        ...


@dataclass(frozen=True)
class Settings:
    """Settings with which a program runs.

    Attributes:
        seed: seed of the initial weights and of dropout.
        precision: dtypes of weights, gradients, activations and optimizer states. In float64, casts of the program also
            keep float64, so that they do not round in a comparison with one device.
        device: device of the tensors.
        optimizer: settings of the optimizer.
        initial: function that reads the initial weights (None: draw them from the seed).
        loss_scale: initial loss scale, in float16.
        compile: whether layers are compiled. Layers of one kind share a graph.
        cuda_graph: whether a step is captured as one CUDA graph, and replayed from then on.
    """

    seed: int = 0
    precision: Precision = FP32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    initial: Initial | None = None
    loss_scale: float = FIRST
    compile: bool = False
    cuda_graph: bool = False


GradientObserver = Callable[[int, Holds, Tensor], None]
"""Function that is called before every update with (layer, slices held, gradient of these slices)."""


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype with a name such as "float32"."""
    return getattr(torch, name)
