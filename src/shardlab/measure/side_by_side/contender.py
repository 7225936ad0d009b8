"""What takes turns: something that trains one step at a time, and its data."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from shardlab.measure.side_by_side.module import loss_of
from shardlab.models.tensors import generator_of

DRAWN = 8
"""Steps whose tokens are drawn beforehand; then they come again."""


class Contender(Protocol):
    """One side of a pair, on one rank."""

    def step(self) -> Tensor:
        """Train one step.

        Returns:
            (2,) float64: the loss summed over the tokens that this rank reports, and their number, as
            `Executor.step` gives them.
        """
        ...


class DrawnBatches:
    """Microbatches of any tokens, drawn before anything is timed; the same on every rank and for both sides."""

    def __init__(self, micro_batch_size: int, microbatches: int, tokens: int, vocab_size: int) -> None:
        self.micro_batch_size = micro_batch_size
        self._tokens = tokens

        def draw(step: int, microbatch: int) -> tuple[Tensor, Tensor]:
            shape = (2, micro_batch_size, tokens)
            x, targets = torch.randint(vocab_size, shape, generator=generator_of("bench", step, microbatch))
            return x, targets

        self._drawn = [[draw(step, m) for m in range(microbatches)] for step in range(DRAWN)]

    def microbatch(self, step: int, microbatch: int, /) -> tuple[Tensor, Tensor]:
        """Tokens and targets, (micro_batch_size, tokens), int64."""
        return self._drawn[step % DRAWN][microbatch]

    def counted(self, step: int, microbatches: int, /) -> int:
        """Targets of a step."""
        return microbatches * self.micro_batch_size * self._tokens

    def whole(self, step: int) -> tuple[Tensor, Tensor]:
        """All microbatches of a step, one after the other."""
        tokens, targets = zip(*self._drawn[step % DRAWN], strict=True)
        return torch.cat(tokens), torch.cat(targets)


@dataclass
class Loop:
    """A PyTorch loop on one batch a step: forward, backward, optimizer.

    Attributes:
        module: wrapped as it may be.
        optimizer: of its parameters.
        batches, microbatch: what the rank trains on.
        device: where.
        reports: whether this rank's tokens are no other rank's.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer
    batches: DrawnBatches
    microbatch: int
    device: torch.device
    reports: bool = True
    at: int = 0

    def step(self) -> Tensor:
        x, targets = (each.to(self.device) for each in self.batches.microbatch(self.at, self.microbatch))
        loss = self.loss(x, targets)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.at += 1
        return reported(loss, targets.numel() if self.reports else 0)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """The loss, whose gradients the parameters then have."""
        loss = loss_of(self.module(x), targets)
        loss.backward()
        return loss


def reported(mean: Tensor, tokens: int) -> Tensor:
    """A mean loss over so many tokens, as a contender reports it."""
    total = mean.detach().double() * tokens
    return torch.stack([total, torch.full_like(total, tokens)])
