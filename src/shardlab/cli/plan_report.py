"""Report of a planner's choice, for a reader: on the first screen what is chosen, and then why."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from shardlab.cli.console import INDENT, print_fact, print_figures, print_path
from shardlab.cli.plan_experiments import how_sure, print_measured
from shardlab.cli.plan_figures import figures, memory_bar, path_text
from shardlab.cli.plan_tables import print_families, print_misses, print_reasons, print_runners_up
from shardlab.planner.chosen import EQUAL, NOTABLE
from shardlab.planner.explain import decisions
from shardlab.planner.words import described, picture
from shardlab.predict.assumed_figures import assumed_figures
from shardlab.rules.pieces import counted
from shardlab.timeline.units import seconds_text

if TYPE_CHECKING:
    from shardlab.planner.chosen import PlanChoice
    from shardlab.planner.dealer import Change

PATH = "what the step waits for, one after the other: of a message and the compute beside it, only what ends last"
"""Why a critical path has less compute than the step."""

NODE = 10
"""Characters of a node's name, before its devices."""

HELPS: dict[Change, str] = {
    "memory": "twice the memory",
    "links": "twice the bandwidth between nodes",
    "batch": "twice the batch",
}


def print_choice(
    choice: PlanChoice,
    model: str,
    cluster: str,
    commands: Mapping[str, str],
    out: Path | None,
    top: int,
    console: Console,
) -> None:
    """Print all of it, the choice and the best of each family first.

    Args:
        commands: that run the plan, by what they do.
        out: the file that holds the plan, if there is one.
        top: how many plans are listed.
    """
    problem, best = choice.problem, choice.best
    console.print(Text.assemble(("plan", "bold cyan"), f" of {model} on {cluster}"), soft_wrap=True)
    batch = f"{counted(problem.sequences, 'sequence')} of {problem.model.seq_len:,} tokens"
    console.print(f"{batch}, {problem.tokens:,} tokens a step; recipe {problem.recipe.name}\n", style="dim")
    for number, line in enumerate(described(problem, best.candidate)):
        print_fact(console, "" if number else "plan", line)
    console.print()
    print_figures(console, figures(choice))
    print_fact(console, "", memory_bar(choice))
    print_fact(console, "how sure", how_sure(choice))
    if assumed := assumed_figures(problem.workload(best.candidate)):
        print_fact(console, "assumed", ", ".join(assumed))
    console.print()
    for line in picture(best.candidate.plan.mesh, problem.cluster):
        print_fact(console, line[:NODE], line[NODE:], indent=NODE)
    print_families(choice, console)
    print_misses(choice, console)
    if choice.beliefs is not None and choice.beliefs.measured:
        print_measured(choice.beliefs, top, console)
    else:
        print_runners_up(choice, console, top)
    console.print()
    print_fact(console, "critical path", path_text(choice.path) if choice.path else choice.unknown)
    if choice.path:
        print_fact(console, "", PATH, style="dim")
    print_reasons(choice, console)
    console.print()
    _print_helps(choice, console)
    _print_end(choice, commands, out, console)


def print_explained(
    choice: PlanChoice, model: str, cluster: str, commands: Mapping[str, str], out: Path | None, console: Console
) -> None:
    """Print the decisions one after the other; arguments as of `print_choice`."""
    console.print(Text.assemble(("plan", "bold cyan"), f" of {model} on {cluster}, decision by decision"))
    for decision in decisions(choice):
        console.print(f"\n{decision.question}", style="bold")
        for line in decision.lines:
            print_fact(console, "  -", line, indent=4)
    console.print("\nchosen", style="bold")
    for line in described(choice.problem, choice.best.candidate):
        print_fact(console, "  -", line, indent=4)
    _print_end(choice, commands, out, console)


def _print_end(choice: PlanChoice, commands: Mapping[str, str], out: Path | None, console: Console) -> None:
    """The commands that run the plan, what was searched, and the file that was written."""
    console.print()
    for what, command in commands.items():
        console.print(Text.assemble((f"{what} it".ljust(INDENT), "dim"), command), soft_wrap=True)
    print_fact(console, "searched", searched(choice))
    if choice.missed:
        print_fact(console, "left out", f"as time was up: {choice.missed}; give more --seconds")
    if out is not None:
        print_path(console, "written to", out)


def _print_helps(choice: PlanChoice, console: Console) -> None:
    kept = [f"{HELPS[change]} {gain:+.1%}" for change, gain in choice.helps.items() if change != "memory"]
    words = [f"{' and '.join(kept)} tokens/s with this very plan"] if kept else []
    gain = choice.helps.get("memory")
    anew = "was not searched to the end" if gain is None else f"less than +{NOTABLE:.0%}" if gain < NOTABLE else ""
    words.append(f"{HELPS['memory']}, planned anew, {anew or f'{gain:+.1%}'}")
    print_fact(console, "would help", "; ".join(words))


def searched(choice: PlanChoice) -> str:
    """What was searched, and whether anything is left that could be better."""
    found = choice.found
    seen = f"{found.space['shapes']:,} shapes and {found.space['candidates']:,} plans"
    done = f"{seen}, {len(found.outcomes):,} simulated in {found.seconds:.1f} s"
    if found.left is None:
        return f"{done}; lower bounds show that no other plan is faster by {EQUAL:.1%} or more"
    if not found.left:
        return (
            f"{done}; the time limit ended before all plans were generated, so there may be faster ones: give "
            "more --seconds"
        )
    chosen = choice.best.forecast.seconds
    least = min(found.left, chosen)
    return (
        f"{done}; the time limit ended, and a step of the remaining plans could take "
        f"{seconds_text(least)} instead of {seconds_text(chosen)}, {1 - least / chosen:.0%} less: give "
        "more --seconds"
    )
