"""Timeline: what happened when, and how much memory was live; simulation and measurement both produce it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from shardlab.check import Checked
from shardlab.language import Kind, Op, OpKind, Program, Spec
from shardlab.language.ops import BOOKKEEPING, COLLECTIVES, COMMUNICATION, ROOTED, picture
from shardlab.language.rules.kinds import ROW_KINDS
from shardlab.language.tape import Communication, communications_of


class Event(NamedTuple):
    """One op of one rank.

    Attributes:
        rank, op: where it stands on the tapes.
        kind, layer: what was done.
        microbatches: the microbatches acted on, as a bit set.
        start, end: when, in the cost model's unit, or in seconds.
        memory: elements live on the rank when the op starts, before its own result is stored; in a priced step, bytes
            live while it runs, its result among them.
    """

    rank: int
    op: int
    kind: OpKind
    layer: int
    microbatches: int
    start: float
    end: float
    memory: int


@dataclass(frozen=True)
class Timeline:
    """All events of one step, by rank and in tape order.

    Attributes:
        program: the tapes.
        events: for each rank its events; WAIT and FREE are not among them.
        in_seconds: whether times are seconds and memory bytes, rather than unit costs and elements.
    """

    program: Program
    events: list[list[Event]]
    in_seconds: bool = False

    @cached_property
    def steps(self) -> float:
        """When the last op starts: the figure that the puzzles print."""
        return round(max((event.start for events in self.events for event in events), default=0.0), 9)

    @cached_property
    def end(self) -> float:
        """When the last op ends."""
        return round(max((event.end for events in self.events for event in events), default=0.0), 9)

    @cached_property
    def peak_memory_by_rank(self) -> list[int]:
        """The largest number of live elements, or bytes, at an op, for each rank."""
        return [max((event.memory for event in events), default=0) for events in self.events]

    @cached_property
    def peak_memory(self) -> int:
        """The largest over the ranks."""
        return max(self.peak_memory_by_rank)

    @cached_property
    def communications(self) -> list[Communication]:
        """The communications whose members all have rows; a member names its row."""
        return communications_of(self.program)[0]

    def _repr_svg_(self) -> str | None:
        return picture(self)


def is_event(kind: OpKind) -> bool:
    """Whether an op counts as something that happens; WAIT and FREE do not."""
    return kind not in BOOKKEEPING


# The bubble of a pipeline: how much of its time the passes of the busiest rank do not fill.


def bubble(timeline: Timeline) -> float:
    """(cost - work) / cost, from 0 to 1 (Qi et al. 2023, arXiv 2401.10241, section 5.3).

    The cost is the longest time, over the ranks, from the start of the first pass to the end of the last; the work is
    all that the busiest rank computes meanwhile: m (F + B + W), where all ranks have as much to do. Updates and
    communication count only where passes wait for them.
    """
    passes = [[e for e in events if e.kind.value in _PASSES] for events in timeline.events]
    cost = max((max(e.end for e in each) - min(e.start for e in each) for each in passes if each), default=0.0)
    work = max((sum(e.end - e.start for e in each) for each in passes), default=0.0)
    return round((cost - work) / cost, 9) if cost else 0.0


_PASSES = frozenset({"forward", "recompute", "backward", "backward_input", "backward_weight"})


# Shares of a rank's time: computing, communication that nothing hides, and waiting.


class RankTimes(NamedTuple):
    """One rank's step; the three add up to the timeline's end.

    Attributes:
        computing: time in which it computes.
        exposed: time in which it communicates and does not compute.
        idle: time in which it does neither, until the last rank has ended.
    """

    computing: float
    exposed: float
    idle: float


def rank_times(timeline: Timeline, rank: int) -> RankTimes:
    """Where one rank's time goes."""
    events = timeline.events[rank]
    work = covered((event.start, event.end) for event in events if event.kind not in COMMUNICATION)
    busy = covered((event.start, event.end) for event in events)
    return RankTimes(work, max(0.0, busy - work), max(0.0, timeline.end - busy))


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The time that lies in at least one of some spans."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


# Messages and bytes that each rank sends in a step.


@dataclass
class Traffic:
    """Traffic of one rank in a step.

    Attributes:
        collectives: how many it takes part in with others.
        messages: how many it sends.
        weights: bytes of weights and of their gradients.
        activations: bytes of activations, residuals, keys and values, and of their gradients.
        others: bytes of anything else, such as a gradient's norm or the loss's numbers.
    """

    collectives: int = 0
    messages: int = 0
    weights: float = 0.0
    activations: float = 0.0
    others: float = 0.0

    @property
    def bytes(self) -> float:
        return self.weights + self.activations + self.others


def traffic(checked: Checked) -> list[Traffic]:
    """Count what each rank sends in a step.

    Collectives are counted as rings move them, which is the least that is possible: of the whole value a rank sends
    (n - 1) / n in an all-gather or a reduce-scatter, and twice that in an all-reduce (nccl-tests, doc/PERFORMANCE.md;
    Rabenseifner 2004, "Optimization of collective reduction operations"). In an all-to-all it sends all that it puts in
    but its own share of 1 / n. A broadcast passes the whole value along a chain from the root, and a reduce towards it,
    so each member but the last sends it once; the root of a scatter sends all pieces but its own, and in a gather all
    others send theirs. A barrier moves nothing.
    """
    return [_of_rank(checked, rank) for rank in range(checked.program.ranks)]


def _of_rank(checked: Checked, rank: int) -> Traffic:
    sent, sizes = Traffic(), checked.program.sizes
    for op in checked.program.tapes[rank]:
        if op.kind is OpKind.SEND:
            sent.messages += 1
            times = 1.0
        elif op.kind in COLLECTIVES and op.group is not None and len(op.group.ranks) > 1:
            sent.collectives += 1
            times = _times(op, rank, op.group.ranks)
        else:
            continue
        if not times:
            continue
        spec = checked.specs[rank][(op.inputs or op.outputs)[0]]
        _add(sent, spec, times * sizes.bytes(spec))
    return sent


def _times(op: Op, rank: int, ranks: tuple[int, ...]) -> float:
    """How often a rank sends what it puts in, or passes on what it receives: the whole value, or a gather's piece."""
    members, others = len(ranks), len(ranks) - 1
    if op.kind is OpKind.BARRIER:
        return 0.0
    if op.kind in ROOTED:
        from_root = (ranks.index(rank) - ranks.index(op.root)) % members
        return {
            OpKind.BROADCAST: float(from_root < others),
            OpKind.SCATTER: 0.0 if from_root else others / members,
            OpKind.GATHER: float(from_root > 0),
            OpKind.REDUCE: float(from_root > 0),
        }[op.kind]
    return {
        OpKind.ALL_GATHER: others,
        OpKind.REDUCE_SCATTER: others / members,
        OpKind.ALL_TO_ALL: others / members,
        OpKind.ALL_REDUCE: 2 * others / members,
    }.get(op.kind, 1.0)


def _add(sent: Traffic, spec: Spec, amount: float) -> None:
    if spec.kind in (Kind.WEIGHT, Kind.GRAD_WEIGHT):
        sent.weights += amount
    elif spec.kind in ROW_KINDS and spec.kind is not Kind.STATS:
        sent.activations += amount
    else:
        sent.others += amount
