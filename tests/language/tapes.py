"""Tracing a few lines, and reading what they put on the tape."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from shardlab.common.errors import Rule
from shardlab.language import Mesh, Op, OpKind, Program, Rank, Refused, Sizes, Strategy, trace
from tests.support.refusing import ExpectedRefusal, require_refusal

Lines = Callable[[Rank], object]


def words(ops: list[Op]) -> list[str]:
    """Each op in short: `forward 2 0 -> 3 4`, `wait h0`, `send 3 h0 to 1`."""
    return [_words(op) for op in ops]


def _words(op: Op) -> str:
    parts = [op.kind.value, *map(str, op.inputs)]
    if op.handle >= 0:
        parts.append(f"h{op.handle}")
    if op.peer >= 0:
        parts.append(f"{'to' if op.kind is OpKind.SEND else 'from'} {op.peer}")
    if op.outputs:
        parts += ["->", *map(str, op.outputs)]
    return " ".join(parts)


def alone(lines: Lines, layers: Sizes | int = 2, microbatches: int = 2) -> list[str]:
    """The tape of plain lines on a world of one rank."""

    async def strategy(rank: Rank) -> None:
        lines(rank)

    return words(trace(strategy, 1, layers, microbatches).tapes[0])


def together(strategy: Strategy, ranks: Mesh | int = 2, layers: int = 2, microbatches: int = 2) -> list[list[str]]:
    """The tapes of a strategy."""
    return [words(tape) for tape in trace(strategy, ranks, layers, microbatches).tapes]


def refusal(strategy: Strategy, ranks: Mesh | int = 2, layers: Sizes | int = 2, microbatches: int = 2) -> Refused:
    """The refusal of a strategy."""
    with pytest.raises(Refused) as caught:
        trace(strategy, ranks, layers, microbatches)
    return caught.value


def refused(
    lines: Lines, rule: Rule | ExpectedRefusal, layers: int = 2, microbatches: int = 2, **fields: object
) -> Refused:
    """Plain lines on a world of one rank are refused by this rule, with these fields."""

    async def strategy(rank: Rank) -> None:
        lines(rank)

    error = refusal(strategy, 1, layers, microbatches)
    require_refusal(error, rule, **fields)
    return error


def says(error: BaseException, *parts: str) -> None:
    missing = [part for part in parts if part not in str(error)]
    assert not missing, f"{missing} not in: {error}"


def live_at_end(program: Program, rank: int) -> set[int]:
    """Values that a tape has made, and has neither freed nor ended by an update (but for what layers keep)."""
    live: set[int] = set()
    for op in program.tapes[rank]:
        live |= set(main_outputs(op))
        if op.kind is OpKind.FREE:
            live -= set(op.inputs)
        if op.kind is OpKind.UPDATE:
            live -= set(op.inputs[1:3])
    return live


def main_outputs(op: Op) -> tuple[int, ...]:
    """Return the values that an op makes, without the saved ones, which come last."""
    if op.kind is OpKind.RECOMPUTE:
        return ()
    if op.kind is OpKind.BACKWARD_INPUT or (op.kind is OpKind.FORWARD and len(op.outputs) > 1):
        return op.outputs[:-1]
    return op.outputs


def sentence(error: BaseException) -> bool:
    """Whether an error is a sentence that begins with its place."""
    return re.fullmatch(r"rank \d+, op \d+[: ].*[.]", str(error), re.DOTALL) is not None
