"""`shardlab history` and `shardlab show RUN`: runs of the past, how they ended, and how to go on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console
from rich.text import Text

from shardlab.cli.config_table import as_words
from shardlab.cli.console import print_fact, print_json, stdout_console, table_of
from shardlab.cli.options import Flag
from shardlab.program import UserError
from shardlab.program.nesting import read_file

if TYPE_CHECKING:
    from shardlab.train.history import PastRun

RUNS = Path("runs")

STYLES = {"finished": "green", "interrupted": "yellow", "running": "cyan"}


@dataclass(frozen=True)
class History:
    """List the runs in some folders: what was trained and how, the last loss, how each ended, how to go on."""

    folders: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER ...")] = ()
    """Folders of runs, or with runs in them; without one, runs/."""

    json: Flag = False
    """Print JSON alone."""

    def run(self) -> int:
        from shardlab.train.history import past_runs

        if not self.folders and not RUNS.is_dir():
            raise UserError("there is no folder runs here; name the folders in which runs are")
        runs = past_runs(self.folders or [RUNS])
        if self.json:
            print_json([run.as_dict() for run in runs])
            return 0
        console = stdout_console()
        if not runs:
            console.print("no runs")
            return 0
        table = table_of("run", "began", "model", "strategy", "ended", "ranks", "steps", "loss", words=5)
        for run in runs:
            table.add_row(*_row(run))
        console.print(table, soft_wrap=True)
        again = [run for run in runs if run.resume]
        if again:
            console.print()
        for run in again:
            print_fact(console, "go on", f"after step {run.checkpoints[-1]}: {run.resume}")
        return 0


@dataclass(frozen=True)
class Show:
    """Show a run: its configuration, its last figures, how it ended, and its files."""

    folder: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="RUN", help_behavior_hint="")] = None
    """The run's folder."""

    json: Flag = False
    """Print JSON alone."""

    def run(self) -> int:
        from shardlab.train.history import CONFIG, past_run

        if self.folder is None:
            raise UserError("no run was named; give its folder, such as: shardlab show runs/fsdp-1")
        run = past_run(self.folder)
        written = (self.folder / CONFIG).is_file()
        config: dict[str, Any] = read_file(self.folder / CONFIG, "TOML") if written else {}
        files = {str(path.relative_to(self.folder)): path.stat().st_size for path in _files(self.folder)}
        if self.json:
            print_json({**run.as_dict(), "config": config, "files": files})
            return 0
        _print(stdout_console(), run, config, files)
        return 0


def _row(run: PastRun) -> list[str | Text]:
    record, model = run.record, run.record.get("model", {})
    size = "x".join(str(model[name]) for name in ("layers", "hidden_size") if name in model)
    loss = run.last.get("loss")
    return [
        str(run.folder),
        str(record.get("began", ""))[:16].replace("T", " "),
        f"{model.get('kind', '')} {size}".strip(),
        str(record.get("name", "")),
        Text(run.ended, STYLES.get(run.ended, "red")),
        str(record.get("ranks", "")),
        f"{run.steps}/{run.wanted}" if run.wanted else str(run.steps),
        "" if loss is None else f"{loss:.3f}",
    ]


def _print(console: Console, run: PastRun, config: dict[str, Any], files: dict[str, int]) -> None:
    table = table_of("section", "field", "value", words=3)
    for section, fields in config.items():
        for number, (name, value) in enumerate(fields.items()):
            table.add_row("" if number else section, name, Text(as_words(value), "bold"))
    console.print(table)
    console.print()
    if command := run.record.get("command"):
        print_fact(console, "command", str(command))
    print_fact(console, "began", str(run.record.get("began", "it is not known when")))
    print_fact(console, "steps", f"{run.steps} of {run.wanted}" if run.wanted else str(run.steps))
    print_fact(console, "ended", run.ended + (f": {run.why}" if run.why else ""), STYLES.get(run.ended, "red"))
    if run.resume:
        print_fact(console, "go on", f"after step {run.checkpoints[-1]}: {run.resume}")
    figures = {name: run.last.get(name) for name in ("loss", "validation_loss", "dt", "tps", "memory_max")}
    text = ", ".join(f"{name} {figure:,.4g}" for name, figure in figures.items() if figure is not None)
    print_fact(console, "last figures", text or "none")
    width = max((len(f"{size:,}") for size in files.values()), default=0)
    for number, (name, size) in enumerate(files.items()):
        print_fact(console, "" if number else "files", name, figure=f"{size:,}".rjust(width))


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())
