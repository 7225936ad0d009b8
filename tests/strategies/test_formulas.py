"""docs/strategies/: every formula in its tables of costs is what the tapes of the strategy send and hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from shardlab.check import Checked, check
from shardlab.language import Kind, OpKind, UserError, trace
from shardlab.simulate.timeline import live_memory, traffic
from shardlab.strategies import STRATEGIES, StrategyEntry
from shardlab.strategies.registry import entry_from_plan
from shardlab.strategies.schedules import SCHEDULES
from tests.strategies.action_clock import PassTimes, cost, peak_live
from tests.support.thorough import sampled

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
    return entry_from_plan(replace(preset(ranks), **changes), strategy)


def checked_steps(strategy: str, holds: str) -> Iterator[tuple[Checked, dict[str, Any]]]:
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
            "v": plan.stages_on_rank(layers) if plan else 1, "u": plan.ulysses if plan else 1,
            "W": sum(sizes.weights), "A": sizes.activations[0],
            "D": sum(w for w, layer in zip(sizes.weights, sizes.signatures, strict=True) if "expert" not in layer.cut),
            "min": min, "all": True,
        }  # fmt: skip
        if eval(holds, {"__builtins__": {}}, symbols):
            yield check(program), symbols


def compare(row: Row, title: str, measured: Callable[[Checked], float]) -> None:
    steps = list(checked_steps(row["strategy"], row["valid for"]))
    assert steps
    for checked, symbols in steps:
        assert measured(checked) == pytest.approx(eval(row[title], {"__builtins__": {}}, symbols), rel=NORMS), symbols


def names(row: Row) -> str:
    return row["strategy"]


@pytest.mark.parametrize("row", ROWS, ids=names)
def test_a_rank_sends_what_the_page_says(row: Row) -> None:
    """The rank that sends most; elements have 4 bytes."""
    compare(
        row,
        "a rank sends",
        lambda step: max(rank_traffic.weights + rank_traffic.activations for rank_traffic in traffic(step)) / 4,
    )


@pytest.mark.parametrize("row", [row for row in ROWS if "activations" in row], ids=names)
def test_a_rank_holds_the_activations_that_the_page_says(row: Row) -> None:
    compare(row, "activations", lambda step: max(max(memory) for memory in live_memory(step, [Kind.ACTIVATION])))


@pytest.mark.parametrize("row", ROWS, ids=names)
def test_a_page_has_the_formulas_of_the_listing(row: Row) -> None:
    """`shardlab strategies` prints the listing; tests/strategies/test_formulas.py holds it to the tapes."""
    name, *flags = row["strategy"].split()
    assert row["a rank keeps"] == STRATEGIES[name].memory
    if not flags:
        assert row["a rank sends"] == STRATEGIES[name].sends


def test_every_built_in_strategy_has_a_row() -> None:
    assert {row["strategy"].split()[0] for row in ROWS} == set(STRATEGIES)


# What the table says that a rank keeps is what its tape keeps, but for a few whole layers on their way.


LAYERS = 32
BLOCKS = 8
"""Of a model in half-blocks: 18 matrices, and norms between them."""

ON_THEIR_WAY = 3.01
"""Matrices that may come on top for a while, with the norms between them."""

UNITS = {"W": Kind.WEIGHT, "G": Kind.GRAD_WEIGHT, "O": Kind.OPT_STATE}


def checked(name: str, ranks: int = 0, microbatches: int = 16) -> Checked:
    entry = STRATEGIES[name]
    mesh = entry.grid(ranks or entry.ranks)
    sizes = entry.puzzle(mesh.world, LAYERS if mesh.tp == mesh.cp == 1 else BLOCKS)
    return check(trace(entry.program, mesh, sizes, microbatches))


def formula(name: str, unit: str, layers: float = LAYERS, experts: float = 0, ranks: int = 0) -> float:
    """Evaluate a formula in layers, counting only this unit; `experts` of the layers are experts.

    "D + E/e of W, G and O" says of each unit what is kept of its dense layers D and of its experts E.
    """
    mesh = STRATEGIES[name].grid(ranks or STRATEGIES[name].ranks)
    names = {
        "n": mesh.world,
        "p": mesh.pp,
        "s": mesh.dp_shard,
        "t": mesh.tp,
        "e": mesh.ep,
        "v": 2,
        **dict.fromkeys(UNITS, 0),
        unit: layers,
    }
    expression, _, units = STRATEGIES[name].memory.partition(" of ")
    if units:
        assert unit in units
        names |= {"D": layers - experts, "E": experts}
    return float(eval(expression, {"__builtins__": {}}, names))


@pytest.mark.parametrize(("times", "microbatches"), sampled([(1, 8), (1, 16), (2, 32)], lambda case: case[1] == 8))
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_rank_keeps_as_much_as_the_formula_says(name: str, times: int, microbatches: int) -> None:
    """On the default ranks of the strategy, and on twice as many if it takes them."""
    ranks = STRATEGIES[name].ranks * (times if STRATEGIES[name].ranks > 1 else 1)
    if name == "context-parallel":  # its tapes grow with the ranks squared, and no pipeline has to fill
        microbatches //= 8
    program = checked(name, ranks, microbatches)
    sizes = program.program.sizes
    layer, layers = sizes.weights[0], sum(sizes.weights) / sizes.weights[0]
    experts = sum("expert" in signature.cut for signature in sizes.signatures)
    for unit, kind in UNITS.items():
        peak = max(max(memory) for memory in live_memory(program, [kind])) / layer
        expected = formula(name, unit, layers, experts, ranks)
        assert expected <= peak <= expected + ON_THEIR_WAY, unit


def test_loading_is_the_part_that_is_never_gathered() -> None:
    for name, whole in (("ddp", 1), ("fsdp", 4), ("zero-3", 4), ("hsdp", 2), ("zero-1", 1)):
        loads = [op for op in checked(name).program.tapes[0] if op.kind is OpKind.LOAD_WEIGHT]
        assert sum(1 / op.holds.of for op in loads if op.holds) == LAYERS / whole == formula(name, "W")


# docs/schedules.md: every formula in its table is what a clock finds.


TABLE = Path(__file__).parents[2] / "docs" / "schedules.md"

FORMULAS = [
    [cell.strip().strip("`") for cell in line.strip("| ").split(" | ")]
    for line in TABLE.read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith(("| schedule", "| ---"))
]


def test_the_table_has_every_schedule() -> None:
    names = [name.removesuffix(", in pairs") for name, *_ in FORMULAS]
    assert list(dict.fromkeys(names)) == list(SCHEDULES)


@pytest.mark.parametrize(
    ("name", "stages", "bubble", "peak", "holds", "_source"), FORMULAS, ids=[row[0] for row in FORMULAS]
)
def test_its_formulas_hold(name: str, stages: str, bubble: str, peak: str, holds: str, _source: str) -> None:
    pairs = name.endswith(", in pairs")  # a forward and a backward pass that overlap are one pass with two results
    schedule = SCHEDULES[name.removesuffix(", in pairs")]
    pipelines = 0
    for p, m, v in product((1, 2, 3, 4), (1, 3, 4, 8, 9, 12), (1, 2, 3) if stages == "any" else (int(stages),)):
        for forward, backward, weight in ((1, 1, 1), (2, 2, 1), (3, 4, 3), (4, 3, 2), (5, 6, 2), (1, 1, 2)):
            symbols = {"p": p, "m": m, "v": v, "F": forward, "B": backward, "W": weight, "min": min, "all": True}
            if not eval(holds, symbols):
                continue
            times = PassTimes(forward / v, backward / v, weight / v)
            work = m * (forward + backward + weight)
            assert cost(schedule, p, m, v, times, pairs=pairs) - work == pytest.approx(eval(bubble, symbols)), symbols
            assert peak_live(schedule, p, m, v) == pytest.approx(eval(peak, symbols)), symbols
            pipelines += p > 1
    assert pipelines >= 5


@pytest.mark.parametrize("microbatches", [1, 2, 3, 5, 8, 13])
def test_a_schedule_with_the_memory_of_1f1b_never_exceeds_it(microbatches: int) -> None:
    for ranks in (1, 2, 3, 4):
        limit = peak_live(SCHEDULES["1f1b"], ranks, microbatches, 1)
        assert peak_live(SCHEDULES["zb-h1"], ranks, microbatches, 1) == limit
        assert peak_live(SCHEDULES["zb-v"], ranks, microbatches, 2) == limit
