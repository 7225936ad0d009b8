"""What to run next for `shardlab plan --measure`, as commands; and what `--measured` steps have told."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from shardlab.cli.console import print_fact, table_of
from shardlab.planner.experiments import Experiment
from shardlab.planner.families import family
from shardlab.planner.words import described, short, train_command
from shardlab.predict.recipe import OWN
from shardlab.rules.pieces import counted
from shardlab.timeline.units import seconds_text

if TYPE_CHECKING:
    from shardlab.planner.beliefs import Beliefs
    from shardlab.planner.chosen import PlanChoice
    from shardlab.planner.found import Found
    from shardlab.planner.problem import Problem

STEPS = 13
"""Steps of a run: three that do not count, and ten of which the median does."""


def commands(experiments: list[Experiment], problem: Problem, words: str) -> list[tuple[str, Path]]:
    """The command that runs each plan, and the new folder that it writes; none for another framework's plans.

    Args:
        words: of the command that tell the model.
    """
    if problem.recipe.name != OWN.name:
        return []
    named = zip((each.outcome.candidate for each in experiments), _free(Path("runs")), strict=False)
    return [
        (train_command(problem, each, words, run=f"--steps {STEPS} --out {folder}", name=folder.name), folder)
        for each, folder in named
    ]


def _free(parent: Path) -> Iterator[Path]:
    """Folders `parent/measure-N` that are not there, in order."""
    number = 0
    while True:
        number += 1
        if not (path := parent / f"measure-{number}").exists():
            yield path


def experiments_as_json(
    experiments: list[Experiment], run: list[tuple[str, Path]], problem: Problem
) -> list[dict[str, Any]]:
    """Experiments for other programs; `measured_seconds` is for whoever runs them to fill in."""
    return [
        {
            "command": run[number][0] if run else None,
            "why": each.why,
            "family": family(each.outcome.candidate.plan),
            "plan": each.outcome.candidate.plan.as_dict(),
            "micro_batch_size": each.outcome.candidate.micro_batch_size,
            "precision": each.outcome.candidate.precision.name,
            "predicted_seconds": each.outcome.forecast.seconds,
            "measured_seconds": None,
        }
        for number, each in enumerate(experiments)
    ]


def print_experiments(
    experiments: list[Experiment], run: list[tuple[str, Path]], choice: PlanChoice, again: str, console: Console
) -> None:
    """Print what to run next, each with its reason, and the command that takes the results in."""
    problem = choice.problem
    console.print("\nworth running next", style="dim")
    for number, each in enumerate(experiments):
        candidate = each.outcome.candidate
        print_fact(console, f"  {number + 1}", f"{family(candidate.plan)}, {short(candidate)}: {each.why}", indent=4)
        if run:
            console.print(Text(f"    {run[number][0]}"), soft_wrap=True)
        else:
            print_fact(console, "", "; ".join(described(problem, candidate)), indent=4)
    if not experiments:
        print_fact(console, "", "nothing: no other plan that may be as fast would give new information", indent=4)
    elif run:
        paths = shlex.join(str(folder) for _, folder in run)
        console.print(Text(f"  then: {again} {paths}"), soft_wrap=True)
    else:
        name = problem.recipe.name
        print_fact(console, "  then", f"run them in {name}, and give {again} what --json prints, with measured_seconds")


def measured_as_json(beliefs: Beliefs) -> dict[str, Any]:
    """What was measured, and what followed, for other programs."""
    rows: list[dict[str, Any]] = [
        {
            "family": outcome.family,
            "plan": outcome.candidate.plan.as_dict(),
            "micro_batch_size": outcome.candidate.micro_batch_size,
            "precision": outcome.candidate.precision.name,
            "predicted_seconds": outcome.seconds,
            "measured_seconds": beliefs.measured.get(at),
            "step_seconds": beliefs.seconds[at],
            "error": beliefs.sure[at],
        }
        for at, outcome in enumerate(beliefs.plans)
    ]
    return {"factors": beliefs.factors, "plans": sorted(rows, key=lambda row: row["step_seconds"])}


def print_measured(beliefs: Beliefs, top: int, console: Console) -> None:
    """Print what was measured, and the best plans as they are ranked now."""
    table = table_of("", "after measuring", "predicted", "measured", "corrected", "sure to", words=2)
    table.columns[1].no_wrap = False
    order = sorted(range(len(beliefs.plans)), key=lambda at: beliefs.seconds[at])
    for at in [at for place, at in enumerate(order) if place <= top or at in beliefs.measured]:
        outcome, seconds = beliefs.plans[at], beliefs.measured.get(at)
        table.add_row(
            outcome.family,
            short(outcome.candidate),
            seconds_text(outcome.seconds),
            "" if seconds is None else seconds_text(seconds),
            seconds_text(beliefs.seconds[at]),
            f"± {beliefs.sure[at]:.1%}",
        )
    console.print()
    console.print(table)
    factors = ", ".join(f"{name} {factor:.2f}" for name, factor in beliefs.factors.items())
    console.print()
    print_fact(console, "corrected by", f"{factors} times as long as predicted, and what alike plans took")


def print_ran_out(found: Found, console: Console) -> None:
    """Print the plans that were run, and ran out of memory."""
    for each in (each for each in found.outcomes if each.ran_out):
        print_fact(console, "does not fit", f"{each.family}, {short(each.candidate)}: it ran out of memory")


def how_sure(choice: PlanChoice) -> str:
    """How far the chosen plan's time may be off."""
    beliefs = choice.beliefs
    if beliefs is None or not beliefs.measured:
        return f"{choice.sure}; plans that are closer are as good as equal"
    steps = counted(len(beliefs.measured), "measured step")
    now = f"± {choice.sure_now:.1%} after {steps}, ± {choice.sure.mean:.1%} before"
    return f"{now}; plans that are closer are as good as equal"
