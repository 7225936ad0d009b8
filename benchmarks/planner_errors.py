"""Print the errors of first predictions, and those that would have been stated without the runs of their publisher.

    python benchmarks/planner_errors.py

The functions below make src/shardlab/simulate/predict/errors.toml of predictions; `regenerate.py` writes it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean
from typing import Any

from fit_devices import Errors

from shardlab.common.files import toml_value
from shardlab.planner.published.reading import read_run
from shardlab.simulate.predict.confidence import AXES, Figure, Kind, RunErrors, confidence, first_sight
from shardlab.simulate.predict.recipe import find_recipe

ERRORS = Path(__file__).parents[1] / "src/shardlab/simulate/predict/errors.toml"


def main() -> None:
    """Print the errors of first predictions, and those that would have been stated for them."""
    print("| first predictions | | actual | stated |\n| --- | ---: | ---: | ---: |")
    for figure in FIGURES:
        actual, stated = list[float](), list[float]()
        for row in first_sight():
            recipe = find_recipe(row.recipe)
            names, axes = (recipe.name, *recipe.bases), frozenset(row.axes)
            kind = Kind(names, frozenset(row.switches), row.device, row.mixture, axes, row.seq_len)
            found = confidence(kind, figure, left_out_publisher=row.publisher)
            actual += [abs(error) for error in row.errors(figure)]
            stated += [found.error] * len(row.errors(figure))
        print(f"| {figure} | {len(actual)} | {mean(actual):.1%} | {mean(stated):.1%} |")


FIGURES: tuple[Figure, ...] = ("time", "memory")


def errors_of_run(row: dict[str, Any], errors: Errors) -> RunErrors:
    """Return the errors of one run, with its publisher and kind."""
    kind = Kind.of(read_run(row).workload)
    axes = tuple(axis for axis in AXES if axis in (kind.axes or ()))
    time, memory = (() if error is None else (round(error, 3),) for error in errors)
    return RunErrors(
        publisher=row["publication"],
        recipe=kind.recipe[0],
        device=kind.device,
        seq_len=kind.seq_len,
        switches=tuple(sorted(kind.switches)),
        mixture=kind.mixture,
        axes=axes,
        time=time,
        memory=memory,
    )


def with_runs(text: str, found: Iterable[RunErrors]) -> str:
    """Return the text of errors.toml with the errors of the given runs in place of those of their publishers.

    Runs of one publisher and kind share a row. The comment above the first row stays.
    """
    head, _, _ = text.partition("\n[[")
    tables = tomllib.loads(text)
    ours: dict[tuple[Any, ...], RunErrors] = {}
    for run in found:
        key = (run.publisher, run.recipe, run.device, run.seq_len, run.switches, run.mixture, run.axes)
        old = ours.get(key)
        ours[key] = run if old is None else _joined(old, run)
    publishers = {run.publisher for run in ours.values()}
    kept = [row for row in tables.get("runs", []) if row["publisher"] not in publishers]
    rows = [*kept, *(_as_row(ours[key]) for key in sorted(ours))]
    rows.sort(key=lambda row: row["publisher"])
    parts = [*_tables("runs", rows), *_tables("first_sight", tables.get("first_sight", []))]
    return "\n\n".join([head.rstrip(), *parts]) + "\n"


def _joined(one: RunErrors, other: RunErrors) -> RunErrors:
    return replace(one, time=one.time + other.time, memory=one.memory + other.memory)


def _as_row(run: RunErrors) -> dict[str, Any]:
    """Return a row with the fields that are not left out."""
    return {name: value for name, value in asdict(run).items() if value}


def _tables(name: str, rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    for row in rows:
        lines = [f"{key} = {toml_value(value)}" for key, value in row.items()]
        yield "\n".join([f"[[{name}]]", *lines])


if __name__ == "__main__":
    main()
