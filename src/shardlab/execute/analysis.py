"""What the executor knows of a tape before it runs: where gathered weights live, and what is done in place."""

from __future__ import annotations

from collections import defaultdict

from shardlab.check import Checked
from shardlab.check.accumulation import InPlace
from shardlab.check.buckets import Buckets
from shardlab.check.kept import Kept
from shardlab.check.views import ends_of, last_copies, last_ends, last_reads
from shardlab.execute.joint_update import followed
from shardlab.program import Kind, OpKind
from shardlab.program.ops import COMMUNICATION
from shardlab.rules.kind import AUTOGRAD_KINDS
from shardlab.rules.pieces import bits

_BUFFERED = COMMUNICATION | {OpKind.CONCATENATE, OpKind.CAST}
"""Ops that make weights of which the memory is taken and given back again and again."""


class Analysis:
    """Facts about one rank's tape.

    Attributes:
        in_place: which ops write over what they read.
        buckets: the memory of collectives that run as one.
        halved: indices of FORWARDs and RECOMPUTEs whose backward pass comes in two halves.
        saved_of: number of an activation to those of what its layer keeps of its forward passes.
        gradient_factor: number of what a layer keeps of a forward pass to the factor of the gradients that its backward
            pass is given.
        kept: the weights that outlive the step, and what is received in their place.
        homes: number of a slice, or of a weight that an update writes, to that of the value whose memory it lies in.
        stepped_at: (layer, slices) of each optimizer state to the place where its update is computed.
        slot: number of a gathered or received weight to the buffer that it lives in; `slots` is how many there are.
        followed: indices of updates that another one follows at once.
        last_reads: index of a FORWARD or RECOMPUTE to the activation that it is the last to read.
        last_copies: indices of collectives that send a copy of rows which nobody else reads any more.
        empties: index of the op that ends such a weight, or the last that lies there, to the buffer.
        leaves_room: index of the FREE of a kept weight, or of the last that lies there, to the weight, which arrives
            there again.
    """

    def __init__(self, checked: Checked, rank: int) -> None:
        self.tape = checked.program.tapes[rank]
        self.specs = checked.specs[rank]
        self.in_place = InPlace(self.tape)
        self.buckets = Buckets(self.tape, self.in_place)
        self.saved_of: dict[int, list[int]] = defaultdict(list)
        for op in self.tape:
            for number in op.outputs:
                if self.specs[number].kind in AUTOGRAD_KINDS:
                    self.saved_of[op.inputs[0]].append(number)
        self.gradient_factor = {
            op.inputs[op.kind.row.saved]: self.specs[op.inputs[1]].form.factor
            for op in self.tape
            if op.kind is OpKind.BACKWARD or op.kind is OpKind.BACKWARD_INPUT
        }
        self.kept = Kept(self.tape, self.specs)
        self.homes = self.kept.homes
        self._ended = last_ends(ends_of(self.tape), self.homes)
        self.stepped_at = {
            (op.layer, self.specs[op.inputs[2]].holds): self.specs[op.inputs[1]].form.place
            for op in self.tape
            if op.kind is OpKind.UPDATE
        }
        self.slot: dict[int, int] = {}
        self.empties: dict[int, int] = {}
        self.slots = self._share_buffers()
        self.leaves_room = self._leaves_room()
        self.halved = self._halved()
        carried = (self.homes[self.tape[at].outputs[0]] for at in self.kept.carried)
        self.followed = followed(self.tape, {self._ended.get(home, -1) for home in carried})
        self.last_reads = last_reads(self.tape, self.specs)
        self.last_copies = last_copies(self.tape, self.specs)

    def _leaves_room(self) -> dict[int, int]:
        kept, ended = self.kept, self._ended
        arriving = {kept.final[number] for number in kept.arrives}
        written = {kept.owner(*key) for key in self.stepped_at}
        return {
            ended[number]: number
            for number, key in kept.loaded.items()
            if key in arriving - written and not kept.places[key] and number in ended
            if self.tape[ended[number]].kind is OpKind.FREE
        }

    def _halved(self) -> set[int]:
        made = {op.outputs[-1]: at for at, op in enumerate(self.tape) if op.kind in (OpKind.FORWARD, OpKind.RECOMPUTE)}
        return {made[op.inputs[3]] for op in self.tape if op.kind is OpKind.BACKWARD_INPUT}

    def _share_buffers(self) -> int:
        """Give each weight that arrives the first buffer that is free while it lives."""
        free_from: list[int] = []
        dtypes: list[str] = []
        for at, op in enumerate(self.tape):
            if op.kind in _BUFFERED and op.outputs and self.specs[op.outputs[0]].kind is Kind.WEIGHT:
                number, form = op.outputs[0], self.specs[op.outputs[0]].form
                if number in self.kept.arrives or form.place or op.offset >= 0:
                    continue
                dtype = form.dtype
                fits = (i for i, free in enumerate(free_from) if free < at and dtypes[i] == dtype)
                slot = next(fits, len(free_from))
                if slot == len(free_from):
                    free_from.append(0)
                    dtypes.append(dtype)
                free_from[slot] = self._ended.get(number, len(self.tape))
                self.slot[number] = slot
                self.empties[free_from[slot]] = slot
        return len(free_from)


def loss_owners(checked: Checked) -> dict[int, tuple[int, int]]:
    """(rank, op) of the LOSS that counts for each piece of the batch: of several, the first."""
    owners: dict[int, tuple[int, int]] = {}
    for rank, tape in enumerate(checked.program.tapes):
        for at, op in enumerate(tape):
            if op.kind is OpKind.LOSS:
                for piece in bits(checked.specs[rank][op.inputs[0]].cells):
                    owners.setdefault(piece, (rank, at))
    return owners
