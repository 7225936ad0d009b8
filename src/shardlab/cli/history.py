"""`shardlab history` lists past runs: how they ended, and how to resume them. `shardlab show RUN` shows one of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.table import Table
from rich.text import Text

from shardlab.cli.console import Report, print_fact, print_json, print_whole, stdout_console, table_of, whole_width
from shardlab.cli.options import Flag
from shardlab.cli.train.command import value_text
from shardlab.common.files import read_file
from shardlab.language import UserError

if TYPE_CHECKING:
    from shardlab.train.history import PastRun


RUNS = Path("runs")

COLUMNS = ("run", "ended", "steps", "loss", "validation", "strategy", "model", "began", "ranks")
"""Columns of the list, most important first. In a narrow terminal, columns at the end are left out."""

FEWEST = 5
"""Number of columns that are never left out."""

WORD_COLUMNS = ("run", "began", "model", "strategy", "ended")
ORDER = (*WORD_COLUMNS, "ranks", "steps", "loss", "validation")

STYLES = {"finished": "green", "interrupted": "yellow", "running": "cyan"}


@dataclass(frozen=True)
class History:
    """List the runs in folders: model and strategy, the last loss, how each ended, and how to resume it."""

    folders: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER ...")] = ()
    """Folders of runs, or folders that contain runs. Default: runs/."""

    json: Flag = False
    """Print only JSON."""

    def run(self) -> int:
        from shardlab.train.history import find_runs

        if not self.folders and not RUNS.is_dir():
            raise UserError("there is no folder runs in this folder; give the folders that contain runs")
        runs = find_runs(self.folders or [RUNS])
        if self.json:
            print_json([run.as_dict() for run in runs])
            return 0
        console = stdout_console()
        if not runs:
            console.print("no runs")
            return 0
        columns = list(COLUMNS)
        while console.is_terminal and len(columns) > FEWEST and whole_width(_table(runs, columns)) > console.width:
            columns.pop()
        print_whole(console, _table(runs, columns), folded=0)
        resumable_runs = [run for run in runs if run.resume]
        if resumable_runs:
            console.print()
        for run in resumable_runs:
            print_fact(console, "go on", f"after step {run.checkpoints[-1]}: {run.resume}")
        return 0


@dataclass(frozen=True)
class Show:
    """Show a run: its configuration, its last metrics, how it ended, and its files."""

    folder: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="RUN", help_behavior_hint="")] = None
    """Folder of the run."""

    json: Flag = False
    """Print only JSON."""

    def run(self) -> int:
        from shardlab.train.history import CONFIG, read_run

        if self.folder is None:
            raise UserError("no run is given; give its folder, such as: shardlab show runs/fsdp-1")
        run = read_run(self.folder)
        has_config = (self.folder / CONFIG).is_file()
        config: dict[str, Any] = read_file(self.folder / CONFIG, "TOML") if has_config else {}
        files = {str(path.relative_to(self.folder)): path.stat().st_size for path in _files(self.folder)}
        report = Report(**run.as_dict(), config=config, files=files)
        table = table_of("section", "field", "value", words=3)
        for section, values in config.items():
            for number, (name, value) in enumerate(values.items()):
                table.add_row("" if number else section, name, Text(value_text(value), "bold"))
        report.draw(partial(print_whole, table=table, folded=2))
        report.line()
        if command := run.record.get("command"):
            report.fact("command", str(command))
        report.fact("began", str(run.record.get("began", "unknown")))
        report.fact("steps", f"{run.steps} of {run.wanted}" if run.wanted else str(run.steps))
        report.fact("ended", run.ended + (f": {run.why}" if run.why else ""), style=STYLES.get(run.ended, "red"))
        if run.resume:
            report.fact("go on", f"after step {run.checkpoints[-1]}: {run.resume}")
        report.fact("last figures", ", ".join(_last_figures(run)) or "none")
        for number, (name, size) in enumerate(files.items()):
            report.fact("" if number else "files", name, f"{size:,}")
        report.show(json=self.json)
        return 0


def _table(runs: Sequence[PastRun], columns: Sequence[str]) -> Table:
    """Return a table with a row for each run, and the given columns in reading order."""
    names = [name for name in ORDER if name in columns]
    words = sum(name in WORD_COLUMNS for name in names)
    table = table_of(*names, words=words)
    for run in runs:
        cells = _cells(run)
        table.add_row(*(cells[name] for name in names))
    return table


def _cells(run: PastRun) -> dict[str, str | Text]:
    """Return the cells of a run's row, by column."""
    record, model = run.record, run.record.get("model", {})
    size = "x".join(str(model[name]) for name in ("layers", "hidden_size") if name in model)
    losses = {"loss": run.last.get("loss"), "validation": run.validation_loss}
    return {
        "run": Text(str(run.folder)),
        "began": str(record.get("began", ""))[:16].replace("T", " "),
        "model": f"{model.get('kind', '')} {size}".strip(),
        "strategy": Text(run.strategy),
        "ended": Text(run.ended, STYLES.get(run.ended, "red")),
        "ranks": str(record.get("ranks", "")),
        "steps": f"{run.steps}/{run.wanted}" if run.wanted else str(run.steps),
        **{name: "" if loss is None else f"{loss:.3f}" for name, loss in losses.items()},
    }


def _last_figures(run: PastRun) -> list[str]:
    """Return a run's last losses, step time, speed and memory as texts, without those that are unknown."""
    figures = (
        (run.last.get("loss"), "loss {:.3f}"),
        (run.validation_loss, "validation loss {:.3f}"),
        (run.last.get("dt"), "{:.3g} s/step"),
        (run.last.get("tps"), "{:,.0f} tokens/s"),
        (run.last.get("memory_max"), "{:.3g} GiB"),
    )
    return [form.format(figure / 2**30 if "GiB" in form else figure) for figure, form in figures if figure is not None]


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())
