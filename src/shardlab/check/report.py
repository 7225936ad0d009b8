"""Check of a whole program: the entry points, and the line of the user's file to which a refusal belongs.

`check` and `check_forward` run the proofs in order: the dataflow of all tapes (`dataflow`), the memory of weights
(`in_place`), batches and arenas (`buffers`), deadlocks under each channel model (`deadlock`), and the limits of the
backends (`runnable`). `FileCheck` does the same for a user's file. If the program is refused, it runs the program once
more (`Retrace`) and puts `file:line` before the sentence.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import types
from collections import defaultdict
from collections.abc import Coroutine, Generator
from types import CodeType, FrameType, TracebackType
from typing import Any, SupportsIndex

from shardlab.check.buffers import check_arena, check_batches, has_arena
from shardlab.check.checked import Checked
from shardlab.check.dataflow import Dataflow
from shardlab.check.deadlock import decide_models
from shardlab.check.in_place import check_kept
from shardlab.check.runnable import why_not_runnable
from shardlab.common.text import listed, plural
from shardlab.common.user_code import Endless, Stalled, display_path
from shardlab.language import Deadlock, Mesh, Op, Program, Rank, Refused, Sizes, Strategy, World, trace
from shardlab.language.rules.kinds import bits
from shardlab.language.world import gc_paused


def check(program: Program) -> Checked:
    """Prove, from the tapes only, that a program computes the same gradient as one device and cannot hang.

    Every microbatch contributes exactly once to each layer's gradient before its update. Every slice of every weight is
    updated exactly once, from step t to t + 1. No op uses a value that is freed, stale, partial, overwritten or of the
    wrong layer. Every message reaches the receive that expects it. The members of a group issue its collectives in one
    order.

    The result also says under which channel models the program runs. On a backend under whose model it deadlocks, the
    program cannot run.

    Raises:
        Refused: with rank, op, layer, and the missing or doubled contributions.
        Deadlock: when ranks wait for one another under every channel model.
    """
    return _checked(program, trains=True)


def check_forward(program: Program) -> Checked:
    """Prove that a program without updates computes the loss of every microbatch, and cannot hang.

    This is `check` for the forward half of a program (see `forward_only`).

    Raises:
        Refused: with rank, op, layer, and the missing contributions; also for an update.
        Deadlock: when ranks wait for one another under every channel model.
    """
    return _checked(program, trains=False)


class FileCheck:
    """Check of a user's program that puts the line at fault before the sentence of a refusal.

    Args:
        program: the strategy.
        file: the path of its file, as the user wrote it.
    """

    def __init__(self, program: Strategy, file: str) -> None:
        self.program = program
        self.file = file

    def check(self, mesh: Mesh, layers: int | Sizes, microbatches: int) -> Checked:
        """Trace and check the program.

        Raises:
            Refused: with `file:line` before the sentence.
        """
        try:
            return check(trace(self.program, mesh, layers, microbatches))
        except Stalled:  # the refusal names the line, and a second run would stall as well
            raise
        except Endless as refusal:  # a second run would take as long
            refusal.line = f"{self.file}:{line_in_traceback(refusal.__traceback__, self.file)}"
            raise
        except Refused as refusal:
            if refusal.line:
                raise
            retrace = Retrace(self.program, self.file, World(mesh, layers, microbatches))
            if isinstance(refusal, Deadlock):
                refusal.trail = retrace.waiting_ranks()
            else:
                refusal.line = f"{self.file}:{retrace.line(refusal.rank, refusal.op)}"
            raise


class Retrace:
    """Second run of a refused program, which notes the line of every op.

    A program depends on its rank only, so the second run is the same. Only refused programs take this time.
    """

    def __init__(self, program: Strategy, file: str, world: World) -> None:
        self.program = program
        self.file = file
        self.stopped_at: dict[int, int] = {}  # rank -> the line at which its program stopped early
        self.tapes = [LineTape(file) for _ in world.ranks]
        for rank, ops in zip(world.ranks, self.tapes, strict=True):
            rank.ops = ops
        with contextlib.suppress(Refused), contextlib.redirect_stdout(io.StringIO()):
            world.run(self._traced)
            world.finish()  # it moves some ops

    def line(self, rank: int | None, op: int | None) -> int:
        """Return the number of the line that wrote an op or was about to (unknown: the function's first line)."""
        if rank is not None and op is not None:
            lines = self.tapes[rank].lines
            line = lines[op] if op < len(lines) else self.stopped_at.get(rank, 0)
            if line:
                return line
        program: object = self.program
        while isinstance(program, functools.partial):
            program = program.func
        code = getattr(inspect.unwrap(program) if callable(program) else program, "__code__", None)
        return code.co_firstlineno if isinstance(code, CodeType) and code.co_filename == self.file else 1

    def waiting_ranks(self) -> str:
        """Return the lines at which the ranks of a deadlock wait, as text with one row for each line of the file."""
        ranks_at: dict[int, list[int]] = defaultdict(list)
        file = display_path(self.file)
        for rank, line in sorted(self.stopped_at.items()):
            ranks_at[line].append(rank)
        rows = [
            f"\n  {plural('rank', len(ranks))} {listed(ranks)} wait{'s' * (len(ranks) == 1)} at {file}:{line}"
            for line, ranks in sorted(ranks_at.items())
        ]
        return "".join(rows)

    async def _traced(self, rank: Rank) -> None:
        await self._drive(rank.index, self.program(rank))

    @types.coroutine
    def _drive(self, rank: int, program: Coroutine[Any, Any, object]) -> Generator[Any, None, None]:
        """Drive a program by hand, and note its line whenever it waits."""
        try:
            while True:
                waits_for = program.send(None)
                self.stopped_at[rank] = line_of_coroutine(program, self.file)
                yield waits_for
        except StopIteration:
            self.stopped_at.pop(rank, None)
        except Exception as error:
            self.stopped_at[rank] = line_in_traceback(error.__traceback__, self.file)
            raise
        finally:
            program.close()


class LineTape(list[Op]):
    """Tape that records which line of a file wrote each op (0: none)."""

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

    def insert(self, at: SupportsIndex, op: Op, /) -> None:
        super().insert(at, op)
        self.lines.insert(at, self.lines[int(at) - 1])

    def __delitem__(self, at: Any, /) -> None:
        super().__delitem__(at)
        del self.lines[at]


def line_of_coroutine(coroutine: object, file: str) -> int:
    """Return the innermost line of a file in a coroutine that waits (0: none)."""
    line = 0
    while isinstance(coroutine, types.CoroutineType):
        frame: FrameType | None = coroutine.cr_frame
        if frame is not None and frame.f_code.co_filename == file:
            line = frame.f_lineno
        coroutine = coroutine.cr_await
    return line


def line_in_traceback(traceback: TracebackType | None, file: str) -> int:
    """Return the innermost line of a file in a traceback (0: none)."""
    line = 0
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == file:
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return line


def _checked(program: Program, *, trains: bool) -> Checked:
    with gc_paused():
        dataflow = Dataflow(program, trains=trains)
        try:
            dataflow.run()
        finally:
            dataflow.release()
        for state in dataflow.states:
            check_kept(state.index, state.ops, state.specs, state.concerned)
        replay = dataflow.communication
        communications, communication_of = replay.communications, replay.communication_of
        if replay.batches:
            check_batches(program, communications, communication_of)
        if any(map(has_arena, program.tapes)):
            check_arena(program, [state.specs for state in dataflow.states])
        models = decide_models(program, communications, communication_of, replay.half_batched)
    specs = [state.specs for state in dataflow.states]
    untrained = bits(~dataflow.trained & ((1 << program.layers) - 1))
    frozen = tuple(layer for layer in untrained if program.sizes.weights[program.sizes.weight_of(layer)])
    why_not = why_not_runnable(program, specs, communications, [state.concerned for state in dataflow.states])
    return Checked(program, specs, communications, communication_of, models, why_not, frozen)
