"""Errors of predicted steps by recipe and device, as the planner prints them.

`python benchmarks/planner_errors.py RUNS.json` prints src/shardlab/planner/errors.toml; without a file, of the
published runs in this folder.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

from shardlab.published.outcomes import outcomes_of
from shardlab.published.rows import read_rows

RUNS = Path(__file__).parent / "published_runs.json"


def main() -> None:
    """Predict every run, and print the mean and the worst error of each recipe on each device."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else RUNS
    rows = read_rows(path)
    errors = defaultdict[tuple[str, str], list[float]](list)
    for row, outcome in zip(rows, outcomes_of(rows), strict=True):
        measured, predicted = outcome.measured.seconds, outcome.prediction and outcome.prediction.seconds
        if measured and predicted:
            errors[row["framework"], row["hardware"]["device"]].append(abs(predicted / measured - 1))
    print("# benchmarks/planner_errors.py writes this: step times of published runs, predicted over measured, less 1\n")
    print(f'source = "benchmarks/{path.name}"')
    for (recipe, device), found in sorted(errors.items()):
        mean, worst = sum(found) / len(found), max(found)
        print(f'\n[[error]]\nrecipe = "{recipe}"\ndevice = "{device}"')
        print(f"runs = {len(found)}\nmean = {mean:.3f}\nworst = {worst:.3f}")


if __name__ == "__main__":
    main()
