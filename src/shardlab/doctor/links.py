"""Ranks that meet: their facts, their clocks, and the time of messages between neighbours."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from shardlab.doctor.facts import HostFacts, host_facts
from shardlab.measure.cases import Team, make_case
from shardlab.measure.clock import Clock

T = TypeVar("T")

SMALL, LARGE = 64, 8 << 20
"""Bytes of the messages that tell latency and bandwidth."""

CALLS = {SMALL: 50, LARGE: 5}
ROUND_TRIPS = 20


@dataclass(frozen=True)
class MeasuredLink:
    """Messages between two ranks.

    Attributes:
        first, second: the ranks.
        latency: seconds of a small message.
        bandwidth: bytes per second of a large one.
        wrong: elements that arrived wrong.
    """

    first: int
    second: int
    latency: float
    bandwidth: float
    wrong: int


@dataclass(frozen=True)
class WorldFacts:
    """All ranks.

    Attributes:
        hosts: facts of each rank, in order.
        links: from each rank to the next.
        clocks: how many seconds each rank's clock is ahead of rank 0's.
    """

    hosts: list[HostFacts]
    links: list[MeasuredLink]
    clocks: list[float]


def world_facts(rank: int, device: torch.device, local_rank: int | None, local_world: int | None) -> WorldFacts | None:
    """Examine the world from one rank; rank 0 tells.

    Args:
        local_rank, local_world: this rank's number on its host, and how many are there; None: it is the only host.
    """
    world = dist.get_world_size()
    first = (rank if local_rank is None else local_rank) == 0
    hosts = _gathered(host_facts(rank, local_world or world, write=first))
    clocks = _gathered(_ahead(rank, device))
    links = measured_links(rank, device)
    return WorldFacts(hosts, links, clocks) if rank == 0 else None


def measured_links(rank: int, device: torch.device) -> list[MeasuredLink]:
    """Time messages between neighbours, one pair after the other; every rank calls this, and gets all."""
    world = dist.get_world_size()
    pairs = [(first, (first + 1) % world) for first in range(world if world > 2 else world - 1)]
    mine = {pair: _link(pair, rank, device) for pair in pairs}
    told = _gathered({pair: link for pair, link in mine.items() if link is not None and pair[0] == rank})
    return [told[first][first, second] for first, second in pairs]


def _link(pair: tuple[int, int], rank: int, device: torch.device) -> MeasuredLink | None:
    group = dist.new_group(list(pair))  # every rank calls this
    seconds: dict[int, float] = {}
    wrong = 0
    if rank in pair:
        assert isinstance(group, dist.ProcessGroup)
        members = (min(pair), max(pair))
        team, clock = Team(group, members, members.index(rank), device), Clock(device)
        for size, calls in CALLS.items():
            case = make_case("send_recv", size, team)
            wrong += case.wrong()
            seconds[size] = clock.seconds(lambda case=case: case.start()(), calls) / 2
    dist.barrier()
    if rank not in pair:
        return None
    return MeasuredLink(*pair, seconds[SMALL], LARGE / seconds[LARGE], wrong)


def _ahead(rank: int, device: torch.device) -> float:
    """How far this rank's clock is ahead of rank 0's: by the quickest of some questions, half of whose time is the way
    there.
    """
    best, ahead = float("inf"), 0.0
    now = torch.zeros(1, dtype=torch.float64, device=device)
    for other in range(1, dist.get_world_size()):
        for _ in range(ROUND_TRIPS):
            if rank == 0:
                dist.recv(now, other)
                dist.send(now.fill_(time.time()), other)
            elif rank == other:
                asked = time.time()
                dist.send(now, 0)
                dist.recv(now, 0)
                took = time.time() - asked
                if took < best:
                    best, ahead = took, asked + took / 2 - float(now)
    return ahead


def _gathered(mine: T) -> list[T]:
    found = [mine] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found
