"""Compare searched pipeline schedules with published ones, in predicted times and in real steps.

    python benchmarks/schedules.py
    python benchmarks/schedules.py --train

The first table has the settings of Primus' simulator (github.com/AMD-AGI/Primus at fd1eeabb, pp_simulation.yaml: 8
ranks, 32 microbatches, equal passes; its figures are those that its simulator.py prints) and the times of table 9 of
arXiv 2401.10241, with the bubbles of table 5. The second has pipelines with unequal stages. Each search takes
`--seconds`, and the column after says when it was within 2 % of its result.

With `--train`, a GPT whose head takes as long as several blocks is trained on processes of this machine, with the best
published schedule for three quarters of 1F1B's memory and with a searched one in turn. The ratio of the median step
times is printed. Nothing else may run meanwhile.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import tyro
from rich.console import Console
from rich.table import Table

from shardlab.language import Mesh
from shardlab.models import GPT, cut_for
from shardlab.planner.schedule_search.problem import ScheduleProblem, StageCosts, equal_stages
from shardlab.planner.schedule_search.search import FoundSchedule, search_schedule
from shardlab.strategies.plan.plan import Plan
from shardlab.strategies.schedules.files import schedule_files

# Times of a forward pass, the halves of a backward pass and a message, in ms; the bubbles of ZB-1p and ZB-2p. The
# models have sequences of 1,024, and 24 heads for a width of 2,304 or 40 for 5,120, without fused attention.
TABLE_9 = [
    (8, 24, (18.522, 18.086, 9.337, 0.601), 24 / 2304, (0.1585, 0.0433)),
    (8, 32, (18.513, 18.086, 9.331, 0.626), 24 / 2304, (0.1242, 0.0039)),
    (8, 64, (18.546, 18.097, 9.321, 0.762), 24 / 2304, (0.0674, 0.0026)),
    (16, 48, (11.347, 11.248, 8.132, 0.377), 40 / 5120, (0.1397, 0.0066)),
    (16, 64, (11.307, 11.254, 8.101, 0.379), 40 / 5120, (0.1088, 0.0054)),
    (16, 128, (11.325, 11.308, 8.109, 0.378), 40 / 5120, (0.0576, 0.0028)),
]

PRIMUS = [("1f1b", "loop", 1, 8.0, 117.0), ("zerobubble", "loop", 1, 8.0, 103.0),
          ("interleaved", "loop", 2, 11.5, 106.5), ("zbv-formatted", "vee", 2, 8.0, 99.5),
          ("v-half", "vee", 2, 5.0, 104.5), ("v-min", "vee", 2, 4.0, 109.0),
          ("zb-heuristic, 8", "loop", 1, 8.0, 103.0), ("zb-heuristic, 10", "loop", 1, 10.0, 103.0)]  # fmt: skip

TRAINED = GPT(layers=8, hidden_size=128, heads=4, seq_len=128, vocab_size=8192)
"""Model of --train. Its head has 1.3 times the FLOPs of five blocks."""


@dataclass(frozen=True)
class Setting:
    """Pipeline, with a published figure if there is one.

    Attributes:
        name: name in the table.
        problem: the pipeline.
        published: published step time, or bubble if the objective is the span.
    """

    name: str
    problem: ScheduleProblem
    published: float | None = None


def settings() -> Iterator[Setting]:
    """Yield the settings with published figures."""
    for name, placement, each, limit, time in PRIMUS:
        stages = equal_stages(8, 1, 1, 1, each)
        assert placement in ("loop", "vee")
        yield Setting(f"Primus, {name}", ScheduleProblem(8, 32, stages, 0, limit, placement), time)
    for ranks, microbatches, (forward, input, weight, message), heads, bubbles in TABLE_9:
        stages = (StageCosts(forward, input, weight, 1, 32 / (34 + 5 * heads * 1024)),) * ranks
        for times, bubble in zip((1, 2), bubbles, strict=True):
            problem = ScheduleProblem(ranks, microbatches, stages, message, times * ranks, objective="span")
            yield Setting(f"table 9, p {ranks}, m {microbatches}, ZB-{times}p", problem, bubble)


def unequal() -> Iterator[Setting]:
    """Yield pipelines with unequal stages, in units of a block's forward pass."""
    block = StageCosts(0.5, 0.5, 0.5, 0.5)
    head = StageCosts(1.25, 1.25, 1.25, 0.75)
    dense = StageCosts(0.25, 0.25, 0.25, 0.5)
    for name, stages in (
        ("head of 128k tokens on the last stage", (*(block,) * 15, head)),
        ("mixture with two dense first stages, head", (dense, dense, *(block,) * 13, head)),
    ):
        for limit in (5.0, 8.0):
            yield Setting(f"{name}, memory {limit:g}", ScheduleProblem(8, 32, stages, 0.05, limit, "vee"))


def main(seconds: float = 5.0, train: bool = False, ranks: tuple[int, ...] = (2, 4), turns: int = 6) -> None:
    """Print the tables, or train.

    Args:
        seconds: time of each search.
        train: train with published and searched schedules.
        ranks: numbers of processes to train on.
        turns: number of trainings with each schedule.
    """
    console = Console()
    if train:
        for count in ranks:
            console.print(_trained(count, seconds, turns))
        return
    table = Table("setting", "published", "found", "best built-in", "lower bound", "within 2 % after", box=None)
    for setting in (*settings(), *unequal()):
        found = search_schedule(setting.problem, seconds=seconds)
        best = found.best_published
        is_span = setting.problem.objective == "span"
        shown = [f"{found.bubble:.2%}" if is_span else f"{found.timing.time:g}"]
        shown.append("" if best is None else f"{best.name}, {best.time / found.timing.time - 1:.1%} slower")
        near = next(after for after, time in found.history if time <= 1.02 * found.timing.time)
        figure = (
            "" if setting.published is None else f"{setting.published:.2%}" if is_span else f"{setting.published:g}"
        )
        bound = "optimal" if found.is_optimal else f"{found.gap:.1%} above"
        table.add_row(setting.name, figure, *shown, bound, f"{near:.1f} s")
    console.print(table)


def _trained(ranks: int, seconds: float, turns: int) -> str:
    """Return the measured gain of a searched schedule, and the predicted one."""
    found, published = _searched(ranks, seconds)
    times: dict[str, list[float]] = {published: [], "found": []}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.csv"
        file.write_text(schedule_files(found.steps)["schedule-with-messages.csv"])
        for turn in range(turns):
            for name, schedule in ((published, published), ("found", str(file))):
                times[name].append(_step(ranks, found.problem.microbatches, schedule, Path(folder) / f"{name}-{turn}"))
    best = found.best_published
    assert best is not None
    ratio = median(times[published]) / median(times["found"])
    steps = ", ".join(f"{name} {1e3 * median(each):.1f} ms" for name, each in times.items())
    return (
        f"{ranks} ranks: predicted {best.time / found.timing.time:.3f}, measured {ratio:.3f} ({steps}, {turns} turns)"
    )


def _searched(ranks: int, seconds: float) -> tuple[FoundSchedule, str]:
    """Return a schedule for the trained model's stages by FLOPs, and the name of the best published one."""
    plan = Plan(Mesh(pp=ranks), schedule="zb-v")
    cut = cut_for(TRAINED, plan.mesh, planned=True)
    bounds = plan.bounds(cut.layers)
    flops = [sum(cut.forward_flops(layer) for layer in range(*pair)) for pair in pairwise(bounds)]
    unit = sum(flops) / len(flops)
    stages = tuple(StageCosts(each / unit, each / unit, each / unit, 0.5) for each in flops)
    found = search_schedule(ScheduleProblem(ranks, 4 * ranks, stages, 0, 0.75 * ranks, "vee"), seconds=seconds)
    assert found.best_published is not None
    return found, found.best_published.name


def _step(ranks: int, microbatches: int, schedule: str, out: Path) -> float:
    """Train, and return the median seconds of a step."""
    size = {"layers": 8, "hidden-size": 128, "heads": 4, "seq-len": 128, "vocab-size": 8192}
    words = [word for name, value in size.items() for word in (f"--{name}", str(value))]
    words += ["--pp", str(ranks), "--schedule", schedule, "--microbatches", str(microbatches), "--steps", "25"]
    command = [sys.executable, "-m", "shardlab", "train", *words, "--passes", "none", "--out", str(out)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return median([line["dt"] for line in lines if "dt" in line][5:])


if __name__ == "__main__":
    tyro.cli(main)
