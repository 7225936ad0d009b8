"""Deadlocks in words: who waits for whom, in a sentence that names the whole cycle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shardlab.errors import Deadlock


class Wait(NamedTuple):
    """A rank that cannot go on: the op that it waits in, and the ranks that would have to act."""

    what: str
    blockers: Sequence[int]


def deadlock(waits: Mapping[int, Wait]) -> Deadlock:
    """The refusal of a program whose ranks wait so."""
    remedy = "let every op come on all of its ranks, and in one order"
    return Deadlock("deadlock", "deadlock", circle(waits), remedy)


def explain(waits: Mapping[int, Wait]) -> str:
    """The sentence about ranks that wait so."""
    return f"deadlock: {circle(waits)}."


def circle(waits: Mapping[int, Wait]) -> str:
    """Follow the waits until a rank repeats (a cycle) or one is reached that has ended without the missing op."""
    rank = min(waits)
    path: list[int] = []
    while rank in waits and rank not in path:
        path.append(rank)
        blockers = waits[rank].blockers
        rank = next((b for b in blockers if b not in waits), blockers[0])
    cyclic = rank in path
    shown = path[path.index(rank) :] if cyclic else path
    sentences = [f"rank {r} waits in {waits[r].what}" for r in shown]
    if not cyclic:
        sentences.append(f"rank {rank} has ended without it")
    rest = len(waits) - len(shown)
    after = f" ({rest} more rank{'s wait' if rest > 1 else ' waits'} behind them)" if rest else ""
    return "; ".join(sentences) + after
