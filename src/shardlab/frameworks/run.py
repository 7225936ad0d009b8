"""`FrameworkRun`: the training step that a configuration describes, as a workload of the simulator.

Each framework's module makes one from its `Config` and the devices. `make_plan` turns a `Layout` into a plan. A layout
has the properties that most frameworks have keys for, such as the numbers of ranks and the stage of ZeRO.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardlab.common.errors import UserError
from shardlab.common.text import counted
from shardlab.frameworks.settings import Config
from shardlab.language import Mesh
from shardlab.language.precision import Optimizer, Precision
from shardlab.models import Blocks
from shardlab.models.architectures import Llama, MoE
from shardlab.planner.problem import plan_layers
from shardlab.simulate.hardware import Cluster
from shardlab.simulate.predict.recipe import Recipe
from shardlab.simulate.predict.workload import Workload
from shardlab.strategies.plan.plan import Context, Plan, ReduceAt


@dataclass(frozen=True)
class FrameworkRun:
    """Training step of a configuration on a cluster.

    Attributes:
        config: the settings that describe the step.
        model_name: the model in the framework's words.
        model, plan, precision, recipe, optimizer: parts of the step.
        cluster: the devices.
        micro_batch_size, microbatches: sequences of a microbatch, and microbatches of the global batch.
        notes: assumptions, and differences between the prediction and the framework.
    """

    config: Config
    model_name: str
    model: Blocks
    plan: Plan
    cluster: Cluster
    micro_batch_size: int
    microbatches: int
    precision: Precision
    recipe: Recipe
    optimizer: Optimizer = "adamw"
    notes: tuple[str, ...] = ()

    @property
    def workload(self) -> Workload:
        """The step as an input of the simulator."""
        return Workload(
            self.plan,
            self.recipe.model_as_run(self.model),
            self.cluster,
            self.microbatches,
            self.micro_batch_size,
            self.precision,
            recipe=self.recipe,
            optimizer=self.optimizer,
        )

    @property
    def sequences(self) -> int:
        """Sequences of the global batch."""
        return self.microbatches * self.micro_batch_size


@dataclass(frozen=True)
class Layout:
    """Distribution of a model over ranks, by properties that most frameworks have keys for.

    Attributes:
        mesh: numbers of ranks along the axes.
        zero: stage of ZeRO, from 0 to 3.
        schedule, stages: the pipeline's schedule, and the number of stages on each rank.
        blocks_of_stages: number of blocks of each stage (empty: as even as possible).
        units_of_stages: number of pipeline units of each stage, as in `Plan.layers_per_stage` (empty: not given). Units
            are blocks, or half-blocks and the head.
        sequence_parallel: whether activations that tensor parallelism would keep whole on every rank of tp are split
            along the sequence.
        recompute: what is recomputed, as in `Plan.recompute`.
        keeps_weights: whether gathered weights are kept until the step ends.
        reduce_at: when gradients are reduced, as in `Plan.reduce_at`.
        context: how queries reach the keys and values of other ranks.
        state_over_replicas: whether gradients and the optimizer's state are also sharded over `dp_replicate`.
    """

    mesh: Mesh
    zero: int = 0
    schedule: str = "1f1b"
    stages: int = 1
    blocks_of_stages: tuple[int, ...] = ()
    units_of_stages: tuple[int, ...] = ()
    sequence_parallel: bool = False
    recompute: str | tuple[int, ...] = "none"
    keeps_weights: bool = False
    reduce_at: ReduceAt = "layer"
    context: Context = "all_gather"
    state_over_replicas: bool = False


def make_plan(layout: Layout, model: Blocks) -> Plan:
    """Return the plan of a layout.

    With ZeRO-3 and a pipeline, gathered weights are kept until the step ends, and gradients are reduced once a step, as
    `shardlab.planner.published.reading.plan_of` assumes too.
    """
    mesh, zero = layout.mesh, layout.zero
    shard = tuple(axis for axis in ("dp_shard", "cp") if getattr(mesh, axis) > 1)
    piped, looped = mesh.pp > 1, layout.stages > 1
    state = (*shard, "dp_replicate") if layout.state_over_replicas and mesh.dp_replicate > 1 else shard
    keeps = zero == 3 and (piped or layout.keeps_weights)
    schedule = layout.schedule if piped else "1f1b"
    plan = Plan(
        mesh,
        schedule,
        stages_per_rank=layout.stages if piped and looped and schedule in LOOPED else None,
        shard_parameters=shard if zero >= 3 else (),
        shard_gradients=state if zero >= 2 and not keeps else (),
        shard_optimizer=state if zero >= 1 else (),
        reduce_at=layout.reduce_at,
        reshard_after="step" if keeps else "layer",
        sequence_parallel=layout.sequence_parallel and mesh.tp > 1,
        recompute=layout.recompute,
        context=layout.context,
    )
    if piped and layout.units_of_stages:
        plan = replace(plan, layers_per_stage=layout.units_of_stages)
    if piped and layout.blocks_of_stages:
        units = plan_layers(model, plan).pipeline_units
        plan = replace(plan, layers_per_stage=_units(layout.blocks_of_stages, units))
    return plan


LOOPED = ("interleaved-1f1b", "breadth-first")
"""Schedules whose number of stages on each rank can be chosen."""


def _units(blocks: Sequence[int], units: int) -> tuple[int, ...]:
    """Return the number of pipeline units of each stage (empty: a stage would have none).

    Args:
        blocks: number of blocks of each stage.
        units: number of all units. They are blocks, or half-blocks and the head.
    """
    per_block = units // sum(blocks)
    counts = [per_block * count for count in blocks]
    counts[-1] += units - sum(counts)
    return tuple(counts) if min(counts) > 0 else ()


def data_ranks(devices: int, others: int, file: str, words: str) -> int:
    """Return the number of data-parallel ranks of some devices.

    Args:
        devices: number of devices.
        others: product of the sizes of all other axes.
        file, words: name of the file and description of these axes, for messages.

    Raises:
        UserError: if `others` does not divide the number of devices.
    """
    ranks, rest = divmod(devices, others)
    if rest or not ranks:
        raise UserError(
            f"{file}: {words} need {counted(others, 'device')} or a multiple of them, but the cluster has {devices:,}; "
            "give another --cluster"
        )
    return ranks


def cut_batch(file: str, sequences: int, micro_batch_size: int, ranks: int) -> int:
    """Return the number of microbatches in a global batch.

    Args:
        file: name of the file, for messages.
        sequences, micro_batch_size: sequences of the global batch, and of a microbatch.
        ranks: number of data-parallel ranks.

    Raises:
        UserError: if the data-parallel ranks do not all get the same number of microbatches.
    """
    microbatches, rest = divmod(sequences, micro_batch_size * ranks)
    if rest or not microbatches:
        raise UserError(
            f"{file}: a global batch of {sequences:,} does not divide among {counted(ranks, 'data-parallel rank')} "
            f"with microbatches of {micro_batch_size}; it must be a multiple of {micro_batch_size * ranks:,}"
        )
    return microbatches * ranks


def other_micro_batches(step: FrameworkRun) -> Iterator[dict[str, int]]:
    """Yield changes to half and to twice the microbatch size with the same global batch, as values by meaning."""
    size, accumulation = step.micro_batch_size, step.microbatches // step.plan.data_ranks
    if size % 2 == 0:
        yield {"micro_batch_size": size // 2, "accumulation": accumulation * 2}
    if accumulation % 2 == 0:
        yield {"micro_batch_size": size * 2, "accumulation": accumulation // 2}


def model_words(model: Blocks) -> str:
    """Return a description of a model that has no name, such as `Llama of 8.03B parameters`."""
    count = model.parameter_count
    size = f"{count / 1e9:.3g}B" if count >= 1e9 else f"{count / 1e6:.3g}M"
    kind = "mixture" if isinstance(model, MoE) else "Llama" if isinstance(model, Llama) else "GPT"
    return f"{kind} of {size} parameters"


OPTIMIZERS: dict[str, Optimizer] = {
    "adamw": "adamw",
    "adam": "adamw",
    "sgd": "sgd",
    "lion": "lion",
    "muon": "muon",
    "dist_muon": "muon",  # of Megatron-LM
}
"""Optimizers by their names in the frameworks."""


def known_optimizer(name: Any, notes: list[str]) -> Optimizer:
    """Return the optimizer that a framework calls `name`, in any case; AdamW, with a note, if the name is unknown."""
    optimizer = OPTIMIZERS.get(str(name).lower())
    if optimizer is None:
        notes.append(f"optimizer {name} is predicted as AdamW")
    return optimizer or "adamw"
