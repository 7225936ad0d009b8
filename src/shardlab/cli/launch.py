"""`shardlab launch -- COMMAND` runs any command as ranks; `shardlab submit -- train ...` submits a job to a scheduler.

Under a launcher, the process of `Launch` is replaced by the command, with the environment that torch.distributed
expects. Without a launcher, `Launch` starts the ranks as processes of this machine. `Submit` writes a job script for
SLURM or PBS, which runs a command of Shardlab under the scheduler's launcher.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from shardlab.cli.console import table_of
from shardlab.cli.options import Count, Flag, Name, OptionalCount
from shardlab.common.errors import closest_name
from shardlab.common.fields import TIME_FORMATS, parse_seconds
from shardlab.common.text import counted
from shardlab.language import UserError
from shardlab.starting import INTERRUPTED
from shardlab.train.launch.environment import LaunchEnvironment, find_launch_environment, launcher_of
from shardlab.train.launch.job_script import SHARDLAB, SUBMIT, Scheduler, SubmittedJob, keep_script, submit

COMMANDS = ("train", "launch", "verify", "bench", "eval", "doctor", "test")
"""Commands that can be submitted, because they join a launcher's world."""


@dataclass(frozen=True)
class Launch:
    """Run any command as ranks, such as your own script with torch.distributed, with any launcher or none.

    Without a launcher, the ranks are processes of this machine, and each line of output begins with its rank. If a rank
    fails, all ranks are stopped, and the last lines of the failed rank are printed again at the end. Under torchrun,
    SLURM, PBS or mpiexec, the command replaces this process, with the variables RANK, WORLD_SIZE, LOCAL_RANK,
    LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and OMP_NUM_THREADS.
    """

    command: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="-- COMMAND ...", help_behavior_hint="")
    ] = ()
    """The command and its arguments. A .py file is run with this Python."""

    ranks: OptionalCount = None
    """Number of ranks. Default: one for each GPU, or else each CPU."""

    bind: Flag = False
    """Pin each rank to CPUs of its own, unless the launcher has done so."""

    max_restarts: Annotated[int, tyro.conf.arg(metavar="N")] = 0
    """Number of times that all ranks are restarted if one fails."""

    def run(self) -> int:
        from shardlab.train.launch.worker import as_program, become

        if self.max_restarts < 0:
            raise UserError(f"--max-restarts is {self.max_restarts}; give 0 or more")
        command = as_program(self.command)
        place = find_launch_environment(os.environ)
        if place is None or place.world == 1:
            return self._start(command)
        launcher = launcher_of(os.environ)
        if self.ranks not in (None, place.world):
            raise UserError(f"--ranks is {self.ranks}, but {launcher} started {place.world}; leave out --ranks")
        if self.max_restarts:
            raise UserError(
                f"--max-restarts is for ranks that this command starts, but {launcher} started these; leave it out"
            )
        if place.local_rank == 0:
            self._report_launcher(place)
        return become(place, command, bound=self.bind)

    def _report_launcher(self, place: LaunchEnvironment) -> None:
        place_text = f"{socket.gethostname()} has {place.local_world or 'some'} of {counted(place.world, 'rank')}"
        bound = ", each on CPUs of its own" if self.bind else ""
        print(f"shardlab: {place_text}, started by {launcher_of(os.environ)}{bound}", file=sys.stderr, flush=True)

    def _start(self, command: list[str]) -> int:
        from shardlab.cli.bench.command import default_ranks
        from shardlab.train.launch.environment import as_ranges, divide_cpus, usable_cpus

        cpus = usable_cpus()
        ranks = self.ranks or default_ranks()
        cpu_sets = divide_cpus(cpus, ranks) if self.bind else [cpus] * ranks
        threads = os.environ.get("OMP_NUM_THREADS")
        table = table_of("rank", "cpus", "threads", words=0)
        for rank, cpu_set in enumerate(cpu_sets):
            table.add_row(str(rank), as_ranges(cpu_set), threads or str(max(1, len(cpus) // ranks)))
        Console(file=sys.stderr, highlight=False).print(table)
        sys.stdout.flush()

        from shardlab.train.launch.commands import LAST_LINES, run_command
        from shardlab.train.launch.processes import how_ended

        result = run_command(command, ranks, bound=self.bind, restarts=self.max_restarts)
        if result.rank is not None and not result.signal:
            if result.output:
                print(f"\nshardlab: last lines of rank {result.rank} (at most {LAST_LINES}):", file=sys.stderr)
                print(result.output, file=sys.stderr)
            print(f"shardlab: rank {result.rank} {how_ended(result.code)}, so all ranks were stopped", file=sys.stderr)
        if result.signal:
            print(
                f"shardlab: interrupted ({signal.Signals(result.signal).name}); all ranks have ended", file=sys.stderr
            )
            return 0 if result.rank is None else INTERRUPTED
        return result.code if result.code >= 0 else 128 - result.code


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
    """Partition of SLURM, or several from which SLURM chooses; the same as --queue."""

    account: Name = None
    """Account that is charged."""

    name: str = "shardlab"
    """Name of the job."""

    dry_run: Flag = False
    """Print the job script, and submit nothing."""

    def run(self) -> int:
        if not self.command or self.command[0] not in COMMANDS:
            name = self.command[0] if self.command else ""
            guess = closest_name(name, COMMANDS)
            error = f"{name!r} does not run under a launcher" if name else "there is no command"
            raise UserError(
                f"{error}; {f'did you mean {guess}?' if guess else 'give one after --, such as: -- train --steps 1000'}"
            )
        schedulers: list[Scheduler] = [name for name, program in SUBMIT.items() if shutil.which(program)]
        scheduler = self.scheduler or next(iter(schedulers), None)
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
            with nullcontext() if job.run is None else keep_script(script, job.run):
                print(submit(script, scheduler))
        return 0

    def _job(self) -> SubmittedJob:
        """Return the job that the options describe.

        Raises:
            UserError: if the folder of its run exists and the command does not resume it.
        """
        words, run = [*SHARDLAB, *self.command], None
        if self.queue is not None and self.partition is not None:
            raise UserError(f"--queue {self.queue} and --partition {self.partition} were given; give one of them")
        if (seconds := parse_seconds(self.time)) is None:
            raise UserError(f"--time is {self.time!r}; give {TIME_FORMATS}")
        if self.command[0] == "train":
            flags = _parse_flags(self.command)
            out, resume = flags.get("--out"), flags.get("--resume")
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
            words += [] if "--save-every" in flags else ["--save-every", "10m"]
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


def _parse_flags(command: Sequence[str]) -> dict[str, str]:
    """Return the flags of a command, each with the argument that follows it."""
    words = [word for flag in command for word in (flag.split("=", 1) if flag.startswith("--") else [flag])]
    return {flag: word for flag, word in pairwise([*words, ""]) if flag.startswith("--")}
