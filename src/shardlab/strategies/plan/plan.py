"""A plan: how a model is laid over the mesh, in a dozen words. `planned` is the one program that follows any plan."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from shardlab.common.errors import nearest
from shardlab.common.fields import COUNT, NUMBERS, SWITCH, as_text, axes, check_fields, choice, choice_or_numbers, word
from shardlab.common.files import read_file
from shardlab.common.user_code import MAX_FOLDED, MAX_OPS, require_ops
from shardlab.language import AXES, Mesh, Sizes, UserError
from shardlab.language.pass_names import PASSES_FIELD, named_passes
from shardlab.language.rules.kinds import counted
from shardlab.strategies.schedules import Schedule
from shardlab.strategies.schedules.find import find_schedule
from shardlab.strategies.schedules.steps import Steps, steps_of

DATA_AXES = ("dp_shard", "dp_replicate")
"""The axes over which parameters may be cut."""

BATCH_AXES = ("dp_replicate", "dp_shard", "ep")
"""The axes over which microbatches are dealt, outermost first."""

CUT_AXES = (*DATA_AXES, "cp")
"""The axes whose ranks see different tokens, and so may share the work of keeping weights."""

UNNAMED = "plan"
"""Name of a plan that flags or a file without one describe."""

Context = Literal["ring", "all_gather", "ulysses"]
Reshard = Literal["layer", "stage", "step"]
ReduceAt = Literal["layer", "step"]
Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class Plan:
    """A choice of what is split over which axis, and when it is put together.

    The three mappings make the rows of one table. Over an axis of n data-parallel ranks:

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

    Gradients are reduced while backward passes go on. Over each axis, those of one block at a time are in flight, the
    rank's largest, however finely blocks are cut; so this takes no more memory in half-blocks than in whole ones.

    What each field does is written beside it, and is the help of its flag; `shardlab.common.fields` makes
    flags, TOML and JSON of the same description.

    Selective recomputation is that of Korthikanti et al. 2022 (arXiv 2205.05198, section 5): scores, and what is made
    of them, from queries, keys and values. Blocks that are recomputed keep their input alone; in half-blocks the
    embedding and the head keep what they need, in a mixture the dense layers.
    """

    mesh: Mesh = field(default_factory=Mesh)
    """The ranks, by axes."""

    schedule: Annotated[str | Schedule, word(Schedule)] = "1f1b"
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
    backward passes continue, or after all backward passes."""

    reshard_after: Annotated[Reshard, choice(Reshard)] = "layer"
    """When gathered weights are freed: after each use (layer), when the rank goes on to another stage (stage), or after
    their last use (step)."""

    sequence_parallel: Annotated[bool, SWITCH] = False
    """Shard the activations between the matrices along the sequence, over the tp ranks."""

    recompute: Annotated[Recompute | tuple[int, ...], choice_or_numbers(Recompute, "block")] = "none"
    """What the backward pass recomputes: nothing, the attention scores (selective), everything but the input of each
    block (full), or the blocks with these numbers, from 0."""

    freeze: Annotated[tuple[int, ...], NUMBERS] = ()
    """Blocks, by number from 0, whose weights are not trained. They have no gradient and no optimizer state. The
    embedding is part of the first block, and the head is part of the last."""

    context: Annotated[Context, choice(Context)] = "ring"
    """How queries reach the keys and values of other context-parallel ranks: in a ring, by all_gather, or by ulysses,
    where ranks exchange slices of sequences for heads."""

    ulysses_degree: Annotated[int | None, COUNT] = None
    """Number of neighbouring cp ranks that exchange slices of sequences for heads. Default: all of them with ulysses,
    otherwise none. Other keys and values are gathered with all_gather, otherwise passed around a ring."""

    stripes: Annotated[int | None, COUNT] = None
    """Slices of every sequence on each cp rank, dealt in turn (striped attention), which nearly balances the work.
    Default: an early and a late slice, which balance it exactly."""

    passes: Annotated[str | None, PASSES_FIELD] = None
    """Passes that rewrite the program for speed or memory, such as prefetch,bucket=4; or all, or none (shardlab passes
    lists them). Default: every pass that helps, if ranks run the program; none, if it is drawn or predicted."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.passes is not None:
            named_passes(self.passes)
        for name in ("shard_parameters", "shard_gradients"):
            cut, kept = getattr(self, name), self.shard_optimizer
            if kept[: len(cut)] != cut:
                raise UserError(
                    f"{name} is {as_text(cut)} but shard_optimizer is {as_text(kept)}; what is updated must be a slice "
                    f"of what is kept: let shard_optimizer begin with {as_text(cut)}"
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

    def on(self, ranks: int) -> Plan:
        """This plan on another number of ranks: its data-parallel axes follow, and all others stay.

        Where it has replicas, their number follows if it can, so that a rank keeps as much as before; else all
        data-parallel ranks share what is sharded.

        >>> str(Plan(Mesh(pp=2, dp_shard=4)).on(4).mesh), str(Plan(Mesh(dp_replicate=2, dp_shard=2)).on(6).mesh)
        ('pp 2 x dp_shard 2', 'dp_replicate 3 x dp_shard 2')

        Raises:
            UserError: when the other axes do not divide the ranks.
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
        return (
            self
            if ranks == mesh.world
            else replace(self, mesh=replace(mesh, dp_replicate=data // shard, dp_shard=shard))
        )

    def counted(self, sizes: Sizes) -> Sizes:
        """Sizes of a model whose sequences are counted in the slices that this plan deals."""
        return sizes if self.stripes is None else replace(sizes, slices_per_rank=self.stripes)

    @property
    def title(self) -> str:
        """Name of a plan that has no other: its mesh, and the schedule of a pipeline."""
        schedule = f" ({self.as_dict()['schedule']})" if self.mesh.pp > 1 else ""
        return f"{self.mesh}{schedule}" if self.mesh.world > 1 else "one device"

    @property
    def attention_apart(self) -> bool:
        """Whether attention must be a step of its own, between two layers of half-blocks."""
        return self.mesh.cp > 1 or self.recompute == "selective"

    @property
    def ulysses(self) -> int:
        """Number of neighbouring ranks of `cp` that exchange slices of sequences for heads (1: none do)."""
        return self.ulysses_degree or (self.mesh.cp if self.context == "ulysses" else 1)

    @property
    def axes_of_every_microbatch(self) -> tuple[str, ...]:
        """Axes over which each microbatch's gradient is reduced at once: as named, or those that cut it."""
        return self.shard_gradients if self.reduce_every_microbatch is None else self.reduce_every_microbatch

    @property
    def zero_stage(self) -> int:
        """The stage of ZeRO, by what data-parallel ranks share: 0 nothing, 3 everything."""
        shared = self.shard_optimizer, self.shard_gradients
        return 3 if self.shard_parameters else sum(map(bool, shared))

    @property
    def data_ranks(self) -> int:
        """Number of ranks among which the batch is dealt."""
        sizes = self.mesh.sizes()
        return math.prod(sizes[axis] for axis in BATCH_AXES)

    @property
    def order(self) -> Schedule | Steps:
        """The schedule itself, or one that was imported for one size.

        Raises:
            UserError: if there is none of this name.
        """
        return self.schedule if isinstance(self.schedule, Schedule) else find_schedule(self.schedule)

    def steps(self, units: int, microbatches: int) -> Steps:
        """Steps of each pipeline rank on its share of the microbatches.

        Args:
            units: the most stages into which the model may be cut: its layers, or fewer.
            microbatches: of the global batch.

        Raises:
            UserError: when they do not divide among the data-parallel ranks, or do not fit the schedule.
        """
        each, rest = divmod(microbatches, self.data_ranks)
        if rest:
            do = "does" if microbatches == 1 else "do"
            raise UserError(
                f"{counted(microbatches, 'microbatch')} {do} not divide among {self.data_ranks} data-parallel ranks; "
                f"give a multiple of {self.data_ranks}"
            )
        order, ranks = self.order, self.mesh.pp
        if isinstance(order, Schedule):
            return steps_of(order, ranks, each, self.stages_of_a_rank(units))
        if (len(order.of_ranks), order.microbatches) != (ranks, each):
            raise UserError(
                f"{self.schedule} is for {len(order.of_ranks)} pipeline ranks and {order.microbatches} microbatches on "
                f"each, but the mesh has pp {ranks} and {each} microbatches come to each; give --pp "
                f"{len(order.of_ranks)} --microbatches {order.microbatches * self.data_ranks}"
            )
        return order

    def bounds(self, units: int, named: str = "") -> list[int]:
        """Units at which stages begin, and the end of the last one: stage s has units bounds[s] up to bounds[s + 1].

        Args:
            units: into which the model may be cut.
            named: what a refusal calls them.

        Raises:
            UserError: when there are fewer units than stages, or the layers named are not those of the model.
        """
        order = self.order
        stages = order.stages if isinstance(order, Steps) else self.mesh.pp * self.stages_of_a_rank(units)
        given = self.layers_per_stage
        if given:
            if len(given) != stages or sum(given) != units or min(given) < 1:
                raise UserError(
                    f"layers_per_stage is {as_text(given)}, but {units} layers are to be cut into "
                    f"{counted(stages, 'stage')}; give {counted(stages, 'number')} of 1 or more that add up to {units}"
                )
            return [sum(given[:stage]) for stage in range(stages + 1)]
        if units < stages:
            raise UserError(
                f"{named or counted(units, 'layer')} do{'es' * (units == 1)} not reach {stages} pipeline stages; give "
                f"at most {counted(units, 'stage')}, or more layers"
            )
        return [stage * units // stages for stage in range(stages + 1)]

    def require_ops(self, layers: int, microbatches: int, *, tiles: int = 1, folded: bool = False) -> None:
        """Refuse sizes with which a step is sure to have more ops than are traced.

        Args:
            layers, microbatches: the model's, and the global batch's.
            tiles: into how many each layer is cut.
            folded: whether only one rank of each pipeline stage is traced.

        Raises:
            UserError: with how many there would be at least.
        """
        mesh, alike = self.mesh, self.mesh.world // self.mesh.pp
        passes = 2 * layers * tiles * -(-microbatches // self.data_ranks) * (1 if folded else alike)
        sizes = f"{counted(layers, 'layer')} and {counted(microbatches, 'microbatch')} on {counted(mesh.world, 'rank')}"
        sizes += f" in {counted(tiles, 'tile')}" if tiles > 1 else ""
        least = passes + 2 * layers * (1 if folded else alike) + mesh.pp
        require_ops(least, sizes, MAX_FOLDED if folded else MAX_OPS)

    def natural_layers(self) -> int:
        """Layers of a model that gives each stage one, or as many as the plan says.

        Raises:
            UserError: if there is no such schedule, or it must have another number of stages than was asked for.
        """
        order = self.order
        if self.layers_per_stage:
            return sum(self.layers_per_stage)
        stages = self.mesh.pp * (self.stages_per_rank or 1)
        require_ops(2 * stages, f"the passes of {counted(stages, 'pipeline stage')}")
        on_a_rank = self.stages_of_a_rank(2 * self.mesh.pp)
        return order.stages if isinstance(order, Steps) else self.mesh.pp * on_a_rank

    def stages_of_a_rank(self, units: int) -> int:
        """Stages on each pipeline rank: as asked, as the schedule must have, or else 2 if the model's units reach.

        Raises:
            UserError: when the schedule must have another number than was asked for.
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
        must = order.stages_per_rank
        if must is not None and self.stages_per_rank not in (None, must):
            raise UserError(
                f"{order.name} has {must} stage{'s' * (must > 1)} on each rank, but stages_per_rank is "
                f"{self.stages_per_rank}; leave it out, or take a looped schedule such as interleaved-1f1b"
            )
        return must or self.stages_per_rank or max(1, min(2 if self.mesh.pp > 1 else 1, units // self.mesh.pp))

    def as_dict(self) -> dict[str, Any]:
        """The fields as words, numbers and lists, as they would stand in a file; what is nothing is left out."""
        words: dict[str, Any] = {"mesh": self.mesh.used}
        for each in fields(self)[1:]:
            value = getattr(self, each.name)
            if value or value != each.default:
                words[each.name] = _as_written(value)
        return words

    @classmethod
    def from_dict(cls, words: Mapping[str, Any]) -> Plan:
        """The plan that `as_dict` has written, or somebody else.

        Raises:
            UserError: for a field or an axis that there is not, or a value that does not fit.
        """
        _require_known("field", words, [each.name for each in fields(cls)])
        mesh = words.get("mesh", {})
        if not isinstance(mesh, dict):
            raise UserError(f"mesh is {mesh!r}; write a table, as in mesh = {{ pp = 2, dp_shard = 2 }}")
        sizes = cast(dict[str, Any], mesh)
        _require_known("axis", sizes, AXES)
        for axis, size in sizes.items():
            if type(size) is not int:
                raise UserError(f"{axis} is {size!r}; give a whole number")
        return cls(Mesh(**sizes), **{name: _as_read(value) for name, value in words.items() if name != "mesh"})


def _as_written(value: Any) -> Any:
    if isinstance(value, Schedule):
        return value.name
    return list(cast(tuple[Any, ...], value)) if isinstance(value, tuple) else value


def _as_read(value: Any) -> Any:
    return tuple(cast(list[Any], value)) if isinstance(value, list) else value


def _require_known(what: str, words: Iterable[str], known: Iterable[str]) -> None:
    known = list(known)
    for name in words:
        if name not in known:
            raise UserError(f"a plan has no {what} {name!r}; {nearest(name, known)}")


# A plan written down in a TOML file.


def read_plan(path: Path) -> Plan:
    """The plan in a file: the fields of `Plan`, and a table `mesh` of its axes' sizes.

    Raises:
        UserError: for a file that cannot be read, a field that a plan does not have, or a value that does not fit.
    """
    written = read_file(path, "TOML")
    try:
        return Plan.from_dict(written)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
