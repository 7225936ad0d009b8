"""`shardlab submit -- train ...`: a command of Shardlab as a job of SLURM or PBS."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import tyro

from shardlab.cli.options import Count, Flag, Name, OptionalCount
from shardlab.errors import closest
from shardlab.program import UserError
from shardlab.program.duration import A_TIME, seconds_of
from shardlab.train.job_script import SHARDLAB, SUBMIT, Scheduler, SubmittedJob, kept, submit

COMMANDS = ("train", "launch", "verify", "bench", "eval", "doctor", "test")
"""Commands that join a launcher's world."""


@dataclass(frozen=True)
class Submit:
    """Submit a command of Shardlab as a job that gets a signal before its time limit, and restarts after a failure.

    A training saves every 10 minutes and resumes by itself, unless its own flags set this differently. If the time
    limit ends before the training does, it is submitted again.
    """

    command: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="-- train ...", help_behavior_hint="")
    ] = ()
    """The command and its options, without `shardlab`."""

    scheduler: Annotated[Scheduler | None, tyro.conf.arg(help_behavior_hint="")] = None
    """slurm or pbs. Default: the one whose sbatch or qsub is installed."""

    nodes: Count = 1
    """Number of hosts."""

    ranks_per_node: Count = 1
    """Number of ranks on each host."""

    cpus_per_rank: OptionalCount = None
    """Number of CPUs of each rank."""

    gpus_per_node: OptionalCount = None
    """Number of GPUs of each host."""

    time: Annotated[str, tyro.conf.arg(metavar="TIME")] = "1:00:00"
    """Time limit of the job, such as 90m, 2h, 1:30:00 or 1-12:00:00."""

    queue: Name = None
    """Queue of PBS."""

    partition: Annotated[str | None, tyro.conf.arg(metavar="NAME[,NAME]", help_behavior_hint="")] = None
    """Partition of SLURM, or several, of which SLURM chooses one; the same as --queue."""

    account: Name = None
    """Account that is charged."""

    name: str = "shardlab"
    """Name of the job."""

    dry_run: Flag = False
    """Print the job script, and submit nothing."""

    def run(self) -> int:
        if not self.command or self.command[0] not in COMMANDS:
            given = self.command[0] if self.command else ""
            meant = closest(given, COMMANDS)
            what = f"{given!r} does not run under a launcher" if given else "there is no command"
            raise UserError(
                f"{what}; {f'did you mean {meant}?' if meant else 'give one after --, such as: -- train --steps 1000'}"
            )
        there: list[Scheduler] = [name for name, program in SUBMIT.items() if shutil.which(program)]
        scheduler = self.scheduler or next(iter(there), None)
        if scheduler is None:
            raise UserError(
                "neither sbatch nor qsub is installed here; submit on a host that has one, or give --scheduler "
                "and --dry-run"
            )
        job = self._job()
        script = job.script(scheduler)
        if self.dry_run:
            print(script, end="")
        else:
            with nullcontext() if job.run is None else kept(script, job.run):
                print(submit(script, scheduler))
        return 0

    def _job(self) -> SubmittedJob:
        """The job that the flags ask for.

        Raises:
            UserError: when its run's folder is there, and nobody has said that its run is to go on.
        """
        words, run = [*SHARDLAB, *self.command], None
        if self.queue is not None and self.partition is not None:
            raise UserError(f"--queue {self.queue} and --partition {self.partition} were given; give one of them")
        if (seconds := seconds_of(self.time)) is None:
            raise UserError(f"--time is {self.time!r}; give {A_TIME}")
        if self.command[0] == "train":
            given = _given(self.command)
            out, resume = given.get("--out"), given.get("--resume")
            goes_on = resume not in (None, "auto")
            run = Path(out or (resume if goes_on and resume else f"runs/{self.name}"))
            if resume is None and run.exists():
                raise UserError(
                    f"{run} exists; give another {'--out' if out else '--name'}, so that nothing is overwritten, or "
                    f"resume its run: -- train --resume {run}"
                )
            if goes_on and not run.is_dir():
                raise UserError(f"{run} does not exist; name the folder of a run with --resume")
            words += [] if out or goes_on else ["--out", str(run)]
            words += ["--resume", "auto"] if resume is None else []
            words += [] if "--save-every" in given else ["--save-every", "10m"]
        return SubmittedJob(
            words,
            self.name,
            self.nodes,
            self.ranks_per_node,
            self.cpus_per_rank,
            self.gpus_per_node,
            int(seconds),
            self.partition if self.queue is None else self.queue,
            self.account,
            run,
            "--partition" if self.queue is None else "--queue",
        )


def _given(command: Sequence[str]) -> dict[str, str]:
    """The flags of a command, each with the word that follows it."""
    words = [word for flag in command for word in (flag.split("=", 1) if flag.startswith("--") else [flag])]
    return {flag: word for flag, word in pairwise([*words, ""]) if flag.startswith("--")}
