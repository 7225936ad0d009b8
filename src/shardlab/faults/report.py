"""Report of a run that failed or hangs: where every rank was, and its stack; ranks that agree have one line."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from shardlab.faults.waits import RankWait
from shardlab.rules.pieces import listed, plural


@dataclass(frozen=True)
class RankReport:
    """A rank's part of a report: where it stands, and since when.

    Attributes:
        wait: where it is.
        idle: seconds in which it has not got on.
        fate: what became of its process (`was killed (SIGKILL)`, `is stopped`); empty if it just runs.
        stack: its frames, the innermost last; none where it gave none.
    """

    wait: RankWait
    idle: float
    fate: str
    stack: list[str]


def names(ranks: tuple[int, ...] | list[int]) -> str:
    """`rank 1` or `ranks 0-2`."""
    return f"{plural('rank', len(ranks))} {listed(sorted(ranks))}"


def ended_with(ranks: list[int], fate: str) -> str:
    """`rank 1 was killed (SIGKILL), and the run ended with it.`"""
    return f"{said_of(ranks, fate)}, and the run ended with {'it' if len(ranks) == 1 else 'them'}."


def said_of(ranks: list[int], fate: str) -> str:
    """`rank 1 is stopped`, `ranks 0-1 are stopped`."""
    verb, _, rest = fate.partition(" ")
    several = {"is": "are", "was": "were", "has": "have"}.get(verb, verb)
    return f"{names(ranks)} {verb if len(ranks) == 1 else several} {rest}"


def report_text(ranks: Mapping[int, RankReport]) -> str:
    """The report, without a verdict: that is for who knows why the run ended."""
    lines = ["where each rank was:"]
    alike: dict[tuple[RankWait, str], list[int]] = defaultdict(list)
    for rank, seen in ranks.items():
        alike[seen.wait, seen.fate].append(rank)
    for (wait, fate), members in alike.items():
        lines.append(f"  {names(members)}: {_sentence(wait, max(ranks[rank].idle for rank in members), fate)}")
    lines += ["", "stacks, innermost call last:"]
    stacks: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for rank, seen in ranks.items():
        stacks[tuple(seen.stack) or (seen.fate or "gave none in time",)].append(rank)
    for frames, members in stacks.items():
        if ranks[members[0]].stack:
            lines += [f"  {names(members)}:", *(f"    {frame}" for frame in frames)]
        else:
            lines.append(f"  {names(members)}: none, it {frames[0]}")
    return "\n".join(lines)


def _sentence(wait: RankWait, idle: float, fate: str) -> str:
    whom = f" for {names(wait.blockers)}" if wait.blockers else ""
    come = ", which came as well" if wait.come and wait.blockers else ""
    since = time.strftime("%H:%M:%S", time.localtime(time.time() - idle))
    return f"{wait.what}{whom}{come}, since {since} ({idle:.0f} s)" + (f"; it {fate}" if fate else "")
