"""Seconds and bytes of a sample's passes, from the replay of its tape."""

from __future__ import annotations

from shardlab.predict.folding import Folded
from shardlab.predict.passes import Crest, Held, Meeting, Pass, PassKey
from shardlab.program import OpKind
from shardlab.timeline.clocks import Clocks
from shardlab.timeline.memory import MemoryLedger
from shardlab.timeline.prices import Bytes, Prices

FREE, WAIT = OpKind.FREE, OpKind.WAIT
MAIN = frozenset({OpKind.FORWARD, OpKind.BACKWARD, OpKind.BACKWARD_INPUT, OpKind.BACKWARD_WEIGHT})


class PassMeter:
    """Measures passes, as parts of a sample's tape."""

    def __init__(self, traced: Folded, prices: Prices, size: Bytes) -> None:
        self.tape, self.times = traced.program.tapes[0], Clocks(traced, prices).run()
        self.memory = MemoryLedger(self.tape, traced.specs[0], size, real=True, counters=True, sizes=size.sizes).run()
        self.moments = self._moments(prices.blocking_p2p)

    def _moments(self, blocking: float) -> list[float]:
        """When compute gets to each op."""
        moments, clock = list[float](), 0.0
        issued: dict[int, int] = {}
        idle_until = {idle.op: idle.until for idle in self.times.idle[0]}
        for at, op in enumerate(self.tape):
            moments.append(clock)
            if op.kind is WAIT:
                clock = idle_until.get(issued[op.handle], clock)
            elif op.handle >= 0:
                issued[op.handle] = at
                clock += blocking * self._seconds(at) if op.kind is OpKind.SEND else 0.0
            elif op.kind is not FREE:
                clock = self.times.ends[0][at]
        return moments

    def _seconds(self, at: int) -> float:
        return self.times.ends[0][at] - self.times.starts[0][at]

    def between(self, start: int, stop: int, key: PassKey) -> Pass:
        """Measure a pass, from one op up to another."""
        layer = key[1] if len(key) > 1 else 0
        assert isinstance(layer, int)
        tape = self.tape[start:stop]
        main = start + next((at for at, op in enumerate(tape) if op.kind in MAIN), len(tape))
        meetings, rest = self._meetings(start, stop)
        seconds = rest + sum(meeting.after + meeting.seconds for meeting in meetings)
        if rest < 0:  # communication beside compute, on streams that nobody else uses
            seconds, meetings = self.moments[stop] - self.moments[start], ()
        return Pass(
            seconds,
            meetings,
            rest if rest >= 0 else seconds,
            _less(self.memory.at_starts[stop], self.memory.at_starts[start]),
            (
                self._crest(start, range(start, main), layer),
                self._crest(start, range(main, min(main + 1, stop)), layer),
                self._crest(start, range(main + 1, stop), layer),
            ),
        )

    def _crest(self, start: int, ops: range, layer: int) -> Crest | None:
        timed = [at for at in ops if self.tape[at].kind not in (FREE, WAIT)]
        if not timed:
            return None
        at = max(timed, key=self.memory.during.__getitem__)
        held = _less(self.memory.counters[at], self.memory.at_starts[start])
        return Crest(sum(held), held, self.tape[at].kind, self.tape[at].layer - layer)

    def _meetings(self, start: int, stop: int) -> tuple[tuple[Meeting, ...], float]:
        """Collectives that are awaited at once, and the seconds after the last one; below 0: others are not."""
        found: list[Meeting] = []
        after, issued = 0.0, -1
        for at in range(start, stop):
            op = self.tape[at]
            if op.kind is FREE:
                continue
            if op.kind is WAIT:
                if op.handle != issued:
                    return (), -1.0
                issued = -1
            elif issued >= 0:
                return (), -1.0
            elif op.handle < 0:
                after += self._seconds(at)
            elif op.group is None:
                return (), -1.0
            else:
                found.append(Meeting(after, op.group, self._seconds(at)))
                after, issued = 0.0, op.handle
        return tuple(found), after


def _less(held: Held, other: Held) -> Held:
    return tuple([more - less for more, less in zip(held, other, strict=True)])
