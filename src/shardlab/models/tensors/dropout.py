"""Dropout whose masks depend on what is dropped, not on who computes it or how often."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shardlab.models.primitives import DropoutSite
from shardlab.models.tensors.seeding import generator_of


@dataclass(frozen=True)
class Dropout:
    """The masks of one layer in one step. A microbatch has the same ones wherever and however often it is computed.

    Attributes:
        probability: that an element is dropped; the others are scaled by 1 / (1 - probability).
        seed: of the run.
        step: the optimizer step.
        layer: the layer's number.
        microbatches: which of them the input's rows are, in order, with equally many rows each.
    """

    probability: float
    seed: int
    step: int
    layer: int
    microbatches: tuple[int, ...]

    def of_block(self, block: int) -> Dropout | None:
        """The masks of a block, which may be one of several in a layer; None if nothing is dropped."""
        return replace(self, layer=block) if self.probability else None

    def mask(
        self, site: DropoutSite, shape: tuple[int, ...], like: Tensor, dim: int = 0, part: Sequence[int] | None = None
    ) -> Tensor:
        """What to multiply with: 0 or 1 / (1 - probability), of `shape` (rows first), as `like` in dtype and device.

        Each microbatch's mask is drawn whole, on the CPU, from a generator of its own; of dim `dim` only `part` is
        given.
        """
        rows, count = shape[0], len(self.microbatches)
        assert rows % count == 0, f"{rows} rows do not hold {count} microbatches of equal size"
        kept = torch.empty(shape, dtype=torch.bool)
        for microbatch, drawn in zip(self.microbatches, kept.chunk(count), strict=True):
            generator = generator_of("dropout", self.seed, self.step, self.layer, microbatch, site)
            drawn.bernoulli_(1 - self.probability, generator=generator)
        if part is not None:
            kept = kept.index_select(dim, torch.tensor(part))
        return kept.to(like.device, like.dtype).mul_(1 / (1 - self.probability))
