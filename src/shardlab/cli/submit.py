"""`shardlab submit -- train ...`: a command of Shardlab as a job of SLURM or PBS."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from shardlab.cli.options import Count, Flag, Name, OptionalCount
from shardlab.errors import closest
from shardlab.program import UserError
from shardlab.train.job_script import SUBMIT, Scheduler, SubmittedJob, seconds_of, submit

COMMANDS = ("train", "launch", "verify", "bench", "eval", "doctor", "test")
"""Commands that join a launcher's world."""


@dataclass(frozen=True)
class Submit:
    """Submit a command of Shardlab as a job, which is told before its time is over and starts again after a failure.

    A training saves every 10 minutes and resumes by itself, unless its own flags say otherwise.
    """

    command: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="-- train ...")] = ()
    """The command and its options, without `shardlab`."""

    scheduler: Annotated[Scheduler | None, tyro.conf.arg(help_behavior_hint="")] = None
    """slurm or pbs; without it the one whose sbatch or qsub is there."""

    nodes: Count = 1
    """How many hosts."""

    ranks_per_node: Count = 1
    """Ranks on each host."""

    cpus_per_rank: OptionalCount = None
    """CPUs of each rank."""

    gpus_per_node: OptionalCount = None
    """GPUs of each host."""

    time: Annotated[str, tyro.conf.arg(metavar="H:MM:SS")] = "1:00:00"
    """The job's limit."""

    queue: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="", aliases=("--partition",))] = None
    """PBS's queue, or SLURM's partition."""

    account: Name = None
    """Who pays."""

    name: str = "shardlab"
    """The job's name."""

    dry_run: Flag = False
    """Print the job script, and submit nothing."""

    def run(self) -> int:
        if not self.command or self.command[0] not in COMMANDS:
            given = self.command[0] if self.command else ""
            meant = closest(given, COMMANDS)
            what = f"{given!r} joins no launcher's world" if given else "there is no command"
            raise UserError(
                f"{what}; {f'did you mean {meant}?' if meant else 'give one after --, such as: -- train --steps 1000'}"
            )
        seconds_of(self.time)
        there: list[Scheduler] = [name for name, program in SUBMIT.items() if shutil.which(program)]
        scheduler = self.scheduler or next(iter(there), None)
        if scheduler is None:
            raise UserError("neither sbatch nor qsub is here; submit where one is, or give --scheduler and --dry-run")
        script = self._job().script(scheduler)
        if self.dry_run:
            print(script, end="")
        else:
            print(submit(script, scheduler))
        return 0

    def _job(self) -> SubmittedJob:
        words = [sys.executable, "-m", "shardlab", *self.command]
        if self.command[0] == "train":
            flags = {word.partition("=")[0] for word in self.command}
            if "--out" not in flags and "--resume" not in flags:
                words += ["--out", str(Path("runs", self.name))]
            if "--resume" not in flags:
                words += ["--resume", "auto"]
            if "--save-every" not in flags:
                words += ["--save-every", "10m"]
        return SubmittedJob(
            words,
            self.name,
            self.nodes,
            self.ranks_per_node,
            self.cpus_per_rank,
            self.gpus_per_node,
            self.time,
            self.queue,
            self.account,
        )
