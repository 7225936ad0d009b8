"""Measure how well the planner chooses on this machine: run every plan of small spaces, including the chosen one.

    python benchmarks/plan_agreement.py

First, `shardlab bench` measures the machine's collectives and layers. The planner knows only this profile. Then each
model and batch is planned, and every plan of its space is trained on two processes, which are the same for all cases.
In each round, each plan takes a step to warm up and a step that counts, so that other work on the machine slows all
plans alike. A plan's time is the median over the rounds. After the first rounds, only plans that may still be the
fastest continue, until the time of the case is over. The loss of a choice is how much longer its step takes than that
of the fastest plan. It is reported for the plan that is predicted fastest, and for the plan that
`shardlab train --plan auto` chooses after it measured the plans that may be faster. Each case is printed when it ends,
also before Ctrl-C. Nothing else may run on the machine. Everything takes about seven minutes.
"""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import torch
import tyro
from agreement import bench
from rich.console import Console
from rich.table import Table

from shardlab.common.fields import as_flags
from shardlab.common.text import counted
from shardlab.language.precision import PRECISIONS
from shardlab.measure.profile import this_machine
from shardlab.measure.progress import Race
from shardlab.measure.side_by_side.sides import race_rank
from shardlab.models import GPT, Blocks, Llama
from shardlab.planner.choose import choose, find_contenders
from shardlab.planner.describe import chosen_fields
from shardlab.planner.lines import every_line
from shardlab.planner.problem import Candidate, Limits, Problem, family
from shardlab.planner.workers import Query, answer_request, workers
from shardlab.simulate.hardware import Cluster, Profile
from shardlab.starting import INTERRUPTED
from shardlab.train.job import Job
from shardlab.train.launch.ranks import run_ranks

RANKS = 2

CASES: list[tuple[Blocks, int, int]] = [  # model, sequences of the global batch, and at most of a microbatch
    (GPT(layers=4, hidden_size=192, heads=4, seq_len=96, vocab_size=256), 4, 1),
    (GPT(layers=4, hidden_size=256, heads=4, seq_len=64, vocab_size=256), 2, 1),
    (GPT(layers=8, hidden_size=128, heads=2, seq_len=64, vocab_size=256), 8, 1),
    (GPT(layers=2, hidden_size=320, heads=5, seq_len=128, vocab_size=256), 4, 2),
    (GPT(layers=4, hidden_size=128, heads=4, seq_len=128, vocab_size=4096), 4, 1),
    (GPT(layers=6, hidden_size=64, heads=2, seq_len=64, vocab_size=256), 8, 2),
    (Llama(layers=4, hidden_size=192, heads=4, kv_heads=2, seq_len=128, vocab_size=256), 4, 1),
]
"""Small models: some compute much and communicate little, and some the other way round."""


@dataclass(frozen=True)
class Options:
    """Plan small models by this machine's profile, run every plan, and compare the chosen one with the fastest."""

    profile: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: measured first)")] = (
        None
    )
    """A profile that shardlab bench has written."""

    other_machine: bool = False
    """Take a profile from another machine."""

    rounds: int = 40
    """Maximum number of runs of each plan that may be the fastest."""

    seconds: float = 40.0
    """Seconds of a case after which no further round begins."""

    cases: Annotated[tuple[int, ...], tyro.conf.arg(metavar="N ...", help_behavior_hint="(default: all)")] = ()
    """Numbers of the cases to run, from 1."""

    plans: bool = False
    """Show predicted and measured seconds of every plan."""

    json: bool = False
    """Print JSON alone."""


@dataclass(frozen=True)
class PlanTimes:
    """Predicted and measured seconds of a step of one plan in a case's space."""

    family: str
    plan: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Relative error of the prediction; above 0, it is too long."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class CaseResult:
    """Result of one model and batch: the plan that is predicted fastest, the fastest of the plans that alternated with
    it, and the whole space."""

    model: str
    sequences: int
    chosen: PlanTimes
    raced: PlanTimes
    plans: list[PlanTimes]

    @property
    def best(self) -> PlanTimes:
        return min(self.plans, key=lambda each: each.measured)

    @property
    def regret(self) -> float:
        return self.chosen.measured / self.best.measured - 1

    @property
    def regret_raced(self) -> float:
        return self.raced.measured / self.best.measured - 1

    def as_dict(self) -> dict[str, Any]:
        losses = {"regret": self.regret, "regret_raced": self.regret_raced}
        return {**asdict(self), "best": asdict(self.best), **losses}

    @classmethod
    def of_dict(cls, found: dict[str, Any]) -> CaseResult:
        """Return the case from the output of `as_dict`."""
        plans = [PlanTimes(**each) for each in found["plans"]]
        chosen, raced = (PlanTimes(**found[name]) for name in ("chosen", "raced"))
        return cls(found["model"], found["sequences"], chosen, raced, plans)


@dataclass(frozen=True)
class PlannedCase:
    """A model and batch, its space, and the indices in the space of the plans that alternate; the first is the plan
    that is predicted fastest."""

    model: str
    sequences: int
    turns: list[int]
    jobs: list[Job]
    plans: list[PlanTimes]

    def with_times(self, measured: Sequence[float]) -> CaseResult:
        """Return the result of the case with measured times."""
        plans = [replace(each, measured=seconds) for each, seconds in zip(self.plans, measured, strict=True)]
        raced = min((plans[at] for at in self.turns), key=lambda each: each.measured)
        return CaseResult(self.model, self.sequences, plans[self.turns[0]], raced, plans)


def plan_case(model: Blocks, sequences: int, most: int, cluster: Cluster) -> PlannedCase:
    """Plan it, and forecast every plan of its space."""
    limits = Limits(fixed={"recompute": "none"}, maximum={"micro_batch_size": most})
    problem = Problem(model, cluster, sequences, (PRECISIONS["fp32"],), limits=limits)
    with workers(problem, 1) as processes:
        taking_turns = find_contenders(choose(problem, processes, measured=(), families=False), inf)
    lines = every_line(problem)
    forecasts = {each: found.forecast for each in lines if (found := answer_request(problem, Query(each))) is not None}
    plans = [PlanTimes(family(each.plan), words(each), made.seconds, 0.0) for each, made in forecasts.items()]
    name = f"{type(model).__name__} {model.layers} x {model.hidden_size}, {model.seq_len} tokens"
    name += f", vocabulary {model.vocab_size}" if model.vocab_size != 256 else ""
    jobs = [_job(problem, each) for each in forecasts]
    turns = [list(forecasts).index(each.candidate) for each in taking_turns]
    return PlannedCase(name, sequences, turns, jobs, plans)


def time_cases(rank: int, device: torch.device, cases: Sequence[PlannedCase], options: Options, results: Path) -> None:
    """Run every plan of every case; rank 0 prints each case when it ends, and appends it to a file of results."""
    for number, case in enumerate(cases, 1):
        turns = Race(options.rounds, options.seconds, always=case.turns)
        result = case.with_times(race_rank(rank, device, case.jobs, turns))
        if rank == 0:
            tell(f"{number}/{len(cases)}", result)
            with results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(result.as_dict()) + "\n")


def read_results(file: Path) -> list[CaseResult]:
    """Read the results that `time_cases` has written; none if there is no file."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return [CaseResult.of_dict(json.loads(line)) for line in lines]


def tell(place: str, case: CaseResult) -> None:
    """Print a case in two lines: the choice, and the errors of the prediction."""
    families: dict[str, list[float]] = {}
    for each in case.plans:
        families.setdefault(each.family, []).append(each.error)
    erred = ", ".join(f"{name} {mean(errors):+.0%}" for name, errors in families.items())
    worst = max(case.plans, key=lambda each: abs(each.error))
    chosen, best = case.chosen, case.best
    losses = f"loss {case.regret:.1%}, after trial runs {case.regret_raced:.1%}"
    print(
        f"{place} {case.model}, {case.sequences} sequences, {len(case.plans)} plans: {losses}\n"
        f"    chosen {chosen.plan}: {1000 * chosen.measured:.1f} ms ({chosen.error:+.0%} predicted); "
        f"best {best.plan}: {1000 * best.measured:.1f} ms ({best.error:+.0%})\n"
        f"    predictions: {erred}; worst {worst.plan} {worst.error:+.0%}",
        file=sys.stderr,
        flush=True,
    )


def _job(problem: Problem, candidate: Candidate) -> Job:
    microbatches = problem.sequences // candidate.micro_batch_size
    return Job(candidate.plan, RANKS, microbatches, problem.model, candidate.micro_batch_size)


def words(candidate: Candidate) -> str:
    """The flags of a candidate."""
    return as_flags({**chosen_fields(candidate.plan), "micro_batch_size": candidate.micro_batch_size})


def show(results: Sequence[CaseResult], options: Options) -> None:
    """Print a line for each case, and, if asked, one for each plan."""
    console = Console(highlight=False)

    def milliseconds(seconds: float) -> str:
        return f"{1000 * seconds:.1f}"

    if options.plans:
        for result in results:
            table = Table("plan", "predicted, ms", "measured", "error", box=None, title=f"{result.model}")
            for row in sorted(result.plans, key=lambda each: each.measured):
                mark = "> " if row == result.chosen else "  "
                table.add_row(
                    mark + row.plan, milliseconds(row.predicted), milliseconds(row.measured), f"{row.error:+.1%}"
                )
            console.print(table, soft_wrap=True)
            console.print()
    table = Table("model", "batch", "plans", "chosen", "ms", "best", "ms", "loss", "after trial runs", box=None)
    for result in results:
        table.add_row(
            result.model,
            str(result.sequences),
            str(len(result.plans)),
            result.chosen.plan,
            milliseconds(result.chosen.measured),
            result.best.plan,
            milliseconds(result.best.measured),
            f"{result.regret:.1%}",
            f"{result.regret_raced:.1%}",
        )
    console.print(table)
    errors = [abs(each.error) for result in results for each in result.plans]
    console.print(f"predictions of {len(errors)} plans: mean error {mean(errors):.1%}, worst {max(errors):.1%}")
    for what, losses in {
        "loss": [each.regret for each in results],
        "loss after trial runs": [each.regret_raced for each in results],
    }.items():
        console.print(f"{what}: mean {mean(losses):.1%}, worst {max(losses):.1%}")


def main(options: Options) -> int:
    """Measure, plan and run; after Ctrl-C, print the cases that were run."""
    load, began = os.getloadavg()[0], time.perf_counter()
    if load > 0.5:
        print(f"plan_agreement: the machine is busy (load {load:.1f}); its timings tell little", file=sys.stderr)
    wanted = [case for number, case in enumerate(CASES, 1) if not options.cases or number in options.cases]
    interrupted = False
    with tempfile.TemporaryDirectory(prefix="shardlab-") as folder:
        file = Path(folder, "results.jsonl")
        try:
            profile = read_profile(options.profile, options.other_machine) if options.profile else bench(Path(folder))
            print(f"measured the machine in {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
            planned = [plan_case(*case, Cluster.of_profile(profile)) for case in wanted]
            run_ranks(RANKS, time_cases, planned, options, file)
        except KeyboardInterrupt:
            interrupted = True
        results = read_results(file)
    if options.json:
        data = {"machine": asdict(this_machine()), "load": load, "cases": [each.as_dict() for each in results]}
        print(json.dumps(data, indent=2))
    elif results:
        show(results, options)
        machine = this_machine()
        print(f"{machine.processor}, {machine.places} cores; {time.perf_counter() - began:.0f} s")
    if interrupted:
        print(f"plan_agreement: interrupted after {len(results)} of {counted(len(wanted), 'case')}", file=sys.stderr)
    return INTERRUPTED if interrupted else 0


def read_profile(file: Path, other_machine: bool) -> Profile:
    """Read the profile that the options name; it must be of this machine unless another one's is allowed."""
    return Profile.read(file, this_machine=this_machine(), other_machine=other_machine)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
