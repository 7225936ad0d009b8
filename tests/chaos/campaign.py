"""A campaign of kills: every run is killed at random, again and again, and must end as if nobody had.

    python -m tests.chaos.campaign --kills 200

For each strategy one run is left alone. Another is started, killed at a random moment, and started again with the same
words, until it comes to its end or has had its share of kills. After each kill no process may be left, and each
checkpoint that is complete must be that of the undisturbed run, bit by bit; so must be the final weights, and every
step's loss. At the end no shared memory may be left.

Runs that are killed later than in their start are started warm (`tests/support/warm.py`).
"""

from __future__ import annotations

import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import tyro
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tests.chaos.scene import CASES, MOMENTS, words, wrong
from tests.chaos.training import Training, environment
from tests.support.warm import WarmStarts

LIMIT = 120.0
"""Seconds in which a run ends once one of its processes has been killed; what is left then is left behind."""


@dataclass(frozen=True)
class Campaign:
    """Kill training runs at random."""

    kills: int = 200
    """Kills in all, shared evenly by the cases."""

    seed: int = 0
    """Of the moments and of who is killed."""

    cases: tuple[str, ...] = tuple(CASES)
    """Strategies, by name."""

    steps: int = 24
    """Optimizer steps of a run."""

    save_every: int = 3
    """Steps between two checkpoints."""

    moments: tuple[str, ...] = tuple(MOMENTS)
    """Moments at which runs are killed, by turns."""

    folder: Path | None = None
    """Where the runs lie; a temporary folder without it."""

    json: bool = False
    """Print JSON alone."""


@dataclass
class Kill:
    """One kill, and what came of it.

    Attributes:
        moment: at which it was.
        victims: which processes were killed: the ranks' numbers, -1 for the command itself.
        reached: whether one of them was still there.
        steps: that the run had put on record by then.
        seconds: from the kill to the end of the last process.
        wrong: what must not be.
    """

    moment: str
    victims: list[int]
    reached: bool
    steps: int
    seconds: float
    wrong: list[str]


@dataclass
class Found:
    """What came of one case's runs.

    Attributes:
        kills: each of them.
        ends: how many of its runs came to their end, equal to the undisturbed one.
        seconds: that all of them took.
        wrong: what must not be, at the end.
    """

    kills: list[Kill] = field(default_factory=list[Kill])
    ends: int = 0
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list[str])

    @property
    def all_wrong(self) -> list[str]:
        return [*(f"kill {at}: {what}" for at, kill in enumerate(self.kills) for what in kill.wrong), *self.wrong]


def campaign(
    options: Campaign, folder: Path, warm: WarmStarts | None = None
) -> Iterator[tuple[str, Kill | None, Found]]:
    """Run the campaign, giving each kill when it is over, and None when a case is.

    Args:
        warm: server that starts the runs (None: its own).
    """
    each = -(-options.kills // len(options.cases))
    with ExitStack() as stack:
        if warm is None:
            warm = WarmStarts(environment())
            stack.callback(warm.close)
        for case in options.cases:
            for kill, found in _case(options, case, each, folder, warm):
                yield case, kill, found


def _case(
    options: Campaign, case: str, kills: int, folder: Path, warm: WarmStarts
) -> Iterator[tuple[Kill | None, Found]]:
    """One case's runs: kills are counted that reached a process, and as many runs are begun as that takes."""
    chance, found, began = random.Random(f"{options.seed} {case}"), Found(), time.monotonic()
    name = Path(case).stem
    reference, saving = folder / f"{name}-alone", words(case, options.steps, options.save_every)
    alone = Training([*saving, "--keep", str(options.steps)], reference, warm=warm)
    left = alone.ended(10 * LIMIT)
    if alone.process.returncode or left:
        found.wrong.append(f"the undisturbed run failed, see {alone.log}")
        yield None, found
        return
    runs, reached = 1, 0
    for number in range(2 * kills):
        if reached == kills:
            break
        moment = options.moments[number % len(options.moments)]
        training = Training(saving, folder / f"{name}-{runs}", warm=None if moment == "start" else warm)
        kill = killed(training, moment, chance)
        ended = not kill.reached
        reached += kill.reached
        if training.out.exists():
            kill.wrong += wrong(training.out, reference, ended=ended)
        if ended:
            kill.wrong += [f"it failed by itself, see {training.log}"] * bool(training.process.returncode)
            found.ends += not kill.wrong
            runs += 1
        found.kills.append(kill)
        found.seconds = time.monotonic() - began
        yield kill, found
    last = Training(saving, folder / f"{name}-{runs}", warm=warm)
    if left := last.ended(10 * LIMIT):
        found.wrong.append(f"{len(left)} processes were left behind at the end")
    if last.process.returncode:
        found.wrong.append(f"the run did not go on to its end, see {last.log}")
    else:
        found.wrong += wrong(last.out, reference, ended=True)
        found.ends += not found.wrong
    found.seconds = time.monotonic() - began
    yield None, found


def killed(training: Training, moment: str, chance: random.Random) -> Kill:
    """Kill one process of a run at a moment, mostly one rank."""
    MOMENTS[moment](training, chance)
    ranks = training.ranks()
    draw = chance.random()
    if not ranks or draw < 0.1:
        victims, pids = [-1], [training.process.pid]
    else:
        victims = sorted(chance.sample(range(len(ranks)), min(len(ranks), 1 + (draw < 0.3))))
        pids = [ranks[rank] for rank in victims]
    steps, began = training.steps(), time.monotonic()
    reached = training.running and training.signal(pids, signal.SIGKILL) > 0
    left = training.ended(LIMIT)
    bad = [f"{len(left)} processes were left behind"] if left else []
    return Kill(moment, victims, reached, steps, time.monotonic() - began, bad)


def report(found: dict[str, Found]) -> Table:
    """One line for each case, and one for all."""
    table = Table("case", "kills", *MOMENTS, "rank 0", "two ranks", "command", "runs", "s to the end", "wrong")
    everything = Found([kill for each in found.values() for kill in each.kills], sum(x.ends for x in found.values()))
    for case, each in [*found.items(), ("all", everything)]:
        reached = [kill for kill in each.kills if kill.reached]
        moments = Counter(kill.moment for kill in reached)
        victims = [
            sum(0 in kill.victims for kill in reached),
            sum(len(kill.victims) > 1 for kill in reached),
            sum(-1 in kill.victims for kill in reached),
        ]
        slowest = max((kill.seconds for kill in reached), default=0.0)
        counts = [len(reached), *(moments[name] for name in MOMENTS), *victims, each.ends]
        table.add_row(case, *map(str, counts), f"{slowest:.1f}", "\n".join(each.all_wrong) or "nothing")
    return table


def shared_memory() -> set[str]:
    """Names of shared memory on this machine that no process has mapped."""
    folder = Path("/dev/shm")
    mapped: list[str] = []
    for process in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            mapped.append(process.read_text())
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set[str]()
    return {name for name in names if not any(f"/dev/shm/{name}" in text for text in mapped)}


def main(options: Campaign) -> int:
    found: dict[str, Found] = {}
    before, console = shared_memory(), Console(stderr=True)
    with tempfile.TemporaryDirectory() as temporary, Progress(console=console) as progress:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        task = progress.add_task("kills", total=-(-options.kills // len(options.cases)) * len(options.cases))
        for case, kill, each in campaign(options, folder):
            found[case] = each
            reached = kill is not None and kill.reached
            progress.update(task, advance=int(reached), description=f"{case}: {len(each.all_wrong)} wrong")
            if kill is None:
                kills = sum(kill.reached for kill in each.kills)
                progress.console.print(f"{case}: {kills} kills in {each.seconds:.0f} s, {len(each.all_wrong)} wrong")
    left = shared_memory() - before
    if options.json:
        print(
            json.dumps({"cases": {case: asdict(each) for case, each in found.items()}, "left": sorted(left)}, indent=1)
        )
    else:
        Console().print(report(found))
    if left:
        console.print(f"shared memory was left behind, if nobody else has made it: {', '.join(sorted(left))}")
    return int(bool(left) or any(each.all_wrong for each in found.values()))


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Campaign, description=__doc__)))
