"""What the tests of comparisons run on every rank."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import time
from contextlib import nullcontext

import torch
from torch import Tensor

from shardlab.execute.transport.neighbours import Neighbours
from shardlab.language import UserError
from shardlab.measure.side_by_side.results import Comparison, Size, StrategyPair
from shardlab.measure.side_by_side.sides import compare_rank, compare_sides, find_transport
from shardlab.models import GPT

CPU = torch.device("cpu")
TINY = Size("tiny", GPT(layers=2, hidden_size=16, heads=4, vocab_size=32, seq_len=8), 8)


def compared(rank: int, pair: StrategyPair, size: Size, turns: int, transport: str = "") -> Comparison:
    return compare_rank(rank, CPU, pair, size, turns, transport)


def transports(rank: int, transport: str, shares: bool) -> str:
    """The transport of a comparison, or why there is none."""
    with nullcontext() if shares else Neighbours.not_used():
        try:
            return find_transport(CPU, transport)
        except UserError as error:
            return str(error)


class StandIn:
    """Keeps a core busy, or sleeps, for so many seconds a step."""

    def __init__(self, busy: float, asleep: float) -> None:
        self._busy, self._asleep = busy, asleep

    def step(self) -> Tensor:
        until = time.thread_time() + self._busy
        while time.thread_time() < until:
            pass
        time.sleep(self._asleep)
        return torch.tensor([torch.ones(5).sum().item(), 1.0], dtype=torch.float64)


def stand_ins(rank: int, turns: int, **sides: tuple[float, float]) -> Comparison:
    """Sides that take so many seconds, busy and asleep."""
    return compare_sides(
        {name: lambda seconds=seconds: StandIn(*seconds) for name, seconds in sides.items()}, turns, CPU
    )


def slow_stand_in(rank: int, turns: int) -> Comparison:
    """Ours computes as long as the plain step and sleeps; theirs is busy for longer and does not sleep."""
    return stand_ins(rank, turns, plain=(0.005, 0.0), ours=(0.005, 0.3), theirs=(0.02, 0.0))
