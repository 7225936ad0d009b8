"""The world that torchrun, SLURM, PBS or mpiexec has put this process into, if any, and whether it can meet there."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shardlab.program import UserError


@dataclass(frozen=True)
class LaunchEnvironment:
    """A launcher's world, as its variables tell this process.

    Attributes:
        rank, world: its number among all processes, and how many there are.
        local_rank: its number on its own host: the device that it uses.
        address, port: where the processes meet.
        local_world: how many processes are on its host; None if the launcher does not say.
    """

    rank: int
    world: int
    local_rank: int
    address: str
    port: int
    local_world: int | None = None

    def variables(self) -> dict[str, str]:
        """The world as torch.distributed's `env://` reads it, and every script that torchrun can start."""
        local = {} if self.local_world is None else {"LOCAL_WORLD_SIZE": str(self.local_world)}
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world),
            "LOCAL_RANK": str(self.local_rank),
            **local,
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }


_OMPI = "OMPI_COMM_WORLD_"

_LAUNCHERS = (
    # launcher, its variables for rank, world size, local rank, local size
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("Open MPI's mpiexec", f"{_OMPI}RANK", f"{_OMPI}SIZE", f"{_OMPI}LOCAL_RANK", f"{_OMPI}LOCAL_SIZE"),
    ("PALS's mpiexec", "PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PMI_LOCAL_SIZE"),
    ("MPICH's mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("SLURM's srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
)


def find_launch_environment(environment: Mapping[str, str]) -> LaunchEnvironment | None:
    """Read the launcher's environment variables; None if no launcher started this process.

    All processes meet at MASTER_ADDR:MASTER_PORT. torchrun sets both; under SLURM the host that started the step is
    taken if there is none, under PBS the first of the job's hosts, and a world on one host meets on 127.0.0.1.

    Raises:
        UserError: when the variables contradict each other, or hosts are several and none is named to meet on.
    """
    for launcher, rank_name, world_name, local_name, size_name in _LAUNCHERS:
        if rank_name not in environment or world_name not in environment:
            continue
        numbers: dict[str, int] = {}
        for name in (rank_name, world_name, local_name, "MASTER_PORT"):
            text = environment.get(name, {"MASTER_PORT": "29500"}.get(name, environment[rank_name]))
            if not text.isdecimal():
                raise UserError(f"{name} is {text!r}, set by {launcher}; it must be a whole number")
            numbers[name] = int(text)
        rank, world = numbers[rank_name], numbers[world_name]
        if rank >= world:
            raise UserError(f"{rank_name} is {rank} but {world_name} is {world}; {launcher} counts ranks from 0")
        address = environment.get("MASTER_ADDR") or environment.get("SLURM_LAUNCH_NODE_IPADDR") or _of_pbs(environment)
        if address is None and environment.get("SLURM_JOB_NUM_NODES", "1") != "1":
            raise UserError(f"{launcher} started {world} processes on several hosts; name one of them in MASTER_ADDR")
        here = _tasks_here(environment.get(size_name, ""), environment.get("SLURM_NODEID", "0"))
        port = numbers["MASTER_PORT"]
        return LaunchEnvironment(rank, world, numbers[local_name], address or "127.0.0.1", port, here)
    return None


def _of_pbs(environment: Mapping[str, str]) -> str | None:
    """The first of a PBS job's hosts, if it has several."""
    file = environment.get("PBS_NODEFILE")
    if file is None:
        return None
    try:
        hosts = dict.fromkeys(Path(file).read_text().split())
    except OSError as error:
        raise UserError(f"PBS_NODEFILE is {file!r}, which cannot be read ({error.strerror})") from error
    return next(iter(hosts)) if len(hosts) > 1 else None


def _tasks_here(text: str, node: str) -> int | None:
    """How many processes are on this host: a number, or SLURM's list such as `2(x3),1`, host by host."""
    counts: list[int] = []
    for word in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", word)
        if found is None:
            return None
        counts += [int(found[1])] * int(found[2] or 1)
    at = int(node) if node.isdecimal() else 0
    return counts[at] if at < len(counts) else counts[0]


def launcher_of(environment: Mapping[str, str]) -> str:
    """What started this process: the launcher's name, or shardlab itself."""
    found = (name for name, rank, world, *_ in _LAUNCHERS if rank in environment and environment.get(world, "1") != "1")
    return next(found, "shardlab")


def require_port(environment: Mapping[str, str]) -> None:
    """Refuse a port that is in use, before the seconds that importing torch takes, on the rank that will listen there.

    Under torchrun its agent listens.

    Raises:
        UserError: if so.
    """
    found = find_launch_environment(environment)
    if found is None or found.rank or found.world == 1 or "TORCHELASTIC_RUN_ID" in environment:
        return
    try:
        socket.create_server(("", found.port)).close()
    except OSError as error:
        raise port_in_use(found, os.strerror(error.errno or 0)) from None


def port_in_use(environment: LaunchEnvironment, reason: str) -> UserError:
    """Make the error that rank 0 raises when it cannot listen."""
    return UserError(
        f"rank 0 could not meet the others at {environment.address}:{environment.port}: is the port in use? "
        f"Choose another in MASTER_PORT ({reason})"
    )


def may_restart(environment: Mapping[str, str]) -> bool:
    """Whether torchrun starts the ranks again after a failure, perhaps on fewer hosts, or on more."""
    return environment.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"


def restarts(environment: Mapping[str, str]) -> int:
    """How many times torchrun has started the ranks again after a failure."""
    return int(environment.get("TORCHELASTIC_RESTART_COUNT", "0"))
