"""A job script for a scheduler, and its submission."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from shardlab.program import UserError

Scheduler = Literal["slurm", "pbs"]

WARNING = 120
"""Seconds before its time is over at which a job is told by SIGUSR1, so that it saves."""

RESTARTS = 3
"""How often a job that fails starts again."""

SUBMIT: dict[Scheduler, str] = {"slurm": "sbatch", "pbs": "qsub"}


@dataclass(frozen=True)
class SubmittedJob:
    """What is asked of a scheduler.

    Attributes:
        command: of every rank; it finds its world by the launcher's variables.
        name: of the job.
        nodes, ranks_per_node: hosts, and ranks on each.
        cpus_per_rank, gpus_per_node: what each rank and each host is given; None: as the scheduler does.
        time: the limit, HOURS:MINUTES:SECONDS.
        queue: SLURM's partition or PBS's queue, if one is named.
        account: who pays, if that is named.
    """

    command: Sequence[str]
    name: str
    nodes: int
    ranks_per_node: int
    cpus_per_rank: int | None
    gpus_per_node: int | None
    time: str
    queue: str | None
    account: str | None

    def __post_init__(self) -> None:
        """Refuse names that a scheduler would take for something else.

        Raises:
            UserError: saying which.
        """
        for option in ("name", "queue", "account"):
            value = getattr(self, option)
            if value is not None and not re.fullmatch(r"[\w.@+-]+", value):
                raise UserError(f"--{option} {value!r}: give letters, digits and . _ - + @ alone")

    def script(self, scheduler: Scheduler) -> str:
        """The job script, which starts the command again from its newest checkpoint after a failure."""
        return (_slurm if scheduler == "slurm" else _pbs)(self)


def seconds_of(time: str) -> int:
    """Seconds of HOURS:MINUTES:SECONDS.

    >>> seconds_of("1:30:00")
    5400

    Raises:
        UserError: when it is no such time, or none is left for the warning.
    """
    found = re.fullmatch(r"(\d+):([0-5]\d):([0-5]\d)", time)
    seconds = 0 if found is None else 3600 * int(found[1]) + 60 * int(found[2]) + int(found[3])
    if seconds <= WARNING:
        raise UserError(f"--time is {time!r}; give HOURS:MINUTES:SECONDS, more than {WARNING} seconds, such as 1:00:00")
    return seconds


def _slurm(job: SubmittedJob) -> str:
    asked = {
        "job-name": job.name,
        "nodes": job.nodes,
        "ntasks-per-node": job.ranks_per_node,
        "cpus-per-task": job.cpus_per_rank,
        "gpus-per-node": job.gpus_per_node,
        "time": job.time,
        "partition": job.queue,
        "account": job.account,
        "signal": f"USR1@{WARNING}",
        "output": f"{job.name}-%j.log",
        "open-mode": "append",
    }
    # srun has not taken this over from sbatch since 22.05
    cpus = "" if job.cpus_per_rank is None else f"--cpus-per-task={job.cpus_per_rank} "
    lines = [f"#SBATCH --{name}={value}" for name, value in asked.items() if value is not None]
    return "\n".join(
        [
            "#!/bin/bash",
            *lines,
            "#SBATCH --requeue",
            "",
            _port("SLURM_JOB_ID"),
            f"srun --kill-on-bad-exit=1 {cpus}{shlex.join(job.command)}",
            "status=$?",
            "# A job that fails starts again where its newest checkpoint is, but not for ever.",
            f'if [ "$status" -ne 0 ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {RESTARTS} ]; then',
            '    scontrol requeue "$SLURM_JOB_ID"',
            "fi",
            'exit "$status"',
            "",
        ]
    )


def _pbs(job: SubmittedJob) -> str:
    each = f"ncpus={job.ranks_per_node * (job.cpus_per_rank or 1)}:mpiprocs={job.ranks_per_node}"
    gpus = "" if job.gpus_per_node is None else f":ngpus={job.gpus_per_node}"
    asked = {
        "-N": job.name,
        "-l select": f"{job.nodes}:{each}{gpus}",
        "-l walltime": job.time,
        "-q": job.queue,
        "-A": job.account,
        "-r": "y",
        "-j": "oe",
    }
    lines = [f"#PBS {name}{'=' if ' ' in name else ' '}{value}" for name, value in asked.items() if value is not None]
    ranks, limit = job.nodes * job.ranks_per_node, seconds_of(job.time) - WARNING
    started = f"mpiexec -n {ranks} {shlex.join(job.command)}"
    return "\n".join(
        [
            "#!/bin/bash",
            *lines,
            "",
            'cd "$PBS_O_WORKDIR" || exit 1',
            _port("PBS_JOBID"),
            'export MASTER_ADDR="$(head -n 1 "$PBS_NODEFILE")"',
            f"for attempt in {' '.join(map(str, range(RESTARTS + 1)))}; do",
            f"    # PBS warns nobody: {WARNING} s before the end the ranks are told to save, and timeout gives 124.",
            f"    timeout --signal=USR1 $(({limit} - SECONDS)) {started}",
            "    status=$?",
            "    # A job that fails starts again where its newest checkpoint is, but not for ever.",
            '    if [ "$status" -eq 0 ] || [ "$status" -eq 124 ] || [ "$SECONDS" -ge '
            + str(limit)
            + " ]; then break; fi",
            "done",
            'exit "$status"',
            "",
        ]
    )


def _port(identity: str) -> str:
    """A port of the job's own, since several may share a host."""
    return f'export MASTER_PORT=$((20000 + 10#0$(echo "${identity}" | tr -dc 0-9 | tail -c 5) % 20000))'


def submit(script: str, scheduler: Scheduler) -> str:
    """Hand a script to the scheduler; what it answers.

    Raises:
        UserError: when the scheduler is not there, or refuses.
    """
    program = SUBMIT[scheduler]
    if shutil.which(program) is None:
        raise UserError(
            f"there is no {program} here, so this host knows no {scheduler.upper()}; submit where there is one, or "
            "print the script with --dry-run"
        )
    done = subprocess.run([program], input=script, capture_output=True, text=True, check=False)
    if done.returncode:
        answer = (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"
        raise UserError(f"{program} has refused the job: {answer}")
    return done.stdout.strip()
