"""Facts about a host and the process that runs there, which the checks judge."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from shardlab.program.duration import TICK

SAMPLE = 16 << 20
"""Bytes that are written to learn how fast the disk is."""

SHARED_MEMORY = Path("/dev/shm")
INFINIBAND = Path("/sys/class/infiniband")
NVIDIA = Path("/proc/driver/nvidia/version")
MEMORY = Path("/proc/meminfo")


@dataclass(frozen=True)
class HostFacts:
    """Facts about a host, as one of its ranks sees them.

    Attributes:
        rank, host: the process, and where it runs.
        ranks: processes of the world on this host.
        versions: of Python and packages; None for one that is missing.
        distributed: backends of torch.distributed that this torch has.
        cuda: version of CUDA that torch was built for; None for a build without.
        gpus: names of those that torch sees.
        driver: whether NVIDIA's driver is loaded.
        infiniband: whether there is such an interface.
        launcher: what started the ranks.
        cpus: how many this process may use.
        threads: OMP_NUM_THREADS, if it is set.
        open_files, locked_memory: soft limits, of files and bytes; None: without limit.
        shared_memory: bytes that are free in /dev/shm; None if there is none.
        memory: bytes of memory that are available; None if the system does not say.
        folder: where runs are written.
        disk: bytes that are free there.
        write_speed: bytes per second of a small file that is brought to the disk; None if none was written.
        write_error: why it could not be written.
    """

    rank: int
    host: str
    ranks: int
    versions: dict[str, str | None]
    distributed: tuple[str, ...]
    cuda: str | None
    gpus: tuple[str, ...]
    driver: bool
    infiniband: bool
    launcher: str
    cpus: int
    threads: str | None
    open_files: int | None
    locked_memory: int | None
    shared_memory: int | None
    memory: int | None
    folder: str
    disk: int
    write_speed: float | None
    write_error: str | None


def host_facts(rank: int, ranks: int, *, write: bool) -> HostFacts:
    """Look at this host.

    Args:
        rank, ranks: this process's number, and how many ranks are on this host.
        write: whether to write a file in the current folder: one rank of a host does.
    """
    import torch
    import torch.distributed as dist

    from shardlab.train.binding import usable_cpus
    from shardlab.train.launch_environment import launcher_of
    from shardlab.train.world import versions

    there = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available} if dist.is_available() else {}
    speed, error = _write_speed() if write else (None, None)
    return HostFacts(
        rank=rank,
        host=socket.gethostname(),
        ranks=ranks,
        versions=versions(),
        distributed=tuple(name for name, available in there.items() if available()),
        cuda=torch.version.cuda,
        gpus=tuple(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())),
        driver=NVIDIA.exists(),
        infiniband=INFINIBAND.is_dir() and any(INFINIBAND.iterdir()),
        launcher=launcher_of(os.environ),
        cpus=len(usable_cpus()),
        threads=os.environ.get("OMP_NUM_THREADS"),
        open_files=_limit(resource.RLIMIT_NOFILE),
        locked_memory=_limit(resource.RLIMIT_MEMLOCK),
        shared_memory=shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else None,
        memory=_available_memory(),
        folder=os.getcwd(),
        disk=shutil.disk_usage(".").free,
        write_speed=speed,
        write_error=error,
    )


def _limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def _available_memory() -> int | None:
    if platform.system() != "Linux":
        return None
    fields = dict(line.split(":") for line in MEMORY.read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def _write_speed() -> tuple[float | None, str | None]:
    """Bytes per second of a small file in the current folder, or why it cannot be written."""
    try:
        with tempfile.TemporaryFile(dir=".") as file:
            began = time.monotonic()
            file.write(bytes(SAMPLE))
            file.flush()
            os.fsync(file.fileno())
            return SAMPLE / max(TICK, time.monotonic() - began), None
    except OSError as error:
        return None, error.strerror or str(error)
