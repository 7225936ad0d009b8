"""PyTorch's parallelisms, used as in their documentation: DDP, ZeroRedundancyOptimizer, FSDP2, DTensor, pipelines.

Options that help without a cost are set. Gradients are views of DDP's buckets, ZeroRedundancyOptimizer broadcasts whole
buckets of parameters, and tensor parallelism computes queries, keys and values with one matrix.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false
# torch leaves some of its annotations out.

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from shardlab.execute.transport.process_group import BACKEND, register_backend
from shardlab.measure.side_by_side.contender import (
    ADAMW,
    Block,
    CausalAttention,
    DrawnBatches,
    GPTModule,
    Loop,
    adamw,
    gpt_module,
    groups_of,
    loss_of,
    report_loss,
)
from shardlab.measure.side_by_side.results import MICROBATCHES, SEED, SHARED, Size, StrategyPair

Wrapped = tuple[torch.nn.Module, torch.optim.Optimizer]


_mesh_numbers = count()


@dataclass(frozen=True)
class TorchRanks:
    """Ranks of PyTorch's side, and their transport.

    Attributes:
        count: number of ranks.
        transport: "shared" for shared memory as a backend of torch.distributed. With any other value, the default
            process group is used.
    """

    count: int
    transport: str

    def group(self) -> dist.ProcessGroup | None:
        """Create the process group of all ranks (None: the default group)."""
        if self.transport != SHARED:
            return None
        register_backend()
        group = dist.new_group(backend=BACKEND)
        assert isinstance(group, dist.ProcessGroup)
        return group

    def mesh(self, module: GPTModule, *shape: int) -> DeviceMesh:
        """Create a device mesh. Its dims get new names, since DTensor's caches treat meshes of equal names as one."""
        number = next(_mesh_numbers)
        names = tuple(f"mesh_{number}_{dim}" for dim in range(len(shape)))
        backends: Any = None
        if self.transport == SHARED:
            register_backend()
            backends = dict.fromkeys(names, BACKEND)
        device = next(module.parameters()).device.type
        return init_device_mesh(device, shape, mesh_dim_names=names, backend_override=backends)


def ddp(module: GPTModule, ranks: TorchRanks) -> Wrapped:
    """Wrap a module in DDP: gradients are averaged in buckets during the backward pass."""
    wrapped = DistributedDataParallel(module, gradient_as_bucket_view=True, process_group=ranks.group())
    return wrapped, adamw(list(module.parameters()))


def zero_1(module: GPTModule, ranks: TorchRanks) -> Wrapped:
    """Wrap a module in DDP, and shard the optimizer's state over the ranks."""
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # torch itself uses torch.jit
        from torch.distributed.optim import ZeroRedundancyOptimizer

    group = ranks.group()
    wrapped = DistributedDataParallel(module, gradient_as_bucket_view=True, process_group=group)
    groups = groups_of(list(module.parameters()))
    settings: dict[str, Any] = ADAMW | {"process_group": group}
    return wrapped, ZeroRedundancyOptimizer(groups, torch.optim.AdamW, parameters_as_bucket_view=True, **settings)


def fsdp2(module: GPTModule, ranks: TorchRanks) -> Wrapped:
    """Shard each block, and then the rest, over all ranks."""
    return _fully_sharded(module, ranks.mesh(module, ranks.count))


def hsdp(module: GPTModule, ranks: TorchRanks) -> Wrapped:
    """Shard each block within each half of the ranks; the halves are replicas."""
    return _fully_sharded(module, ranks.mesh(module, 2, ranks.count // 2))


def _fully_sharded(module: GPTModule, mesh: DeviceMesh) -> Wrapped:
    for block in module.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module, adamw(list(module.parameters()))


WRAPPERS: dict[str, Callable[[GPTModule, TorchRanks], Wrapped]] = {
    "ddp": ddp,
    "zero-1": zero_1,
    "zero-3": fsdp2,
    "fsdp": fsdp2,
    "hsdp": hsdp,
}
"""Functions that wrap a module for data parallelism and create its optimizer, by the name of the pair."""


class TensorParallelLoop(Loop):
    """Training loop whose logits are split over the vocabulary."""

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        with loss_parallel():
            loss = loss_of(self.module(x), targets)
            loss.backward()
        assert isinstance(loss, DTensor)
        return loss.to_local()


def tensor_parallel(module: GPTModule, ranks: TorchRanks) -> torch.optim.Optimizer:
    """Split a module over all ranks, as in the tutorial of parallelize_module, and return this rank's optimizer."""
    mesh = ranks.mesh(module, ranks.count)
    outer: dict[str, ParallelStyle] = {
        "wte": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(module, mesh, outer)
    for block in module.blocks:
        assert isinstance(block, Block)
        _cut(block, mesh, ranks.count)
    parameters = list(module.parameters())
    cut = [parameter for parameter in parameters if isinstance(parameter, DTensor)]
    whole = [parameter for parameter in parameters if not isinstance(parameter, DTensor)]
    return adamw(cut, whole)


def _cut(block: Block, mesh: DeviceMesh, ranks: int) -> None:
    """Split the heads of a block and the hidden features of its MLP."""
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
    """Reorder the rows for queries, keys and values so that those of each rank are consecutive."""
    linear: nn.Linear = attention.c_attn
    with torch.no_grad():
        for tensor in (linear.weight, linear.bias):
            tensor.copy_(tensor.unflatten(0, (3, ranks, -1)).transpose(0, 1).flatten(0, 2).clone())


ONE_STAGE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
MORE_STAGES = {"interleaved-1f1b": ScheduleInterleaved1F1B, "zb-v": ScheduleZBVZeroBubble}
"""Schedules of torch.distributed.pipelining, by the name of the pair."""


def stages_of(pair: StrategyPair, size: Size, ranks: int, rank: int) -> dict[int, range]:
    """Return the layers of each stage of a rank, by the number of the stage. They are those of our plan."""
    plan, layers = pair.plan(ranks), size.model.layers
    bounds = plan.bounds(layers)
    owners = plan.steps(layers, MICROBATCHES).ranks_of_stages
    return {stage: range(bounds[stage], bounds[stage + 1]) for stage, owner in enumerate(owners) if owner == rank}


class Pipeline:
    """One rank's part of a pipeline of `torch.distributed.pipelining`.

    Attributes:
        modules: stages of the rank.
    """

    def __init__(
        self, pair: StrategyPair, size: Size, ranks: TorchRanks, rank: int, batches: DrawnBatches, device: torch.device
    ) -> None:
        own_stages = stages_of(pair, size, ranks.count, rank)
        count, group = ranks.count * len(own_stages), ranks.group()
        self.modules: list[GPTModule] = [gpt_module(size.model, layers, SEED, device) for layers in own_stages.values()]
        numbered = zip(self.modules, own_stages, strict=True)
        stages: list[Any] = [PipelineStage(module, stage, count, device, group=group) for module, stage in numbered]
        self._schedule: Any = (
            ONE_STAGE[pair.name](stages[0], MICROBATCHES, loss_of)
            if pair.name in ONE_STAGE
            else MORE_STAGES[pair.name](stages, MICROBATCHES, loss_of)
        )
        self._optimizer = adamw([parameter for module in self.modules for parameter in module.parameters()])
        self._first, self._last = 0 in own_stages, count - 1 in own_stages
        self._batches, self._device, self._at = batches, device, 0

    def step(self) -> Tensor:
        x, targets = (tensor.to(self._device) for tensor in self._batches.whole(self._at))
        losses: list[Tensor] = []
        arguments = (x,) if self._first else ()
        keywords = {"target": targets, "losses": losses} if self._last else {}
        self._schedule.step(*arguments, **keywords)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._at += 1
        mean = torch.stack(losses).mean() if self._last else torch.zeros((), device=self._device)
        return report_loss(mean, targets.numel() if self._last else 0)
