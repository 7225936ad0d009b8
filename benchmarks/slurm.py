"""Run a job that Shardlab submits, on a scheduler of one node that this script starts from Debian's packages.

As root: `apt-get install slurmctld slurmd slurm-client munge`, then `python benchmarks/slurm.py [COMMAND ...]`. The
default command of Shardlab is `test`. With `--warned`, it is a training that SLURM warns after its first steps that its
time is nearly over. It must save, be requeued, which takes SLURM two minutes, and run to its end. All files except
munge's socket are in a temporary folder, which is deleted with the end of this script.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LIMIT = 600
"""Seconds until the job has to be over."""

CONFIG = """
ClusterName=shardlab
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmctldPort={port}
SlurmdPort={other}
AuthType=auth/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


def free_port() -> int:
    """A free port of this host."""
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def output_of(*command: str) -> str:
    """Output of a command."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def steps_of(run: Path) -> int:
    """Number of steps that a run has recorded."""
    metrics = run / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def start_munge() -> subprocess.Popen[bytes] | None:
    """Start munge's daemon, which authenticates users, unless one runs already."""
    if (
        Path("/run/munge/munge.socket.2").is_socket()
        and subprocess.run(["munge", "-n"], capture_output=True).returncode == 0
    ):
        return None
    Path("/run/munge").mkdir(exist_ok=True)
    shutil.chown("/run/munge", "munge", "munge")
    return subprocess.Popen(["runuser", "-u", "munge", "--", "munged", "--foreground"], stderr=subprocess.DEVNULL)


TRAIN = ["train", "--strategy", "fsdp", "--hidden-size", "16", "--steps", "3000"]


def main(command: list[str]) -> int:
    """Start the daemons, submit the job, wait until it is over, and print its log; its exit status is the job's."""
    warned = command == ["--warned"]
    command = TRAIN if warned else command or ["test"]
    missing = [name for name in ("slurmctld", "slurmd", "sbatch", "munged") if shutil.which(name) is None]
    if missing or os.geteuid():
        print(f"run this as root, with slurmctld, slurmd, slurm-client and munge installed; missing: {missing}")
        return 2
    daemons = [munge] if (munge := start_munge()) else []
    with tempfile.TemporaryDirectory(prefix="slurm-") as name:
        folder = Path(name)
        (folder / "state").mkdir()
        (folder / "spool").mkdir()
        host, cpus = socket.gethostname().partition(".")[0], len(os.sched_getaffinity(0))
        config = CONFIG.format(host=host, folder=folder, port=free_port(), other=free_port(), cpus=cpus)
        (folder / "slurm.conf").write_text(config)
        os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
        try:
            time.sleep(1)
            daemons += [
                subprocess.Popen([daemon, "-D"], stderr=subprocess.DEVNULL) for daemon in ("slurmctld", "slurmd")
            ]
            while host not in output_of("sinfo", "--noheader", "--states=idle", "--format=%n"):
                time.sleep(0.2)
            print(output_of("sinfo"), flush=True)
            ranks = str(min(2, cpus))
            job_name = f"slurm-{os.getpid()}"
            flags = ["--scheduler", "slurm", "--ranks-per-node", ranks, "--time", "10m", "--name", job_name]
            words = [sys.executable, "-m", "shardlab", "submit", *flags, "--", *command]
            answer = output_of(*words).strip()
            print(f"{shlex.join(words)}\n{answer}", flush=True)
            job, state, began = answer.split()[-1], "PENDING", time.monotonic()
            while state in ("PENDING", "RUNNING", "COMPLETING") and time.monotonic() - began < LIMIT:
                time.sleep(0.5)
                state = re.findall(r"JobState=(\w+)", output_of("scontrol", "show", "job", job))[0]
                if warned and steps_of(Path("runs", job_name)) > 10:
                    output_of("scancel", "--signal=USR1", job)
                    print(f"warned after step {steps_of(Path('runs', job_name))}", flush=True)
                    warned = False
            log = Path(f"{job_name}-{job}.log")
            print(log.read_text() if log.exists() else "the job has left no log", end="")
            print(f"\n{state} after {time.monotonic() - began:.1f} s")
            return 0 if state == "COMPLETED" else 1
        finally:
            for daemon in reversed(daemons):
                daemon.terminate()
                daemon.wait()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
