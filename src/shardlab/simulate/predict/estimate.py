"""Figures of a step, from its replay in seconds and bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from shardlab.language import OpKind, Sizes
from shardlab.language.ops import COLLECTIVES
from shardlab.language.rules.kinds import bits, listed
from shardlab.language.world import gc_paused
from shardlab.simulate.timeline.memory import CATEGORIES, RankMemory, memory_in_bytes
from shardlab.simulate.timeline.prices import Prices, Traced, rank_of
from shardlab.simulate.timeline.run import Clocks, Times, timeline_of
from shardlab.simulate.timeline.timeline import Timeline


@dataclass(frozen=True)
class Peak:
    """The most that one rank holds at a time, in bytes.

    Attributes:
        rank: which (of folded ranks, the one that stands for those of its stage).
        bytes: how many.
        by_category: what for.
        op, layer, microbatches: during which op (None: the rank does nothing), on which of the program's layers and
            which microbatches (a bit set).
        part: of the model, if it is known: what that layer is to a reader.
    """

    rank: int
    bytes: int
    by_category: dict[str, int]
    op: OpKind | None
    layer: int
    microbatches: int
    part: str = ""

    @property
    def cause(self) -> str:
        """`backward of block 3, feed-forward, microbatch 0`; a part that is not in a block has an article."""
        if self.op is None:
            return "a rank without ops"
        part = self.part if not self.part or self.part.startswith("block") else f"the {self.part}"
        where = f" of {part or f'layer {self.layer}'}" if self.layer >= 0 else ""
        plural = "es" * (self.microbatches.bit_count() > 1)
        about = f", microbatch{plural} {listed(bits(self.microbatches))}" if self.microbatches else ""
        return f"{self.op.value.replace('_', '-')}{where}{about}"


@dataclass(frozen=True)
class Estimate:
    """One step of a traced program, timed by prices.

    Attributes:
        traced: what was replayed.
        times: when everything happened.
        memory: what each row holds.
        place: where a layer stands in the model (None: layers are only numbered).
        beside: seconds of the step beside its ops, in which no rank computes.
    """

    traced: Traced
    times: Times
    memory: list[RankMemory]
    place: Callable[[int], str] | None = None
    beside: float = 0.0

    @cached_property
    def step(self) -> float:
        """How long the step takes."""
        return self.times.end + self.beside

    @cached_property
    def compute_share(self) -> float:
        """Share of the step in which compute runs; the mean over ranks. With exposed communication and bubble it makes
        1."""
        busy = 0.0
        for row, tape in enumerate(self.traced.program.tapes):
            starts, ends = self.times.starts[row], self.times.ends[row]
            busy += sum([end - start for op, start, end in zip(tape, starts, ends, strict=True) if op[4] < 0])
        return self._share(busy)

    @cached_property
    def exposed(self) -> dict[tuple[str, str], float]:
        """Share of the step in which compute waits for communication, by (kind, axis); the mean over ranks.

        It counts from when all members have come; what is waited for then runs, or is queued behind another one.
        """
        waited: dict[tuple[str, str], float] = defaultdict(float)
        for row, tape in enumerate(self.traced.program.tapes):
            ready = self.times.ready[row]
            for at, since, until in self.times.idle[row]:
                op = tape[at]
                axis = op.group.axis if op.group else self._axis(row, op.peer)
                kind = op.kind.value if op.kind in COLLECTIVES else "message"
                waited[kind, axis] += max(0.0, until - max(since, ready[at]))
        return {key: self._share(seconds) for key, seconds in sorted(waited.items(), key=lambda item: -item[1])}

    @property
    def exposed_share(self) -> float:
        return sum(self.exposed.values())

    @property
    def bubble_share(self) -> float:
        """Share of the step in which a rank has nothing to do: it waits until others have come, or has ended."""
        return max(0.0, 1.0 - self.compute_share - self.exposed_share) if self.step else 0.0

    @cached_property
    def peaks(self) -> list[Peak]:
        """Peak of each row's memory."""
        program = self.traced.program
        found = [peak_of(self.traced, row, memory, rank_of(program, row)) for row, memory in enumerate(self.memory)]
        return [replace(peak, part=self._part(peak)) for peak in found]

    @property
    def peak(self) -> Peak:
        """The largest."""
        return max(self.peaks, key=lambda peak: peak.bytes)

    def timeline(self) -> Timeline:
        """All events; of many ranks that takes longer than the estimate."""
        return timeline_of(self.traced, self.times, [memory.during for memory in self.memory], in_seconds=True)

    def _part(self, peak: Peak) -> str:
        if self.place is None or peak.layer < 0:
            return ""
        if peak.layer == self.traced.program.layers:
            return "head"  # the loss and the logits are numbered as what comes after the last layer
        return self.place(peak.layer)

    def _share(self, seconds: float) -> float:
        ranks = self.traced.program.ranks
        return seconds / (ranks * self.step) if self.step else 0.0

    def _axis(self, row: int, peer: int) -> str:
        mesh, here = self.traced.program.mesh, rank_of(self.traced.program, row)
        apart = [axis for axis in mesh.sizes() if mesh.coordinate(here, axis) != mesh.coordinate(peer, axis)]
        return apart[0] if len(apart) == 1 else "world"


def estimate(
    traced: Traced, prices: Prices, kept: Sizes | None = None, place: Callable[[int], str] | None = None
) -> Estimate:
    """Replay a traced program in seconds and bytes.

    Args:
        kept: how large values are in memory, if not as traced.
        place: see `Estimate`.
    """
    with gc_paused():
        return Estimate(traced, Clocks(traced, prices).run(), memory_in_bytes(traced, kept), place)


def peak_of(traced: Traced, row: int, memory: RankMemory, rank: int) -> Peak:
    """A row's peak, with what was done at that moment."""
    tape, specs = traced.program.tapes[row], traced.specs[row]
    by_category = {category.value: bytes for category, bytes in zip(CATEGORIES, memory.by_category, strict=True)}
    if not tape:
        return Peak(rank, memory.peak, by_category, None, -1, 0)
    op = tape[memory.peak_op]
    about = [specs[number].microbatches for number in (*op.inputs[:1], *op.outputs[:1])]
    return Peak(rank, memory.peak, by_category, op.kind, op.layer, about[0] if about else 0)
