"""How a program is run, and on what."""

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
    """Where the batches come from; every rank can ask for every microbatch."""

    @property
    def micro_batch_size(self) -> int:
        """Sequences of a microbatch."""
        ...

    def microbatch(self, step: int, microbatch: int, /) -> tuple[Tensor, Tensor]:
        """Tokens and targets (micro_batch_size, seq_len), int64; a target of -1 does not count."""
        ...

    def counted(self, step: int, microbatches: int, /) -> int:
        """Targets that count in a step of so many microbatches: what its loss is the mean over."""
        ...


@dataclass(frozen=True)
class Settings:
    """How a program is run.

    Attributes:
        seed: of the first weights and of dropout.
        precision: of weights, gradients, activations and optimizer states; in float64 casts are to float64 as well, so
            that the program is compared with one device and not its rounding.
        device: where they are.
        optimizer: its settings.
        initial: reads the first weights (None: they are drawn from the seed).
        loss_scale: the first, in float16.
        compile: whether layers are compiled, each kind once.
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
"""Called before every update with (layer, slices held, gradient of these slices)."""


def torch_dtype(name: str) -> torch.dtype:
    """The dtype that torch calls so."""
    return getattr(torch, name)
