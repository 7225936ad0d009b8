"""One rank of the puzzles, with the published names, arguments and costs."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from shardlab.program import Refused
from shardlab.puzzles import rules
from shardlab.puzzles.calls import Call
from shardlab.puzzles.check import check
from shardlab.puzzles.compute import Compute
from shardlab.puzzles.lines import Line
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

    def allreduce(self, v: T, layer: int) -> Call[T]:
        """The sum over all ranks, on every rank."""
        return self._meet("allreduce", v, layer)

    def allgather(self, v: T, layer: int) -> Call[T]:
        """The pieces of all ranks put together, on every rank."""
        return self._meet("allgather", v, layer)

    def scatterreduce(self, v: T, layer: int) -> Call[T]:
        """The sum over all ranks, shard r of it on rank r."""
        return self._meet("scatterreduce", v, layer)

    def pass_to(self, rank: int, v: Any) -> Call[None]:
        """Put anything into a rank's mailbox, once there is room."""
        return self._call("pass_to", f"rank {rank}", lambda line: self._pass(rank, v, line))

    def receive(self) -> Call[Any]:
        """The earliest message to this rank, whoever sent it."""
        return self._call("receive", "", self._receive)

    def _call(self, verb: str, argument: str, work: Callable[[Line | None], Coroutine[Any, Any, T]]) -> Call[T]:
        return Call(f"rank {self.rank}, op {len(self.log)}", verb, argument, work, self.forgotten)

    async def _pass(self, rank: int, v: Any, line: Line | None) -> None:
        self.begin(f"pass_to(rank {rank})", v)
        with judged(self, line):
            self._check_rank("pass_to", self.rank)
            self._check_rank(f"pass_to(rank {rank})", rank)
        self.note_pass(v, to=rank)
        about = str(v.spec) if isinstance(v, Value) else repr(v)[:40]
        await self._run.mail.send(Message(self.rank, rank, v, self.time, about, line))
        stand(self)

    async def _receive(self, line: Line | None) -> Any:
        self.begin()
        with judged(self, line):
            self._check_rank("receive", self.rank)
        message = await self._run.mail.receive(self.rank, self.time, line)
        stand(self)
        self.time = max(self.time, message.sent)
        self.note_pass(source=message.sender)
        return self.derive(message.value)

    def _meet(self, name: str, v: T, layer: int) -> Call[T]:
        async def meet(line: Line | None) -> T:
            op = self.begin(f"{name}(layer {layer})", v)
            with judged(self, line):
                self._check_rank(name, self.rank)
                if isinstance(v, Weight):
                    rules.fresh(op, v.spec, self._updated)
                part = Part(name, layer, v, line)
                result, time = await self._run.meetings.join(self.rank, part, self.time)
            stand(self)
            self.time = max(self.time, time)
            self.note(name, v, layer=layer)
            return self.derive(result)

        return self._call(name, f"layer {layer}", meet)

    def _check_rank(self, op: str, rank: int) -> None:
        if not 0 <= rank < self.RANKS:
            raise Refused(f"{op}: rank {rank} does not exist; the Dist has {self.RANKS}, counted from 0.")

    @staticmethod
    def check(models: Sequence[Model]) -> None:
        """Print "Correct!" if every layer was updated once, on all ranks together; see `shardlab.puzzles.check`."""
        check(models, models[0].LAYERS if models else 0)
