"""A program that has passed the check, and what the check knows of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING

from shardlab.errors import Refused
from shardlab.program import Kind, OpKind, Program, Spec
from shardlab.program.matching import Communication

if TYPE_CHECKING:
    from shardlab.check.dependence import Dependences
    from shardlab.check.drift import Drift


class ChannelModel(Enum):
    """A promise that a channel makes, from the most lenient to the strictest; each passes whatever the next one passes.

    There is one exception: a message between an exchange and a single call may pass QUEUED, and never QUEUED_PER_PAIR.

    BUFFERED: a send never waits, and a receive takes the message that it means.
    IN_ORDER: a send never waits, and messages between two ranks arrive in the order they were sent.
    RENDEZVOUS: a send waits for its receive (gloo, even for 16 bytes).
    QUEUED_PER_PAIR: each communicator runs its operations one at a time in issue order, each a rendezvous. A group has
        one, two ranks' messages another, all exchanges a third, and ranks wait for one another when they first use it
        (NCCL without `device_id`).
    QUEUED: each rank runs its communication one operation at a time in issue order, each a rendezvous (NCCL with
        `device_id`, which ranks are started with).
    """

    BUFFERED = "buffered"
    IN_ORDER = "in-order"
    RENDEZVOUS = "rendezvous"
    QUEUED_PER_PAIR = "queued per pair"
    QUEUED = "queued"


BACKENDS = {"gloo": ChannelModel.RENDEZVOUS, "nccl": ChannelModel.QUEUED}
"""The channel model that each torch.distributed backend keeps to, as ranks are started."""


@dataclass(frozen=True)
class Checked:
    """A program that computes the right gradient, with what the proof derived.

    Attributes:
        program: the tapes.
        specs: for each rank, the spec of each of its values, by number.
        communications: every communication.
        communication_of: for each rank, its handles' places in `communications`.
        models: for each channel model, None if the program passes it, else the deadlock that it would run into.
        frozen: layers with parameters that are not trained, since no rank loads an optimizer state of them.
        not_runnable: why no backend can run the program, however right it is; None if there is no such reason.
    """

    program: Program
    specs: list[dict[int, Spec]]
    communications: list[Communication]
    communication_of: list[dict[int, int]]
    models: dict[ChannelModel, str | None]
    not_runnable: Refused | None = None
    frozen: tuple[int, ...] = ()

    @cached_property
    def drifts(self) -> list[Drift]:
        """Replicas of weights that floating point may drive apart, however right the program is; found when asked."""
        from shardlab.check.drift import drifts_of

        return drifts_of(self)

    @cached_property
    def dependences(self) -> list[Dependences]:
        """For each rank what must come before what on its tape; found when asked."""
        from shardlab.check.dependence import Dependences

        return [Dependences(tape, rank, self.specs[rank]) for rank, tape in enumerate(self.program.tapes)]

    def backends(self) -> list[str]:
        """The torch.distributed backends on which the program runs."""
        return [backend for backend in BACKENDS if self.why_not(backend) is None]

    @cached_property
    def trains(self) -> bool:
        """Whether weights are updated."""
        return any(op.kind is OpKind.UPDATE for tape in self.program.tapes for op in tape)

    @cached_property
    def clips(self) -> bool:
        """Whether updates are given the gradient's norm: all of a program's are, or none."""
        updates = (
            (rank, op) for rank, tape in enumerate(self.program.tapes) for op in tape if op.kind is OpKind.UPDATE
        )
        return any(self.specs[rank][number].kind is Kind.SCALAR for rank, op in updates for number in op.inputs[3:])

    def why_not(self, backend: str) -> Refused | None:
        """Why the program does not run on a backend; None if it does."""
        deadlock = self.models[BACKENDS[backend]]
        if self.not_runnable or not deadlock:
            return self.not_runnable
        remedy = "issue in one order on all ranks, or put messages that cross into one exchange"
        return Refused("can hang", f"on {backend} this program can hang", deadlock.removesuffix("."), remedy)
