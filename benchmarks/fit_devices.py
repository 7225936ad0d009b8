"""Refit the fitted constants of devices, links and recipes, and print the errors on runs that a fit has not seen.

    python benchmarks/fit_devices.py [RUNS.json] [--every N]

`python benchmarks/regenerate.py` fits all committed runs and writes what depends on the fits.

Constants are those that are marked `fitted_to` in `hardware/devices.toml`, `links.toml`, `constants.toml` and
`predict/recipes`. One Gauss-Newton step from today's values minimizes the squared errors of seconds and bytes together,
with errors of 5 %. Each constant has a prior with a width of 30 %: the figure of another device, or of a recipe without
figures. So a constant that only one source informs does not follow that source alone. The errors are those of real
predictions with the constants of each fit:

now       with the constants in the files
refitted  with those of a fit to all sources
left out  with those of a fit to all sources but the row's own

A prediction takes most of a second, and there are dozens of constants: --every 4 takes every fourth run of a source.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import Any, cast

import numpy as np

from shardlab.language import Refused, UserError
from shardlab.planner.published.predict import predict
from shardlab.planner.published.reading import read_run
from shardlab.planner.published.records import Incomplete, read_rows
from shardlab.simulate.hardware import DEVICES, LINKS, device
from shardlab.simulate.hardware.device import CONSTANTS, Figure
from shardlab.simulate.predict.recipe import Recipe, recipes, variants
from shardlab.simulate.predict.workload import Workload

RUNS = Path(__file__).parent / "published_runs.json"
STEP, NOISE, WIDTH, LEAST = 0.02, 0.05, 0.30, -0.9
"""Relative change of a constant for its derivative, relative error of a run, width of a prior, and least change."""

OTHER = {"a100-40gb": "h100", "h100": "a100-40gb", "h100-96gb": "h100", "h200": "h100", "gb200": "h100"}
"""For each device, the device whose figures are its prior."""

PRIORS: dict[tuple[str, str], float] = {
    ("mi300x", "matmul.bfloat16"): 0.42,
    ("fsdp2", "kernels.padded_slots"): 8.0,
    ("infiniband-ndr", "efficiency"): 0.65,
    ("megatron-core", "memory.tp_context_bytes"): 7 * 2.0**30,
}
"""Priors that no other device or recipe gives: H100's share of its peak, scaled by what large products reach on both
(51.4 and 80.3 %; stas00/ml-engineering, compute/accelerator/README.md, Maximum Achievable Matmul FLOPS); a slot for
each token; InfiniBand HDR's share; and what megatron-deepspeed-2022 holds."""


@dataclass(frozen=True)
class Constant:
    """A fitted number: of a device's efficiency, a link, a recipe, or of all.

    Attributes:
        owner: the first device, link or recipe that has it ("": it is of all).
        name: name of the figure; "matmul.float16" also applies to bfloat16.
        key: which number, for a figure of several numbers.
        value: value in the files.
        prior: expected value without any run.
        figure: for a number of a recipe, the figure of a recipe with this number.
    """

    owner: str
    name: str
    key: Any
    value: float
    prior: float
    figure: Figure | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return f"{self.owner} {self.name}{'' if self.key is None else f'.{self.key}'}".strip()

    def in_workload(self, workload: Workload) -> bool:
        """Whether it may matter for a step."""
        if self.owner in DEVICES:
            return workload.cluster.device.efficiency is DEVICES[self.owner].efficiency
        if self.owner in LINKS:
            return _same_kind(workload.cluster.inter_node.name, self.owner)
        return not self.owner or _has(workload.recipe, self)

    def matters(self, name: str, workload: Workload) -> bool:
        """Whether it may matter for a run of that id."""
        told = self.owner or any(fnmatch(name, pattern) for pattern in CONSTANTS[self.name].runs)
        return bool(told) and self.in_workload(workload)


def _same_kind(link: str, other: str) -> bool:
    return LINKS[link].figures == LINKS[other].figures


def _has(recipe: Recipe, constant: Constant) -> bool:
    return recipe.figures.get(constant.name) == constant.figure


def constants() -> list[Constant]:
    """Every fitted number; switches that were fitted are left out, since nothing lies between on and off."""
    return [*_of_devices(), *_of_links(), *_of_recipes(), *_of_all()]


def _of_devices() -> Iterator[Constant]:
    seen: set[int] = set()
    for owner, row in DEVICES.items():
        if id(row.efficiency) in seen:
            continue
        seen.add(id(row.efficiency))
        other = DEVICES[OTHER.get(owner, "h100")].efficiency.figures
        for name, figure in row.efficiency.figures.items():
            twin = row.efficiency.figures.get("matmul.float16")
            if not figure.fitted_to or (name == "matmul.bfloat16" and twin is not None and twin.fitted_to):
                continue  # one constant for both
            value: Any = figure.value
            like: Any = PRIORS.get((owner, name)) or (other[name].value if name in other else value)
            if isinstance(value, list):
                pair = cast(list[float], value)
                yield from (Constant(owner, name, n, each, like[n]) for n, each in enumerate(pair))
            else:
                yield Constant(owner, name, None, value, like)


def _of_links() -> Iterator[Constant]:
    seen: list[Any] = []
    for owner, link in LINKS.items():
        figure = link.figures["efficiency"]
        if figure.fitted_to and link.figures not in seen:
            seen.append(link.figures)
            prior = PRIORS.get((owner, "efficiency")) or figure.value
            yield Constant(owner, "efficiency", None, figure.value, prior)


def _of_recipes() -> Iterator[Constant]:
    seen: list[Any] = []
    every = [each for recipe in recipes().values() for each in (recipe, *(other for *_, other in variants(recipe)))]
    for recipe in every:
        for name, figure in recipe.figures.items():
            if not figure.fitted_to or isinstance(figure.value, bool) or (name, figure) in seen:
                continue
            seen.append((name, figure))
            group, field = name.split(".")
            neutral, value = getattr(getattr(Recipe(), group), field), figure.value
            if isinstance(value, Mapping):
                shares = cast(Mapping[str, float], value)
                yield from (Constant(recipe.name, name, key, each, 0.0, figure) for key, each in shares.items() if each)
            elif value:
                prior: float = PRIORS.get((recipe.name, name)) or (value if neutral is None else neutral)
                yield Constant(recipe.name, name, None, value, prior, figure)


def _of_all() -> Iterator[Constant]:
    for name, figure in CONSTANTS.items():
        if figure.fitted_to:
            yield Constant("", name, None, figure.value, figure.value)


Change = Mapping[Constant, float]
"""Constants, and the relative change of each."""


def changed(workload: Workload, changes: Change) -> Workload:
    """The step with other constants."""
    cluster, recipe = workload.cluster, workload.recipe
    for constant, by in changes.items():
        if not constant.in_workload(workload):
            continue
        value = constant.value * (1 + by)
        if constant.owner in DEVICES:
            figures = cluster.device.efficiency
            field, _, inner = constant.name.partition(".")
            new: Any = value
            if inner:
                table = dict(getattr(figures, field))
                for name in (inner, *(["bfloat16"] if inner == "float16" else [])):
                    old = table[name]
                    table[name] = (
                        value if constant.key is None else [*old[: constant.key], value, *old[constant.key + 1 :]]
                    )
                new = table
            cluster = replace(cluster, device=replace(cluster.device, efficiency=replace(figures, **{field: new})))
        elif constant.owner in LINKS:
            cluster = replace(cluster, inter_node=replace(cluster.inter_node, efficiency=value))
        elif constant.owner:
            group, field = constant.name.split(".")
            old = getattr(recipe, group)
            new = value if constant.key is None else {**getattr(old, field), constant.key: value}
            recipe = replace(recipe, **{group: replace(old, **{field: new})})
    return replace(workload, cluster=cluster, recipe=recipe, model=recipe.model_as_run(workload.model))


Errors = tuple[float | None, float | None]
"""Relative errors of a row's seconds and bytes."""


def errors_of(task: tuple[dict[str, Any], Change]) -> Errors | None:
    """Errors of a row with other constants (None: it cannot be predicted)."""
    row, changes = task
    device.MISALIGNED_BATCH = next(
        (each.value * (1 + by) for each, by in changes.items() if each.name == "misaligned_batch"),
        CONSTANTS["misaligned_batch"].value,
    )
    device.alignment.cache_clear()
    try:
        run = read_run(row)
        made = predict(replace(run, workload=changed(run.workload, changes)))
    except (Incomplete, UserError, Refused):
        return None
    seconds, bytes = run.measured.seconds, run.measured.bytes
    return (
        made.seconds / seconds - 1 if seconds and made.seconds else None,
        made.bytes / bytes - 1 if bytes else None,
    )


def fit(
    rows: Sequence[int], now: Sequence[Errors], slopes: Sequence[Mapping[int, Errors]], all: Sequence[Constant]
) -> Change:
    """Changes that minimize the squared errors of some rows, with the priors."""
    system = [
        ([(each[n][kind] or 0.0) if n in each else 0.0 for each in slopes], -(now[n][kind] or 0.0))
        for n in rows
        for kind in (0, 1)
        if now[n][kind] is not None
    ]
    weight = NOISE / WIDTH
    prior = [weight * (each.prior / each.value - 1) for each in all]
    left = np.vstack([np.array([line for line, _ in system]), weight * np.eye(len(all))])
    found, *_ = np.linalg.lstsq(left, np.array([right for _, right in system] + prior), rcond=None)
    return {each: max(LEAST, float(by)) for each, by in zip(all, found, strict=True)}


def table(rows: Sequence[dict[str, Any]], kind: int, columns: Sequence[Sequence[Errors]]) -> Iterator[str]:
    """Lines of a Markdown table: the mean error of each source, by column."""
    known = [n for n, each in enumerate(columns[0]) if each[kind] is not None]
    if not known:
        return
    yield f"| {('step time', 'memory')[kind]} | runs | now | refitted | left out |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    for source in [*dict.fromkeys(rows[n]["publication"] for n in known), "all"]:
        some = [n for n in known if source in ("all", rows[n]["publication"])]
        means = (mean(abs(column[n][kind] or 0.0) for n in some) for column in columns)
        yield f"| {source} | {len(some)} | {' | '.join(f'{each:.1%}' for each in means)} |"


@dataclass(frozen=True)
class Fits:
    """Values of all constants under fits to runs, each by the name of the constant.

    Attributes:
        runs: number of runs that depend on the constant.
        now: value with which the fit began.
        together: value of a fit to all sources.
        without: by source, values of a fit to all others.
    """

    runs: Mapping[str, int]
    now: Mapping[str, float]
    together: Mapping[str, float]
    without: Mapping[str, Mapping[str, float]]

    def change(self, values: Mapping[str, float]) -> Change:
        """Return by how much today's constants change to these values; those that are not in the fit stay."""
        known = {str(each): each for each in constants()}
        return {each: values[name] / each.value - 1 for name, each in known.items() if name in values}


@dataclass(frozen=True)
class Refit:
    """Errors of runs under fits.

    Attributes:
        rows: of the runs that can be predicted.
        now, refitted, left_out: errors of each row with today's constants, with a fit to all sources, and with one to
            all but the row's own.
    """

    rows: list[dict[str, Any]]
    now: list[Errors]
    refitted: list[Errors]
    left_out: list[Errors]


def rows_of(path: Path, every: int) -> list[dict[str, Any]]:
    """Runs of a file that name their framework: the first of each source, and every `every`-th after it."""
    by_source = defaultdict[str, list[dict[str, Any]]](list)
    for row in read_rows(path):
        if row.get("framework"):
            by_source[row["publication"]].append(row)
    return [row for some in by_source.values() for row in some[::every]]


def fit_all(rows: Sequence[dict[str, Any]]) -> Fits:
    """Fit every constant to all sources, and to all but each one."""
    every = constants()
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        found = list(pool.map(errors_of, [(row, {}) for row in rows]))
        rows = [row for row, each in zip(rows, found, strict=True) if each is not None]
        now: list[Errors] = [each for each in found if each is not None]
        workloads = [read_run(row).workload for row in rows]
        slopes: list[Mapping[int, Errors]] = []
        for constant in every:
            at = [n for n, row in enumerate(rows) if constant.matters(row["id"], workloads[n])]
            moved = pool.map(errors_of, [(rows[n], {constant: STEP}) for n in at])
            slopes.append({n: _slope(now[n], after) for n, after in zip(at, moved, strict=True) if after is not None})
            print(f"{constant}: {len(at)} runs", file=sys.stderr, flush=True)

    def values(rows: Sequence[int]) -> dict[str, float]:
        return {str(each): float(f"{each.value * (1 + by):.5g}") for each, by in fit(rows, now, slopes, every).items()}

    sources = dict.fromkeys(row["publication"] for row in rows)
    return Fits(
        {str(each): len(at) for each, at in zip(every, slopes, strict=True)},
        {str(each): each.value for each in every},
        values(range(len(rows))),
        {source: values([n for n, row in enumerate(rows) if row["publication"] != source]) for source in sources},
    )


def predict_with(fits: Fits, rows: Sequence[dict[str, Any]]) -> Refit:
    """Predict runs with today's constants, with those of a fit to all, and with those of a fit without their source."""
    together = fits.change(fits.together)
    without = {source: fits.change(values) for source, values in fits.without.items()}
    none: Change = {}
    changes = [(none, together, without.get(row["publication"], together)) for row in rows]
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        tasks = [(row, change) for row, several in zip(rows, changes, strict=True) for change in several]
        found = list(pool.map(errors_of, tasks))
    known = [n for n in range(len(rows)) if found[3 * n] is not None]
    columns = ([found[3 * n + column] or (None, None) for n in known] for column in range(3))
    return Refit([rows[n] for n in known], *columns)


def main() -> None:
    """Print every constant with its fitted values, and the errors of each source."""
    words = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    words.add_argument("runs", nargs="?", type=Path, default=RUNS)
    words.add_argument("--every", type=int, default=1)
    told = words.parse_args()
    rows = rows_of(told.runs, told.every)
    fits = fit_all(rows)
    print("| constant | runs | now | refitted |\n| --- | ---: | ---: | ---: |")
    for name, count in fits.runs.items():
        if count:
            print(f"| {name} | {count} | {fits.now[name]:.4g} | {fits.together[name]:.4g} |")
    made = predict_with(fits, rows)
    for kind in (0, 1):
        print("", *table(made.rows, kind, (made.now, made.refitted, made.left_out)), sep="\n")


def _slope(before: Errors, after: Errors) -> Errors:
    (one, other), (first, second) = zip(before, after, strict=True)
    return _over(one, other), _over(first, second)


def _over(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else (after - before) / STEP


if __name__ == "__main__":
    main()
