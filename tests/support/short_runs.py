"""Training runs with blank pictures and short samples, which take half of a short run's CPU time otherwise.

Importing this module has that effect in a process and its forks: in the servers that fork ranks and commands. Tests of
pictures and samples call what makes them (tests/draw, tests/train/test_report.py, tests/train/test_output.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardlab.train import output, report, sample
from shardlab.train.run import Summary, TrainingRun

write_report = report.write_report


def write_blank(_: Any, path: Path, *__: Any) -> None:
    """Write an empty picture, in place of `save_timeline` or `draw_runs`."""
    path.write_text('<svg xmlns="http://www.w3.org/2000/svg"></svg>\n')


def write_report_without_plots(run: TrainingRun, summary: Summary, predicted: float | str) -> None:
    draw_runs, report.draw_runs = report.draw_runs, write_blank
    try:
        write_report(run, summary, predicted)
    finally:
        report.draw_runs = draw_runs


sample.SAMPLE_TOKENS = 8
output.save_timeline = write_blank
report.write_report = write_report_without_plots
