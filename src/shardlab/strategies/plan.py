"""A plan: how a model is laid over the mesh, in a dozen words. `planned` is the one program that follows any plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, cast, get_args

from shardlab.program import LayerKind, Mesh, UserError
from shardlab.program.bounds import MAX_FOLDED, MAX_OPS, require_ops
from shardlab.program.sizes import CARRYING
from shardlab.rules.pieces import counted
from shardlab.strategies.schedules import Schedule
from shardlab.strategies.schedules.find import find_schedule
from shardlab.strategies.schedules.steps import Steps, steps_of

DATA_AXES = ("dp_shard", "dp_replicate")
"""The axes over which parameters may be cut; the batch is dealt over these and over `ep`."""

CUT_AXES = (*DATA_AXES, "cp")
"""The axes whose ranks see different tokens, and so may share the work of keeping weights."""

Context = Literal["ring", "all_gather"]
Reshard = Literal["layer", "stage", "step"]
ReduceAt = Literal["layer", "step"]
Recompute = Literal["none", "selective", "full"]

Kinds = Sequence[LayerKind]
"""Each layer's kind."""


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

    Attributes:
        mesh: the ranks. Microbatches are dealt over `dp_replicate` x `dp_shard` x `ep`, layers over `pp`, the matrices
            of a model in half-blocks are cut over `tp`, its sequences over `cp`, the experts of a mixture over `ep`.
        schedule: the pipeline's order of work, a built-in name, a file (see `find_schedule`) or a `Schedule`; on one
            pipeline rank, `1f1b` takes the microbatches one by one.
        stages_per_rank: of the pipeline; a schedule that has a fixed number uses that.
        layers_per_stage: how many layers each stage has (empty: as even as can be); of half-blocks, how many pairs of
            a norm and a body, the embedding's body not counted; of a mixture, how many blocks, the head one of its own.
        shard_parameters: axes over which a layer's weights are cut, outermost cut first.
        shard_gradients: axes over which the gradient that accumulates over microbatches is cut.
        shard_optimizer: axes over which the optimizer's state is cut; the other two must be beginnings of it.
        reduce_each: axes over which each microbatch's gradient is reduced at once (None: those that cut it); over the
            others it is reduced once a step. May name `ep`, over which the gradients of all but experts are reduced.
        reduce_at: what is reduced once a step is so as soon as a layer's last gradient is in, beside the backward
            passes that go on, or when all are over.
        reshard_after: a gathered weight is freed after each use, after the visit of its stage (while consecutive
            work stays on the stage), or when its last use in the step is over.
        sequence_parallel: whether norms and residuals are cut along the sequence over `tp`.
        recompute: what the backward pass computes again instead of keeping it: nothing; of attention the scores and
            what is made of them, from queries, keys and values (selective: Korthikanti et al. 2022, arXiv 2205.05198,
            section 5); all blocks, whose input alone is then kept (full), or the blocks that are numbered, from 0
            as the layers of the uncut model are. Of half-blocks the embedding and the head keep what they need, of a
            mixture the dense layers.
        context: how queries meet the keys and values of other slices of the sequence over `cp`, which has an early and
            a late slice on each rank: blocks go round in a ring, or all are gathered.
    """

    mesh: Mesh = field(default_factory=Mesh)
    schedule: str | Schedule = "1f1b"
    stages_per_rank: int | None = None
    layers_per_stage: tuple[int, ...] = ()
    shard_parameters: tuple[str, ...] = ()
    shard_gradients: tuple[str, ...] = ()
    shard_optimizer: tuple[str, ...] = ()
    reduce_each: tuple[str, ...] | None = None
    reduce_at: ReduceAt = "layer"
    reshard_after: Reshard = "layer"
    sequence_parallel: bool = False
    recompute: Recompute | tuple[int, ...] = "none"
    context: Context = "ring"

    def __post_init__(self) -> None:
        for name, words in (
            ("reduce_at", get_args(ReduceAt)),
            ("reshard_after", get_args(Reshard)),
            ("recompute", get_args(Recompute)),
            ("context", get_args(Context)),
        ):
            said = getattr(self, name)
            if said not in words and not (name == "recompute" and isinstance(said, tuple)):
                numbers = ", or the numbers of blocks" if name == "recompute" else ""
                raise UserError(f"{name} is {said!r}; give one of {', '.join(words)}{numbers}")
        if self.stages_per_rank is not None and self.stages_per_rank < 1:
            raise UserError(f"stages_per_rank is {self.stages_per_rank}; give 1 or more")
        for name in ("shard_parameters", "shard_gradients", "shard_optimizer", "reduce_each"):
            axes: tuple[str, ...] = getattr(self, name) or ()
            known = (*CUT_AXES, "ep") if name == "reduce_each" else CUT_AXES
            for axis in axes:
                if axis not in known or axes.count(axis) > 1:
                    raise UserError(f"{name} is {_said(axes)}; give some of {', '.join(known)}, each once")
        for name in ("shard_parameters", "shard_gradients"):
            axes = getattr(self, name)
            if self.shard_optimizer[: len(axes)] != axes:
                raise UserError(
                    f"{name} is {_said(axes)} but shard_optimizer is {_said(self.shard_optimizer)}; what is updated "
                    f"must be a slice of what is kept: let shard_optimizer begin with {_said(axes)}"
                )
        if self.mesh.ep > 1 and max(self.mesh.tp, self.mesh.cp) > 1:
            sizes = ", ".join(f"{axis} {self.mesh.sizes()[axis]}" for axis in ("cp", "tp", "ep"))
            raise UserError(
                f"the mesh has {sizes}; tensor and context parallelism cut half-blocks, expert parallelism cuts "
                "mixtures, and no model is cut into both yet: set ep to 1, or tp and cp"
            )
        if self.recompute == "selective" and self.mesh.ep > 1:
            raise UserError(
                f"selective recomputation works on half-blocks, but the mesh has ep {self.mesh.ep}, which cuts "
                "mixtures; recompute none, full, or blocks by number"
            )
        if self.sequence_parallel and self.mesh.tp == 1:
            raise UserError("sequence_parallel cuts sequences over tp, but the mesh has tp 1; give --tp 2 or more")
        if not set(self.shard_gradients) <= set(self.reduced_each):
            raise UserError(
                f"shard_gradients is {_said(self.shard_gradients)} but reduce_each is {_said(self.reduced_each)}; a "
                "gradient that is cut is reduced at each microbatch: name its axes in reduce_each as well"
            )

    @property
    def attention_apart(self) -> bool:
        """Whether attention must be a step of its own, between two layers of half-blocks."""
        return self.mesh.cp > 1 or self.recompute == "selective"

    @property
    def reduced_each(self) -> tuple[str, ...]:
        return self.shard_gradients if self.reduce_each is None else self.reduce_each

    @property
    def data_ranks(self) -> int:
        """Among how many ranks the batch is dealt."""
        return self.mesh.dp_shard * self.mesh.dp_replicate * self.mesh.ep

    @property
    def order(self) -> Schedule | Steps:
        """The schedule itself, or one that was imported for one size.

        Raises:
            UserError: if there is none of this name.
        """
        return self.schedule if isinstance(self.schedule, Schedule) else find_schedule(self.schedule)

    def steps(self, kinds: Kinds, microbatches: int) -> Steps:
        """Steps of each pipeline rank on its share of the microbatches.

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
            return steps_of(order, ranks, each, self.stages_of_a_rank(kinds))
        if (len(order.of_ranks), order.microbatches) != (ranks, each):
            raise UserError(
                f"{self.schedule} is for {len(order.of_ranks)} pipeline ranks and {order.microbatches} microbatches on "
                f"each, but the mesh has pp {ranks} and {each} microbatches come to each; give --pp "
                f"{len(order.of_ranks)} --microbatches {order.microbatches * self.data_ranks}"
            )
        return order

    def bounds(self, kinds: Kinds, blocks: int = 0) -> list[int]:
        """Layers at which stages begin, and the end of the last one: stage s has layers bounds[s] up to bounds[s + 1].

        Args:
            blocks: of how many blocks half-blocks are, to be said.

        Raises:
            UserError: when there are fewer layers than stages, or the layers named are not those of the model.
        """
        order = self.order
        places = cuts(kinds)
        layers = len(places) - 1
        stages = order.stages if isinstance(order, Steps) else self.mesh.pp * self.stages_of_a_rank(kinds)
        given = self.layers_per_stage
        if given:
            if len(given) != stages or sum(given) != layers or min(given) < 1:
                raise UserError(
                    f"layers_per_stage is {_said(given)}, but {layers} layers are to be cut into {stages} stages; give "
                    f"{stages} numbers of 1 or more that add up to {layers}"
                )
            return [places[sum(given[:stage])] for stage in range(stages + 1)]
        if layers < stages and any(kind in CARRYING for kind in kinds):
            halves = f"{layers - 1} half-blocks of {blocks} blocks, and the head," if blocks else f"{layers} parts"
            raise UserError(f"{halves} do not reach {stages} pipeline stages; give at most {layers} stages")
        if layers < stages:
            raise UserError(
                f"{layers} layer{'s do' if layers > 1 else ' does'} not reach {stages} pipeline stages; give at least "
                "one layer a stage"
            )
        return [places[stage * layers // stages] for stage in range(stages + 1)]

    def require_ops(self, layers: int, microbatches: int, *, folded: bool = False) -> None:
        """Refuse sizes with which a step is sure to have more ops than are traced.

        Args:
            layers, microbatches: the model's, and the global batch's.
            folded: whether only one rank of each pipeline stage is traced.

        Raises:
            UserError: with how many there would be at least.
        """
        mesh, alike = self.mesh, self.mesh.world // self.mesh.pp
        passes = 2 * layers * -(-microbatches // self.data_ranks) * (1 if folded else alike)
        sizes = f"{counted(layers, 'layer')} and {counted(microbatches, 'microbatch')} on {counted(mesh.world, 'rank')}"
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
        on_a_rank = self.stages_of_a_rank([LayerKind.WHOLE] * 2 * self.mesh.pp)
        return order.stages if isinstance(order, Steps) else self.mesh.pp * on_a_rank

    def stages_of_a_rank(self, kinds: Kinds) -> int:
        """Stages on each pipeline rank: as asked, as the schedule must have, or else 2 if the layers reach.

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
        fitting = (len(cuts(kinds)) - 1) // self.mesh.pp
        return must or self.stages_per_rank or max(1, min(2 if self.mesh.pp > 1 else 1, fitting))

    def as_dict(self) -> dict[str, Any]:
        """The fields as words and numbers, as they would stand in a file; those that are nothing are left out."""
        sizes = {axis: size for axis, size in self.mesh.sizes().items() if size > 1}
        schedule = self.schedule if isinstance(self.schedule, str) else self.schedule.name
        written: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        written |= {"mesh": sizes, "schedule": schedule}
        return {name: _listed(value) for name, value in written.items() if value not in (None, (), False)}


def cuts(kinds: Kinds) -> list[int]:
    """Where a pipeline may cut a model, both ends included: between layers; before those that carry a residual."""
    carrying = [layer for layer, kind in enumerate(kinds) if kind in CARRYING]
    return [0, *carrying[1:], len(kinds)] if carrying else list(range(len(kinds) + 1))


def _said(items: tuple[object, ...]) -> str:
    return ", ".join(map(str, items)) or "nothing"


def _listed(value: Any) -> Any:
    return list(cast(tuple[Any, ...], value)) if isinstance(value, tuple) else value
