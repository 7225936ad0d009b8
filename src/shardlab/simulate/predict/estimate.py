"""Estimate of a step: a replay in seconds and bytes, and its figures.

`estimate` replays a traced program. An `Estimate` gives the step's duration, the shares of compute, exposed
communication and idle time, and the memory peak (`Peak`) of each rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

from shardlab.common.text import listed
from shardlab.language import OpKind, Sizes
from shardlab.language.ops import COLLECTIVES
from shardlab.language.rules.kinds import bits
from shardlab.language.world import gc_paused
from shardlab.simulate.timeline.memory import CATEGORIES, RankMemory, memory_in_bytes
from shardlab.simulate.timeline.prices import Prices, Traced, awaited_by, rank_of
from shardlab.simulate.timeline.run import Clocks, Times, timeline_of
from shardlab.simulate.timeline.timeline import Timeline

COMPUTE, IDLE = "compute", "idle"
"""Parts of a step in which ranks do not wait for communication."""


@dataclass(frozen=True)
class Peak:
    """Largest memory of one rank during a step.

    Attributes:
        rank: number of the rank; in a folded program, the rank that represents its stage.
        bytes: bytes of tensors.
        by_category: these bytes by purpose.
        op, layer, microbatches: the op at the peak (None: the rank has no ops), its layer in the program, and the bit
            set of its microbatches.
        part: name of that layer in the model ("": unknown).
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
        """The op at the peak as text, such as `backward of block 3, feed-forward, microbatch 0`."""
        if self.op is None:
            return "a rank without ops"
        part = self.part if not self.part or self.part.startswith("block") else f"the {self.part}"
        location = f" of {part or f'layer {self.layer}'}" if self.layer >= 0 else ""
        plural = "es" * (self.microbatches.bit_count() > 1)
        about = f", microbatch{plural} {listed(bits(self.microbatches))}" if self.microbatches else ""
        return f"{self.op.row.hyphenated}{location}{about}"


@dataclass(frozen=True)
class Estimate:
    """Replay of one step of a traced program.

    Attributes:
        traced: the program.
        times: start and end of every op.
        memory: memory of each row of the program: of a rank, or in a folded program, of the rank that represents its
            stage.
        place: function from a layer to its position in the model as text (None: layers only have numbers).
        seconds_outside_ops: seconds of the step that belong to no op, in which no rank computes.
    """

    traced: Traced = field(repr=False)
    times: Times = field(repr=False)
    memory: list[RankMemory] = field(repr=False)
    place: Callable[[int], str] | None = field(default=None, repr=False)
    seconds_outside_ops: float = 0.0

    @cached_property
    def step(self) -> float:
        """Duration of the step."""
        return self.times.end + self.seconds_outside_ops

    @cached_property
    def compute_share(self) -> float:
        """Share of the step in which compute runs, the mean over ranks.

        The shares of compute, exposed communication and idle time add up to 1.
        """
        busy = 0.0
        for row, tape in enumerate(self.traced.program.tapes):
            starts, ends = self.times.starts[row], self.times.ends[row]
            busy += sum([end - start for op, start, end in zip(tape, starts, ends, strict=True) if op[4] < 0])
        return self._share(busy)

    @cached_property
    def exposed(self) -> dict[tuple[str, str], float]:
        """Share of the step in which compute waits for communication, by (kind, axis), the mean over ranks.

        A wait counts only after the last member has arrived. From then on, the communication runs or is queued behind
        another one.
        """
        waited: dict[tuple[str, str], float] = defaultdict(float)
        for row, tape in enumerate(self.traced.program.tapes):
            ready = self.times.ready[row]
            for index, since, until in self.times.idle[row]:
                kind, axis = awaited_by(self.traced.program, row, tape[index])
                name = kind.value if kind in COLLECTIVES else "message"
                waited[name, axis] += max(0.0, until - max(since, ready[index]))
        return {key: self._share(seconds) for key, seconds in sorted(waited.items(), key=lambda item: -item[1])}

    @property
    def exposed_share(self) -> float:
        return sum(self.exposed.values())

    @property
    def idle_share(self) -> float:
        """Share of the step in which a rank waits for other ranks to arrive, or has ended; the mean over ranks."""
        return max(0.0, 1.0 - self.compute_share - self.exposed_share) if self.step else 0.0

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of the step by part, such as "compute", "idle" or "all-gather on tp", the mean over ranks."""
        parts = {COMPUTE: self.compute_share, IDLE: self.idle_share}
        parts |= {f"{kind.replace('_', '-')} on {axis}": share for (kind, axis), share in self.exposed.items()}
        return {name: share * self.step for name, share in parts.items()}

    @cached_property
    def peaks(self) -> list[Peak]:
        """Peak of each row's memory."""
        program = self.traced.program
        peaks = [peak_of(self.traced, row, memory, rank_of(program, row)) for row, memory in enumerate(self.memory)]
        return [replace(peak, part=self._part(peak)) for peak in peaks]

    @property
    def peak(self) -> Peak:
        """Largest peak of all rows."""
        return max(self.peaks, key=lambda peak: peak.bytes)

    def timeline(self) -> Timeline:
        """Return the timeline with all events. For many ranks this takes longer than the estimate itself."""
        return timeline_of(self.traced, self.times, [memory.during for memory in self.memory], in_seconds=True)

    def _part(self, peak: Peak) -> str:
        if self.place is None or peak.layer < 0:
            return ""
        if peak.layer == self.traced.program.layers:
            return "head"  # the loss and the logits have the number after the last layer's
        return self.place(peak.layer)

    def _share(self, seconds: float) -> float:
        ranks = self.traced.program.ranks
        return seconds / (ranks * self.step) if self.step else 0.0


def estimate(
    traced: Traced, prices: Prices, kept_sizes: Sizes | None = None, place: Callable[[int], str] | None = None
) -> Estimate:
    """Replay a traced program in seconds and bytes.

    Args:
        traced: the program.
        prices: times of its ops.
        kept_sizes: sizes of values in memory (None: those of the program).
        place: function from a layer to its position in the model as text (None: layers only have numbers).
    """
    with gc_paused():
        return Estimate(traced, Clocks(traced, prices).run(), memory_in_bytes(traced, kept_sizes), place)


def peak_of(traced: Traced, row: int, memory: RankMemory, rank: int) -> Peak:
    """Return the peak of a row, with the op at the peak."""
    tape, specs = traced.program.tapes[row], traced.specs[row]
    by_category = {category.value: bytes for category, bytes in zip(CATEGORIES, memory.by_category, strict=True)}
    if not tape:
        return Peak(rank, memory.peak, by_category, None, -1, 0)
    op = tape[memory.peak_op]
    microbatches = [specs[number].microbatches for number in (*op.inputs[:1], *op.outputs[:1])]
    return Peak(rank, memory.peak, by_category, op.kind, op.layer, microbatches[0] if microbatches else 0)
