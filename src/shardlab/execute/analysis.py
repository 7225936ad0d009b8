"""What the executor knows of a tape before it runs: which results may reuse what they were made from.

A value whose last reader is the op at hand can be written over. So all_reduce and ADD work in place, a gradient is
accumulated by the BACKWARD that makes it, and gathered weights take turns in a few buffers.
"""

from __future__ import annotations

from collections import defaultdict

from shardlab.check import Checked
from shardlab.program import Kind, Op, OpKind
from shardlab.program.tape import COMMUNICATION


class Analysis:
    """Facts about one rank's tape.

    Attributes:
        in_place: indices of ops that may write over their first input.
        accumulate: index of a BACKWARD to the number of the gradient that it accumulates into.
        accumulated: indices of the ADDs that such a BACKWARD has done already.
        regathered: indices of FORWARDs whose BACKWARD is given another weight value than they were.
        saved_of: number of an activation to those of what autograd saved from its forward passes.
        slot: number of a gathered or received weight to the buffer that it lives in; `slots` is how many there are.
    """

    def __init__(self, checked: Checked, rank: int) -> None:
        self.tape = checked.program.tapes[rank]
        self.specs = checked.specs[rank]
        self.readers: dict[int, list[int]] = defaultdict(list)
        self.made_at: dict[int, int] = {}
        self.freed_at: dict[int, int] = {}
        self.saved_of: dict[int, list[int]] = defaultdict(list)
        for at, op in enumerate(self.tape):
            for number in op.outputs:
                self.made_at[number] = at
                if self.specs[number].kind is Kind.SAVED:
                    self.saved_of[op.inputs[0]].append(number)
            for number in op.inputs:
                if op.kind is OpKind.FREE:
                    self.freed_at[number] = at
                else:
                    self.readers[number].append(at)
        self.in_place = {
            at
            for at, op in enumerate(self.tape)
            if op.kind in (OpKind.ALL_REDUCE, OpKind.ADD) and self.readers[op.inputs[0]][-1] == at
        }
        self.accumulate: dict[int, int] = {}
        self.accumulated: set[int] = set()
        for at, op in enumerate(self.tape):
            if op.kind is OpKind.ADD:
                self._fuse(at, op)
        self.regathered = self._regathered()
        self.slot: dict[int, int] = {}
        self.slots = self._share_buffers()

    def _fuse(self, at: int, op: Op) -> None:
        """An ADD of a fresh gradient to an older one, neither read by anybody else from then on."""
        total, fresh = sorted(op.inputs, key=self.made_at.__getitem__)
        backward = self.made_at[fresh]
        if (
            self.tape[backward].kind is OpKind.BACKWARD
            and self.readers[fresh] == [at]
            and self.made_at[total] < backward
            and self._arrived(total) < backward
            and all(reader < backward for reader in self.readers[total][:-1])
            and self.readers[total][-1] == at
        ):
            self.accumulate[backward] = total
            self.accumulated.add(at)

    def _arrived(self, number: int) -> int:
        """Index of the op after which a value may be used."""
        at = self.made_at[number]
        handle = self.tape[at].handle
        if handle < 0:
            return at
        return next(
            i for i in range(at, len(self.tape)) if self.tape[i][0] is OpKind.WAIT and self.tape[i][4] == handle
        )

    def _regathered(self) -> set[int]:
        given = {op.inputs[3]: op.inputs[2] for op in self.tape if op.kind is OpKind.BACKWARD}
        forwards = [(at, op) for at, op in enumerate(self.tape) if op.kind is OpKind.FORWARD]
        return {at for at, op in forwards if given.get(op.outputs[-1], op.inputs[1]) != op.inputs[1]}

    def _share_buffers(self) -> int:
        """Give each weight that arrives the first buffer that is free while it lives."""
        free_from: list[int] = []
        for at, op in enumerate(self.tape):
            if op.kind in COMMUNICATION and op.outputs and self.specs[op.outputs[0]].kind is Kind.WEIGHT:
                number = op.outputs[0]
                until = self.freed_at.get(number, len(self.tape))
                slot = next((i for i, free in enumerate(free_from) if free < at), len(free_from))
                if slot == len(free_from):
                    free_from.append(until)
                free_from[slot] = until
                self.slot[number] = slot
        return len(free_from)
