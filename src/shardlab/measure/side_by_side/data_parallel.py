"""PyTorch's data parallelism: DDP, ZeroRedundancyOptimizer and FSDP2, each as its documentation writes it.

Two options that cost nothing are set where they help: gradients are views of DDP's buckets, and ZeroRedundancyOptimizer
broadcasts buckets of parameters and not one after the other.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from shardlab.measure.side_by_side.module import GPTModule, adamw, groups_of
from shardlab.measure.side_by_side.pairs import OPTIMIZER

Wrapped = tuple[torch.nn.Module, torch.optim.Optimizer]


def ddp(module: GPTModule, ranks: int) -> Wrapped:
    """Gradients are averaged in buckets while the backward pass goes on."""
    return DistributedDataParallel(module, gradient_as_bucket_view=True), adamw(_parameters(module), OPTIMIZER)


def zero_1(module: GPTModule, ranks: int) -> Wrapped:
    """DDP, with the optimizer's state dealt to the ranks."""
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # torch's own use of torch.jit
        from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = DistributedDataParallel(module, gradient_as_bucket_view=True)
    groups: Any = groups_of(_parameters(module), OPTIMIZER)
    settings: Any = {"lr": OPTIMIZER.learning_rate, "betas": OPTIMIZER.betas, "eps": OPTIMIZER.eps, "fused": True}
    optimizer = ZeroRedundancyOptimizer(groups, torch.optim.AdamW, parameters_as_bucket_view=True, **settings)
    return wrapped, optimizer


def fsdp2(module: GPTModule, ranks: int) -> Wrapped:
    """Each block, and then the rest, is sharded over all ranks."""
    return _fully_sharded(module, init_device_mesh(_device(module), (ranks,)))


def hsdp(module: GPTModule, ranks: int) -> Wrapped:
    """Each block is sharded within two halves of the ranks, which are replicas."""
    names = ("dp_replicate", "dp_shard")
    return _fully_sharded(module, init_device_mesh(_device(module), (2, ranks // 2), mesh_dim_names=names))


def _fully_sharded(module: GPTModule, mesh: DeviceMesh) -> Wrapped:
    for block in module.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module, adamw(_parameters(module), OPTIMIZER)


def _parameters(module: GPTModule) -> list[Tensor]:
    return list(module.parameters())


def _device(module: GPTModule) -> str:
    return next(module.parameters()).device.type


WRAPPERS: dict[str, Callable[[GPTModule, int], Wrapped]] = {
    "ddp": ddp,
    "zero-1": zero_1,
    "zero-3": fsdp2,
    "fsdp": fsdp2,
    "hsdp": hsdp,
}
"""By the pair's name, what makes a module and its optimizer data-parallel over so many ranks."""
