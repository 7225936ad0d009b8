"""Tracing: the world of ranks that run a program together, and the loop that drives them.

`trace` is the entry point. `World.run` starts the strategy once for each rank and resumes the coroutines in turn,
without an event loop. A rank that awaits a communication is parked until the last member has issued its part.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import linecache
import re
import traceback
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, NoReturn

from shardlab.common.errors import Refused, UserError, error_text
from shardlab.common.user_code import MAX_OPS, OpCount, is_library_frame, max_ops, never_awaited, run_stepwise
from shardlab.language.mesh import Mesh
from shardlab.language.misuse import remedy_of_type_error
from shardlab.language.rank import MACHINERY, Rank
from shardlab.language.rendezvous import Channels, OpenCollectives
from shardlab.language.rules.layer_rules import rules_of
from shardlab.language.sizes import Sizes
from shardlab.language.tape import Program
from shardlab.language.values import Handle, argument_text, deadlock_error

if TYPE_CHECKING:
    from collections.abc import Generator


Strategy = Callable[[Rank], Coroutine[Any, Any, object]]
"""`async def strategy(rank: Rank) -> None`: what one rank does in one optimizer step."""

NO_LOOP = ("no running event loop", "no current event loop")
"""Errors of asyncio's own functions (sleep, gather), since ranks are driven without an event loop."""

AWAITED_OBJECT = re.compile("object (.*) can't be used in 'await' expression")
"""Python's error for an `await` of an object that is not awaitable."""

VERB_CLASS = re.compile(r"^(\w*Verbs|Rank)\.(?=\w+\(\))")
"""Class name before the verb in Python's errors about arguments."""

WRONG_ARGUMENTS = re.compile(r"rank\.(\w+)\(\) (?:takes .* given|missing .*|got .* argument '?(\w*).*)")
"""Python's error about the arguments of a verb, with the name of an unknown one."""

ARGUMENT_COUNTS = re.compile(r"(?<=\(\) takes )(?:from )?(\d+)(?: to (\d+))? positional arguments? but (\d+)")
"""Numbers of arguments in Python's error about the arguments of a verb. They count the rank itself."""

TORCH_ARGUMENTS = {"dst": "to", "src": "source", "group": "axis", "op": "reduction", "shards": "of", "num": "of"}
"""Names of arguments in torch.distributed, each with the name of the same argument of a verb."""

CLOSING_TRIES = 100
"""Number of attempts to close a coroutine whose `finally` clauses await again, before it is abandoned."""


def trace(strategy: Strategy, ranks: Mesh | int, layers: Sizes | int, microbatches: int) -> Program:
    """Run a strategy once on symbolic values, and return the tapes of all ranks.

    >>> program = trace(fsdp, ranks=4, layers=6, microbatches=4)

    Raises:
        Refused: with the rank and the op that break a rule, or that exceed `MAX_OPS` ops. The traceback has the line.
        Deadlock: when no rank can go on.
        UserError: for a strategy that is not an async function, or a count below 1.
    """
    world = World(ranks, layers, microbatches)
    program = world.run(strategy)
    world.release()
    return program


class World:
    """Ranks that run one program together while it is traced.

    Args:
        mesh: the ranks' grid, or the number of ranks.
        sizes: elements of every value; or an integer, for the puzzles' model with this number of layers (of blocks, if
            the mesh is tensor, context or expert parallel).
        microbatches: number of microbatches of the global batch.

    Attributes:
        trained: bit set of the layers of which some rank has loaded an optimizer state so far.

    Raises:
        UserError: for a count below 1.
    """

    most_ops = MAX_OPS
    """Limit of the ops on all tapes, if `trace_limits` sets none."""

    def __init__(
        self,
        mesh: Mesh | int,
        sizes: Sizes | int,
        microbatches: int,
    ) -> None:
        counts = {"microbatches": microbatches}
        counts |= {"ranks": mesh} if isinstance(mesh, int) else {}
        counts |= {"layers": sizes if isinstance(sizes, int) else sizes.layers}
        for name, count in counts.items():
            if count < 1:
                raise UserError(f"{count} {name} were asked for; give 1 or more")
        self.mesh = Mesh(dp_shard=mesh) if isinstance(mesh, int) else mesh
        if isinstance(sizes, int):
            sizes = Sizes.of_puzzle(sizes, self.mesh)
        self.sizes = sizes
        self.microbatches = microbatches
        self.rules = rules_of(sizes.signatures, sizes.space(self.mesh, microbatches), sizes.directed)
        self.trained = 0
        self.collectives = OpenCollectives(self._wake, self.rules)
        self.channels = Channels(self._wake)
        self.count = OpCount(max_ops(self.most_ops))
        self.ranks = self.make_ranks()
        self._parked: dict[int, Handle[Any]] = {}
        self._runnable: deque[int] = deque()
        self._resumed = 0
        self._current_rank = self.ranks[0]

    def make_ranks(self) -> list[Rank]:
        """Return the ranks to trace: all of the mesh."""
        return [Rank(index, self) for index in range(self.mesh.world)]

    def place(self, rank: int) -> int:
        """Return the index of a rank among the traced ranks."""
        return rank

    def run(self, strategy: Strategy) -> Program:
        """Drive `strategy` on every rank, in rank order, until all have ended.

        Raises:
            Refused: with the rank and the op that break a rule. The traceback has the line.
            Deadlock: when no rank can go on.
            Stalled: when a rank writes no op for too long.
        """
        coroutines = self._start(strategy)
        is_builtin = str(getattr(strategy, "__module__", "")).startswith("shardlab.")
        with gc_paused(), nullcontext() if is_builtin else _refusing_dropped_coroutines():
            return run_stepwise(
                lambda: self._drive(coroutines),
                lambda: self._resumed + sum(len(rank.ops) for rank in self.ranks),
                lambda: f"rank {self._current_rank.index}, op {len(self._current_rank.ops)}",
            )

    def finish(self) -> Program:
        """Close every rank's tape after all programs have ended."""
        frozen = ~self.trained if self.trained else 0
        for rank in self.ranks:
            rank.require_stores()
            rank.end(frozen)
        return Program(self.mesh, self.microbatches, self.sizes, [rank.ops for rank in self.ranks])

    def release(self) -> None:
        """Drop tapes and values. They refer to each other, so only the garbage collector would free them."""
        for rank in self.ranks:
            rank.release()

    def _drive(self, coroutines: list[Coroutine[Any, Any, object]]) -> Program:
        self._runnable.extend(range(len(coroutines)))
        try:
            while self._runnable:
                self._resume(self._runnable.popleft(), coroutines)
            if self._parked:
                raise deadlock_error({handle.rank.index: handle.waits_for() for handle in self._parked.values()})
            return self.finish()
        finally:
            for coroutine in coroutines:
                _close(coroutine)

    def _start(self, strategy: Strategy) -> list[Coroutine[Any, Any, object]]:
        name = getattr(strategy, "__name__", repr(strategy))
        if not inspect.iscoroutinefunction(strategy):
            raise UserError(f"{name} is not a strategy: write it as `async def {name}(rank): ...`")
        try:
            inspect.signature(strategy).bind(self.ranks[0])
        except TypeError as error:
            raise UserError(f"{name} cannot be called with the rank alone: {error}") from None
        return [strategy(rank) for rank in self.ranks]

    def _resume(self, index: int, coroutines: list[Coroutine[Any, Any, object]]) -> None:
        rank = self._current_rank = self.ranks[index]
        self._resumed += 1
        try:
            handle = coroutines[index].send(None)
        except StopIteration:
            return
        except Refused as refusal:
            if refusal.rule == "no operator":
                _refuse_arguments(rank, refusal, "")
            raise rank.cause_of(refusal) from None
        except UserError:
            raise
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            if isinstance(error, RuntimeError) and any(words in str(error) for words in NO_LOOP):
                _refuse_awaited(rank)
            if isinstance(error, TypeError) and (match := AWAITED_OBJECT.fullmatch(str(error))):
                fault = f"the program awaited an object of type {match[1]}, and only communication is awaited"
                remedy = "leave out `await`: other verbs give their results at once"
                if match[1] == "NoneType":
                    remedy = "leave out `await` before a verb that returns None; await a handle only after its call"
                rank.refuse("awaited something else", "", fault, remedy)
            if isinstance(error, AttributeError):
                rank.refuse_attribute(error)
            message = VERB_CLASS.sub("rank.", str(error))
            rank.require_stores()
            raised = f"raised {error_text(error, ARGUMENT_COUNTS.sub(_without_self, message))}"
            remedy = _accepted_arguments(message)
            if isinstance(error, TypeError | ValueError | KeyError) and not remedy:
                _refuse_arguments(rank, error, raised)
            if isinstance(error, TypeError):
                remedy = remedy or remedy_of_type_error(error, rank)
            refusal = Refused("the program raised", "", f"the program {raised}", remedy or "fix it there")
            raise refusal.at(rank.index, len(rank.ops)) from error
        if not isinstance(handle, Handle) or handle.rank is not rank:
            _refuse_awaited(rank)
        self._parked[index] = handle  # a handle is yielded only if it is not ready

    def _wake(self, handle: Handle[Any]) -> None:
        handle.ready = True
        index = handle.rank.index
        place = self.place(index)
        if self._parked.get(place) is handle:
            del self._parked[place]
            self._runnable.append(place)


def _refuse_arguments(rank: Rank, error: Exception, raised: str) -> None:
    """Refuse the arguments of a verb that raised an error.

    Args:
        raised: the error in words; may be empty.

    Raises:
        Refused: with the call. Errors of other code are ignored.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for frame in frames if is_library_frame(frames[-1]) else ():
        name, arguments = frame.f_code.co_name, frame.f_locals
        verb: Any = None if name in MACHINERY else getattr(Rank, name, None)
        if arguments.get("self") is rank and getattr(verb, "__code__", None) is frame.f_code:
            _, *parameters = inspect.signature(verb).parameters.values()
            explicit = [p for p in parameters if arguments[p.name] is not p.default]
            texts = [f"{p.name}=" * (p.kind is p.KEYWORD_ONLY) + argument_text(arguments[p.name]) for p in explicit]
            mistyped = [p for p in explicit if type(arguments[p.name]).__name__ not in p.annotation.split(" | ")]
            uncalled = [argument_text(arguments[p.name]) for p in mistyped if inspect.ismethod(arguments[p.name])]
            remedy = f"give {', '.join(f'{p.name} as {p.annotation}' for p in mistyped or explicit)}"
            if uncalled:
                remedy = f"write {uncalled[0]}(), with parentheses"
            fault = f"rank.{name}({', '.join(texts)}) {raised or 'was called'}"
            raise Refused("the program raised", "", fault, remedy).at(rank.index, len(rank.ops)) from error


def _accepted_arguments(error: str) -> str:
    """Return the remedy for wrong arguments of a verb; "" for another error."""
    match = WRONG_ARGUMENTS.fullmatch(error)
    verb = getattr(Rank, match[1], None) if match else None
    if match is None or not inspect.isfunction(verb):
        return ""
    _, *parameters = inspect.signature(verb).parameters.values()
    required = [f"{p.name}{'=...' * (p.kind is p.KEYWORD_ONLY)}" for p in parameters if p.default is p.empty]
    optional = [p.name for p in parameters if p.default is not p.empty]
    others = f", and it also takes {', '.join(optional)}" if optional else ""
    equivalent = TORCH_ARGUMENTS.get(match[2] or "")
    hint = f"{match[2]} is called {equivalent} here: " if any(p.name == equivalent for p in parameters) else ""
    if match[1] == "reduce_scatter" and "reduction" in (match[2], equivalent):
        hint = "it always sums, and gradients are shares of the step's mean already: "
    return f"{hint}write rank.{match[1]}({', '.join(required)}){others}"


def _without_self(match: re.Match[str]) -> str:
    minimum, maximum, passed_count = (int(number or 1) - 1 for number in match.groups())
    number = f"{minimum} to {maximum}" if maximum else str(minimum)
    return f"{number} positional argument{'s' * (number != '1')} but {passed_count}"


@contextmanager
def gc_paused() -> Generator[None, None, None]:
    """Pause the garbage collector: it would take a third of tracing's time and free nothing, as all objects stay.

    At the end these objects are marked as old, so that the collector does not scan all of them at once.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.freeze()
            gc.unfreeze()
            gc.enable()


@contextmanager
def _refusing_dropped_coroutines() -> Generator[None, None, None]:
    """Replace a refusal by the one for a coroutine that was never awaited, if any: that is the likelier cause."""
    refused = None
    with never_awaited() as dropped:
        try:
            yield
        except Refused as refusal:
            refused = refusal
    if refused is not None:
        if not dropped:
            raise refused
        name, line, _ = dropped[0]
        fault = f"{name}(...) was called without `await`, so it has not run"
        refusal = Refused("not awaited", "", fault, f"write `await {name}(...)`")
        refusal.line, refusal.source = str(line), linecache.getline(*line).strip()
        raise refusal from None
    for coroutine in dropped:
        coroutine.warn()


def _refuse_awaited(rank: Rank) -> NoReturn:
    fault = "the program awaited something else than a communication of its own rank"
    remedy = "await the handles that this rank's verbs return, one by one"
    rank.refuse("awaited something else", "", fault, remedy)


def _close(coroutine: Coroutine[Any, Any, object]) -> None:
    """Close a coroutine. Errors of its `finally` clauses are ignored: the error that ended the trace is reported."""
    for _ in range(CLOSING_TRIES):
        # Also "coroutine ignored GeneratorExit": the coroutine awaits again, so close it again.
        with suppress(Exception):
            coroutine.close()
            return
