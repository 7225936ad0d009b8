"""Checks of all ranks together: their facts, their clocks, the links between neighbours, and a small training run.

`examine_world` collects the facts, `check_world` yields the findings, and `smoke_rank` trains a small model with some
strategies and compares it with a single device.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from shardlab.common.text import counted
from shardlab.execute.state import State
from shardlab.execute.transport.collectives import Groups, gather_objects
from shardlab.measure.collectives import Clock, CollectiveBench, MeasuringRanks, Team, make_case, measure_case
from shardlab.measure.doctor.checks import CheckResult, Finding, HostFacts, check_host, finding, host_facts
from shardlab.measure.fits import CollectivePoint
from shardlab.models import GPT
from shardlab.strategies import find
from shardlab.train.job import Job
from shardlab.train.verification.cases import Verdict
from shardlab.train.verification.verify import verify_rank

SMALL, LARGE = 64, 8 << 20
"""Sizes in bytes of the messages for latency and for bandwidth."""

CALLS = {SMALL: 50, LARGE: 5}
ROUND_TRIPS = 20


@dataclass(frozen=True)
class MeasuredLink:
    """Link between two ranks.

    Attributes:
        first, second: the ranks.
        latency: seconds of a small message.
        bandwidth: bytes per second of a large message.
        wrong: elements that arrived with a wrong value.
    """

    first: int
    second: int
    latency: float
    bandwidth: float
    wrong: int


@dataclass(frozen=True)
class WorldFacts:
    """Facts of all ranks.

    Attributes:
        hosts: facts of each rank, in order.
        links: link from each rank to the next one. With more than two ranks, rank 0 follows the last rank.
        clocks: offset of each rank's clock from rank 0's, in seconds.
    """

    hosts: list[HostFacts]
    links: list[MeasuredLink]
    clocks: list[float]


def examine_world(
    rank: int, device: torch.device, local_rank: int | None, local_world: int | None
) -> WorldFacts | None:
    """Run one rank's part of the examination. Rank 0 returns the facts, the others None.

    Args:
        local_rank, local_world: this rank's number on its host, and the number of ranks there (None: there is one
            host).
    """
    world = dist.get_world_size()
    first = (rank if local_rank is None else local_rank) == 0
    hosts = gather_objects(host_facts(rank, local_world or world, write=first))
    clocks = gather_objects(_clock_offset(rank, device))
    links = measure_links(rank, device)
    return WorldFacts(hosts, links, clocks) if rank == 0 else None


def measure_links(rank: int, device: torch.device) -> list[MeasuredLink]:
    """Time messages between consecutive ranks, pair by pair. Every rank calls this, and receives all links."""
    world = dist.get_world_size()
    pairs = [(first, (first + 1) % world) for first in range(world if world > 2 else world - 1)]
    own_links = {pair: _link(pair, rank, device) for pair in pairs}
    links = gather_objects({pair: link for pair, link in own_links.items() if link is not None and pair[0] == rank})
    return [links[first][first, second] for first, second in pairs]


STRATEGIES = ("ddp", "fsdp")
STEPS = 3


@dataclass(frozen=True)
class SmokeRun:
    """Run of a strategy in the smoke test.

    Attributes:
        strategy: name of the strategy.
        verdict: differences from the results of a single device.
        unequal: ranks whose copy of a slice of weights differs from the copy on the first rank that holds this slice.
    """

    strategy: str
    verdict: Verdict
    unequal: list[int]

    @property
    def ok(self) -> bool:
        return self.verdict.ok and not self.unequal


@dataclass(frozen=True)
class SmokeResult:
    """Result of the smoke test.

    Attributes:
        trained: run of each strategy.
        all_reduce: all-reduce of 8 MiB among all ranks; None for one rank.
        links: links between neighbours.
    """

    trained: list[SmokeRun]
    all_reduce: CollectivePoint | None
    links: list[MeasuredLink]

    def failures(self) -> list[str]:
        """Return a sentence for each failure."""
        failures: list[str] = []
        for run in self.trained:
            if not run.verdict.ok:
                failures.append(f"{run.strategy} is {max(run.verdict.all):.1e} from one device")
            if run.unequal:
                failures.append(
                    f"{run.strategy}: rank {', '.join(map(str, run.unequal))} has other weights than its replica"
                )
        if self.all_reduce is not None and self.all_reduce.wrong:
            failures.append(f"an all-reduce gave {self.all_reduce.wrong} wrong numbers")
        for link in self.links:
            if link.wrong:
                failures.append(f"{link.wrong} numbers arrived wrong between ranks {link.first} and {link.second}")
        return failures


def smoke_job(strategy: str, ranks: int) -> Job:
    """Return a job that takes about a second."""
    model = GPT(layers=2, hidden_size=32, heads=4, seq_len=16)
    return Job(find(strategy).for_job(ranks), ranks, 2 * ranks, model, 2, "fp64", name=strategy)


def smoke_rank(rank: int, device: torch.device, strategies: Sequence[str]) -> SmokeResult | None:
    """Run one rank's part of the smoke test. Rank 0 returns the result, the others None."""
    world = dist.get_world_size()
    groups: Groups = {}
    trained: list[SmokeRun] = []
    for strategy in strategies:
        unequal: list[int] = []
        job = smoke_job(strategy, world)
        verdict = verify_rank(
            rank, device, job, STEPS, groups, trained=lambda state, odd=unequal: odd.extend(_unequal_ranks(state))
        )
        trained.append(SmokeRun(strategy, verdict, unequal))
    point = None
    if world > 1:
        ranks = MeasuringRanks(rank, device)
        team = ranks.team(world)
        bench = CollectiveBench(("all_reduce",), (LARGE,), (world,), overlap=False)
        point = measure_case(ranks, team, "all_reduce", make_case("all_reduce", LARGE, team), bench)
    links = measure_links(rank, device)
    return SmokeResult(trained, point, links) if rank == 0 else None


CLOCKS_APART = 1.0
"""Clock offset in seconds above which logs of several hosts are misleading."""

SLOWER = 5
"""A link is reported if its bandwidth is smaller than the median by this factor."""


def _versions(facts: WorldFacts) -> CheckResult:
    reference = facts.hosts[0].versions
    for other in facts.hosts:
        for name, version in other.versions.items():
            if version != reference[name]:
                text = f"{name} {reference[name]} on rank 0, {version} on rank {other.rank} ({other.host})"
                return "error", text, "install the same everywhere, such as by constraints.txt"
    return f"the same on {counted(len(facts.hosts), 'rank')}"


def _clocks(facts: WorldFacts) -> CheckResult:
    rank = max(range(len(facts.clocks)), key=lambda rank: abs(facts.clocks[rank]))
    offset = facts.clocks[rank]
    if abs(offset) < CLOCKS_APART:
        return f"at most {1000 * abs(offset):.1f} ms apart"
    text = f"rank {rank} ({facts.hosts[rank].host}) is {abs(offset):,.1f} s {'ahead' if offset > 0 else 'behind'}"
    return "warning", text, "start chrony or ntpd there"


def _messages(facts: WorldFacts) -> CheckResult:
    wrong = [link for link in facts.links if link.wrong]
    if wrong:
        text = f"{wrong[0].wrong} numbers arrived wrong between ranks {wrong[0].first} and {wrong[0].second}"
        return "error", text, "do not train over this link; look at its network card and memory"
    return "all that was sent has arrived"


def _links(facts: WorldFacts) -> CheckResult:
    if not facts.links:
        return "one rank: none"
    usual = median(link.bandwidth for link in facts.links)
    slowest = min(facts.links, key=lambda link: link.bandwidth)
    text = f"latency {1e6 * median(link.latency for link in facts.links):,.0f} us, {usual / 1e9:.2f} GB/s"
    if len(facts.links) > 1:
        names = [facts.hosts[rank].host for rank in (slowest.first, slowest.second)]
        hosts_text = "on one host" if names[0] == names[1] else f"{names[0]} to {names[1]}"
        text += f"; slowest {slowest.bandwidth / 1e9:.2f} GB/s: ranks {slowest.first}-{slowest.second}, {hosts_text}"
    if slowest.bandwidth * SLOWER < usual:
        return "warning", text, "look at that link; GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names the interface"
    return text


WORLD_CHECKS: dict[str, Callable[[WorldFacts], CheckResult]] = {
    "versions": _versions,
    "clocks": _clocks,
    "messages": _messages,
    "links": _links,
}


def check_world(facts: WorldFacts) -> Iterator[Finding]:
    """Yield the findings of each host once, and then those of the world."""
    several = len({rank_facts.host for rank_facts in facts.hosts}) > 1
    firsts = {rank_facts.host: rank_facts for rank_facts in reversed(facts.hosts)}  # the first rank of each host
    for host in sorted(firsts.values(), key=lambda rank_facts: rank_facts.rank):
        yield from check_host(host, host.host if several else "")
    for name, check in WORLD_CHECKS.items():
        yield finding(name, check(facts))


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


def _clock_offset(rank: int, device: torch.device) -> float:
    """Return the offset of this rank's clock from rank 0's in seconds, by the fastest of several round trips."""
    best, ahead = float("inf"), 0.0
    now = torch.zeros(1, dtype=torch.float64, device=device)
    for other in range(1, dist.get_world_size()):
        for _ in range(ROUND_TRIPS):
            if rank == 0:
                dist.recv(now, other)
                dist.send(now.fill_(time.time()), other)
            elif rank == other:
                send_time = time.time()
                dist.send(now, 0)
                dist.recv(now, 0)
                round_trip = time.time() - send_time
                if round_trip < best:
                    best, ahead = round_trip, send_time + round_trip / 2 - float(now)
    return ahead


def _unequal_ranks(state: State) -> list[int]:
    """Return the ranks whose copy of a slice differs, bitwise, from the copy on the first rank that holds the slice."""
    own_hashes = {
        (layer, repr(holds)): hashlib.sha256(slices.cpu().numpy().tobytes()).hexdigest()
        for (layer, holds), slices in state.kept.items()
    }
    all_hashes = gather_objects(own_hashes)
    first: dict[tuple[int, str], str] = {}
    for hashes in all_hashes:
        first = hashes | first
    return [rank for rank, hashes in enumerate(all_hashes) if any(first[key] != value for key, value in hashes.items())]
