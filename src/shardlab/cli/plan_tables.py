"""Tables of a planner's choice: the best of each family, runners-up, alternatives, and what does not fit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console

from shardlab.cli.console import table_of
from shardlab.planner.reasons import sentence
from shardlab.planner.words import short
from shardlab.timeline.units import bytes_text, seconds_text

if TYPE_CHECKING:
    from shardlab.planner.chosen import PlanChoice

WIDE = 80
"""Columns of a terminal in which families, and what limits them, need no second line."""

WORDS = 0.4
"""Share of the line that an alternative's name has at most, before what it would cost."""


def print_families(choice: PlanChoice, console: Console) -> None:
    """Print the best plan of each family, and what limits it."""
    table = table_of("", "best found of each family", "step", "memory", "what limits it", words=2)
    table.columns[1].no_wrap = False
    table.columns[0].no_wrap = table.columns[4].no_wrap = console.width >= WIDE
    table.columns[4].justify = "left"
    for outcome, answer in choice.families:
        limit = ""
        if answer.shares is not None:
            name, share = answer.shares.limit
            name, share = (name, share) if share >= 0.02 else ("compute", answer.shares.compute)
            limit = f"{name.replace(' on', '')} {share:.0%}"
        table.add_row(
            outcome.family,
            short(outcome.candidate),
            seconds_text(outcome.seconds),
            bytes_text(outcome.forecast.memory.total, 1),
            limit,
            style="bold" if outcome.candidate == choice.best.candidate else "",
        )
    console.print()
    console.print(table)


def print_runners_up(choice: PlanChoice, console: Console, top: int) -> None:
    """Print the plans that are fastest after the chosen one, at most `top`."""
    shown = choice.found.fitting[1 : top + 1]
    if not shown:
        return
    table = table_of("", "runners-up", "step", "slower by", "memory", words=2)
    table.columns[1].no_wrap = False
    for outcome in shown:
        slower = outcome.seconds / choice.best.seconds - 1
        equal = " (equal)" if slower < choice.sure_now else ""
        memory = bytes_text(outcome.forecast.memory.total, 1)
        table.add_row(
            outcome.family, short(outcome.candidate), seconds_text(outcome.seconds), f"{slower:.1%}{equal}", memory
        )
    console.print()
    console.print(table)


def print_reasons(choice: PlanChoice, console: Console) -> None:
    """Print the nearest alternative of each choice, and what it would cost."""
    if not choice.alternatives:
        return
    predicted = ", as predicted" if choice.beliefs and choice.beliefs.measured else ""
    heading = f"why, choice by choice: another one, all else as it is{predicted} (shares of this step)"
    console.print(f"\n{heading}", style="dim")
    table = table_of("", "", words=2)
    table.show_header = False
    table.columns[0].max_width = int(WORDS * console.width)
    for column in table.columns:
        column.no_wrap = False
    for each in choice.alternatives:
        table.add_row(each.choice, sentence(each, choice.answer, choice.problem))
    console.print(table)


def print_misses(choice: PlanChoice, console: Console) -> None:
    """Print the families of which no plan fits, and by how much."""
    if misses := choice.found.misses():
        console.print("\nwhat does not fit", style="dim")
    for name, (bytes, _) in misses.items():
        over = bytes_text(bytes - choice.problem.room, 1)
        console.print(f"  {name}: at least {over} too many", highlight=False, soft_wrap=True)
