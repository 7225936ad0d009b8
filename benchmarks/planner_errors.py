"""Print the errors of predicted steps by recipe and device, as the planner reports them.

    python benchmarks/planner_errors.py [RUNS.json] [--every N]

The output is src/shardlab/planner/errors.toml, without its rows for runs that are not in this repository. The error of
a run is computed with constants that were fitted without the run's source, as in the column "left out" of
fit_devices.py.
"""

from __future__ import annotations

from collections import defaultdict
from statistics import mean

from fit_devices import refit_as_told


def main() -> None:
    """Print the mean and the worst error of each recipe on each device."""
    made = refit_as_told(__doc__)
    errors = defaultdict[tuple[str, str], list[float]](list)
    for row, (seconds, _) in zip(made.rows, made.left_out, strict=True):
        if seconds is not None:
            errors[row["framework"], row["hardware"]["device"]].append(abs(seconds))
    for (recipe, device), found in sorted(errors.items()):
        print(f'\n[[error]]\nrecipes = ["{recipe}"]\ndevice = "{device}"')
        print(f"runs = {len(found)}\nmean = {mean(found):.3f}\nworst = {max(found):.3f}")


if __name__ == "__main__":
    main()
