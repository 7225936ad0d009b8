"""Lion, which torch does not have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from shardlab.execute.one_moment import OneMoment


class Lion(OneMoment):
    """Steps by the sign of a moment that the gradient is mixed into (Chen et al. 2023, arXiv 2302.06675, program 1)."""

    def __init__(self, params: Iterable[dict[str, Any]], lr: float, betas: tuple[float, float]) -> None:
        super().__init__(params, lr)
        self._betas = betas

    def move(self, weight: Tensor, moment: Tensor) -> tuple[Tensor, float]:
        """The sign of a mixture by the first decay; the moment keeps one by the second."""
        assert weight.grad is not None
        by, kept = self._betas
        sign = torch.lerp(weight.grad, moment, by).sign_()
        moment.lerp_(weight.grad, 1 - kept)
        return sign, 1.0
