"""What must come before what on one tape, whatever order a pass puts it into."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence

from shardlab.check.views import roots_of
from shardlab.program import Kind, Op, OpKind, Spec
from shardlab.program.matching import channel_of
from shardlab.program.ops import COMMUNICATION, COPIES

FREE, WAIT, UPDATE = OpKind.FREE, OpKind.WAIT, OpKind.UPDATE


class Dependences:
    """The order that one tape's numbers need.

    An op comes after the ops that made what it reads, and after the waits for what was on its way. A value ends, and
    memory is written over, after all that read it. Ranks issue what they communicate on one channel in the order in
    which they did. Any order that keeps to this computes the same, bit by bit.

    Args:
        tape: of a program that has passed the check.
        rank: whose it is.
        specs: of its values.

    Attributes:
        tape, rank: as given.
        before: for each op the indices of others that it comes after.
        after: for each op the indices of those that come after it.
        readers: number of a value to the indices of the ops that read it; those that end it are not among them.
        waits: handle to the index of its WAIT.
    """

    def __init__(self, tape: Sequence[Op], rank: int, specs: Mapping[int, Spec]) -> None:
        self.tape, self.rank = tape, rank
        self.waits = {op.handle: at for at, op in enumerate(tape) if op.kind is WAIT}
        self.readers: dict[int, list[int]] = defaultdict(list)
        self.before: list[set[int]] = [set() for _ in tape]
        self._available: dict[int, int] = {}  # number of a value to the index of the op that made it, or awaited it
        self._memory = roots_of(tape, specs)
        self._reads: dict[Hashable, list[int]] = defaultdict(list)  # what is in memory to the ops that read it
        last_on: dict[Hashable, int] = {}
        for at, op in enumerate(tape):
            before = self.before[at]
            if op.kind is WAIT:
                continue
            before.update(self._available[number] for number in op.inputs)
            reads = (read for number in self._written(op, specs) for read in self._reads[number])
            before.update(self.over(read) if self.over(read) < at else read for read in reads)  # an update awaits it
            self._note(at, op, specs)
            if op.kind in COMMUNICATION:
                self.before[self.waits[op.handle]].add(at)
            if op.kind in COMMUNICATION - COPIES:  # a copy meets no other rank
                channel = channel_of(rank, op)
                if channel in last_on:
                    before.add(last_on[channel])
                last_on[channel] = at
        self.after: list[list[int]] = [[] for _ in tape]
        for at, others in enumerate(self.before):
            others.discard(at)
            for other in others:
                self.after[other].append(at)

    def over(self, at: int) -> int:
        """The index of the op with which one is over: its WAIT, or itself."""
        op = self.tape[at]
        return self.waits[op.handle] if op.kind in COMMUNICATION else at

    def _note(self, at: int, op: Op, specs: Mapping[int, Spec]) -> None:
        """Note what an op reads and makes."""
        for number in op.outputs:
            self._available[number] = self.over(at)
        if op.kind is FREE:
            return
        ended = {op.inputs[place] for place in op.kind.row.ends}
        for number in op.inputs:
            if number not in ended:
                self.readers[number].append(at)
            self._reads[number].append(at)
            self._reads[self._memory.get(number, number)].append(at)
            self._reads[specs[number].kind, specs[number].layer].append(at)

    def _written(self, op: Op, specs: Mapping[int, Spec]) -> list[Hashable]:
        """What an op ends or writes over: values, and for a step's new weights all older ones of their layer."""
        ended = [op.inputs[place] for place in op.kind.row.ends]
        roots = [self._memory[number] for number in ended if number in self._memory]
        arriving = [(Kind.WEIGHT, specs[number].layer) for number in op.outputs if _is_new_weight(specs[number])]
        return [*ended, *roots, *arriving]


def _is_new_weight(spec: Spec) -> bool:
    return spec.kind is Kind.WEIGHT and spec.step > 0
