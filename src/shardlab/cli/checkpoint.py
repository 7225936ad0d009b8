"""`shardlab checkpoint`: list, verify and convert the checkpoints of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.text import Text
from tyro.conf import subcommand

from shardlab.cli.console import Report
from shardlab.cli.convert import Convert
from shardlab.cli.options import Count, Flag, OptionalCount
from shardlab.common.errors import UserError

Run = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN", help_behavior_hint="")]
"""Folder of a run, as a positional argument."""


@dataclass(frozen=True)
class ListCheckpoints:
    """List the checkpoints of a run, and what is missing from incomplete ones."""

    run_folder: Run
    """Folder of a run."""

    json: Flag = False
    """Print only JSON."""

    def run(self) -> int:
        return _show(self.run_folder, verify=False, json=self.json)


@dataclass(frozen=True)
class VerifyCheckpoints:
    """Read the checkpoints of a run and verify every checksum; the exit status is 1 if one is damaged."""

    run_folder: Run
    """Folder of a run."""

    json: Flag = False
    """Print only JSON."""

    def run(self) -> int:
        return _show(self.run_folder, verify=True, json=self.json)


@dataclass(frozen=True)
class ConvertCheckpoint:
    """Write the unsharded weights of a checkpoint into a new folder, for Shardlab, Hugging Face or torchtitan."""

    run_folder: Run
    """Folder of a run."""

    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="TO", help_behavior_hint="")]
    """New folder."""

    step: OptionalCount = None
    """Convert the checkpoint after N steps. Default: the newest one."""

    to: Literal["hf", "shardlab", "dcp"] = "hf"
    """Format to write: Hugging Face's, a run's, or torch.distributed.checkpoint as torchtitan lays it out."""

    shard_mb: Count = 5000
    """Largest size of a file, in megabytes. Larger weights are split into several files."""

    json: Flag = False
    """Print only JSON."""

    def run(self) -> int:
        from shardlab.train.checkpoints import find_checkpoint

        checkpoint = find_checkpoint(self.run_folder, self.step)
        assert checkpoint is not None
        return Convert(checkpoint.folder, self.out, to=self.to, shard_mb=self.shard_mb, json=self.json).run()


@dataclass(frozen=True)
class CheckpointCommand:
    """List, verify and convert the checkpoints of a run."""

    what: Annotated[
        Annotated[ListCheckpoints, subcommand("ls", prefix_name=False)]
        | Annotated[VerifyCheckpoints, subcommand("verify", prefix_name=False)]
        | Annotated[ConvertCheckpoint, subcommand("convert", prefix_name=False)],
        tyro.conf.arg(name=""),
    ]

    def run(self) -> int:
        return self.what.run()


def _show(run: Path, *, verify: bool, json: bool) -> int:
    """Print a row for each checkpoint of a run.

    Args:
        verify: whether to read all files and verify their checksums.

    Returns:
        The exit status: 1 if a checkpoint is damaged.

    Raises:
        UserError: if the run has no checkpoints.
    """
    from shardlab.train.checkpoint.write import Disk, folder_of, steps_in
    from shardlab.train.checkpoints import without_checkpoints
    from shardlab.train.history import CHECKPOINTS

    steps = steps_in(Disk(), run / CHECKPOINTS)
    if not steps:
        raise without_checkpoints(run, "checkpoints")
    rows = [_row(folder_of(run / CHECKPOINTS, step), step, verify=verify) for step in steps]
    whole = all(not row["wrong"] for row in rows)
    verdict = Text("checksums are right" if verify else "complete", "green")
    columns: dict[str, Callable[[Any], str | Text]] = {
        "step": lambda row: str(row["step"]),
        "plan": lambda row: str(row["plan"]),
        "ranks": lambda row: str(row["ranks"]),
        "bytes": lambda row: "" if row["bytes"] is None else f"{row['bytes']:,}",
        "written": lambda row: str(row["written"]),
        "state": lambda row: Text("damaged", "red") if row["wrong"] else verdict,
    }
    report = Report(run=str(run))
    report.table(columns, rows, "checkpoints", words=6)
    for row in rows:
        if row["wrong"]:
            report.line(row["wrong"], wrap=False)
    if whole:
        report.line(f"resume with: shardlab train --resume {run}", wrap=False)
    report.show(json=json)
    return 0 if whole else 1


def _row(folder: Path, step: int, *, verify: bool) -> dict[str, Any]:
    """Return the fields of a checkpoint for the table and for --json."""
    from shardlab.train.checkpoint.read import Checkpoint

    row: dict[str, Any] = {"step": step, "folder": str(folder), "plan": "", "ranks": "", "bytes": None}
    row |= {"written": datetime.fromtimestamp(folder.stat().st_mtime).isoformat(" ", "seconds"), "wrong": None}
    try:
        checkpoint = Checkpoint.open(folder)
        row |= {"plan": checkpoint.state["plan"], "ranks": checkpoint.ranks}
        row |= {"bytes": checkpoint.size, "kinds": sorted(checkpoint.kinds)}
        if verify:
            checkpoint.verify()
    except UserError as error:
        row["wrong"] = str(error)
    return row
