"""What the executor knows of a tape before it runs: where gathered weights live, and what is done in place."""

from __future__ import annotations

from collections import defaultdict

from shardlab.check import Checked
from shardlab.check.accumulation import InPlace
from shardlab.program import Kind, OpKind
from shardlab.program.tape import COMMUNICATION


class Analysis:
    """Facts about one rank's tape.

    Attributes:
        in_place: which ops write over what they read.
        regathered: indices of FORWARDs and RECOMPUTEs whose BACKWARD is given another weight value than they were.
        saved_of: number of an activation to those of what autograd saved from its forward passes.
        slot: number of a gathered or received weight to the buffer that it lives in; `slots` is how many there are.
    """

    def __init__(self, checked: Checked, rank: int) -> None:
        self.tape = checked.program.tapes[rank]
        self.specs = checked.specs[rank]
        self.in_place = InPlace(self.tape)
        self.saved_of: dict[int, list[int]] = defaultdict(list)
        for op in self.tape:
            for number in op.outputs:
                if self.specs[number].kind is Kind.SAVED:
                    self.saved_of[op.inputs[0]].append(number)
        self.regathered = self._regathered()
        self.slot: dict[int, int] = {}
        self.slots = self._share_buffers()

    def _regathered(self) -> set[int]:
        given = {op.inputs[3]: op.inputs[2] for op in self.tape if op.kind is OpKind.BACKWARD}
        makers = (OpKind.FORWARD, OpKind.RECOMPUTE)
        saving = [(at, op) for at, op in enumerate(self.tape) if op.kind in makers]
        return {at for at, op in saving if given.get(op.outputs[-1], op.inputs[1]) != op.inputs[1]}

    def _share_buffers(self) -> int:
        """Give each weight that arrives the first buffer that is free while it lives."""
        freed = {op.inputs[0]: at for at, op in enumerate(self.tape) if op.kind is OpKind.FREE}
        free_from: list[int] = []
        for at, op in enumerate(self.tape):
            if op.kind in COMMUNICATION and op.outputs and self.specs[op.outputs[0]].kind is Kind.WEIGHT:
                number = op.outputs[0]
                slot = next((i for i, free in enumerate(free_from) if free < at), len(free_from))
                if slot == len(free_from):
                    free_from.append(0)
                free_from[slot] = freed.get(number, len(self.tape))
                self.slot[number] = slot
        return len(free_from)
