"""`shardlab recipes [NAME]`: how frameworks run a step, and where each figure is from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, cast

import tyro
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shardlab.cli.console import print_fact, print_json, stdout_console
from shardlab.cli.options import Flag
from shardlab.hardware.figure import Figure
from shardlab.models.kept import SavedActivations
from shardlab.predict.recipe import GROUPS, Recipe, find_recipe, recipes


@dataclass(frozen=True)
class Recipes:
    """List the recipes, which describe how a training framework runs a step; or show one with all its sources."""

    name: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="NAME|FILE", help_behavior_hint="")] = None
    """Name of a recipe, or path/to/recipe.toml."""

    json: Flag = False
    """Print only JSON."""

    def run(self) -> int:
        if self.name is not None:
            recipe = find_recipe(self.name)
            print_json(as_json(recipe)) if self.json else print_recipe(recipe, stdout_console())
        elif self.json:
            print_json([as_json(recipe) for recipe in recipes().values()])
        else:
            print_table(stdout_console())
        return 0


def as_json(recipe: Recipe) -> dict[str, Any]:
    """Describe a recipe for other programs: every field of every group, and the figures that have a source."""
    groups = {group: asdict(getattr(recipe, group)) for group in GROUPS}
    figures = {name: asdict(figure) for name, figure in recipe.figures.items()}
    return {"name": recipe.name, "source": recipe.source, **groups, "figures": figures}


def print_table(console: Console) -> None:
    """A row for each recipe: where it is described, and how many of its figures are fitted and assumed."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("name", style="cyan", no_wrap=True)
    for title in ("figures", "fitted", "assumed"):
        table.add_column(title, justify="right")
    table.add_column("source")
    for recipe in recipes().values():
        figures = recipe.figures.values()
        counts = len(figures), sum(bool(each.fitted_to) for each in figures), sum(each.assumed for each in figures)
        table.add_row(recipe.name, *map(str, counts), recipe.source)
    console.print(table)
    console.print("\n[dim]All figures of one recipe, with their sources:[/] shardlab recipes NAME")


def print_recipe(recipe: Recipe, console: Console) -> None:
    """All figures, by group."""
    print_fact(console, recipe.name, recipe.source)
    for group in GROUPS:
        told = {name: figure for name, figure in recipe.figures.items() if name.split(".")[0] == group}
        if told:
            console.print(f"\n[bold]{group}[/]")
        for name, figure in told.items():
            label, value = Text(name.split(".")[1], "cyan"), as_text(figure.value)
            console.print(Padding(Text.assemble(label, f" = {value}"), (0, 0, 0, 2)))
            if provenance := _provenance(figure, recipe):
                console.print(Padding(Text(provenance, "dim"), (0, 0, 0, 4)))


def as_text(value: Any) -> str:
    """A figure's value for a reader."""
    if isinstance(value, SavedActivations):
        value = asdict(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {as_text(each)}" for key, each in cast(Mapping[str, Any], value).items())
    if isinstance(value, tuple):
        return " and ".join(map(as_text, cast(tuple[float, ...], value)))
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def _provenance(figure: Figure, recipe: Recipe) -> str:
    """Where a figure is from, if the recipe's own source does not say."""
    parts = [
        f"{'assumed' if figure.assumed else 'source'}: {figure.source}" if figure.source != recipe.source else "",
        f"fitted to: {figure.fitted_to}" if figure.fitted_to else "",
        f"runs: {', '.join(figure.runs)}" if figure.runs else "",
    ]
    return "; ".join(filter(None, parts))
