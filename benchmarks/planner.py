"""Measure how good the planner's answer is after 1, 3, 10 and 30 seconds, on twelve problems.

    python benchmarks/planner.py [--forecasts N]

Each problem is searched twice, with all cores: as `shardlab plan` does, until it ends by itself or after 30 seconds;
and for half a minute as a reference, which also follows plans that are 10 % slower than the best one. The gap of a
moment is how much longer the step of the best plan so far takes than that of the best plan of both searches. The
seconds of a moment include the time to load the planner. The last problem is for this machine's profile, which is
measured first, for some minutes, if no file is given. Nothing else may run on the machine.

With --forecasts N the first search ends after about N simulated plans, and the reference after twice as many. Gaps are
those after 3, 10, 30 and 100 simulated plans, and wall times are left out. No clock matters, so other work may run
beside it.
"""

from __future__ import annotations

import time

BEGAN = time.monotonic()

import json  # noqa: E402
import resource  # noqa: E402
import tempfile  # noqa: E402
from dataclasses import asdict, dataclass, replace  # noqa: E402
from math import inf  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Annotated  # noqa: E402

import tyro  # noqa: E402
from rich.box import MARKDOWN  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from shardlab.cli.plan.command import PlanCommand  # noqa: E402
from shardlab.language.precision import PRECISIONS  # noqa: E402
from shardlab.models import GPT  # noqa: E402
from shardlab.planner.describe import summary  # noqa: E402
from shardlab.planner.problem import Problem  # noqa: E402
from shardlab.planner.results import Results  # noqa: E402
from shardlab.planner.search import Budget, Search  # noqa: E402
from shardlab.planner.workers import workers  # noqa: E402
from shardlab.simulate.hardware import Cluster, Profile  # noqa: E402

LOADING = time.monotonic() - BEGAN
"""Seconds of loading the planner."""

PROBLEMS = {
    "llama3-8b, h100x8, torchtitan": PlanCommand(model="llama3-8b", cluster="h100x8", recipe="torchtitan"),
    "llama3-8b, h100x64, torchtitan": PlanCommand(model="llama3-8b", cluster="h100x64", recipe="torchtitan"),
    "llama3-8b, 131,072 tokens, h100x16, torchtitan": PlanCommand(
        model="llama3-8b", cluster="h100x16", sequence=131072, recipe="torchtitan"
    ),
    "llama3-70b, h100x32, nanotron": PlanCommand(model="llama3-70b", cluster="h100x32", recipe="nanotron"),
    "llama3-70b, 32,768 tokens, h100x128, torchtitan": PlanCommand(
        model="llama3-70b", cluster="h100x128", sequence=32768, recipe="torchtitan"
    ),
    "llama3-70b, h100x256, megatron-core-tuned": PlanCommand(
        model="llama3-70b", cluster="h100x256", recipe="megatron-core-tuned"
    ),
    "llama3-405b, h100x512, megatron-core-tuned": PlanCommand(
        model="llama3-405b", cluster="h100x512", recipe="megatron-core-tuned"
    ),
    "mixtral-8x7b, h100x64, torchtitan": PlanCommand(model="mixtral-8x7b", cluster="h100x64", recipe="torchtitan"),
    "mixtral-8x7b, a100-80gbx128, megatron-core-tuned": PlanCommand(
        model="mixtral-8x7b", cluster="a100-80gbx128", recipe="megatron-core-tuned"
    ),
    "gpt3-6.7b, a100-40gbx32, megatron-2022": PlanCommand(
        model="gpt3-6.7b", cluster="a100-40gbx32", recipe="megatron-2022"
    ),
    "gpt2-xl, a100-40gbx8, fsdp2": PlanCommand(model="gpt2-xl", cluster="a100-40gbx8", recipe="fsdp2"),
}
"""Problems on GPUs: dense models and mixtures of experts, of short and long sequences, on 8 to 512 devices."""

MOMENTS = (1, 3, 10, 30)
"""Seconds at which the best plan so far is compared."""

FORECASTS = (3, 10, 30, 100)
"""Numbers of simulated plans after which the best plan so far is compared, with --forecasts."""

REFERENCE_SECONDS = 30.0

REFERENCE_SLACK = 0.1


@dataclass(frozen=True)
class Options:
    """Search twelve problems, and say how good the plan is after 1, 3, 10 and 30 seconds."""

    profile: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: measured first)")] = (
        None
    )
    """A profile that shardlab bench has written, for the last problem."""

    only: str = ""
    """Only problems whose name contains this."""

    forecasts: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="(default: seconds count)")] = None
    """End a search after about this many simulated plans, and compare after numbers of plans instead of seconds."""

    json: bool = False
    """Print JSON alone."""


@dataclass(frozen=True)
class Row:
    """Search of one problem.

    Attributes:
        problem, plan: name of the problem, and the best plan of the first search.
        step: seconds of its step.
        seconds: seconds until the search ended, with loading.
        cpu_seconds: CPU seconds of all processes of the search.
        forecasts: number of simulated plans.
        gaps: how much longer a step of the best plan took at each moment, or after each number of simulated plans (inf:
            there was none).
    """

    problem: str
    plan: str
    step: float
    seconds: float
    cpu_seconds: float
    forecasts: int
    gaps: list[float]


def local_problem(profile: Profile) -> Problem:
    """A small GPT on four ranks of a machine with a profile."""
    model = GPT(layers=8, hidden_size=256, heads=8, seq_len=256, vocab_size=1024)
    return Problem(model, replace(Cluster.of_profile(profile), per_node=4), 64, (PRECISIONS["fp32"],))


def searched(problem: Problem, budget: Budget, slack: float = 0.0) -> Results:
    with workers(problem) as processes:
        return Search(problem, processes, budget=budget, slack=slack).run()


def measure(name: str, problem: Problem, forecasts: int | None) -> Row:
    before = cpu_seconds()
    budget = Budget(seconds=MOMENTS[-1] - LOADING) if forecasts is None else Budget(forecasts=forecasts)
    more = Budget(seconds=REFERENCE_SECONDS) if forecasts is None else Budget(forecasts=2 * forecasts)
    found = searched(problem, budget)
    used = cpu_seconds() - before
    reference = searched(problem, more, REFERENCE_SLACK).best
    best = found.best
    assert best is not None, "a plan fits"
    assert reference is not None, "a plan fits"
    least = min(best.seconds, reference.seconds)
    reached = [each.elapsed_seconds + LOADING if forecasts is None else each.forecasts for each in found.improvements]
    gaps = [
        min((each.seconds for each, at in zip(found.improvements, reached, strict=True) if at <= moment), default=inf)
        / least
        - 1
        for moment in (MOMENTS if forecasts is None else FORECASTS)
    ]
    seconds = found.seconds + LOADING
    return Row(name, summary(best.candidate), best.seconds, seconds, used, len(found.outcomes), gaps)


def cpu_seconds() -> float:
    """CPU seconds of this process and of its children that have ended."""
    uses = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(use.ru_utime + use.ru_stime for use in uses)


def main(options: Options) -> None:
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        problems = {name: command.problem() for name, command in PROBLEMS.items()}
        name = "GPT 8 x 256, 4 ranks of this machine"
        if options.only in name:
            if options.profile is None:
                from agreement import bench

                profile = bench(Path(folder))
            else:
                profile = Profile.read(options.profile)
            problems[name] = local_problem(profile)
    console = Console()
    for name, problem in problems.items():
        if options.only in name:
            rows.append(measure(name, problem, options.forecasts))
            if not options.json:
                row = rows[-1]
                gaps = ", ".join("none" if gap == inf else f"{gap:.1%}" for gap in row.gaps)
                console.print(f"{name}: {row.plan}; {row.step:.2f} s; gaps {gaps}", highlight=False, soft_wrap=True)
    if options.json:
        console.print_json(json.dumps([asdict(row) for row in rows]))
        return
    clocked = options.forecasts is None
    table = Table("problem", "plan", "step (s)", *["ended (s)"] * clocked, "CPU (s)", "forecasts", box=MARKDOWN)
    for moment in MOMENTS if clocked else FORECASTS:
        table.add_column(f"{moment} s" if clocked else f"{moment}", justify="right")
    for row in rows:
        gaps = ["none" if gap == inf else f"{gap:.1%}" for gap in row.gaps]
        ended = [f"{row.seconds:.1f}"] * clocked
        cells = f"{row.step:.2f}", *ended, f"{row.cpu_seconds:.1f}", str(row.forecasts)
        table.add_row(row.problem, row.plan, *cells, *gaps)
    Console(width=220).print(table)


if __name__ == "__main__":
    main(tyro.cli(Options))
