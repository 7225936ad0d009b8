"""Collectives: the k-th that each rank joins is one for them all."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

from shardlab.errors import About, Refused, of_layer
from shardlab.program import Holds
from shardlab.program.lines import at
from shardlab.program.values import Wait
from shardlab.puzzles import rules
from shardlab.puzzles.asyncio_watch import Blocked
from shardlab.puzzles.values import PuzzleValue, WeightGrad
from shardlab.rules import sums


@dataclass(eq=False)
class Brought(Blocked):
    """What one rank brings to a collective.

    Attributes:
        name, layer, value: of the call.
        time: when the rank came.
        collective: every rank's part, None until the rank comes.
    """

    name: str
    layer: int
    value: Any
    time: float
    collective: dict[int, Brought | None]

    def __str__(self) -> str:
        return f"{self.name}({self.value.spec if isinstance(self.value, PuzzleValue) else f'layer {self.layer}'})"

    def wait(self) -> Wait:
        missing = [rank for rank, part in self.collective.items() if part is None]
        names = ", ".join(map(str, missing))
        return Wait(f"{self} for rank{'s' * (len(missing) > 1)} {names}{at(self.line)}", missing)


class PuzzleCollectives:
    """All collectives of a run."""

    def __init__(self, ranks: int) -> None:
        self._joined: Counter[int] = Counter()
        self._open: defaultdict[int, dict[int, Brought | None]] = defaultdict(lambda: dict.fromkeys(range(ranks)))

    def next_of(self, rank: int) -> dict[int, Brought | None]:
        """The first collective that this rank has not joined yet."""
        self._joined[rank] += 1
        return self._open[self._joined[rank]]

    def advance(self) -> bool:
        """Let the ranks of a collective go on if all are there or two do not fit; False if none may."""
        for sequence_number, collective in self._open.items():
            parts = [part for part in collective.values() if part is not None]
            waiting = [part for part in parts if not part.future.done()]
            complete = len(parts) == len(collective)
            if not waiting or not (complete or any(part.name != parts[0].name for part in parts)):
                continue
            if complete:
                del self._open[sequence_number]
            try:
                results = combine(parts)
            except Exception as error:  # also one of a student's own objects
                for part in waiting:
                    part.future.set_exception(error)
            else:
                time = max(part.time for part in parts)
                for part, result in zip(parts, results, strict=True):
                    part.go_on((result, time))
            return True
        return False


def combine(parts: list[Brought]) -> list[Any]:
    """What each rank takes away; the parts stand in the order of the ranks.

    Raises:
        Refused: if they do not fit.
    """
    first, values = parts[0], [part.value for part in parts]
    op = of_layer(first.name, first.layer)
    other = next((part for part in parts if part.name != first.name), None)
    if other is not None:
        given = f"rank {first.rank} meets with {first} and rank {other.rank} with {other}"
        raise Refused("other order", op, given, "let all ranks call the same collectives in the same order")
    if not any(isinstance(value, PuzzleValue) for value in values):
        return _of_anything(first, values)
    names = [f"rank {rank}" for rank in range(len(values))]
    specs = [rules.spec_of(op, f"value of {name}", value) for name, value in zip(names, values, strict=True)]
    op = specs[0].about(first.name)
    if first.name == "allgather":
        whole = rules.gather(op, specs, names)
        return [values[0].holding(whole.holds)] * len(values)
    total = sums.add(op, specs, names)
    gradient: WeightGrad = values[0].summing(total)
    if first.name == "allreduce":
        return [gradient] * len(values)
    if not gradient.is_complete():
        raise Refused("partial", op, f"rank 0 gave {specs[0]}, which is partial", "sum and scatter whole gradients")
    return [gradient.holding(Holds(1 << rank, len(values))) for rank in range(len(values))]


def _of_anything(part: Brought, values: list[Any]) -> list[Any]:
    """Combine objects that are no values of the puzzles: whatever can be added, combined, sharded."""
    try:
        if part.name == "allgather":
            return [reduce(lambda a, b: a.combine(b), values)] * len(values)
        total = reduce(add, values)
        if part.name == "allreduce":
            return [total] * len(values)
        return [total.shard(rank, len(values)) for rank in range(len(values))]
    except (TypeError, AttributeError) as error:
        about, given = About(str(part), part.layer), f"these objects cannot be put together: {error}"
        raise Refused("no value", about, given, "give values of the puzzles, or what can be added") from None
