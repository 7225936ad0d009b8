"""`ScheduleProblem`: the stages of a pipeline with their costs and a memory limit, for which a schedule is searched.

Times and memory are in any units, as long as all times and all memory have the same one. `lower_bound` and
`minimum_memory` say what no schedule can beat.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal

from shardlab.common.errors import UserError
from shardlab.strategies.schedules.actions import loop, vee

TOLERANCE = 1e-9
"""Share by which a memory may exceed its limit, since it is a sum of floating-point numbers."""

Placement = Literal["loop", "vee"]
"""Placement of stages on ranks: `shardlab.strategies.schedules.loop` or `vee`."""

Objective = Literal["step", "span"]
"""Time to minimize: from the start of the first pass to the end of the last one of all ranks (step), or the longest
such time of a single rank (span), which counts if ranks start the next step without waiting for each other (Qi et al.
2023, arXiv 2401.10241, section 4)."""


@dataclass(frozen=True)
class StageCosts:
    """Costs of one stage for one microbatch.

    Attributes:
        forward, input, weight: times of the forward pass and of the two halves of the backward pass. If the weight half
            takes no time on any stage, the input half is the whole backward pass.
        activation: memory from the start of the forward pass to the start of the input half.
        kept: memory from there to the end of the weight half (None: the same). It is more if the input half computes
            activations again.
    """

    forward: float
    input: float
    weight: float
    activation: float
    kept: float | None = None

    @property
    def kept_memory(self) -> float:
        """Memory from the start of the input half to the end of the weight half."""
        return self.activation if self.kept is None else self.kept

    @property
    def work(self) -> float:
        """Time of all three passes."""
        return self.forward + self.input + self.weight


@dataclass(frozen=True)
class ScheduleProblem:
    """Pipeline for which a schedule is searched.

    Attributes:
        ranks: number of pipeline ranks.
        microbatches: number of microbatches of a step.
        stages: costs of all stages, in the order of the model.
        message: time from the end of a pass to the start of the pass on another rank that reads its output.
        limit: memory of activations on each rank, one number for all or one for each rank.
        placement: placement of stages on ranks. A V has two stages on each rank.
        objective: time to minimize.
    """

    ranks: int
    microbatches: int
    stages: tuple[StageCosts, ...]
    message: float = 0.0
    limit: float | tuple[float, ...] = math.inf
    placement: Placement = "loop"
    objective: Objective = "step"

    def __post_init__(self) -> None:
        """Check the sizes and the costs.

        Raises:
            UserError: if the costs have the wrong length or are not finite numbers of zero or more, or if no schedule
                fits the memory limit.
        """
        each, rest = divmod(len(self.stages), self.ranks)
        if rest or not each or (self.placement == "vee" and each != 2):
            wanted = f"{2 * self.ranks}, two a rank" if self.placement == "vee" else f"a multiple of {self.ranks}"
            raise UserError(f"costs of {len(self.stages)} stages are given for {self.ranks} ranks; give {wanted}")
        for number, stage in enumerate(self.stages):
            for name in ("forward", "input", "weight", "activation", "kept_memory"):
                _require_cost(getattr(stage, name), f"{name} of stage {number}", positive=name in ("forward", "input"))
        _require_cost(self.message, "the time of a message", positive=False)
        if len(self.limits) != self.ranks:
            raise UserError(f"{len(self.limits)} memory limits are given for {self.ranks} ranks; give one for each")
        for rank, (limit, least) in enumerate(zip(self.limits, self.minimum_memory, strict=True)):
            if math.isnan(limit) or limit < least * (1 - TOLERANCE):
                raise UserError(
                    f"a memory limit of {limit:g} is below {least:g}, which one microbatch takes on rank {rank}; "
                    "raise the limit, or take more ranks"
                )

    @cached_property
    def ranks_of_stages(self) -> tuple[int, ...]:
        """Rank of each stage."""
        place = vee if self.placement == "vee" else loop
        return tuple(place(stage, self.ranks) for stage in range(len(self.stages)))

    @cached_property
    def limits(self) -> tuple[float, ...]:
        """Memory limit of each rank."""
        return self.limit if isinstance(self.limit, tuple) else (self.limit,) * self.ranks

    @property
    def has_halves(self) -> bool:
        """Whether backward passes are computed in halves. Whole ones have weight halves that take no time."""
        return any(stage.weight for stage in self.stages)

    @property
    def stages_per_rank(self) -> int:
        """Number of stages of each rank."""
        return len(self.stages) // self.ranks

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages of a rank, in the order of the model."""
        return [stage for stage, place in enumerate(self.ranks_of_stages) if place == rank]

    @cached_property
    def minimum_memory(self) -> tuple[float, ...]:
        """Memory of one microbatch on each rank. No schedule needs less, and one that needs no more exists."""
        return tuple(
            sum(self.stages[stage].activation for stage in self.stages_of(rank)) + self.growths[rank]
            for rank in range(self.ranks)
        )

    @cached_property
    def growths(self) -> tuple[float, ...]:
        """Most memory that an input half adds on each rank."""
        added = [max(0.0, stage.kept_memory - stage.activation) for stage in self.stages]
        return tuple(max(added[stage] for stage in self.stages_of(rank)) for rank in range(self.ranks))

    @cached_property
    def lower_bound(self) -> float:
        """Time that no schedule can beat: the largest of three bounds.

        Each rank does all its work after its first forward pass has become possible. One microbatch passes all stages
        forth and back. A rank holds each microbatch at least as long as the way from a forward pass to its weight half,
        so within its memory limit only so many microbatches pass in a given time.
        """
        heads = self._heads
        bounds = [self._whole_way]
        for rank in range(self.ranks):
            mine = self.stages_of(rank)
            work = self.microbatches * sum(self.stages[stage].work for stage in mine)
            bounds.append(work + (heads[mine[0]] if self.objective == "step" else 0.0))
        known = max(bounds)
        for rank, limit in enumerate(self.limits):
            if limit < math.inf:
                known = max(known, self._time_in_memory(rank, known))
        return known

    def _time_in_memory(self, rank: int, known: float) -> float:
        """Return the time that a rank needs at least, because it holds no more than its limit.

        Memory times time: each activation, times the time for which it must be held, summed over all microbatches
        (`held`), must fit below the limit during the step. Not all of limit times step can be used. Nothing is held
        before the rank's first forward pass (`head`). While the input halves of earlier stages end the step (`tail`),
        only weight halves hold memory. After the first forward pass, memory fills no faster than forward passes run,
        and at the end it empties no faster than backward passes do (`unused`). So

            held + unused <= limit * (step - head - tail) + the part of weight halves in the tail

        For the objective span, the step is the longest span of a rank, and there is neither head nor tail.

        Args:
            rank: number of the rank.
            known: another lower bound.
        """
        stages = [self.stages[stage] for stage in self.stages_of(rank)]
        first = self.stages_of(rank)[0]
        holds = [self._holding_times[stage] for stage in self.stages_of(rank)]
        limit = min(self.limits[rank], self.microbatches * sum(max(s.activation, s.kept_memory) for s in stages))
        in_weights = self.microbatches * sum(s.kept_memory * s.weight for s in stages)
        held = in_weights + self.microbatches * sum(
            s.activation * (hold - s.weight) for s, hold in zip(stages, holds, strict=True)
        )
        if not held:
            return 0.0
        head = tail = 0.0
        if self.objective == "step":
            head = self._heads[first]
            tail = sum(self.stages[stage].input + self._message_after(stage) for stage in range(first))
        largest = max(max(s.activation, s.kept_memory) for s in stages)
        fill_rate = max(max(s.activation, s.kept_memory) / s.forward for s in stages)
        empty_rate = max(
            max(s.activation / (s.input + s.weight), _ratio(s.kept_memory, s.weight) if self.has_halves else 0.0)
            for s in stages
        )
        filling = max(0.0, limit - largest) / fill_rate
        emptying = max(0.0, limit - largest) / empty_rate
        unused = 0.0
        if known >= head + filling + max(tail, emptying):  # so that the two do not overlap
            unused = fill_rate * filling**2 / 2 + (empty_rate * max(0.0, emptying - tail) ** 2 / 2 if emptying else 0.0)
        return head + tail + (held + unused - min(in_weights, limit * tail)) / limit

    @cached_property
    def _heads(self) -> list[float]:
        """Earliest start of each stage's first forward pass."""
        times = [stage.forward + self._message_after(number) for number, stage in enumerate(self.stages)]
        return [0.0, *accumulate(times[:-1])]

    @cached_property
    def _holding_times(self) -> list[float]:
        """Shortest time from the start of a stage's forward pass to the end of its weight half, by stage."""
        times: list[float] = []
        later = 0.0  # from the end of this stage's forward pass to the start of its input half
        for number in reversed(range(len(self.stages))):
            stage = self.stages[number]
            if number < len(self.stages) - 1:
                after = self.stages[number + 1]
                later += after.forward + after.input + 2 * self._message_after(number)
            times.append(stage.forward + later + stage.input + stage.weight)
        return times[::-1]

    @property
    def _whole_way(self) -> float:
        """Time of one microbatch through all stages forth and back; of the first stage's rank, if ranks do not wait."""
        return self._holding_times[0]

    def _message_after(self, stage: int) -> float:
        """Return the time of a message from a stage to the next one: none within a rank."""
        places = self.ranks_of_stages
        return self.message if stage + 1 < len(places) and places[stage] != places[stage + 1] else 0.0


def equal_stages(
    ranks: int, forward: float, input: float, weight: float, stages_per_rank: int = 1
) -> tuple[StageCosts, ...]:
    """Return the costs of equal stages.

    Args:
        ranks: number of ranks.
        forward, input, weight: times of the passes of a rank, which its stages share.
        stages_per_rank: number of stages of each rank. Its activations of one microbatch are 1 in all.
    """
    each = StageCosts(*(value / stages_per_rank for value in (forward, input, weight, 1.0)))
    return (each,) * (ranks * stages_per_rank)


def _ratio(amount: float, time: float) -> float:
    return amount / time if time else (math.inf if amount else 0.0)


def _require_cost(value: float, name: str, *, positive: bool) -> None:
    if not math.isfinite(value) or value < 0 or (positive and value == 0):
        raise UserError(f"{name} is {value:g}; give a number {'above 0' if positive else 'of 0 or more'}")
