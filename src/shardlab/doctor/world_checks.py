"""Checks of all ranks together: versions, clocks, and the links between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median

from shardlab.doctor.checks import Judged, examined, finding
from shardlab.doctor.finding import Finding
from shardlab.doctor.links import WorldFacts
from shardlab.rules.pieces import counted

CLOCKS_APART = 1.0
"""Seconds from which on logs of several hosts mislead."""

SLOWER = 5
"""A link that has less than one such part of the median bandwidth is told."""


def _versions(facts: WorldFacts) -> Judged:
    reference = facts.hosts[0].versions
    for other in facts.hosts:
        for name, version in other.versions.items():
            if version != reference[name]:
                found = f"{name} {reference[name]} on rank 0, {version} on rank {other.rank} ({other.host})"
                return "error", found, "install the same everywhere, such as by constraints.txt"
    return f"the same on {counted(len(facts.hosts), 'rank')}"


def _clocks(facts: WorldFacts) -> Judged:
    rank = max(range(len(facts.clocks)), key=lambda rank: abs(facts.clocks[rank]))
    apart = facts.clocks[rank]
    if abs(apart) < CLOCKS_APART:
        return f"at most {1000 * abs(apart):.1f} ms apart"
    found = f"rank {rank} ({facts.hosts[rank].host}) is {abs(apart):,.1f} s {'ahead' if apart > 0 else 'behind'}"
    return "warning", found, "start chrony or ntpd there"


def _messages(facts: WorldFacts) -> Judged:
    wrong = [link for link in facts.links if link.wrong]
    if wrong:
        found = f"{wrong[0].wrong} numbers arrived wrong between ranks {wrong[0].first} and {wrong[0].second}"
        return "error", found, "do not train over this link; look at its network card and memory"
    return "all that was sent has arrived"


def _links(facts: WorldFacts) -> Judged:
    if not facts.links:
        return "one rank: none"
    usual = median(link.bandwidth for link in facts.links)
    slowest = min(facts.links, key=lambda link: link.bandwidth)
    found = f"latency {1e6 * median(link.latency for link in facts.links):,.0f} us, {usual / 1e9:.2f} GB/s"
    if len(facts.links) > 1:
        names = [facts.hosts[rank].host for rank in (slowest.first, slowest.second)]
        between = "on one host" if names[0] == names[1] else f"{names[0]} to {names[1]}"
        found += f"; slowest {slowest.bandwidth / 1e9:.2f} GB/s: ranks {slowest.first}-{slowest.second}, {between}"
    if slowest.bandwidth * SLOWER < usual:
        return "warning", found, "look at that link; GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names the interface"
    return found


WORLD_CHECKS: dict[str, Callable[[WorldFacts], Judged]] = {
    "versions": _versions,
    "clocks": _clocks,
    "messages": _messages,
    "links": _links,
}


def all_findings(facts: WorldFacts) -> Iterator[Finding]:
    """Judge each host once, and then the world."""
    several = len({each.host for each in facts.hosts}) > 1
    firsts = {each.host: each for each in reversed(facts.hosts)}  # the first rank of each host
    for host in sorted(firsts.values(), key=lambda each: each.rank):
        yield from examined(host, host.host if several else "")
    for name, check in WORLD_CHECKS.items():
        yield finding(name, check(facts))
