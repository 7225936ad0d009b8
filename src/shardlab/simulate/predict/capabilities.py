"""Capabilities: the limits of the steps that a framework can run.

`CanRun` is the group `[can_run]` of a recipe; each of its figures has a source. An empty field of a recipe sets no
limit. `shardlab.simulate.predict.limits` compares a plan with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from shardlab.language.recompute_names import modules_of


@dataclass(frozen=True, kw_only=True)
class CanRun:
    """Limits of the steps that a framework can run. Empty fields set no limit.

    Attributes:
        axes: supported axes of the mesh. Without dp_replicate, shards have no replicas.
        zero_stages: supported stages of ZeRO, 0 for data-parallel ranks without shards.
        zero_stages_with_pp: supported stages of ZeRO with several pipeline ranks (empty: `zero_stages`).
        replicated_zero_stages: stages whose shards may have replicas over dp_replicate.
        state_over_replicas: "never" if the optimizer's state must be cut over the same axes as the parameters (or
            gradients, if parameters are whole). "with gradients" if it may be cut over more axes than the parameters,
            as long as the gradients are cut over the same axes as the state.
        shards_over_cp: "always" or "never" if shards of data-parallel ranks must or cannot be cut over cp, too ("":
            both are possible).
        gradients_with_pp: "whole" if the ranks of a pipeline keep the gradients of sharded parameters whole, and reduce
            them once a step.
        reshard_after: times at which gathered parameters can be freed (see `Plan.reshard_after`).
        reshard_after_with_pp: the same with several pipeline ranks (empty: `reshard_after`).
        sequence_parallel: "always" or "never" if tensor-parallel ranks must or cannot cut sequences ("": both are
            possible).
        schedules: pipeline schedules, by Shardlab's names.
        microbatches: by schedule, conditions on the microbatches of a data-parallel rank: "at least pp - 1", "at least
            pp", "at least stages", "multiple of pp", and "multiple of rounds", where the number of rounds is
            `microbatches // pp`.
        pipeline_ranks: by schedule, the smallest number of pipeline ranks.
        stages: "even" if all stages must have the same number of blocks.
        recompute: supported recomputation: none, selective, full; first, uniform and every for first-N, uniform-N and
            every-N; blocks for any blocks, given by number; per-op, modules and policies inside blocks.
        context: how queries reach other ranks' keys and values: ring, all_gather, ulysses, ulysses+ring.
        precisions: names of precisions, without the dtype of gradients.
        offload: values that may be kept on the host or the disk.
    """

    axes: tuple[str, ...] = ()
    zero_stages: tuple[int, ...] = ()
    zero_stages_with_pp: tuple[int, ...] = ()
    replicated_zero_stages: tuple[int, ...] = (1, 2, 3)
    state_over_replicas: Literal["", "never", "with gradients"] = ""
    shards_over_cp: Literal["", "always", "never"] = ""
    gradients_with_pp: Literal["", "whole"] = ""
    reshard_after: tuple[str, ...] = ()
    reshard_after_with_pp: tuple[str, ...] = ()
    sequence_parallel: Literal["", "always", "never"] = ""
    schedules: tuple[str, ...] = ()
    microbatches: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    pipeline_ranks: Mapping[str, int] = field(default_factory=dict[str, int])
    stages: Literal["", "even"] = ""
    recompute: tuple[str, ...] = ()
    context: tuple[str, ...] = ()
    precisions: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()

    def lacks(self, axis: str) -> bool:
        """Return whether the framework lacks an axis of the mesh."""
        return bool(self.axes) and axis not in self.axes

    def stages_of_zero(self, pp: int) -> tuple[int, ...]:
        """Return the stages of ZeRO that the framework supports with `pp` pipeline ranks."""
        return (self.zero_stages_with_pp if pp > 1 else ()) or self.zero_stages or (0, 1, 2, 3)

    def reshards(self, pp: int) -> tuple[str, ...]:
        """Return the times at which gathered parameters can be freed with `pp` pipeline ranks, the usual one first."""
        return (self.reshard_after_with_pp if pp > 1 else ()) or self.reshard_after

    def conform_stage(self, zero: int, pp: int) -> int:
        """Return a supported stage of ZeRO: the given one, or the next lower one, or the lowest."""
        stages = self.stages_of_zero(pp)
        return max((stage for stage in stages if stage <= zero), default=min(stages))

    def recomputes(self, kind: str) -> bool:
        """Return whether the framework supports a recomputation (see `recompute_kind`)."""
        return kind == "none" or not self.recompute or set(modules_of(kind) or [kind]) <= set(self.recompute)
