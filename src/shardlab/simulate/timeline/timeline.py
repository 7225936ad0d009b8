"""Timeline of a step: when each op ran, and how much memory was live. Simulation and measurement both produce one.

After `Timeline` and `Event` come figures that are computed from a timeline: how a rank's time is divided
(`rank_times`), and the messages and bytes that ranks send (`traffic`). `bubble.py` has the bubble of a pipeline.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from shardlab.check import Checked
from shardlab.language import Kind, Op, OpKind, Program, Spec
from shardlab.language.ops import BOOKKEEPING, COLLECTIVES, COMMUNICATION, ROOTED, picture
from shardlab.language.rules.kinds import ROW_KINDS
from shardlab.language.tape import Communication, communications_of


class Event(NamedTuple):
    """Run of one op on one rank.

    Attributes:
        rank, op: the rank (in a folded program, the row of its tape), and the op's index on the tape.
        kind, layer: kind and layer of the op.
        microbatches: bit set of the op's microbatches.
        start, end: in time units, or in seconds.
        memory: in a timeline of time units, the live elements of the rank when the op starts, without its output. In a
            predicted timeline of seconds, the live bytes while the op runs, with its output. In a measured one, the
            live bytes when the op starts (0: not measured).
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
        program: the program that ran.
        events: for each rank its events. WAIT and FREE have none.
        in_seconds: whether times are seconds and memory bytes, rather than time units and elements.
    """

    program: Program
    events: list[list[Event]] = field(repr=False)
    in_seconds: bool = False

    def __repr__(self) -> str:
        end, unit = (f"{self.end:.6g} s", "bytes") if self.in_seconds else (f"{self.end:g}", "elements")
        return f"<Timeline of {len(self.events)} ranks, ends at {end}, at most {self.peak_memory:,} {unit} on a rank>"

    @cached_property
    def steps(self) -> float:
        """Start of the last op: the figure that the puzzles print."""
        return round(max((event.start for events in self.events for event in events), default=0.0), 9)

    @cached_property
    def end(self) -> float:
        """End of the last op."""
        return round(max((event.end for events in self.events for event in events), default=0.0), 9)

    @cached_property
    def peak_memory_by_rank(self) -> list[int]:
        """Largest number of live elements, or bytes, at an op, for each rank."""
        return [max((event.memory for event in events), default=0) for events in self.events]

    @cached_property
    def peak_memory(self) -> int:
        """Largest number of live elements, or bytes, on any rank."""
        return max(self.peak_memory_by_rank)

    @cached_property
    def communications(self) -> list[Communication]:
        """Communications whose members all have a tape in the program. A member is given by the row of its tape."""
        return communications_of(self.program)[0]

    def _repr_svg_(self) -> str | None:
        return picture(self)


def is_event(kind: OpKind) -> bool:
    """Return whether ops of a kind are events; WAIT and FREE are not."""
    return kind not in BOOKKEEPING


class RankTimes(NamedTuple):
    """Times of one rank in a step, which add up to the end of the timeline.

    Attributes:
        computing: time in which the rank computes.
        exposed: time in which it communicates and does not compute.
        idle: time in which it does neither, until the last rank has ended.
    """

    computing: float
    exposed: float
    idle: float


def rank_times(timeline: Timeline, rank: int) -> RankTimes:
    """Return the division of one rank's time into computing, exposed communication and idle time."""
    events = timeline.events[rank]
    work = covered((event.start, event.end) for event in events if event.kind not in COMMUNICATION)
    busy = covered((event.start, event.end) for event in events)
    return RankTimes(work, max(0.0, busy - work), max(0.0, timeline.end - busy))


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of some spans."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


@dataclass
class Traffic:
    """Traffic of one rank in a step. Bytes and elements are those that it sends, in messages and collectives.

    Attributes:
        collectives: number of collectives with other ranks.
        messages: number of messages that it sends.
        weights: bytes of weights and of their gradients.
        activations: bytes of activations, residuals, keys and values, and of their gradients.
        others: bytes of anything else, such as a gradient's norm or the loss's numbers.
        elements: number of elements in all these bytes.
    """

    collectives: int = 0
    messages: int = 0
    weights: float = 0.0
    activations: float = 0.0
    others: float = 0.0
    elements: float = 0.0

    @property
    def bytes(self) -> float:
        return self.weights + self.activations + self.others


def traffic(checked: Checked) -> list[Traffic]:
    """Return each rank's traffic in a step.

    Collectives count as in a ring, which moves the fewest bytes. Of the whole value, a rank sends (n - 1) / n in an
    all-gather or a reduce-scatter among n ranks, and twice that in an all-reduce (nccl-tests, doc/PERFORMANCE.md;
    Rabenseifner 2004, "Optimization of collective reduction operations"). In an all-to-all it sends its input except
    its own 1 / n. A broadcast passes the whole value along a chain from the root, and a reduce passes it towards the
    root, so each member but the last sends it once. The root of a scatter sends all pieces but its own, and in a gather
    all other members send their pieces. A barrier moves nothing.
    """
    return [_of_rank(checked, rank) for rank in range(checked.program.ranks)]


def _of_rank(checked: Checked, rank: int) -> Traffic:
    traffic, sizes = Traffic(), checked.program.sizes
    for op in checked.program.tapes[rank]:
        if op.kind is OpKind.SEND:
            traffic.messages += 1
            times = 1.0
        elif op.kind in COLLECTIVES and op.group is not None and len(op.group.ranks) > 1:
            traffic.collectives += 1
            times = _times(op, rank, op.group.ranks)
        else:
            continue
        if not times:
            continue
        spec = checked.specs[rank][(op.inputs or op.outputs)[0]]
        traffic.elements += times * sizes.elements(spec)
        _add(traffic, spec, times * sizes.bytes(spec))
    return traffic


def _times(op: Op, rank: int, ranks: tuple[int, ...]) -> float:
    """Return how many times a rank sends the whole value, or in a GATHER or an ALL_GATHER its own piece."""
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


def _add(traffic: Traffic, spec: Spec, amount: float) -> None:
    if spec.kind in (Kind.WEIGHT, Kind.GRAD_WEIGHT):
        traffic.weights += amount
    elif spec.kind in ROW_KINDS and spec.kind is not Kind.STATS:
        traffic.activations += amount
    else:
        traffic.others += amount
