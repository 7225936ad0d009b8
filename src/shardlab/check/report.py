"""The check of a whole program."""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import types
from collections import defaultdict
from collections.abc import Coroutine, Generator
from types import CodeType, FrameType, TracebackType
from typing import Any

from shardlab.check.buffers import check_arena, check_batches, has_arena
from shardlab.check.checked import Checked
from shardlab.check.dataflow import Dataflow
from shardlab.check.deadlock import decide_models
from shardlab.check.in_place import check_kept
from shardlab.check.runnable import why_not_runnable
from shardlab.common.user_code import Endless, Stalled
from shardlab.language import Deadlock, Mesh, Op, Program, Rank, Refused, Sizes, Strategy, World, trace
from shardlab.language.rules.kinds import bits, listed, plural
from shardlab.language.world import gc_paused


def check(program: Program) -> Checked:
    """Prove, from the tapes alone, that a program computes the gradient of one device and cannot hang.

    Every layer's gradient reaches its update from every microbatch exactly once; every slice of every weight is
    updated exactly once, from step t to t + 1; no value is used freed, stale, partial, written over or of the wrong
    layer; every message reaches the receive that was meant; the members of a group issue its collectives in one order.

    The result also says under which channel models the program runs; a backend whose model deadlocks is not for it.

    Raises:
        Refused: naming rank, op, layer and what is missing or doubled.
        Deadlock: when ranks wait for one another under every channel model.
    """
    return _checked(program, trains=True)


def check_forward(program: Program) -> Checked:
    """Prove that a program computes the loss of every microbatch with the weights that it leaves, and cannot hang.

    As `check`, but for a program that trains nothing (see `forward_only`).

    Raises:
        Refused: naming rank, op, layer and what is missing; for an update as well.
        Deadlock: when ranks wait for one another under every channel model.
    """
    return _checked(program, trains=False)


def _checked(program: Program, *, trains: bool) -> Checked:
    with gc_paused():
        dataflow = Dataflow(program, trains=trains)
        try:
            dataflow.run()
        finally:
            dataflow.release()
        for state in dataflow.states:
            check_kept(state.index, state.ops, state.specs, state.concerned)
        found = dataflow.communication
        communications, communication_of = found.communications, found.communication_of
        if found.batches:
            check_batches(program, communications, communication_of)
        if any(map(has_arena, program.tapes)):
            check_arena(program, [state.specs for state in dataflow.states])
        models = decide_models(program, communications, communication_of, found.half_batched)
    specs = [state.specs for state in dataflow.states]
    untrained = bits(~dataflow.trained & ((1 << program.layers) - 1))
    frozen = tuple(layer for layer in untrained if program.sizes.weights[program.sizes.weight_of(layer)])
    why_not = why_not_runnable(program, specs, communications, [state.concerned for state in dataflow.states])
    return Checked(program, specs, communications, communication_of, models, why_not, frozen)


# The line of a user's file that is at fault when its program is refused.


class Blame:
    """Traces and checks a user's program, and puts the line at fault before whatever is refused.

    Args:
        program: the strategy.
        file: where it stands, as the user wrote it.
    """

    def __init__(self, program: Strategy, file: str) -> None:
        self.program = program
        self.file = file

    def checked(self, mesh: Mesh, layers: int | Sizes, microbatches: int) -> Checked:
        """What `check` gives.

        Raises:
            Refused: with `file:line` before the sentence.
        """
        try:
            return check(trace(self.program, mesh, layers, microbatches))
        except Stalled:  # it names the line, and would take as long again
            raise
        except Endless as refusal:  # running it again would take as long again
            refusal.line = f"{self.file}:{line_of(refusal.__traceback__, self.file)}"
            raise
        except Refused as refusal:
            retrace = Retrace(self.program, self.file, World(mesh, layers, microbatches))
            if isinstance(refusal, Deadlock):
                refusal.trail = retrace.waiting()
            else:
                refusal.line = f"{self.file}:{retrace.line(refusal.rank, refusal.op)}"
            raise


class Retrace:
    """A program is a pure function of its rank, so running it again shows where it goes wrong: only then is it slow."""

    def __init__(self, program: Strategy, file: str, world: World) -> None:
        self.program = program
        self.file = file
        self.stopped: dict[int, int] = {}  # rank -> the line on which its program was left before its end
        self.written = [Written(file) for _ in world.ranks]
        for rank, ops in zip(world.ranks, self.written, strict=True):
            rank.ops = ops
        with contextlib.suppress(Refused), contextlib.redirect_stdout(io.StringIO()):
            world.run(self._noting)

    async def _noting(self, rank: Rank) -> None:
        await self._drive(rank.index, self.program(rank))

    @types.coroutine
    def _drive(self, rank: int, program: Coroutine[Any, Any, object]) -> Generator[Any, None, None]:
        """Go on with a program by hand, and note where it stands whenever it waits."""
        try:
            while True:
                waits_for = program.send(None)
                self.stopped[rank] = waiting_line(program, self.file)
                yield waits_for
        except StopIteration:
            self.stopped.pop(rank, None)
        except Exception as error:
            self.stopped[rank] = line_of(error.__traceback__, self.file)
            raise
        finally:
            program.close()

    def line(self, rank: int | None, op: int | None) -> int:
        """The line that wrote an op, or would have; the function's own if no op is to blame."""
        if rank is not None and op is not None:
            lines = self.written[rank].lines
            line = lines[op] if op < len(lines) else self.stopped.get(rank, 0)
            if line:
                return line
        program: object = self.program
        while isinstance(program, functools.partial):
            program = program.func
        code = getattr(inspect.unwrap(program) if callable(program) else program, "__code__", None)
        return code.co_firstlineno if isinstance(code, CodeType) and code.co_filename == self.file else 1

    def waiting(self) -> str:
        """Where the ranks of a deadlock wait, a row for each line of the file."""
        ranks_at: dict[int, list[int]] = defaultdict(list)
        for rank, line in sorted(self.stopped.items()):
            ranks_at[line].append(rank)
        rows = [
            f"\n  {plural('rank', len(ranks))} {listed(ranks)} wait{'s' * (len(ranks) == 1)} at {self.file}:{line}"
            for line, ranks in sorted(ranks_at.items())
        ]
        return "".join(rows)


class Written(list[Op]):
    """A tape that remembers which line of a file wrote each op (0: none did)."""

    def __init__(self, file: str) -> None:
        super().__init__()
        self.file = file
        self.lines: list[int] = []

    def append(self, op: Op, /) -> None:
        super().append(op)
        frame: FrameType | None = inspect.currentframe()
        while frame is not None and frame.f_code.co_filename != self.file:
            frame = frame.f_back
        self.lines.append(frame.f_lineno if frame else 0)


def waiting_line(coroutine: object, file: str) -> int:
    """The innermost line of a file in a coroutine that waits (0: none)."""
    line = 0
    while isinstance(coroutine, types.CoroutineType):
        frame: FrameType | None = coroutine.cr_frame
        if frame is not None and frame.f_code.co_filename == file:
            line = frame.f_lineno
        coroutine = coroutine.cr_await
    return line


def line_of(traceback: TracebackType | None, file: str) -> int:
    """The innermost line of a file in a traceback (0: none)."""
    line = 0
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == file:
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return line
