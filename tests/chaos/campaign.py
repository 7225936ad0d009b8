"""A campaign of kills: every run is killed at random, again and again, and must end as if nobody had.

    python -m tests.chaos.campaign --kills 200

For each strategy one run is left alone. Another is started, killed at a random moment, and started again with the same
words, until it comes to its end or has had its share of kills. After each kill no process may be left, and each
checkpoint that is complete must be that of the undisturbed run, bit by bit; so must be the final weights, and every
step's loss.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tests.chaos.cases import CASES, words
from tests.chaos.comparing import wrong
from tests.chaos.moments import MOMENTS
from tests.chaos.training import Training

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
        restarts: seconds from a start to the first new step, of the runs that came so far.
        wrong: what must not be, at the end.
    """

    kills: list[Kill] = field(default_factory=list[Kill])
    wrong: list[str] = field(default_factory=list[str])

    @property
    def all_wrong(self) -> list[str]:
        return [*(f"kill {at}: {what}" for at, kill in enumerate(self.kills) for what in kill.wrong), *self.wrong]


def campaign(options: Campaign, folder: Path) -> Iterator[tuple[str, Kill | None, Found]]:
    """Run the campaign, giving each kill when it is over, and None when a case is."""
    each = -(-options.kills // len(options.cases))
    for case in options.cases:
        chance, found = random.Random(f"{options.seed} {case}"), Found()
        name = Path(case).stem
        reference = folder / f"{name}-alone"
        alone = Training([*words(case, options.steps, options.save_every), "--keep", str(options.steps)], reference)
        left = alone.ended(10 * LIMIT)
        if alone.process.returncode or left:
            found.wrong.append(f"the undisturbed run failed, see {alone.log}")
            yield case, None, found
            continue
        runs = 1
        for number in range(each):
            training = Training(words(case, options.steps, options.save_every), folder / f"{name}-{runs}")
            kill = killed(training, options.moments[number % len(options.moments)], chance)
            ended = not kill.reached
            if training.out.exists():
                kill.wrong += wrong(training.out, reference, ended=ended)
            if ended:
                kill.wrong += [f"it failed by itself, see {training.log}"] * bool(training.process.returncode)
                runs += 1
            found.kills.append(kill)
            yield case, kill, found
        last = Training(words(case, options.steps, options.save_every), folder / f"{name}-{runs}")
        if left := last.ended(10 * LIMIT):
            found.wrong.append(f"{len(left)} processes were left behind at the end")
        if last.process.returncode:
            found.wrong.append(f"the run did not go on to its end, see {last.log}")
        else:
            found.wrong += wrong(last.out, reference, ended=True)
        yield case, None, found


def killed(training: Training, moment: str, chance: random.Random) -> Kill:
    """Kill one process of a run at a moment, mostly one rank."""
    MOMENTS[moment](training, chance)
    ranks = training.ranks()
    draw = chance.random()
    if not ranks or draw < 0.1:
        victims, pids = [-1], [training.process.pid]
    else:
        victims = sorted(chance.sample(range(len(ranks)), min(len(ranks), 1 + (draw < 0.2))))
        pids = [ranks[rank] for rank in victims]
    steps, began = training.steps(), time.monotonic()
    reached = training.running and training.signal(pids, signal.SIGKILL) > 0
    left = training.ended(LIMIT)
    bad = [f"{len(left)} processes were left behind"] if left else []
    return Kill(moment, victims, reached, steps, time.monotonic() - began, bad)


def report(found: dict[str, Found]) -> Table:
    """One line for each case."""
    table = Table("case", "kills", "by moment", "s to the end", "wrong")
    for case, each in found.items():
        reached = [kill for kill in each.kills if kill.reached]
        moments = Counter(kill.moment for kill in reached)
        slowest = max((kill.seconds for kill in reached), default=0.0)
        text = ", ".join(f"{moment} {count}" for moment, count in moments.items())
        table.add_row(case, str(len(reached)), text, f"{slowest:.1f}", "\n".join(each.all_wrong) or "nothing")
    return table


def main(options: Campaign) -> int:
    found: dict[str, Found] = {}
    with tempfile.TemporaryDirectory() as temporary, Progress(console=Console(stderr=True)) as progress:
        folder = options.folder or Path(temporary)
        task = progress.add_task("kills", total=-(-options.kills // len(options.cases)) * len(options.cases))
        for case, kill, each in campaign(options, folder):
            found[case] = each
            progress.update(task, advance=kill is not None, description=f"{case}: {len(each.all_wrong)} wrong")
    if options.json:
        rows: dict[str, Any] = {
            case: {"kills": [vars(kill) for kill in each.kills], "wrong": each.all_wrong}
            for case, each in found.items()
        }
        print(json.dumps(rows, indent=1))
    else:
        Console().print(report(found))
    return int(any(each.all_wrong for each in found.values()))


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Campaign, description=__doc__)))
