"""One rank of the puzzles, with the published names, arguments and costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from shardlab.program import Refused
from shardlab.puzzles import rules
from shardlab.puzzles.check import check
from shardlab.puzzles.compute import Compute
from shardlab.puzzles.meetings import Part
from shardlab.puzzles.messages import Message
from shardlab.puzzles.refusal import judged, stand
from shardlab.puzzles.values import Value, Weight

T = TypeVar("T")


class Model(Compute):
    """One rank of a network that several ranks train together for one optimizer step.

    Args:
        rank: this rank's number, from 0; it is looked at when the rank first communicates.
        dist: the ranks; without it there is one.
        layers, batches: sizes of the network and of the global batch, the same on every rank.
    """

    async def allreduce(self, v: T, layer: int) -> T:
        """The sum over all ranks, on every rank."""
        return await self._meet("allreduce", v, layer)

    async def allgather(self, v: T, layer: int) -> T:
        """The pieces of all ranks put together, on every rank."""
        return await self._meet("allgather", v, layer)

    async def scatterreduce(self, v: T, layer: int) -> T:
        """The sum over all ranks, shard r of it on rank r."""
        return await self._meet("scatterreduce", v, layer)

    async def pass_to(self, rank: int, v: Any) -> None:
        """Put anything into a rank's mailbox, once there is room."""
        self.begin(f"pass_to(rank {rank})", v)
        with judged(self):
            self._check_rank("pass_to", self.rank)
            self._check_rank(f"pass_to(rank {rank})", rank)
        self.note_pass(to=rank)
        about = str(v.spec) if isinstance(v, Value) else repr(v)[:40]
        await self._run.mail.send(Message(self.rank, rank, v, self.time, about))
        stand(self)

    async def receive(self) -> Any:
        """The earliest message to this rank, whoever sent it."""
        self.begin()
        with judged(self):
            self._check_rank("receive", self.rank)
        message = await self._run.mail.receive(self.rank, self.time)
        stand(self)
        self.time = max(self.time, message.sent)
        self.note_pass(source=message.sender)
        return message.value

    async def _meet(self, name: str, v: T, layer: int) -> T:
        op = self.begin(f"{name}(layer {layer})", v)
        with judged(self):
            self._check_rank(name, self.rank)
            if isinstance(v, Weight):
                rules.fresh(op, v.spec, self._updated)
            result, time = await self._run.meetings.join(self.rank, Part(name, layer, v), self.time)
        stand(self)
        self.time = max(self.time, time)
        self.note(name, layer)
        return result

    def _check_rank(self, op: str, rank: int) -> None:
        if not 0 <= rank < self.RANKS:
            raise Refused(f"{op}: rank {rank} does not exist; the Dist has {self.RANKS}, counted from 0.")

    @staticmethod
    def check(models: Sequence[Model]) -> None:
        """Print "Correct!" if every layer was updated once, on all ranks together; see `shardlab.puzzles.check`."""
        check(models, models[0].LAYERS if models else 0)
