"""Plan: the settings that say how a model is split over a mesh.

`Plan` is a frozen dataclass whose fields are also the flags of the command line and the keys of TOML and JSON files.
Fields that contradict each other are refused when the plan is created; conditions that depend on a model are checked
later, by `resolve`. `program_from_plan` in `program.py` is the program that follows any plan.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from shardlab.common.calls import public_class
from shardlab.common.errors import naming
from shardlab.common.fields import (
    COUNT,
    NUMBERS,
    SWITCH,
    as_text,
    axes,
    check_fields,
    choice,
    choice_or_ints,
    name_or,
    read_settings,
)
from shardlab.common.files import read_file
from shardlab.common.text import counted
from shardlab.common.user_code import MAX_FOLDED_OPS, MAX_OPS, require_ops
from shardlab.language import Mesh, Sizes, UserError
from shardlab.language.pass_names import PASSES_FIELD, named_passes
from shardlab.language.recompute_names import MODULES, POLICIES, is_inside_blocks
from shardlab.strategies.schedules import Schedule
from shardlab.strategies.schedules.find import find_schedule, schedule_file
from shardlab.strategies.schedules.steps import Steps, require_size, resolve_schedule

DATA_AXES = ("dp_shard", "dp_replicate")
"""Data-parallel axes over which parameters may be sharded."""

BATCH_AXES = ("dp_replicate", "dp_shard", "ep")
"""Axes over which microbatches are distributed, outermost first."""

CUT_AXES = (*DATA_AXES, "cp")
"""Axes whose ranks see different tokens. Weights, gradients and optimizer state may be sharded over them."""

UNNAMED = "plan"
"""Name of a plan that was not given one."""

Context = Literal["ring", "all_gather", "ulysses"]

Reshard = Literal["layer", "forward", "stage", "step"]

ReduceAt = Literal["layer", "step"]

Recompute = Literal["none", "selective", "full", "per-op"]

COUNTED_RECOMPUTE = ("every", "first", "uniform")
"""Words of `Plan.recompute` that take a number, such as every-2."""


@public_class
@dataclass(frozen=True)
class Plan:
    """Settings of how a model is split over mesh axes, and of when values are gathered and reduced.

    The fields `shard_parameters`, `shard_gradients` and `shard_optimizer` select the stage of ZeRO. The table has the
    fraction of the parameters, gradients and optimizer state that each of n data-parallel ranks stores:

    ====================  ===============  ==============  ===============
    name                  parameters       gradients       optimizer state
    ====================  ===============  ==============  ===============
    DDP                   whole            whole           whole
    ZeRO-1                whole            whole           1/n
    ZeRO-2                whole            1/n             1/n
    ZeRO-3, FSDP          1/n              1/n             1/n
    ====================  ===============  ==============  ===============

    (Rajbhandari et al. 2020, arXiv 1910.02054, section 5.) HSDP maps all three to `dp_shard` and replicates them over
    `dp_replicate`; the partially sharded form of Levanter (issue 325) maps parameters to `dp_shard` and the optimizer's
    state to both axes.

    Gradients are reduced while backward passes continue. The gradients in flight over an axis are at most as large as
    the rank's largest block, whether layers are whole blocks or half-blocks.

    Selective recomputation is that of Korthikanti et al. 2022 (arXiv 2205.05198, section 5): the attention scores and
    their softmax are computed again from queries, keys and values. A block that is recomputed in full keeps only its
    input. The embedding and the head of a model in half-blocks are never recomputed; of a mixture of experts, only the
    experts are.

    The string after each field is the help of its flag: `shardlab.common.fields` makes flags, TOML and JSON of it.
    """

    mesh: Mesh = field(default_factory=Mesh)
    """The ranks, by axes."""

    schedule: Annotated[str | Schedule, name_or(Schedule)] = "1f1b"
    """Pipeline schedule: a built-in name, path/to/file.py:generator, or a CSV file of PyTorch. On one pipeline rank,
    1f1b runs the microbatches one by one."""

    stages_per_rank: Annotated[int | None, COUNT] = None
    """Pipeline stages on each rank, for a schedule without a fixed number."""

    layers_per_stage: Annotated[tuple[int, ...], NUMBERS] = ()
    """Number of layers of each stage. Default: as even as possible. Half-blocks are counted in pairs of a norm and a
    body. In a mixture of experts, blocks are counted, and the head as one more."""

    shard_parameters: Annotated[tuple[str, ...], axes(*CUT_AXES)] = ()
    """Mesh axes over which weights are sharded, outermost first: some of dp_shard, dp_replicate and cp, or nothing."""

    shard_gradients: Annotated[tuple[str, ...], axes(*CUT_AXES)] = ()
    """Mesh axes over which accumulated gradients are sharded."""

    shard_optimizer: Annotated[tuple[str, ...], axes(*CUT_AXES)] = ()
    """Mesh axes over which the optimizer state is sharded. The axes that shard weights or gradients come first."""

    reduce_every_microbatch: Annotated[tuple[str, ...] | None, axes(*CUT_AXES, "ep")] = None
    """Mesh axes over which gradients are reduced after each microbatch instead of once a step. Default: the axes that
    shard them. Over ep, this concerns the gradients of all weights but the experts."""

    reduce_at: Annotated[ReduceAt, choice(ReduceAt)] = "layer"
    """When gradients that are reduced once a step are reduced: as soon as a layer's gradient is complete, while
    backward passes continue (layer), or after all backward passes (step)."""

    reshard_after: Annotated[Reshard, choice(Reshard)] = "layer"
    """When gathered weights are freed: after each use (layer), after each forward pass and the last use (forward), when
    the rank goes on to another stage (stage), or after their last use (step)."""

    sequence_parallel: Annotated[bool, SWITCH] = False
    """Shard the activations between the matrices along the sequence, over the tp ranks."""

    recompute: Annotated[
        str | tuple[int, ...],
        choice_or_ints(
            Recompute,
            "block",
            COUNTED_RECOMPUTE,
            is_inside_blocks,
            f"modules joined by + ({', '.join(MODULES)}), a policy ({', '.join(POLICIES)})",
        ),
    ] = "none"
    """Recomputation in the backward pass: nothing, the attention scores (selective), everything but the input of each
    block (full), the blocks with these numbers, from 0, the last of every N blocks (every-N), the first N blocks of
    each stage (first-N), or all blocks, of which N in a row keep one input (uniform-N). For predictions only:
    everything but attention's result and every second product (per-op, as in torchtitan); modules of Megatron-LM,
    joined by +, such as layernorm+moe_act; and policies of MaxText, such as minimal or save_qkv_proj."""

    freeze: Annotated[tuple[int, ...], NUMBERS] = ()
    """Blocks, by number from 0, whose weights are not trained. They have no gradient and no optimizer state. The
    embedding is part of the first block, and the head is part of the last."""

    context: Annotated[Context, choice(Context)] = "ring"
    """How queries reach the keys and values of other context-parallel ranks: in a ring, by all_gather, or by ulysses,
    where ranks exchange slices of sequences for heads."""

    ulysses_degree: Annotated[int | None, COUNT] = None
    """Number of neighbouring cp ranks that exchange slices of sequences for heads. Default: all of them with ulysses,
    otherwise none. Keys and values of other ranks come as `context` says: by all_gather, or else around a ring."""

    stripes: Annotated[int | None, COUNT] = None
    """Slices of every sequence on each cp rank, dealt in turn (striped attention), which nearly balances the work.
    Default: an early and a late slice, which balance it exactly."""

    passes: Annotated[str | None, PASSES_FIELD] = None
    """Passes that rewrite the tapes for speed or memory, such as prefetch,bucket=4; or all, or none (shardlab passes
    lists them). Default: every pass that helps, if ranks run the program; none, if it is drawn or predicted."""

    def __post_init__(self) -> None:
        if not isinstance(self.mesh, Mesh):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UserError(f"mesh is {self.mesh!r:.100}; give a mesh, such as Mesh(dp_shard=4)")
        check_fields(self)
        if isinstance(self.schedule, str):
            schedule_file(self.schedule)
        if self.passes is not None:
            named_passes(self.passes)
        for name in ("shard_parameters", "shard_gradients"):
            cut, state_axes = getattr(self, name), self.shard_optimizer
            if state_axes[: len(cut)] != cut:
                raise UserError(
                    f"{name} is {as_text(cut)} but shard_optimizer is {as_text(state_axes)}; what is updated must be a "
                    f"slice of what is kept: let shard_optimizer begin with {as_text(cut)}"
                )
        if self.sequence_parallel and self.mesh.tp == 1:
            raise UserError("sequence_parallel cuts sequences over tp, but the mesh has tp 1; give --tp 2 or more")
        if self.stripes is not None and min(self.stripes, self.mesh.cp) < 2:
            raise UserError(
                f"stripes is {self.stripes} and the mesh has cp {self.mesh.cp}; sequences are dealt in 2 stripes or "
                "more, over 2 ranks of cp or more"
            )
        if self.mesh.cp % self.ulysses:
            raise UserError(
                f"ulysses_degree is {self.ulysses}, but the mesh has cp {self.mesh.cp}; give a number that divides it"
            )
        if not set(self.shard_gradients) <= set(self.axes_of_every_microbatch):
            raise UserError(
                f"shard_gradients is {as_text(self.shard_gradients)} but reduce_every_microbatch is "
                f"{as_text(self.axes_of_every_microbatch)}; a gradient that is cut is reduced at each microbatch: name "
                "its axes in reduce_every_microbatch as well"
            )

    def __str__(self) -> str:
        axes = ", ".join(f"{axis}={size}" for axis, size in self.mesh.used.items())
        values = ((setting.name, getattr(self, setting.name), setting.default) for setting in fields(self)[1:])
        others = "".join(f", {name}={value!r}" for name, value, default in values if value != default)
        return f"Plan(Mesh({axes}){others})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Show only the fields that differ from their defaults in a notebook."""
        printer.text(str(self))

    def on(self, ranks: int) -> Plan:
        """Return this plan for another number of ranks, with its data-parallel axes resized.

        If the plan has replicas and `dp_shard` divides the data-parallel ranks, the number of replicas changes, so that
        each rank stores as much as before. Otherwise all data-parallel ranks form one shard group.

        >>> str(Plan(Mesh(pp=2, dp_shard=4)).on(4).mesh), str(Plan(Mesh(dp_replicate=2, dp_shard=2)).on(6).mesh)
        ('pp 2 x dp_shard 2', 'dp_replicate 3 x dp_shard 2')

        Raises:
            UserError: if the other axes do not divide the ranks.
        """
        mesh = self.mesh
        others = mesh.world // (mesh.dp_replicate * mesh.dp_shard)
        data, rest = divmod(ranks, others)
        if rest:
            raise UserError(
                f"the plan's mesh is {mesh}, and its data-parallel axes alone follow the number of ranks: give a "
                f"multiple of {others} ranks, not {ranks}"
            )
        shard = mesh.dp_shard if mesh.dp_replicate > 1 and data % mesh.dp_shard == 0 else data
        return replace(self, mesh=replace(mesh, dp_replicate=data // shard, dp_shard=shard))

    @property
    def counted_recompute(self) -> tuple[str, int] | None:
        """Word and number of a recomputation such as every-2 (None: the recomputation has no number)."""
        word, _, number = self.recompute.partition("-") if isinstance(self.recompute, str) else ("", "", "")
        return (word, int(number)) if word in COUNTED_RECOMPUTE else None

    @property
    def recompute_inside(self) -> str:
        """Name of a recomputation of parts of blocks, for predictions only ("": the plan has no such recomputation)."""
        return self.recompute if isinstance(self.recompute, str) and is_inside_blocks(self.recompute) else ""

    @property
    def recomputes_blocks(self) -> bool:
        """Whether whole blocks are recomputed: all or some of them."""
        return self.recompute not in ("none", "selective", ()) and not self.recompute_inside

    def without_effect(self) -> dict[str, str]:
        """Return the fields that change nothing on this mesh, each with the end of a sentence that says why.

        >>> Plan(Mesh(dp_shard=2), shard_optimizer=("cp",), context="ulysses").without_effect()
        {'shard_optimizer': 'cp has no effect: the mesh has cp 1', 'context': 'has no effect: the mesh has cp 1'}
        """
        axes, reasons = set(self.mesh.used), dict[str, str]()
        for name in ("shard_parameters", "shard_gradients", "shard_optimizer", "reduce_every_microbatch"):
            if idle := [axis for axis in getattr(self, name) or () if axis not in axes]:
                reasons[name] = f"{idle[0]} has no effect: the mesh has {idle[0]} 1"
        if self.reshard_after != "layer" and axes.isdisjoint(self.shard_parameters):
            reasons["reshard_after"] = "has no effect: no weight is sharded"
        if self.reduce_at != "layer" and axes.isdisjoint({*CUT_AXES, "ep"} - {*self.axes_of_every_microbatch}):
            reasons["reduce_at"] = "has no effect: no gradient is reduced once a step"
        if self.context != "ring" and self.mesh.cp == 1:
            reasons["context"] = "has no effect: the mesh has cp 1"
        return reasons

    def counted(self, sizes: Sizes) -> Sizes:
        """Return sizes with sequences divided into the slices that this plan distributes over cp."""
        return sizes if self.stripes is None else replace(sizes, slices_per_rank=self.stripes)

    @property
    def title(self) -> str:
        """Title of a plan without a name: its mesh, and the schedule of a pipeline."""
        schedule = f" ({self.as_dict()['schedule']})" if self.mesh.pp > 1 else ""
        return f"{self.mesh}{schedule}" if self.mesh.world > 1 else "one device"

    @property
    def attention_apart(self) -> bool:
        """Whether the plan needs attention as a separate step between two layers of half-blocks."""
        return self.mesh.cp > 1 or self.recompute == "selective"

    @property
    def ulysses(self) -> int:
        """Number of neighbouring cp ranks that exchange slices of sequences for heads (1: no exchange)."""
        return self.ulysses_degree or (self.mesh.cp if self.context == "ulysses" else 1)

    @property
    def axes_of_every_microbatch(self) -> tuple[str, ...]:
        """Axes over which the gradient of each microbatch is reduced: `reduce_every_microbatch` or its default."""
        return self.shard_gradients if self.reduce_every_microbatch is None else self.reduce_every_microbatch

    @property
    def schedule_name(self) -> str:
        """Name of the schedule."""
        return self.schedule if isinstance(self.schedule, str) else self.schedule.name

    @property
    def zero_stage(self) -> int:
        """Stage of ZeRO, from 0 (nothing is sharded) to 3 (weights are sharded too)."""
        shared = self.shard_optimizer, self.shard_gradients
        return 3 if self.shard_parameters else sum(map(bool, shared))

    @property
    def data_ranks(self) -> int:
        """Number of ranks over which the batch is distributed."""
        sizes = self.mesh.sizes()
        return math.prod(sizes[axis] for axis in BATCH_AXES)

    @property
    def order(self) -> Schedule | Steps:
        """The schedule, or the steps from a CSV file for one size of pipeline.

        Raises:
            UserError: if no schedule has this name.
        """
        return self.schedule if isinstance(self.schedule, Schedule) else find_schedule(self.schedule)

    def steps(self, units: int, microbatches: int) -> Steps:
        """Return the steps of each pipeline rank on its share of the microbatches.

        Args:
            units: number of parts between which a pipeline may split the model.
            microbatches: number of microbatches of the global batch.

        Raises:
            UserError: if the data-parallel ranks do not divide the microbatches, or these do not fit the schedule.
        """
        per_rank, rest = divmod(microbatches, self.data_ranks)
        if rest:
            verb = "does" if microbatches == 1 else "do"
            raise UserError(
                f"{counted(microbatches, 'microbatch')} {verb} not divide among {self.data_ranks} data-parallel ranks; "
                f"give a multiple of {self.data_ranks}"
            )
        order, ranks = self.order, self.mesh.pp
        if isinstance(order, Schedule):
            return resolve_schedule(order, ranks, per_rank, self.stages_on_rank(units))
        require_size(order, str(self.schedule), ranks, per_rank, self.data_ranks)
        return order

    def bounds(self, units: int, units_text: str = "") -> list[int]:
        """Return the boundaries of the pipeline stages: stage s has the units from bounds[s] up to bounds[s + 1].

        Args:
            units: number of parts between which a pipeline may split the model.
            units_text: words for the units in an error message.

        Raises:
            UserError: if there are fewer units than stages, or `layers_per_stage` does not add up to the units.
        """
        order = self.order
        stages = order.stages if isinstance(order, Steps) else self.mesh.pp * self.stages_on_rank(units)
        counts = self.layers_per_stage
        if counts:
            if len(counts) != stages or sum(counts) != units or min(counts) < 1:
                raise UserError(
                    f"layers_per_stage is {as_text(counts)}, but {units} layers are to be cut into "
                    f"{counted(stages, 'stage')}; give {counted(stages, 'number')} of 1 or more that add up to {units}"
                )
            return [sum(counts[:stage]) for stage in range(stages + 1)]
        if units < stages:
            raise UserError(
                f"{units_text or counted(units, 'layer')} do{'es' * (units == 1)} not reach {stages} pipeline stages; "
                f"give at most {counted(units, 'stage')}, or more layers"
            )
        return [stage * units // stages for stage in range(stages + 1)]

    def require_ops(self, layers: int, microbatches: int, *, tiles: int = 1, folded: bool = False) -> None:
        """Check that a step does not exceed the number of ops that can be traced.

        Args:
            layers, microbatches: numbers of the model's layers and of the global batch's microbatches.
            tiles: number of tiles of each layer (pass `tile`).
            folded: whether only one rank of each pipeline stage is traced.

        Raises:
            UserError: if it does. The message has a lower bound of the number of ops.
        """
        mesh, replicas = self.mesh, 1 if folded else self.mesh.world // self.mesh.pp
        passes = 2 * layers * tiles * -(-microbatches // self.data_ranks) * replicas
        sizes = f"{counted(layers, 'layer')} and {counted(microbatches, 'microbatch')} on {counted(mesh.world, 'rank')}"
        sizes += f" in {counted(tiles, 'tile')}" if tiles > 1 else ""
        minimum = passes + 2 * layers * replicas + mesh.pp
        require_ops(minimum, sizes, MAX_FOLDED_OPS if folded else MAX_OPS)

    def natural_layers(self) -> int:
        """Return the number of layers of a model with one layer per stage, or with `layers_per_stage`.

        Raises:
            UserError: if there is no such schedule, or it needs another number of stages than `stages_per_rank`.
        """
        order = self.order
        if self.layers_per_stage:
            return sum(self.layers_per_stage)
        stages = self.mesh.pp * (self.stages_per_rank or 1)
        require_ops(2 * stages, f"the passes of {counted(stages, 'pipeline stage')}")
        on_a_rank = self.stages_on_rank(2 * self.mesh.pp)
        return order.stages if isinstance(order, Steps) else self.mesh.pp * on_a_rank

    def stages_on_rank(self, units: int) -> int:
        """Return the number of stages on each pipeline rank.

        It is the number that the schedule requires, or else `stages_per_rank`. If neither sets a number, it is 2 on a
        pipeline of several ranks if the model has enough units, and 1 otherwise.

        Args:
            units: number of parts between which a pipeline may split the model.

        Raises:
            UserError: if the schedule needs another number than `stages_per_rank`.
        """
        order = self.order
        if isinstance(order, Steps):
            stages = order.stages // len(order.of_ranks)
            if self.stages_per_rank not in (None, stages):
                raise UserError(
                    f"{self.schedule} has {order.stages} stages on {len(order.of_ranks)} ranks, but stages_per_rank is "
                    f"{self.stages_per_rank}; leave it out"
                )
            return stages
        required = order.stages_per_rank
        if required is not None and self.stages_per_rank not in (None, required):
            raise UserError(
                f"{order.name} has {required} stage{'s' * (required > 1)} on each rank, but stages_per_rank is "
                f"{self.stages_per_rank}; leave it out, or take a looped schedule such as interleaved-1f1b"
            )
        return required or self.stages_per_rank or max(1, min(2 if self.mesh.pp > 1 else 1, units // self.mesh.pp))

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as strings, numbers and lists, as in a file. Empty fields are left out."""
        words: dict[str, Any] = {"mesh": self.mesh.used}
        for setting in fields(self)[1:]:
            value = getattr(self, setting.name)
            if value or value != setting.default:
                words[setting.name] = _as_written(value)
        return words

    @classmethod
    def from_dict(cls, words: Mapping[str, Any], source: str = "a plan") -> Plan:
        """Return the plan with the fields of a dictionary, as `as_dict` returns it.

        Raises:
            UserError: for an unknown field or axis, or a wrong value.
        """
        return read_settings(cls, words, source)


def read_plan(path: Path) -> Plan:
    """Read a plan from a TOML file with the fields of `Plan` and a table `mesh` of axis sizes.

    Raises:
        UserError: for a file that cannot be read, an unknown field, or a wrong value.
    """
    with naming(path):
        return Plan.from_dict(read_file(path, "TOML"), str(path))


def _as_written(value: Any) -> Any:
    if isinstance(value, Schedule):
        return value.name
    return list(cast(tuple[Any, ...], value)) if isinstance(value, tuple) else value
