"""PyTorch's tensor parallelism: DTensor's parallelize_module, as its tutorial writes it, with a loss over slices of the
vocabulary.

One change makes it faster than the tutorial: queries, keys and values come from one matrix, whose rows are first put in
the order in which the ranks have them.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from shardlab.measure.side_by_side.contender import Loop
from shardlab.measure.side_by_side.module import Block, CausalAttention, GPTModule, groups_of, loss_of
from shardlab.measure.side_by_side.pairs import OPTIMIZER


class TensorParallelLoop(Loop):
    """A loop whose logits are cut over the vocabulary."""

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        with loss_parallel():
            loss = loss_of(self.module(x), targets)
            loss.backward()
        assert isinstance(loss, DTensor)
        return loss.to_local()


def tensor_parallel(module: GPTModule, ranks: int) -> torch.optim.Optimizer:
    """Cut a module over all ranks, in place; the optimizer of what is left of it here."""
    mesh = init_device_mesh(next(module.parameters()).device.type, (ranks,))
    outer: dict[str, ParallelStyle] = {
        "wte": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(module, mesh, outer)
    for block in module.blocks:
        assert isinstance(block, Block)
        _cut(block, mesh, ranks)
    parameters = list(module.parameters())
    cut = [each for each in parameters if isinstance(each, DTensor)]
    whole = [each for each in parameters if not isinstance(each, DTensor)]
    groups = [*groups_of(cut, OPTIMIZER), *groups_of(whole, OPTIMIZER)]
    betas, eps = OPTIMIZER.betas, OPTIMIZER.eps
    return torch.optim.AdamW(groups, lr=OPTIMIZER.learning_rate, betas=betas, eps=eps, fused=True)


def _cut(block: Block, mesh: DeviceMesh, ranks: int) -> None:
    """Cut a block's heads and the features inside its MLP."""
    _by_rank(block.attn, ranks)
    block.attn.heads //= ranks
    plan: dict[str, ParallelStyle] = {
        "attn.c_attn": ColwiseParallel(),
        "attn.c_proj": RowwiseParallel(),
        "mlp.c_fc": ColwiseParallel(),
        "mlp.c_proj": RowwiseParallel(),
    }
    parallelize_module(block, mesh, plan)


def _by_rank(attention: CausalAttention, ranks: int) -> None:
    """Put the rows for queries, keys and values so that each rank's come one after the other."""
    linear: nn.Linear = attention.c_attn
    with torch.no_grad():
        for tensor in (linear.weight, linear.bias):
            tensor.copy_(tensor.unflatten(0, (3, ranks, -1)).transpose(0, 1).flatten(0, 2).clone())
