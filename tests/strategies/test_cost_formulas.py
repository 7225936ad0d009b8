"""docs/strategies/: every formula in its tables of costs is what the tapes of the strategy send and hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardlab.check import Checked, check
from shardlab.language import Kind, UserError, trace
from shardlab.simulate.timeline import live_memory, traffic
from shardlab.strategies import STRATEGIES, StrategyEntry
from shardlab.strategies.registry import planned_entry

PAGES = Path(__file__).parents[2] / "docs" / "strategies"

SIZES = ((2, 4, 6), (4, 8, 8), (8, 2, 8))
"""(ranks, layers, microbatches) with which each formula is tried, if the strategy takes them."""

NORMS = 2e-3
"""Share of the weights that are norms, which tensor parallelism does not cut: formulas leave them out."""

Row = dict[str, str]
"""A row of a table by the titles of its columns."""


def rows() -> Iterator[Row]:
    """Yield the rows of every table of costs: the tables whose first column is `strategy`."""
    for page in sorted(PAGES.glob("*.md")):
        titles: list[str] = []
        for line in page.read_text(encoding="utf-8").splitlines():
            cells = [cell.strip().strip("`") for cell in line.strip("| ").split(" | ")]
            if not line.startswith("| "):
                titles = []
            elif cells[0] == "strategy":
                titles = cells
            elif titles and not line.startswith("| ---"):
                yield dict(zip(titles, cells, strict=True))


ROWS = list(rows())


def entry_of(strategy: str, ranks: int) -> StrategyEntry:
    """The strategy of a row: a built-in name, and flags of `shardlab simulate` that change its plan."""
    name, *flags = strategy.split()
    if not flags:
        return STRATEGIES[name]
    preset = STRATEGIES[name].plan
    assert preset is not None
    changes: dict[str, Any] = {}
    for flag, value in zip(flags[::2], flags[1::2], strict=True):
        changes[flag.removeprefix("--").replace("-", "_")] = int(value) if value.isdecimal() else value
    return planned_entry(replace(preset(ranks), **changes), strategy)


def tried(strategy: str, holds: str) -> Iterator[tuple[Checked, dict[str, Any]]]:
    """Yield the checked steps of a strategy for which a row holds, with the value of each symbol."""
    for ranks, layers, microbatches in SIZES:
        ranks = 1 if STRATEGIES[strategy.split()[0]].ranks == 1 else ranks
        try:
            entry = entry_of(strategy, ranks)
            mesh = entry.grid(ranks)
            program = trace(entry.program, mesh, entry.puzzle(mesh.world, layers), microbatches)
        except UserError:
            continue
        sizes, plan = program.sizes, entry.plan and entry.plan(mesh.world)
        data_ranks = mesh.dp_replicate * mesh.dp_shard * mesh.ep
        symbols = {
            "n": mesh.world, "p": mesh.pp, "r": mesh.dp_replicate, "s": mesh.dp_shard, "d": data_ranks,
            "c": mesh.cp, "t": mesh.tp, "e": mesh.ep, "L": layers, "m": microbatches, "k": microbatches / data_ranks,
            "v": plan.stages_of_a_rank(layers) if plan else 1, "u": plan.ulysses if plan else 1,
            "W": sum(sizes.weights), "A": sizes.activations[0],
            "D": sum(w for w, layer in zip(sizes.weights, sizes.signatures, strict=True) if "expert" not in layer.cut),
            "min": min, "all": True,
        }  # fmt: skip
        if eval(holds, {"__builtins__": {}}, symbols):
            yield check(program), symbols


def compare(row: Row, title: str, measured: Callable[[Checked], float]) -> None:
    steps = list(tried(row["strategy"], row["holds for"]))
    assert steps
    for checked, symbols in steps:
        assert measured(checked) == pytest.approx(eval(row[title], {"__builtins__": {}}, symbols), rel=NORMS), symbols


def names(row: Row) -> str:
    return row["strategy"]


@pytest.mark.parametrize("row", ROWS, ids=names)
def test_a_rank_sends_what_the_page_says(row: Row) -> None:
    """The rank that sends most; elements have 4 bytes."""
    compare(row, "a rank sends", lambda step: max(each.weights + each.activations for each in traffic(step)) / 4)


@pytest.mark.parametrize("row", [row for row in ROWS if "activations" in row], ids=names)
def test_a_rank_holds_the_activations_that_the_page_says(row: Row) -> None:
    compare(row, "activations", lambda step: max(max(each) for each in live_memory(step, [Kind.ACTIVATION])))


@pytest.mark.parametrize("row", ROWS, ids=names)
def test_a_page_says_of_weights_what_the_listing_says(row: Row) -> None:
    """`shardlab strategies` prints the listing; tests/strategies/test_memory_formulas.py holds it to the tapes."""
    assert row["a rank keeps"] == STRATEGIES[row["strategy"].split()[0]].memory


def test_every_built_in_strategy_has_a_row() -> None:
    assert {row["strategy"].split()[0] for row in ROWS} == set(STRATEGIES)
