"""The floor: a rank's own share of a step in plain PyTorch, with all communication left out."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import torch
from torch import Tensor

from shardlab.measure.side_by_side.module import GPTModule, adamw, loss_of
from shardlab.measure.side_by_side.pairs import OPTIMIZER
from shardlab.models import GPT


class Floor:
    """Forward and backward passes of some modules, then fused AdamW on a share of their parameters.

    What would come from another rank is drawn once: features, and their gradients. So its losses mean nothing.

    Args:
        modules: the rank's part of the model, perhaps one slice of it.
        rows: sequences of a microbatch.
        microbatches: how many the rank computes on.
        one_in: the optimizer steps one in so many elements of every parameter.

    Attributes:
        modules, optimizer: what a step calls.
    """

    def __init__(self, model: GPT, modules: list[GPTModule], rows: int, microbatches: int, one_in: int = 1) -> None:
        self.modules, self._microbatches = modules, microbatches
        parameters = [each for module in modules for each in module.parameters()]
        device = parameters[0].device
        shape = rows, model.seq_len, model.hidden_size
        self._tokens = torch.randint(model.vocab_size, shape[:2], device=device)
        self._features = torch.randn(shape, device=device).requires_grad_()
        self._gradient = torch.randn(shape, device=device)
        leaves = parameters
        if one_in > 1:
            leaves = [each.detach().flatten()[: -(-each.numel() // one_in)] for each in parameters]
            for leaf in leaves:
                leaf.grad = torch.zeros_like(leaf)
        self.optimizer = adamw(leaves, OPTIMIZER)

    def step(self) -> Tensor:
        for _ in range(self._microbatches):
            for module in self.modules:
                self._pass(module)
        self.optimizer.step()
        for module in self.modules:
            module.zero_grad()
        return torch.zeros(2, dtype=torch.float64, device=self._tokens.device)

    def _pass(self, module: GPTModule) -> None:
        made: Tensor = module(self._tokens if module.embeds else self._features)
        self._features.grad = None
        if module.scores:
            loss_of(made, self._tokens % made.shape[-1]).backward()
        else:
            made.backward(self._gradient)
