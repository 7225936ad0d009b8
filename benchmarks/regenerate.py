"""Write everything that depends on the published runs, in the right order, or say what is out of date.

    python benchmarks/regenerate.py [--without-fit | --check [--quick]]

1. fits.json beside this file: all fitted constants under a fit to all runs, and to all runs but those of each publisher
   (fit_devices.py). This takes most of the time. --without-fit leaves it out, if neither the runs nor a fitted constant
   have changed.
2. src/shardlab/simulate/predict/errors.toml: the errors of each run's step time and memory, with the constants of the
   fit without its publisher, in place of those of all publishers in the file. Rows of other publishers, and of first
   predictions, stay. `simulate` and `plan` say how sure they are by it.
3. The columns of the tables of docs/validation.md that follow from these predictions.

With --check, nothing is written. Each file that is out of date is named with the reason, and the exit status is 1. With
--quick only a few runs are predicted, and the page is not compared.
"""

from __future__ import annotations

import json
import sys
import tomllib
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any, cast

from fit_devices import RUNS, Errors, Fits, Refit, constants, errors_of, fit_all, predict_with, rows_of
from planner_errors import ERRORS, errors_of_run, with_runs

from shardlab.common.files import write_atomically

FITS = Path(__file__).parent / "fits.json"
PAGE = Path(__file__).parents[1] / "docs" / "validation.md"

QUICK = (
    *("korthikanti-t5-22B-full", "titan-t1-8B-8gpu-eager", "dgxc-llama31-8B-bf16-8gpu", "nemo2407-GPT3-5B-64gpu"),
    *("nanogpt-polaris-4xA100", "kf-05-7B-tp4", "kf-moe-E8-fsdp8", "fp-8B-a100-pp2dp4", "tinyllama-1.1B"),
)
"""Ids of runs that are cheap to predict and of different recipes."""

AGAIN = "run `python benchmarks/regenerate.py`"

TOLERANCE = 0.0011
"""Largest difference of an error and the one in the file, which is rounded to 0.001."""


def main() -> None:
    """Write the files, or check them."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--without-fit", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if options.check:
        found = list(out_of_date(quick=options.quick))
        print("\n".join(found) or "all files are as the runs give them")
        sys.exit(bool(found))
    rows = rows_of(RUNS, 1)
    if not options.without_fit:
        write_atomically(FITS, json.dumps(asdict(fit_all(rows)), indent=1) + "\n")
    if stale := list(stale_fits(read_fits())):
        sys.exit("\n".join(stale))
    made = predict_with(read_fits(), rows)
    if missing := list(unfitted(read_fits(), made.rows)):
        sys.exit("\n".join(missing))
    write_atomically(ERRORS, errors_text(made))
    write_atomically(PAGE, page_text(PAGE.read_text(encoding="utf-8"), made))


def read_fits() -> Fits:
    """Return the committed fits."""
    return Fits(**json.loads(FITS.read_text(encoding="utf-8")))


def out_of_date(*, quick: bool) -> Iterator[str]:
    """Yield sentences about files that differ from the results of the runs."""
    fits = read_fits()
    yield from stale_fits(fits)
    rows = rows_of(RUNS, 1)
    if quick:
        some = [row for row in rows if row["id"] in QUICK]
        missing = list(unfitted(fits, some))
        yield from missing or wrong_errors(fits, some)
        return
    made = predict_with(fits, rows)
    yield from unfitted(fits, made.rows)
    if differs(errors_text(made), ERRORS.read_text(encoding="utf-8")):
        yield f"{ERRORS.name} is not what the runs give; run `python benchmarks/regenerate.py --without-fit`"
    page = PAGE.read_text(encoding="utf-8")
    changed = [new for old, new in zip(page.split("\n"), page_text(page, made).split("\n"), strict=True) if old != new]
    for line in changed:
        yield f"{PAGE.name} does not have the line {line}"


def stale_fits(fits: Fits) -> Iterator[str]:
    """Yield sentences about constants that are not those with which the fits began."""
    now = {str(each): each.value for each in constants()}
    for name in {**now, **fits.now}:
        if now.get(name) != fits.now.get(name):
            yield f"{FITS.name}: {name} is {now.get(name)} and was {fits.now.get(name)}; {AGAIN}"


def unfitted(fits: Fits, rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield sentences about publishers without whom nothing was fitted."""
    for name in sorted({row["publication"] for row in rows} - fits.without.keys()):
        yield f"{FITS.name}: no fit is without {name}; {AGAIN}"


def wrong_errors(fits: Fits, rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield sentences about runs whose errors are not among those of their publisher and kind in errors.toml."""
    tables = tomllib.loads(ERRORS.read_text(encoding="utf-8"))["runs"]
    for row in rows:
        errors = errors_of((row, fits.change(fits.without[row["publication"]])))
        if errors is None or errors == (None, None):
            continue
        run = asdict(errors_of_run(row, errors))
        kind = {name: _plain(run[name]) for name in ("publisher", "recipe", "device", "seq_len", "switches", "axes")}
        similar = [each for each in tables if all((each.get(name) or _plain(())) == kind[name] for name in kind)]
        for figure in ("time", "memory"):
            listed = [error for each in similar for error in each.get(figure, [])]
            for error in run[figure]:
                if not any(abs(error - each) <= TOLERANCE for each in listed):
                    yield f"{ERRORS.name}: {row['id']} has an error of {figure} of {error}, which is not among {listed}"


def _plain(value: Any) -> Any:
    return list(cast(tuple[Any, ...], value)) if isinstance(value, tuple) else value


def errors_text(made: Refit) -> str:
    """Return the text of errors.toml with the errors of these predictions."""
    found = zip(made.rows, made.left_out, strict=True)
    runs = [errors_of_run(row, errors) for row, errors in found if errors != (None, None)]
    return with_runs(ERRORS.read_text(encoding="utf-8"), runs)


def differs(one: str, other: str) -> bool:
    """Return whether two texts of errors.toml differ by more than the rounding of an error."""
    first, second = (tomllib.loads(text)["runs"] for text in (one, other))

    def same(row: Mapping[str, Any], twin: Mapping[str, Any]) -> bool:
        numbers = [(row.get(name, []), twin.get(name, [])) for name in ("time", "memory")]
        rest = [{name: value for name, value in each.items() if name not in ("time", "memory")} for each in (row, twin)]
        near = all(abs(a - b) <= TOLERANCE for each in numbers for a, b in zip(*each, strict=False))
        return rest[0] == rest[1] and near and all(len(a) == len(b) for a, b in numbers)

    return len(first) != len(second) or not all(same(*pair) for pair in zip(first, second, strict=True))


# The tables of the page. A row belongs to the publication with which its first cell begins.


Column = tuple[str, int, Callable[[Sequence[float]], str]]
"""Predictions that a column sums up ("now", "refitted", "left_out"), of seconds (0) or bytes (1), and its text."""


def _count(errors: Sequence[float]) -> str:
    return str(len(errors))


def _size(errors: Sequence[float]) -> str:
    return f"{mean(map(abs, errors)):.1%}".replace("%", " %")


def _worst(errors: Sequence[float]) -> str:
    return f"{max(map(abs, errors)):.1%}".replace("%", " %")


def _bias(errors: Sequence[float]) -> str:
    return f"{mean(errors):+.1%}".replace("%", " %")


def _of_runs(kind: int) -> dict[int, Column]:
    return {n: ("now", kind, text) for n, text in enumerate((_count, _size, _worst, _bias), 1)}


def _of_fits(kind: int) -> dict[int, Column]:
    columns = ("now", "now", "refitted", "left_out")
    return {n: (column, kind, _size if n > 1 else _count) for n, column in enumerate(columns, 1)}


TABLES: dict[str, dict[int, Column]] = {
    "| step time | in | mean | worst |": _of_runs(0),
    "| memory | in | mean | worst |": _of_runs(1),
    "| step time | runs | now | refitted |": _of_fits(0),
    "| memory | runs | now | refitted |": _of_fits(1),
    "| publisher | devices | recipe | runs |": {
        **{5: ("now", 0, _size), 6: ("left_out", 0, _size)},
        **{8: ("now", 1, _size), 9: ("left_out", 1, _size)},
    },
}
"""The columns that follow from predictions, by index, of each table, named by the beginning of its first line."""


def page_text(page: str, made: Refit) -> str:
    """Return the page with the figures of these predictions in its tables."""
    lines, table, publishers = page.split("\n"), dict[int, Column](), list[str]()
    for number, line in enumerate(lines):
        if not line.startswith("| "):
            table, publishers = {}, []
            continue
        found = [columns for head, columns in TABLES.items() if line.startswith(head)]
        table = found[0] if found else table
        if found or not table or line.startswith("| ---"):
            continue
        cells = (
            line.strip("| ").split(" | ") if "|  |" not in line else [cell.strip() for cell in line[1:-1].split("|")]
        )
        named = _publishers(cells[0].strip(), made)
        lists_all = cells[0].startswith("all")
        publishers += [] if lists_all else named
        whose = (publishers if 5 in table else None) if lists_all else named
        for place, (column, kind, text) in table.items():
            errors = _errors(made, column, kind, whose)
            if place < len(cells) and errors:
                cells[place] = text(errors)
        lines[number] = "|" + "|".join(f" {cell} " for cell in cells) + "|"
    return "\n".join(lines)


def _publishers(label: str, made: Refit) -> list[str]:
    """Return the longest publication name with which a label begins."""
    known = {row["publication"] for row in made.rows}
    return sorted((name for name in known if label == name or label.startswith(f"{name}, ")), key=len)[-1:]


def _errors(made: Refit, column: str, kind: int, publishers: Sequence[str] | None) -> list[float]:
    """Return the errors of a column of the runs of some publishers (None: of all)."""
    errors: list[Errors] = getattr(made, column)
    pairs = zip(made.rows, errors, strict=True)
    found = [each[kind] for row, each in pairs if publishers is None or row["publication"] in publishers]
    return [error for error in found if error is not None]


if __name__ == "__main__":
    main()
