"""Ops of a tape that may write over what they read, because nobody reads it any more.

A layer adds a gradient to one that is there already; so a BACKWARD or BACKWARD_WEIGHT whose gradient is only added to
an older one does the ADD itself, and the new gradient never takes room of its own: simulated memory and the executor
both follow this.
The other reuse (`first_input`) is the executor's alone; simulated memory counts input and result of those ops.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from shardlab.program import Op, OpKind

FREE, WAIT = OpKind.FREE, OpKind.WAIT
WEIGHT_BACKWARDS = frozenset({OpKind.BACKWARD, OpKind.BACKWARD_WEIGHT})
"""Ops whose first output is a weight's gradient."""
WRITING = frozenset(kind for kind in OpKind if kind.row.in_place)
"""Ops that may write over what they read."""


class InPlace:
    """Ops of one tape that may be done in place.

    Attributes:
        first_input: indices of the ALL_REDUCEs and ADDs that may write over their first input, and REDUCEs.
        accumulates: index of a BACKWARD to the number of the older gradient that it adds its own to.
        fused: index of the ADD that such a BACKWARD has done to (older gradient, new gradient).
    """

    def __init__(self, tape: Sequence[Op]) -> None:
        self._tape = tape
        self._made: dict[int, int] = {}
        self._readers: dict[int, list[int]] = defaultdict(list)
        self._read_until: dict[int, list[int]] = defaultdict(list)  # when a communication that reads it has ended
        others = [(at, op) for at, op in enumerate(tape) if op[0] is not FREE]
        self._shared = {number for _, op in others if op[0] is OpKind.SLICE for number in (*op[2], *op[3])}
        writing = [(at, op) for at, op in others if op[0] in WRITING and op[2]]
        watched = {number for _, op in writing for number in op[2]}
        waits = {op[4]: at for at, op in others if op[0] is WAIT}
        made, readers = self._made, self._readers
        for at, op in others:
            handle = op[4]
            for number in op[3]:
                if number in watched:
                    made[number] = at if handle < 0 else waits[handle]
            for number in op[2]:
                if number in watched:
                    readers[number].append(at)
                    if handle >= 0:
                        self._read_until[number].append(waits[handle])
        self.first_input = {at for at, op in writing if self._last_read(op.inputs[0], at, before=at)}
        self.accumulates: dict[int, int] = {}
        self.fused: dict[int, tuple[int, int]] = {}
        for at, op in writing:
            if op.kind is OpKind.ADD:
                self._fuse(at, op)

    def _last_read(self, number: int, reader: int, before: int) -> bool:
        """Whether `reader` is the only one to read a value from op `before` on, communications in flight included.

        Of memory that a slice shares nobody says so.
        """
        if number in self._shared:
            return False
        for at in self._readers[number]:
            if at >= before and at != reader:
                return False
        ends = self._read_until.get(number, ())
        own = 1 if self._tape[reader].handle >= 0 else 0  # an all_reduce's own reading ends with it
        return len(ends) <= own or sum(end > before for end in ends) <= own

    def _fuse(self, at: int, op: Op) -> None:
        older, newer = op.inputs
        if self._made[older] > self._made[newer]:
            older, newer = newer, older
        backward = self._made[newer]
        if (
            self._tape[backward].kind in WEIGHT_BACKWARDS
            and self._tape[backward].outputs[0] == newer
            and self._readers[newer] == [at]
            and self._made[older] < backward
            and self._last_read(older, at, before=backward)
        ):
            self.accumulates[backward] = older
            self.fused[at] = (older, newer)
