"""Job scripts for SLURM and PBS, and their submission.

After a failure, a script restarts the command from its newest checkpoint. If the run was warned that its time is nearly
over and has saved, the script submits itself again.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shardlab.common.files import atomic_file
from shardlab.language import UserError
from shardlab.train.history import RECORD, WARNED, writing

Scheduler = Literal["slurm", "pbs"]

WARNING = 120
"""Seconds before the time limit of a job at which it receives SIGUSR1, so that it saves."""

RESTARTS = 3
"""Largest number of restarts of a job that fails."""

SCRIPT = "job.sh"
"""Name of the job script in the folder of its run."""

SHARDLAB = (sys.executable, "-m", "shardlab")

SUBMIT: dict[Scheduler, str] = {"slurm": "sbatch", "pbs": "qsub"}


@dataclass(frozen=True)
class SubmittedJob:
    """Job that a scheduler is to run.

    Attributes:
        command: command of every rank. It reads its rank and world from the launcher's variables.
        name: name of the job.
        nodes, ranks_per_node: number of hosts, and of ranks on each.
        cpus_per_rank, gpus_per_node: CPUs of each rank, and GPUs of each host (None: the scheduler's default).
        seconds: time limit.
        queue: queue of PBS, or partitions of SLURM separated by commas, if the user names any.
        account: account to charge, if the user names one.
        run: folder of the run, if the command trains one. If a job's time is over before the run is, the job is
            submitted again.
        queue_option: name of the option with which the user sets the queue, for messages.
    """

    command: Sequence[str]
    name: str
    nodes: int
    ranks_per_node: int
    cpus_per_rank: int | None
    gpus_per_node: int | None
    seconds: int
    queue: str | None
    account: str | None
    run: Path | None = None
    queue_option: str = "--queue"

    def __post_init__(self) -> None:
        """Refuse names that a scheduler would misread, and time limits that leave no time for a warning.

        Raises:
            UserError: if a name has characters that are not allowed, or the time limit is at most `WARNING`.
        """
        names = {"--name": self.name, self.queue_option: self.queue, "--account": self.account}
        for option, value in names.items():
            several = r"(,[\w.@+-]+)*" if option == self.queue_option else ""
            if value is not None and not re.fullmatch(rf"[\w.@+-]+{several}", value):
                comma_text = ", and commas between several" if several else ""
                raise UserError(f"{option} {value!r}: give letters, digits and . _ - + @ alone{comma_text}")
        if self.seconds <= WARNING:
            raise UserError(f"--time is {self.seconds} s; give more than {WARNING} s, since a warning comes that early")

    def script(self, scheduler: Scheduler) -> str:
        """Return the job script, which restarts the command from its newest checkpoint after a failure."""
        return (_slurm if scheduler == "slurm" else _pbs)(self)

    @property
    def time(self) -> str:
        """Time limit in the format of schedulers: HOURS:MINUTES:SECONDS."""
        return f"{self.seconds // 3600}:{self.seconds // 60 % 60:02}:{self.seconds % 60:02}"

    @property
    def record_lines(self) -> list[str]:
        """Shell lines that keep a copy of the run's record.

        A job that fails early leaves the record of an earlier job in place. The conditions below notice this.
        """
        if self.run is None:
            return []
        return [f"record={shlex.quote(str(self.run / RECORD))}", 'before="$(cat "$record" 2> /dev/null)"']

    @property
    def warned(self) -> str:
        """Shell condition: in this job, the run was warned that its time was nearly over, and recorded its stop."""
        return self._says(WARNED)

    @property
    def interrupted(self) -> str:
        """Shell condition: in this job, the run was asked to stop, by whatever signal, and recorded its stop."""
        return self._says('"interrupted"')

    def _says(self, words: str) -> str:
        if self.run is None:
            return "false"
        new = '[ "$(cat "$record" 2> /dev/null)" != "$before" ]'
        return f"{new} && {shlex.join([*SHARDLAB, 'show', str(self.run), '--json'])} | grep -q {shlex.quote(words)}"


def submit(script: str, scheduler: Scheduler) -> str:
    """Submit a script, and return the scheduler's answer.

    Raises:
        UserError: if there is no such scheduler here, or it refuses the job.
    """
    program = SUBMIT[scheduler]
    if shutil.which(program) is None:
        raise UserError(
            f"there is no {program} here, so this host knows no {scheduler.upper()}; submit where there is one, or "
            "print the script with --dry-run"
        )
    process = subprocess.run([program], input=script, capture_output=True, text=True, check=False)
    if process.returncode:
        answer = (process.stderr or process.stdout).strip() or f"exit code {process.returncode}"
        raise UserError(f"{program} has refused the job: {answer}")
    return process.stdout.strip()


@contextmanager
def keep_script(script: str, run: Path) -> Generator[None]:
    """Context manager that stores the script of a job in the folder of its run.

    If the block raises, the script of an earlier job is kept, and a new folder is removed.

    Raises:
        UserError: if the script cannot be written.
    """
    is_new = not run.exists()
    try:
        with writing(run / SCRIPT):
            run.mkdir(parents=True, exist_ok=True)
            with atomic_file(run / SCRIPT) as part:
                part.write_text(script)
                yield
    except BaseException:
        if is_new:
            with suppress(OSError):
                run.rmdir()
        raise


def _slurm(job: SubmittedJob) -> str:
    options = {
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
    # since SLURM 22.05, srun ignores the option --cpus-per-task of sbatch
    cpus = "" if job.cpus_per_rank is None else f"--cpus-per-task={job.cpus_per_rank} "
    lines = [f"#SBATCH --{name}={value}" for name, value in options.items() if value is not None]
    return "\n".join(
        [
            "#!/bin/bash",
            *lines,
            "#SBATCH --requeue",
            "",
            _port("SLURM_JOB_ID"),
            *job.record_lines,
            f"srun --kill-on-bad-exit=1 {cpus}{shlex.join(job.command)}",
            "status=$?",
            f'failures="{job.name}-$SLURM_JOB_ID.failures"',
            "# SLURM takes a job for completed that ends in the time that preemption leaves it.",
            """preempted() { scontrol show job "$SLURM_JOB_ID" | grep -q 'PreemptTime=[0-9]'; }""",
            f'if preempted && {{ [ "$status" -ne 0 ] || {{ {job.interrupted}; }}; }}; then',
            '    scontrol requeue "$SLURM_JOB_ID"',
            'elif [ "$status" -ne 0 ]; then',
            "    # A job that fails starts again where its newest checkpoint is, but not for ever.",
            '    echo "$(date): exit code $status" >> "$failures"',
            f'    if [ "$(wc -l < "$failures")" -le {RESTARTS} ]; then scontrol requeue "$SLURM_JOB_ID"; fi',
            f"elif {job.warned}; then",
            "    # The job's time is nearly over, and the run has not ended.",
            '    rm -f "$failures"',
            '    scontrol requeue "$SLURM_JOB_ID"',
            "fi",
            'exit "$status"',
            "",
        ]
    )


def _pbs(job: SubmittedJob) -> str:
    if job.queue is not None and "," in job.queue:
        raise UserError(f"{job.queue_option} {job.queue!r}: a job of PBS has one queue; give one")
    node_resources = f"ncpus={job.ranks_per_node * (job.cpus_per_rank or 1)}:mpiprocs={job.ranks_per_node}"
    gpus = "" if job.gpus_per_node is None else f":ngpus={job.gpus_per_node}"
    options = {
        "-N": job.name,
        "-l select": f"{job.nodes}:{node_resources}{gpus}",
        "-l walltime": job.time,
        "-q": job.queue,
        "-A": job.account,
        "-r": "y",
        "-j": "oe",
    }
    lines = [f"#PBS {name}{'=' if ' ' in name else ' '}{value}" for name, value in options.items() if value is not None]
    ranks, limit = job.nodes * job.ranks_per_node, job.seconds - WARNING
    started = f"mpiexec -n {ranks} {shlex.join(job.command)}"
    return "\n".join(
        [
            "#!/bin/bash",
            *lines,
            "",
            'cd "$PBS_O_WORKDIR" || exit 1',
            _port("PBS_JOBID"),
            'export MASTER_ADDR="$(head -n 1 "$PBS_NODEFILE")"',
            *job.record_lines,
            f"for attempt in {' '.join(map(str, range(RESTARTS + 1)))}; do",
            f"    # PBS sends no warning. {WARNING} s before the end, timeout signals the ranks to save; it gives 124.",
            f"    timeout --signal=USR1 $(({limit} - SECONDS)) {started}",
            "    status=$?",
            "    # A job that fails starts again where its newest checkpoint is, but not for ever.",
            f'    if [ "$status" -eq 0 ] || [ "$status" -eq 124 ] || [ "$SECONDS" -ge {limit} ]; then break; fi',
            "done",
            *_goes_on_under_pbs(job),
            'exit "$status"',
            "",
        ]
    )


def _goes_on_under_pbs(job: SubmittedJob) -> list[str]:
    """Return lines by which a job submits its script again, since under PBS only operators may requeue a job."""
    if job.run is None:
        return []
    script = shlex.quote(str(job.run / SCRIPT))
    return [
        f'if {{ [ "$status" -eq 0 ] || [ "$status" -eq 124 ]; }} && {job.warned}; then',
        "    # The job's time is nearly over, and the run has not ended.",
        f"    qsub {script} && status=0",
        "fi",
    ]


def _port(identity: str) -> str:
    """Return the line that sets a port for this job, since several jobs may share a host."""
    return f'export MASTER_PORT=$((20000 + 10#0$(echo "${identity}" | tr -dc 0-9 | tail -c 5) % 20000))'
