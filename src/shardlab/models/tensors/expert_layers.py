"""The layers of a model that is cut before and after its experts."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shardlab.models.expert_layers import Dense, Experts
from shardlab.models.parts import Head
from shardlab.models.tensors.dropout import Dropout
from shardlab.models.tensors.layers import Layer, Tensors
from shardlab.models.tensors.mixture import combine, dispatch, experts_of, route, slots_of
from shardlab.models.tensors.parts import Share, add_branch, compute, norm_of


@dataclass(frozen=True)
class DenseLayer(Layer):
    """(carried, combined) to (carried, dispatched): see `Dense`.

    The first one is given (None, tokens); the last one gives (None, logits). Places follow from the experts' numbers
    again, so that these alone are carried, exactly, in the compute dtype.
    """

    half: Dense

    def compute(self, p: dict[str, Tensor], inputs: Tensors, share: Share, dropout: Dropout | None) -> Tensors:
        carried, x = inputs
        assert x is not None
        half = self.half
        if half.before is not None:
            assert carried is not None
            before, top_k = half.before, half.before.top_k
            residual, gates, choices = torch.split(carried, [before.width, top_k, top_k], -1)
            slots = slots_of(before, choices.detach(), share.microbatches)
            past = None if dropout is None else replace(dropout, layer=self._block_before)
            x = add_branch(before, p, residual, combine(x, gates, slots), share, past)
        if dropout is not None:
            dropout = replace(dropout, layer=half.block)
        for part in half.parts:
            x = compute(part, p, x, dropout, share)
        if half.after is None:
            return None, x
        normalised = norm_of(half.after, p, x)
        gates, choices = route(half.after, p, normalised, share)
        slots = slots_of(half.after, choices, share.microbatches)
        carried = torch.cat([x, gates.to(x.dtype), choices.to(x.dtype)], -1)
        return carried, dispatch(half.after, normalised, slots, share.microbatches)

    @property
    def _block_before(self) -> int:
        """The block of the experts whose results are combined."""
        return self.half.block if isinstance(self.half.parts[-1], Head) else self.half.block - 1


@dataclass(frozen=True)
class ExpertsLayer(Layer):
    """(dispatched,) to (combined,): the buffers of some experts, of any number of microbatches."""

    half: Experts

    def compute(self, p: dict[str, Tensor], inputs: Tensors, share: Share, dropout: Dropout | None) -> Tensors:
        (x,) = inputs
        assert x is not None
        return (experts_of(self.half.part, p, x),)
