"""One rank of the puzzles, with the published names, arguments and costs."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

from shardlab.errors import Refused, of_layer
from shardlab.program.lines import SourceLine, here
from shardlab.puzzles import rules
from shardlab.puzzles.asyncio_watch import Blocked
from shardlab.puzzles.calls import PuzzleCall, refuse_forgotten, without_await
from shardlab.puzzles.combining import Brought
from shardlab.puzzles.mail import Letter, Reader
from shardlab.puzzles.puzzle_compute import PuzzleCompute
from shardlab.puzzles.refusal import PuzzleRefused, derived, judged, stand
from shardlab.puzzles.values import PuzzleValue, Weight

T = TypeVar("T")


class PuzzleModel(PuzzleCompute):
    """One rank of a network that several ranks train together for one optimizer step.

    Args:
        rank: this rank's number, from 0; it is looked at when the rank first communicates.
        dist: the ranks; without it there is one.
        layers, batches: sizes of the network and of the global batch, the same on every rank.
    """

    def allreduce(self, v: T, layer: int) -> PuzzleCall[T]:
        """The sum over all ranks, on every rank."""
        return self._call("allreduce", f"layer {layer}", partial(self._meet, "allreduce", v, layer, here()))

    def allgather(self, v: T, layer: int) -> PuzzleCall[T]:
        """The pieces of all ranks put together, on every rank."""
        return self._call("allgather", f"layer {layer}", partial(self._meet, "allgather", v, layer, here()))

    def scatterreduce(self, v: T, layer: int) -> PuzzleCall[T]:
        """The sum over all ranks, shard r of it on rank r."""
        return self._call("scatterreduce", f"layer {layer}", partial(self._meet, "scatterreduce", v, layer, here()))

    def pass_to(self, rank: int, v: Any) -> PuzzleCall[None]:
        """Put anything into a rank's mailbox, once there is room."""
        return self._call("pass_to", f"rank {rank}", partial(self._pass, rank, v, here()))

    def receive(self) -> PuzzleCall[Any]:
        """The earliest message to this rank, whoever sent it."""
        return self._call("receive", "", partial(self._receive, here()))

    def _call(self, verb: str, argument: str, work: Callable[[], Coroutine[Any, Any, T]]) -> PuzzleCall[T]:
        name = f"{verb}({argument})"
        refusal = without_await(name, f"model.{verb}({'...' * bool(argument)})").at(self.rank, len(self.log))
        return PuzzleCall(name, refusal.on(here()), work, self.forgotten)

    async def _meet(self, name: str, v: T, layer: int, line: SourceLine | None) -> T:
        self._enter(name, line, [self.rank], v)
        with judged(self, line):
            if isinstance(v, Weight):
                rules.fresh(of_layer(name, layer), v.spec, self._updated)
            collective = self._run.collectives.next_of(self.rank)
            collective[self.rank] = mine = Brought(self.rank, line, name, layer, v, self.time, collective)
            result, time = await self._wait(mine)
        self.time = max(self.time, time)
        self.note(name, v, layer=layer)
        return derived(result)

    async def _pass(self, rank: int, v: Any, line: SourceLine | None) -> None:
        self._enter(f"pass_to(rank {rank})", line, [self.rank, rank], v)
        self.note("pass", v, to=rank)
        about = str(v.spec) if isinstance(v, PuzzleValue) else repr(v)[:40]
        letter = Letter(self.rank, line, rank, v, self.time, about)
        self._run.mail.letters.append(letter)
        await self._wait(letter)

    async def _receive(self, line: SourceLine | None) -> Any:
        self._enter("receive", line, [self.rank])
        reader = Reader(self.rank, line, self.time, self._run.watch)
        self._run.mail.readers.append(reader)
        letter: Letter = await self._wait(reader)
        self.time = max(self.time, letter.sent)
        self.note("pass", source=letter.rank)
        return derived(letter.value)

    async def _wait(self, blocked: Blocked) -> Any:
        result = await self._run.watch.block(blocked)
        stand(self)
        return result

    def _enter(self, op: str, line: SourceLine | None, ranks: list[int], *values: Any) -> None:
        """Begin to communicate, between ranks that must exist."""
        self.begin(*values)
        for rank in ranks:
            if not 0 <= rank < self.RANKS:
                with judged(self, line):
                    remedy = f"the Dist has {self.RANKS}, counted from 0, name one of these"
                    raise Refused("unknown rank", op, f"rank {rank} does not exist", remedy)

    @staticmethod
    def check(models: Sequence[PuzzleModel]) -> None:
        """Print "Correct!" if every layer was updated once, on all ranks together.

        Raises:
            PuzzleRefused: naming the layer, and the rank or the elements at fault.
        """
        verify(models)
        print("Correct!")


def verify(models: Sequence[PuzzleModel]) -> None:
    """Refuse final weights that are missing, of another layer, or not updated exactly once.

    Replicas are accepted, and the shards of a layer may lie on any ranks.

    Raises:
        PuzzleRefused: naming the layer, and the rank or the elements at fault.
    """
    if not models:
        raise PuzzleRefused("wrong number", "Model.check", "no models were given", "give those of all ranks")
    for model in models:
        refuse_forgotten(model.forgotten)
        model.memory()  # refuses what is no value, such as a call that was not awaited
    for layer in range(models[0].LAYERS):
        given = {model.rank: model.final_weights[layer] for model in models if layer in model.final_weights}
        try:
            rules.updated_once(layer, given)
        except Refused as refusal:
            raise PuzzleRefused.of(refusal) from None
