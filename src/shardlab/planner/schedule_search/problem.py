"""Schedule problems: the stages of a pipeline with their costs and a memory limit.

All times have the same unit, and so does all memory. `lower_bound` and `minimum_memory` are lower bounds of the time
and memory of all schedules.
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
"""Relative amount by which memory may exceed its limit, since it is a sum of floating-point numbers."""

Placement = Literal["loop", "vee"]
"""Placement of stages on ranks: `shardlab.strategies.schedules.loop` or `vee`."""

Objective = Literal["step", "span"]
"""Time to minimize. `step`: from the start of the first pass to the end of the last pass of all ranks. `span`: the
longest such time of a single rank, which matters if ranks start the next step without waiting for each other (Qi et al.
2023, arXiv 2401.10241, section 4)."""


@dataclass(frozen=True)
class StageCosts:
    """Costs of one stage for one microbatch.

    Attributes:
        forward, input, weight: times of the forward pass and of the two halves of the backward pass. If the weight half
            takes no time on any stage, the input half is the whole backward pass.
        activation: memory in use from the start of the forward pass to the start of the input half.
        kept: memory in use from the start of the input half to the end of the weight half (None: as much as
            `activation`). It is larger than `activation` if the input half computes activations again.
    """

    forward: float
    input: float
    weight: float
    activation: float
    kept: float | None = None

    @property
    def kept_memory(self) -> float:
        """Memory in use from the start of the input half to the end of the weight half."""
        return self.activation if self.kept is None else self.kept

    @property
    def work(self) -> float:
        """Total time of the three passes."""
        return self.forward + self.input + self.weight


class LimitTooLowError(UserError):
    """Error of a memory limit below the activations of one microbatch.

    Attributes:
        rank, minimum: the rank, and the memory that one microbatch takes there.
    """

    def __init__(self, rank: int, limit: float, minimum: float) -> None:
        self.rank, self.minimum = rank, minimum
        reason = f"a memory limit of {limit:g} is below {minimum:g}, which one microbatch takes on rank {rank}"
        super().__init__(f"{reason}; raise the limit, or take more ranks")


@dataclass(frozen=True)
class ScheduleProblem:
    """Pipeline for which a schedule is searched.

    Attributes:
        ranks: number of pipeline ranks.
        microbatches: number of microbatches of a step.
        stages: costs of all stages, in the order of the model.
        message: smallest time from the end of a pass to the start of the pass on another rank that reads its output.
        limit: memory limit of activations, one number for all ranks or one for each rank.
        placement: placement of stages on ranks. "vee" needs two stages on each rank.
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
            UserError: if the number of costs is wrong, a cost is negative or not finite, or no schedule fits the memory
                limit.
        """
        rank_stages, rest = divmod(len(self.stages), self.ranks)
        if rest or not rank_stages or (self.placement == "vee" and rank_stages != 2):
            expected = f"{2 * self.ranks}, two a rank" if self.placement == "vee" else f"a multiple of {self.ranks}"
            raise UserError(f"costs of {len(self.stages)} stages are given for {self.ranks} ranks; give {expected}")
        for number, stage in enumerate(self.stages):
            for name in ("forward", "input", "weight", "activation", "kept_memory"):
                _require_cost(getattr(stage, name), f"{name} of stage {number}", positive=name in ("forward", "input"))
        _require_cost(self.message, "the time of a message", positive=False)
        if len(self.limits) != self.ranks:
            raise UserError(f"{len(self.limits)} memory limits are given for {self.ranks} ranks; give one for each")
        for rank, (limit, minimum) in enumerate(zip(self.limits, self.minimum_memory, strict=True)):
            if math.isnan(limit) or limit < minimum * (1 - TOLERANCE):
                raise LimitTooLowError(rank, limit, minimum)

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
        """Whether backward passes are split. If they are not, weight halves take no time."""
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
        """Memory of one microbatch on each rank, the smallest limit for which a schedule exists."""
        return tuple(
            sum(self.stages[stage].activation for stage in self.stages_of(rank)) + self.growths[rank]
            for rank in range(self.ranks)
        )

    @cached_property
    def growths(self) -> tuple[float, ...]:
        """Largest memory that an input half adds on each rank."""
        added = [max(0.0, stage.kept_memory - stage.activation) for stage in self.stages]
        return tuple(max(added[stage] for stage in self.stages_of(rank)) for rank in range(self.ranks))

    @cached_property
    def lower_bound(self) -> float:
        """Lower bound of the time of all schedules: the largest of three bounds.

        1. Each rank does all its work after its first forward pass can start.
        2. One microbatch passes through all stages forward and backward.
        3. A rank holds each microbatch at least from its forward pass to its weight half, so the memory limit bounds
           the number of microbatches per time.
        """
        heads = self._heads
        bounds = [self._whole_way]
        for rank in range(self.ranks):
            rank_stages = self.stages_of(rank)
            work = self.microbatches * sum(self.stages[stage].work for stage in rank_stages)
            bounds.append(work + (heads[rank_stages[0]] if self.objective == "step" else 0.0))
        bound = max(bounds)
        for rank, limit in enumerate(self.limits):
            if limit < math.inf:
                bound = max(bound, self._time_in_memory(rank, bound))
        return bound

    def _time_in_memory(self, rank: int, bound: float) -> float:
        """Return a lower bound of the time of a rank that follows from its memory limit.

        An area is memory times time. The area that the activations of all microbatches occupy (`used`) cannot exceed
        the available area, which is the limit times the time of the step. A part of the available area cannot be
        occupied. No memory is held before the rank's first forward pass (`head`). While the input halves of earlier
        stages end the step (`tail`), only weight halves of this rank hold memory. Memory fills no faster than forward
        passes run, and empties no faster than backward passes run (`unused`). Therefore

            used + unused <= limit * (step - head - tail) + area of weight halves in the tail

        The last term is at most limit * tail, and at most the area of all weight halves of the rank. For the objective
        span, the step is the longest span of a rank, and there is neither head nor tail.

        Args:
            rank: number of the rank.
            bound: another lower bound of the time.
        """
        stages = [self.stages[stage] for stage in self.stages_of(rank)]
        first = self.stages_of(rank)[0]
        holds = [self._holding_times[stage] for stage in self.stages_of(rank)]
        limit = min(self.limits[rank], self.microbatches * sum(max(s.activation, s.kept_memory) for s in stages))
        in_weights = self.microbatches * sum(s.kept_memory * s.weight for s in stages)
        used = in_weights + self.microbatches * sum(
            s.activation * (hold - s.weight) for s, hold in zip(stages, holds, strict=True)
        )
        if not used:
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
        if bound >= head + filling + max(tail, emptying):  # otherwise the two would overlap
            unused = fill_rate * filling**2 / 2 + (empty_rate * max(0.0, emptying - tail) ** 2 / 2 if emptying else 0.0)
        return head + tail + (used + unused - min(in_weights, limit * tail)) / limit

    @cached_property
    def _heads(self) -> list[float]:
        """Earliest start of each stage's first forward pass, counted from the start of the step."""
        times = [stage.forward + self._message_after(number) for number, stage in enumerate(self.stages)]
        return [0.0, *accumulate(times[:-1])]

    @cached_property
    def _holding_times(self) -> list[float]:
        """Shortest time from the start of one microbatch's forward pass to the end of its weight half, by stage."""
        times: list[float] = []
        later = 0.0  # from the end of this stage's forward pass to the start of its input half
        for number in reversed(range(len(self.stages))):
            stage = self.stages[number]
            if number < len(self.stages) - 1:
                next_stage = self.stages[number + 1]
                later += next_stage.forward + next_stage.input + 2 * self._message_after(number)
            times.append(stage.forward + later + stage.input + stage.weight)
        return times[::-1]

    @property
    def _whole_way(self) -> float:
        """Time of one microbatch through all stages and back. It begins and ends on the first stage's rank."""
        return self._holding_times[0]

    def _message_after(self, stage: int) -> float:
        """Return the time of a message from a stage to the next one: 0 within a rank."""
        places = self.ranks_of_stages
        return self.message if stage + 1 < len(places) and places[stage] != places[stage + 1] else 0.0


def equal_stages(
    ranks: int, forward: float, input: float, weight: float, stages_per_rank: int = 1
) -> tuple[StageCosts, ...]:
    """Return the costs of equal stages. The activations of one microbatch on all stages of a rank sum to 1.

    Args:
        ranks: number of ranks.
        forward, input, weight: sums of the times of one microbatch's passes on all stages of a rank.
        stages_per_rank: number of stages of each rank.
    """
    stage = StageCosts(*(value / stages_per_rank for value in (forward, input, weight, 1.0)))
    return (stage,) * (ranks * stages_per_rank)


def _ratio(amount: float, time: float) -> float:
    return amount / time if time else (math.inf if amount else 0.0)


def _require_cost(value: float, name: str, *, positive: bool) -> None:
    if not math.isfinite(value) or value < 0 or (positive and value == 0):
        raise UserError(f"{name} is {value:g}; give a number {'above 0' if positive else 'of 0 or more'}")
