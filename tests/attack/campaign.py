"""An attack on the check: random programs, right and wrong ones, of which every accepted one is run for real.

    python -m tests.attack.campaign --count 10000 --seed 1

Each program is traced, checked, timed, predicted on a cluster, run by the tests' interpreter, and trained for two
steps in float64 on as many processes as it has ranks. A failure is: a traceback, a rank that dies or hangs, numbers
that are not one device's, copies that differ though the check takes them for equal, a judge of another opinion, and a
right program that is refused. Each is printed with the words that repeat it, and with its text.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import tyro
from rich.console import Console
from rich.progress import Progress

from tests.attack.subjects import FAMILIES, PASSED, Subject
from tests.attack.trial import Outcome, ask, job_of, results_in, run_jobs

BATCH = 40
"""Programs that are run in one call of the same processes."""


PATIENCE = 3.0
"""Seconds that the other ranks have once one has failed."""


@dataclass(frozen=True)
class Attack:
    """Try random programs."""

    count: int = 10_000
    """Programs in all."""

    seed: int = 0
    """Of the first program; the others follow."""

    families: tuple[str, ...] = FAMILIES
    """Kinds of programs (see `subjects.py`)."""

    wild: float = 0.5
    """The share of programs that have mistakes."""

    judge_every: int = 3
    """How often the tests' interpreter judges an accepted program: every so many."""

    draw_every: int = 50
    """How often a picture of it is drawn."""

    trained: bool = True
    """Whether accepted programs are trained; else they are only checked, timed and interpreted."""

    again: tuple[str, ...] = ()
    """Words of one program, as a failure prints them: it alone is tried, and printed."""


@dataclass
class Report:
    """What came of all programs so far.

    Attributes:
        outcomes: of each kind, by family.
        rules: how often each rule refused a program.
        failures: the programs that failed.
    """

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    rules: Counter[str] = field(default_factory=Counter[str])
    failures: list[Outcome] = field(default_factory=list[Outcome])

    def add(self, outcome: Outcome) -> None:
        family = outcome.subject.family + (", wild" if outcome.subject.wild else "")
        self.outcomes[family, outcome.what if not outcome.failed else "failed"] += 1
        if outcome.rule:
            self.rules[outcome.rule] += 1
        if outcome.failed:
            self.failures.append(outcome)


def subjects_of(options: Attack) -> Iterator[Subject]:
    """The programs of an attack."""
    weights = {"script": 6, "plan": 2, "written": 1}
    for number in range(options.count):
        random = Random(options.seed * 1_000_003 + number)
        family = random.choices(options.families, [weights[each] for each in options.families])[0]
        passes = random.sample(list(PASSED), random.randint(1, 3)) if number % 2 else []
        yield Subject(
            family,
            random.randrange(10**9),
            random.random() < options.wild,
            tuple(sorted(passes, key=list(PASSED).index)),
        )


def _start(count: int) -> Any:
    from tests.support.ranks import Ranks  # which imports torch

    return Ranks(count, PATIENCE)


class World:
    """Processes on which programs are run, started again where one of them has died or hangs.

    Args:
        start: starts so many ranks, as `tests.support.ranks.Ranks` does.
    """

    def __init__(self, start: Callable[[int], Any] | None = None) -> None:
        self._start = start or _start
        self._ranks: dict[int, Any] = {}

    def run(self, accepted: Sequence[Outcome], count: int) -> Iterator[Outcome]:
        """Run accepted programs of so many ranks one after the other."""
        left = list(accepted)
        while left:
            if count not in self._ranks or not self._ranks[count].usable:
                self._ranks[count] = self._start(count)
            with tempfile.TemporaryDirectory(prefix="attack-") as folder:
                failed = ""
                try:
                    self._ranks[count].call(run_jobs, list(map(job_of, left)), folder)
                except AssertionError as error:
                    failed = "\n".join([str(error), *(path.read_text() for path in Path(folder).glob("stacks-*"))])
                    self._ranks[count].close()
                found, ended = results_in(Path(folder), count)
            for number in range(ended):
                wrong = found[number]
                yield Outcome(left[number].subject, "the numbers are wrong" if wrong else "accepted", wrong)
            if failed:
                yield Outcome(left[ended].subject, "running it fails", failed)
                ended += 1
            left = left[ended:]

    def close(self) -> None:
        for ranks in self._ranks.values():
            if ranks.usable:
                ranks.close()


def attack(options: Attack) -> Iterator[Outcome]:
    """Try all programs; each gives one outcome, in any order."""
    world, waiting = World(), dict[int, list[Outcome]]()
    try:
        for number, subject in enumerate(subjects_of(options)):
            outcome = ask(
                subject, interpreted=number % options.judge_every == 0, drawn=number % options.draw_every == 9
            )
            if outcome.what != "accepted" or not options.trained:
                yield outcome
                continue
            ranks = subject.job.ranks
            batch = waiting.setdefault(ranks, [])
            batch.append(outcome)
            if len(batch) >= BATCH:
                yield from world.run(waiting.pop(ranks), ranks)
        for ranks, batch in waiting.items():
            yield from world.run(batch, ranks)
    finally:
        world.close()


def text_of(subject: Subject) -> str:
    """A program as a reader can repeat it by hand."""
    job = subject.job
    head = f"{job.model}, {job.mesh}, {job.microbatches} microbatches"
    if job.script is not None:
        return f"{head}\n{job.script.text}"
    return f"{head}\n{job.strategy if not isinstance(job.strategy, str) else 'tests.support.random_programs'}"


def subject_of(words: Sequence[str]) -> Subject:
    family, seed, *rest = words
    return Subject(family, int(seed), "wild" in rest, tuple(word for word in rest if word != "wild"))


def main(options: Attack) -> int:
    console, report, began = Console(stderr=True, highlight=False), Report(), time.monotonic()
    if options.again:
        return _again(subject_of(options.again))
    with Progress(console=console) as progress, suppress(KeyboardInterrupt):  # and say what has come by then
        task = progress.add_task("programs", total=options.count)
        for outcome in attack(options):
            report.add(outcome)
            progress.update(task, advance=1, description=f"{len(report.failures)} failed")
            if outcome.failed:
                last = outcome.detail.strip().splitlines()[-1:] or [""]
                print(f"FAILED {outcome.subject}: {outcome.what}: {last[0]}", flush=True)
    print(
        f"{sum(report.outcomes.values())} programs in {time.monotonic() - began:.0f} s, {len(report.failures)} failed"
    )
    for (family, what), count in sorted(report.outcomes.items()):
        print(f"{family:16s} {what:10s} {count:7d}")
    print("refused by: " + ", ".join(f"{rule} {count}" for rule, count in report.rules.most_common()))
    kinds = Counter((each.what, each.rule) for each in report.failures)
    for (what, rule), count in kinds.most_common():
        example = next(each for each in report.failures if (each.what, each.rule) == (what, rule))
        print(f"\n{count} times: {what} {rule}, such as {example.subject}\n{example.detail}")
    return int(bool(report.failures))


def _again(subject: Subject) -> int:
    """Try one program and print all that is known of it."""
    outcome = ask(subject, interpreted=True, drawn=True)
    if outcome.what == "accepted":
        world = World()
        (outcome,) = world.run([outcome], subject.job.ranks)
        world.close()
    print(text_of(subject))
    print(f"{outcome.subject}: {outcome.what} {outcome.rule}\n{outcome.detail}")
    return int(outcome.failed)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Attack, description=__doc__)))
