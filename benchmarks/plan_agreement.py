"""Whether the planner chooses well on this machine: every plan of small spaces run, and the chosen one among them.

    python benchmarks/plan_agreement.py

First `shardlab bench` measures the machine's collectives and layers; that profile is all that the planner knows. Then
each model and batch is planned, and every plan of its space is trained on two processes: in rounds, in which each plan
takes a step to warm up and one that counts, so that what else the machine does slows all of them alike. A plan's time
is the median over the rounds; after the first ones those go on that may still be the fastest. Regret is how much longer
the chosen plan's step takes than the shortest one. Nothing else may run meanwhile.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any

import torch
import torch.distributed as dist
import tyro
from agreement import bench
from rich.console import Console
from rich.table import Table

from shardlab.data import Corpus
from shardlab.execute import Executor, Settings
from shardlab.execute.communicator import Groups
from shardlab.hardware import Cluster, Profile
from shardlab.measure.saving import this_machine
from shardlab.models import GPT, Blocks, Llama
from shardlab.planner.families import family
from shardlab.planner.problem import Candidate, Limits, Problem
from shardlab.planner.search import Search
from shardlab.planner.space import candidates, shapes
from shardlab.planner.words import chosen_fields
from shardlab.planner.workers import Asked, answer, workers
from shardlab.program.field_types import as_flags
from shardlab.program.precision import PRECISIONS
from shardlab.train.data import Batches
from shardlab.train.job import Job
from shardlab.train.launch import backend_of, run_ranks

RANKS = 2

FIRST = 5
"""Rounds in which every plan is run."""

FAR = 1.25
"""A plan whose step takes so many times the shortest one after the first rounds is not run again."""

CASES: list[tuple[Blocks, int, int]] = [  # model, sequences of the global batch, and at most of a microbatch
    (GPT(layers=4, hidden_size=192, heads=4, seq_len=96, vocab_size=256), 8, 2),
    (GPT(layers=4, hidden_size=256, heads=4, seq_len=64, vocab_size=256), 2, 1),
    (GPT(layers=8, hidden_size=128, heads=2, seq_len=64, vocab_size=256), 16, 2),
    (GPT(layers=2, hidden_size=320, heads=5, seq_len=128, vocab_size=256), 4, 2),
    (GPT(layers=4, hidden_size=128, heads=4, seq_len=128, vocab_size=4096), 4, 1),
    (GPT(layers=6, hidden_size=64, heads=2, seq_len=64, vocab_size=256), 8, 2),
    (Llama(layers=4, hidden_size=192, heads=4, kv_heads=2, seq_len=128, vocab_size=256), 8, 2),
]
"""Small models, of which some compute much and communicate little, and some the other way round."""


@dataclass(frozen=True)
class Options:
    """Plan small models by this machine's profile, run every plan, and see how good the chosen one is."""

    profile: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: measured first)")] = (
        None
    )
    """A profile that shardlab bench has written."""

    other_machine: bool = False
    """Take a profile from another machine."""

    rounds: int = 25
    """How often each plan is run that may be the fastest."""

    cases: Annotated[tuple[int, ...], tyro.conf.arg(metavar="N ...", help_behavior_hint="(default: all)")] = ()
    """Numbers of the cases to run, from 1."""

    plans: bool = False
    """Show every plan, what was predicted and measured."""

    json: bool = False
    """Print JSON alone."""


@dataclass(frozen=True)
class PlanTimes:
    """A plan of a case's space; seconds of a step."""

    family: str
    plan: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Above 0 is too long."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class CaseResult:
    """One model and batch: the plan that the planner chose, and all of its space."""

    model: str
    sequences: int
    chosen: PlanTimes
    plans: list[PlanTimes]

    @property
    def best(self) -> PlanTimes:
        return min(self.plans, key=lambda each: each.measured)

    @property
    def regret(self) -> float:
        return self.chosen.measured / self.best.measured - 1

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "best": asdict(self.best), "regret": self.regret}


def time_plans(rank: int, device: torch.device, jobs: Sequence[Job], rounds: int) -> list[float]:
    """Seconds of a step of every job, the median over rounds of its slowest rank; all ranks know the same."""
    groups: Groups = {}
    executors: list[Executor] = []
    for job in jobs:
        corpus = Corpus.open((), job.model.seq_len)
        batches = Batches(corpus, job.model.seq_len, job.micro_batch_size, job.microbatches, job.seed)
        settings = Settings(job.seed, job.numbers, device)
        executors.append(
            Executor(job.checked(), rank, job.cut, batches, settings, backend_of(device.type), groups=groups)
        )
        executors[-1].step()  # memory is first taken, and connections are made
    times: list[list[float]] = [[] for _ in jobs]
    running = list(range(len(jobs)))
    for number in range(rounds):
        if number == FIRST:
            least = min(median(each) for each in times)
            running = [at for at in running if median(times[at]) < FAR * least]
        for at in running[:: 1 if number % 2 else -1]:
            executors[at].step()
            dist.barrier()
            began = time.perf_counter()
            executors[at].step()
            took = torch.tensor([time.perf_counter() - began])
            dist.all_reduce(took, dist.ReduceOp.MAX)
            times[at].append(float(took))
    return [median(each) for each in times]


def run_case(model: Blocks, sequences: int, most: int, cluster: Cluster, rounds: int) -> CaseResult:
    """Plan it, and run every plan."""
    limits = Limits(fixed={"recompute": "none"}, most={"micro_batch_size": most})
    problem = Problem(model, cluster, sequences, (PRECISIONS["fp32"],), limits=limits)
    with workers(problem, 1) as ask:
        best = Search(problem, ask).run().best
    assert best is not None, "small models fit"
    space = [each for shape in shapes(problem) for each in candidates(problem, shape)]
    forecasts = [(each, found.forecast) for each in space if (found := answer(problem, Asked(each))) is not None]
    jobs = [_job(problem, each) for each, _ in forecasts]
    measured = run_ranks(RANKS, time_plans, jobs, rounds)
    rows = {
        each: PlanTimes(family(each.plan), words(each), forecast.seconds, seconds)
        for (each, forecast), seconds in zip(forecasts, measured, strict=True)
    }
    name = f"{type(model).__name__} {model.layers} x {model.hidden_size}, {model.seq_len} tokens"
    name += f", vocabulary {model.vocab_size}" if model.vocab_size != 256 else ""
    return CaseResult(name, sequences, rows[best.candidate], list(rows.values()))


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
    table = Table("model", "batch", "plans", "chosen", "ms", "best", "ms", "regret", box=None)
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
        )
    console.print(table)
    errors = [abs(each.error) for result in results for each in result.plans]
    console.print(f"predictions of {len(errors)} plans: mean error {mean(errors):.1%}, worst {max(errors):.1%}")
    console.print(f"regret: mean {mean(r.regret for r in results):.1%}, worst {max(r.regret for r in results):.1%}")


def main(options: Options) -> None:
    load, began = os.getloadavg()[0], time.perf_counter()
    if load > 0.5:
        print(f"plan_agreement: the machine is busy (load {load:.1f}); its timings tell little", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="shardlab-") as place:
        here, other = this_machine(), options.other_machine
        profile = (
            Profile.read(options.profile, here=here, other_machine=other) if options.profile else bench(Path(place))
        )
    results: list[CaseResult] = []
    for number, (model, sequences, most) in enumerate(CASES, 1):
        if options.cases and number not in options.cases:
            continue
        results.append(run_case(model, sequences, most, Cluster.of_profile(profile), options.rounds))
        print(f"{number}/{len(CASES)} regret {results[-1].regret:.1%}", file=sys.stderr)
    if options.json:
        data = {"machine": asdict(profile.machine), "load": load, "cases": [each.as_dict() for each in results]}
        print(json.dumps(data, indent=2))
    else:
        show(results, options)
        print(f"{profile.machine.processor}, {profile.machine.places} cores; {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main(tyro.cli(Options))
