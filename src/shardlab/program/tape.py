"""The tape: what one rank does in one optimizer step, as an ordered list of ops. Everything else reads tapes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, cast

from shardlab.errors import About
from shardlab.program.mesh import Group, Mesh
from shardlab.program.ops import OpKind
from shardlab.program.sizes import Sizes
from shardlab.rules.factor import Factor
from shardlab.rules.kind import ROW_KINDS, Kind, Reduction
from shardlab.rules.layers import Rules, rules_of
from shardlab.rules.pieces import Holds, microbatches_text
from shardlab.rules.spec import Spec, microbatches_of

SUM = Reduction.SUM

NO_WEIGHT = "the head is tied to the embedding and has no weight of its own"
"""Why nothing is loaded for the last layer of a tied model."""

LOAD_FIRST = "it computes with weights[0], load layer 0"
"""What to do instead."""


_new: Callable[[type[ExpectedValue], tuple[Kind, int, int]], ExpectedValue] = cast(Any, tuple).__new__
"""Makes a ExpectedValue without the call that a NamedTuple's own constructor is."""


class ExpectedValue(NamedTuple):
    """A message that a receive means: the value's kind, layer and microbatches (a bit set)."""

    kind: Kind
    layer: int
    microbatches: int

    @classmethod
    def of(cls, spec: Spec) -> ExpectedValue:
        """The name by which a receive expects a value."""
        form, cells, _ = spec
        space = form.space
        if form.kind not in ROW_KINDS:
            cells = spec.microbatches
        elif space.sequence > 1:
            cells = microbatches_of(cells, space)
        return _new(cls, (form.kind, form.layer, cells))

    def __str__(self) -> str:
        about = f" of {microbatches_text(self.microbatches)}" if self.microbatches else ""
        return f"{self.kind.value}[{self.layer}]{about}"


class Op(NamedTuple):
    """One entry of a tape. Values and handles are numbers, counted from 0 on each rank.

    Attributes:
        kind: what is done.
        layer: the layer computed on or communicated for (WAIT and FREE: -1).
        inputs: numbers of the values read. FORWARD (activation, weight[, residual]); BACKWARD (activation, gradient,
            weight, saved[, gradient of the next residual]), of a PROJECT layer (activation, gradient of the queries,
            weight, saved, gradient of keys and values), and BACKWARD_INPUT the same; BACKWARD_WEIGHT (activation,
            gradient, saved for weight); LOSS (activation[, stats]); ATTEND (queries, keys and values); ATTEND_BACKWARD
            (queries, keys and values, attended activation, its gradient); DIRECTION (gradient, optimizer state[,
            norm]); UPDATE (gradient, weight, optimizer state[, norm][, direction]); BROADCAST and SCATTER (value) on
            the root alone; BARRIER none; the others as their names say.
        outputs: numbers of the values made. FORWARD (activation[, residual][, saved]), of a PROJECT layer (queries,
            keys and values, saved); ATTEND_BACKWARD (gradients of the queries, of keys and values); BACKWARD (weight
            gradient, gradient of the activation[, of the residual]); BACKWARD_INPUT (gradient of the activation[, of
            the residual], saved for weight); LOSS (gradient of the activation; none where nothing is trained); UPDATE
            (weight, optimizer state); BROADCAST (value) on all but the root, which has it; GATHER and
            REDUCE (value) on the root alone; BARRIER none.
        handle: number of the communication that this op issues, or that WAIT waits for (-1: none).
        group: the ranks that meet in a collective.
        peer: the other rank of a SEND or RECV (-1: none).
        holds: what LOAD_WEIGHT, LOAD_OPT_STATE and LOAD_BATCH load (the last in microbatches, or in pieces of them);
            the slices of a ZERO_GRADIENT; which of so many equal parts of its value a SLICE takes; to which part of the
            experts a FORWARD dispatches tokens (None: to all).
        expect: what a RECV must deliver, or a BROADCAST or SCATTER to a rank that is not its root.
        batch: SENDs and RECVs with one number are issued together, as one group (-1: alone).
        root: the rank that alone gives or receives in a BROADCAST, SCATTER, GATHER or REDUCE (-1: none).
        reduction: what a REDUCE or an ALL_REDUCE makes of the members' values.
        factor: by what a SCALE multiplies.
        dtype: what a CAST makes of its value ("": the numbers of its kind).
        place: where an OFFLOAD copies to, and where what LOAD_WEIGHT and LOAD_OPT_STATE load lies ("": the device).
        offset: the byte of the step's arena at which the first output begins (-1: memory of its own, taken when it is
            made); see `shardlab.check.rooms`.
    """

    kind: OpKind
    layer: int
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    handle: int = -1
    group: Group | None = None
    peer: int = -1
    holds: Holds | None = None
    expect: ExpectedValue | None = None
    batch: int = -1
    root: int = -1
    reduction: Reduction = Reduction.SUM
    factor: Factor | None = None
    dtype: str = ""
    place: str = ""
    offset: int = -1

    @property
    def about(self) -> About:
        """The op, for a refusal."""
        return About(str(self), self.layer)

    def __str__(self) -> str:
        kind = self.kind
        if kind is OpKind.WAIT:
            return f"wait(handle {self.handle})"
        if kind is OpKind.FREE and self.inputs:  # a tape from a file may say anything
            return f"free(value {self.inputs[0]})"
        if kind is OpKind.SEND:
            return f"send to rank {self.peer}"
        if kind is OpKind.RECV:
            return f"recv from rank {self.peer}" + (f" of {self.expect}" if self.expect else "")
        place = f" on {self.group}" if self.group else ""
        if kind is OpKind.BARRIER:
            return f"barrier{place}"
        return f"{kind.value}({'batch' if kind is OpKind.LOAD_BATCH else f'layer {self.layer}'}){place}"


_new_op: Callable[[type[Op], tuple[object, ...]], Op] = cast(Any, tuple).__new__


def compute_op(
    kind: OpKind, layer: int, inputs: tuple[int, ...], outputs: tuple[int, ...], holds: Holds | None = None
) -> Op:
    """Make an op that computes, without the call that a NamedTuple's own constructor is."""
    return _new_op(Op, (kind, layer, inputs, outputs, -1, None, -1, holds, None, -1, -1, SUM, None, "", "", -1))


def communication_op(
    kind: OpKind,
    layer: int,
    inputs: tuple[int, ...],
    outputs: tuple[int, ...],
    handle: int,
    group: Group | None,
    peer: int,
    expect: ExpectedValue | None,
    batch: int,
    root: int = -1,
    reduction: Reduction = Reduction.SUM,
) -> Op:
    """Make an op that communicates, as `compute_op` does."""
    return _new_op(
        Op, (kind, layer, inputs, outputs, handle, group, peer, None, expect, batch, root, reduction, None, "", "", -1)
    )


@dataclass(frozen=True)
class Program:
    """The tapes of all ranks for one optimizer step, and the world that they were written for.

    Attributes:
        mesh: the ranks' grid.
        microbatches: how many there are in the global batch.
        sizes: elements of every value.
        tapes: for each rank its ops, in order.
    """

    mesh: Mesh
    microbatches: int
    sizes: Sizes
    tapes: list[list[Op]] = field(repr=False)

    @property
    def ranks(self) -> int:
        return len(self.tapes)

    @property
    def layers(self) -> int:
        return self.sizes.layers

    @cached_property
    def rules(self) -> Rules:
        """Rules of what its ops make of values."""
        return rules_of(self.sizes.signatures, self.sizes.space(self.mesh, self.microbatches), self.sizes.directed)

    def fingerprint(self) -> str:
        """A hash of all tapes: processes compare it, since unequal tapes on gloo silently give wrong numbers."""
        text = repr((self.mesh, self.microbatches, self.sizes, self.tapes))
        return hashlib.sha256(text.encode()).hexdigest()
