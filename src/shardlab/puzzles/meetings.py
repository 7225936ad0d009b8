"""Collectives: the k-th that each rank joins is one meeting of them all."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import Any

from shardlab.program import Holds, Refused
from shardlab.program.waiting import Wait
from shardlab.puzzles import rules
from shardlab.puzzles.lines import Line, at
from shardlab.puzzles.values import Value, WeightGrad
from shardlab.puzzles.watch import Watch


@dataclass(frozen=True)
class Part:
    """What one rank brings to a meeting."""

    name: str
    layer: int
    value: Any
    line: Line | None = None

    def __str__(self) -> str:
        return f"{self.name}({self.value.spec if isinstance(self.value, Value) else f'layer {self.layer}'})"


@dataclass(eq=False)
class Meeting:
    """The parts that have come, by rank; then what each rank takes away, or why none does."""

    ranks: int
    parts: dict[int, Part] = field(default_factory=lambda: {})
    time: float = 0
    results: list[Any] | Refused | None = None
    blocked: set[int] = field(default_factory=lambda: set())

    def add(self, rank: int, part: Part, time: float) -> None:
        """Take a rank's part, and settle the meeting when it is the last or does not fit."""
        self.parts[rank] = part
        self.time = max(self.time, time)
        if self.results is not None:
            return
        ranks = sorted(self.parts)
        other = next((r for r in ranks if self.parts[r].name != self.parts[ranks[0]].name), None)
        if other is not None:
            self.results = Refused(
                f"{part.name}(layer {part.layer}): rank {ranks[0]} meets with {self.parts[ranks[0]]} and rank {other} "
                f"with {self.parts[other]}; all ranks must call the same collectives in the same order."
            )
        elif len(ranks) == self.ranks:
            try:
                self.results = combine([self.parts[r] for r in ranks])
            except Refused as refusal:
                self.results = refusal

    def wait(self, rank: int) -> Wait:
        """What a rank that has come waits for."""
        missing = [r for r in range(self.ranks) if r not in self.parts]
        names = ", ".join(map(str, missing))
        part = self.parts[rank]
        return Wait(f"{part} for rank{'s' * (len(missing) > 1)} {names}{at(part.line)}", missing)


class Meetings:
    """All collectives of a run."""

    def __init__(self, ranks: int, watch: Watch) -> None:
        self._ranks = ranks
        self._watch = watch
        self._turns: dict[int, int] = defaultdict(int)
        self._meetings: defaultdict[int, Meeting] = defaultdict(lambda: Meeting(ranks))

    async def join(self, rank: int, part: Part, time: float) -> tuple[Any, float]:
        """What this rank takes away, and when the last one came."""
        turn = self._turns[rank]
        self._turns[rank] += 1
        meeting = self._meetings[turn]
        meeting.add(rank, part, time)
        meeting.blocked.add(rank)
        try:
            await self._watch.block(rank, meeting, lambda: meeting.wait(rank))
        finally:
            meeting.blocked.discard(rank)
        if isinstance(meeting.results, list):
            return meeting.results[rank], meeting.time
        raise Refused(str(meeting.results))

    def advance(self) -> bool:
        """Let the ranks of a settled meeting go on, the lowest first; False if there is none."""
        for turn, meeting in self._meetings.items():
            if meeting.results is not None and meeting.blocked:
                for rank in sorted(meeting.blocked):
                    self._watch.wake(rank, meeting)
                meeting.blocked.clear()
                if len(meeting.parts) == self._ranks:
                    del self._meetings[turn]
                return True
        return False


def combine(parts: list[Part]) -> list[Any]:
    """What each rank takes away; the parts stand in the order of the ranks."""
    name, values = parts[0].name, [part.value for part in parts]
    ranks = range(len(parts))
    if not any(isinstance(value, Value) for value in values):
        return _of_anything(parts[0], values)
    op = f"{name}(layer {parts[0].layer})"
    names = [f"rank {rank}" for rank in ranks]
    specs = [rules.spec_of(op, f"value of rank {rank}", value) for rank, value in enumerate(values)]
    op = f"{name}({specs[0].name})"
    if name == "allgather":
        whole = rules.gather(op, specs, names)
        return [values[0].holding(whole.holds)] * len(parts)
    total = rules.reduce(op, specs, names)
    first: WeightGrad = values[0]
    if name == "allreduce":
        return [first.summing(total)] * len(parts)
    if not total.holds.complete:
        raise Refused(f"{op}: rank 0 gave {specs[0]}, which is partial; only whole gradients are summed and scattered.")
    return [first.summing(total).holding(Holds(1 << rank, len(parts))) for rank in ranks]


def _of_anything(part: Part, values: list[Any]) -> list[Any]:
    """The same of objects that are no values of the puzzles: whatever can be added, combined, sharded."""
    try:
        if part.name == "allgather":
            return [reduce(lambda a, b: a.combine(b), values)] * len(values)
        total = reduce(add, values)
        if part.name == "allreduce":
            return [total] * len(values)
        return [total.shard(rank, len(values)) for rank in range(len(values))]
    except (TypeError, AttributeError) as error:
        raise Refused(f"{part}: these objects cannot be put together: {error}.") from None
