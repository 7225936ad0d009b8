"""How far the clocks of other processes are from rank 0's, by letting a message go there and back, as NTP does."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import time
from typing import NamedTuple

import torch
import torch.distributed as dist

ROUNDS = 16


class ClockOffset(NamedTuple):
    """What to take from a process's clock (time.perf_counter) to have rank 0's, in seconds.

    Attributes:
        seconds: the offset; 0 where none was seen beyond the bound: processes of one host share its clock.
        bound: the most that the estimate may be wrong by: half of the shortest way there and back.
    """

    seconds: float
    bound: float


def clock_offset(rank: int, ranks: int, device: torch.device) -> ClockOffset:
    """This rank's offset; all ranks of the default process group call it together.

    Of several messages there and back the fastest is taken, since its two ways can differ least (Mills 1991, "Internet
    time synchronization: the Network Time Protocol").
    """
    if rank:
        for _ in range(ROUNDS):
            _receive(0, 1, device)
            _send([time.perf_counter()], 0, device)
        return ClockOffset(*_receive(0, 2, device))
    for peer in range(1, ranks):
        rounds: list[tuple[float, float]] = []
        for _ in range(ROUNDS):
            sent = time.perf_counter()
            _send([sent], peer, device)
            (theirs,) = _receive(peer, 1, device)
            came = time.perf_counter()
            rounds.append((came - sent, theirs - (sent + came) / 2))
        _send(list(estimate(rounds)), peer, device)
    return ClockOffset(0.0, 0.0)


def estimate(rounds: list[tuple[float, float]]) -> ClockOffset:
    """The offset from (time there and back, the other clock's lead over the middle of it) of several rounds."""
    way, lead = min(rounds)
    bound = way / 2
    return ClockOffset(lead if abs(lead) > bound else 0.0, bound)


def _send(numbers: list[float], to: int, device: torch.device) -> None:
    dist.send(torch.tensor(numbers, dtype=torch.float64, device=device), to)


def _receive(source: int, count: int, device: torch.device) -> list[float]:
    numbers = torch.empty(count, dtype=torch.float64, device=device)
    dist.recv(numbers, source)
    return [float(number) for number in numbers]
