"""A small model trained by the ranks that are there: compared with one device, and the ranks with each other."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from shardlab.doctor.links import LARGE, MeasuredLink, measured_links
from shardlab.execute.communicator import Groups
from shardlab.execute.state import State
from shardlab.measure.cases import make_case
from shardlab.measure.collectives import CollectiveBench, time_case
from shardlab.measure.points import CollectivePoint
from shardlab.measure.world import MeasuringRanks
from shardlab.models import GPT
from shardlab.strategies import find
from shardlab.train.job import Job
from shardlab.train.verdict import Verdict
from shardlab.train.verify import verify_rank

STRATEGIES = ("ddp", "fsdp")
STEPS = 3


@dataclass(frozen=True)
class Trained:
    """A strategy that was tried.

    Attributes:
        strategy: its name.
        verdict: how far it is from one device.
        unequal: ranks whose weights differ from those of the first rank that has the same ones.
    """

    strategy: str
    verdict: Verdict
    unequal: list[int]

    @property
    def ok(self) -> bool:
        return self.verdict.ok and not self.unequal


@dataclass(frozen=True)
class SmokeResult:
    """What the smoke test found.

    Attributes:
        trained: each strategy.
        all_reduce: of 8 MiB among all ranks; None for one rank.
        links: messages between neighbours.
    """

    trained: list[Trained]
    all_reduce: CollectivePoint | None
    links: list[MeasuredLink]

    def failures(self) -> list[str]:
        """Sentences on what is wrong; none if nothing is."""
        found: list[str] = []
        for each in self.trained:
            if not each.verdict.ok:
                found.append(f"{each.strategy} is {max(each.verdict.all):.1e} from one device")
            if each.unequal:
                found.append(
                    f"{each.strategy}: rank {', '.join(map(str, each.unequal))} has other weights than its twin"
                )
        if self.all_reduce is not None and self.all_reduce.wrong:
            found.append(f"an all-reduce gave {self.all_reduce.wrong} wrong numbers")
        for link in self.links:
            if link.wrong:
                found.append(f"{link.wrong} numbers arrived wrong between ranks {link.first} and {link.second}")
        return found


def smoke_job(strategy: str, ranks: int) -> Job:
    """A job so small that it takes a second."""
    model = GPT(layers=2, hidden_size=32, heads=4, seq_len=16)
    return Job(find(strategy).for_job(ranks), ranks, 2 * ranks, model, 2, "fp64", name=strategy)


def smoke_rank(rank: int, device: torch.device, strategies: Sequence[str]) -> SmokeResult | None:
    """Run one rank's part; rank 0 tells."""
    world = dist.get_world_size()
    groups: Groups = {}
    trained: list[Trained] = []
    for strategy in strategies:
        unequal: list[int] = []
        job = smoke_job(strategy, world)
        verdict = verify_rank(
            rank, device, job, STEPS, groups, trained=lambda state, found=unequal: found.extend(_unequal(state))
        )
        trained.append(Trained(strategy, verdict, unequal))
    point = None
    if world > 1:
        ranks = MeasuringRanks(rank, device)
        team = ranks.team(world)
        bench = CollectiveBench(("all_reduce",), (LARGE,), (world,), overlap=False)
        point = time_case(ranks, team, "all_reduce", make_case("all_reduce", LARGE, team), bench)
    links = measured_links(rank, device)
    return SmokeResult(trained, point, links) if rank == 0 else None


def _unequal(state: State) -> list[int]:
    """Ranks that hold slices of which another rank has other values, bit by bit."""
    mine = {
        (layer, repr(holds)): hashlib.sha256(slices.cpu().numpy().tobytes()).hexdigest()
        for (layer, holds), slices in state.kept.items()
    }
    everyone = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    first: dict[tuple[int, str], str] = {}
    for theirs in everyone:
        first = theirs | first
    return [rank for rank, theirs in enumerate(everyone) if any(first[key] != value for key, value in theirs.items())]
