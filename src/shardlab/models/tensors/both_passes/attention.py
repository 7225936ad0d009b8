"""Both passes of causal attention."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import torch
from torch import Tensor

from shardlab.models.attention import Attend
from shardlab.models.tensors.both_passes.primitive import BothPasses, TensorPlaces, Workspace, passes


@passes.register
def _(primitive: Attend, at: TensorPlaces) -> BothPasses | None:
    """On a CPU, where torch has one kernel for it."""
    if primitive.drops or at.device != "cpu":
        return None
    size = primitive.hidden_size // primitive.heads
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    attend_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    q, kv, made = at.tensors["q"], at.tensors["kv"], at.make("x")
    keeps = queries, keys, values, mixed, lse = [at.make() for _ in range(5)]

    def heads(x: Tensor, tokens: int) -> Tensor:
        """(rows x T, features) to (rows, heads, T, size)."""
        return x.view(-1, tokens, x.shape[-1] // size, size).transpose(1, 2)

    def features(x: Tensor) -> Tensor:
        """(rows, heads, T, size) to (rows x T, features)."""
        return x.transpose(1, 2).reshape(-1, x.shape[1] * size)

    def forward(its: Workspace) -> None:
        tensors = its.tensors
        each = [heads(part, its.tokens) for part in (tensors[q], *tensors[kv].chunk(2, -1))]
        tensors[queries], tensors[keys], tensors[values] = each
        tensors[mixed], tensors[lse] = attend(*each, 0.0, True)
        tensors[made] = features(tensors[mixed])

    def backward(its: Workspace) -> None:
        kept = [its.tensors[place] for place in keeps]
        each = attend_backward(heads(its.taken(made), its.tokens), *kept, 0.0, True)
        of_queries, *of_kv = [features(gradient) for gradient in each]
        together = torch.cat((of_queries, *of_kv), -1)  # as a projection wants them, which makes no copy then
        of_q, of_kv = together.split_with_sizes((of_queries.shape[-1], together.shape[-1] - of_queries.shape[-1]), -1)
        its.give(q, of_q)
        its.give(kv, of_kv)

    return BothPasses(forward, backward, tuple(keeps))
