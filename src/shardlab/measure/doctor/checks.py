"""Checks of a single host. Each check evaluates the facts of the host, and returns problems with their remedy.

`host_facts` collects the facts; `HOST_CHECKS` are the checks; `check_host` yields a `Finding` for each.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import os
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shardlab.common.fields import SHORTEST_SECONDS
from shardlab.common.memory import available_memory
from shardlab.common.text import bytes_text, counted

SAMPLE = 16 << 20
"""Number of bytes that are written to measure the speed of the disk."""

SHARED_MEMORY = Path("/dev/shm")
INFINIBAND = Path("/sys/class/infiniband")
NVIDIA = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class HostFacts:
    """Facts about a host, collected by one of its ranks.

    Attributes:
        rank, host: number of the rank, and name of its host.
        ranks: number of ranks on this host.
        versions: versions of Python and packages (None: not installed).
        distributed: backends of torch.distributed in this build of torch.
        cuda: version of CUDA that torch was built for (None: a build without CUDA).
        gpus: names of the GPUs that torch sees.
        driver: whether NVIDIA's driver is loaded.
        infiniband: whether there is an InfiniBand interface.
        launcher: the launcher that started the ranks.
        cpus: number of CPUs that this process may use.
        threads: OMP_NUM_THREADS, if it is set.
        open_files, locked_memory: soft limits of open files, and of locked bytes (None: no limit).
        shared_memory: free bytes in /dev/shm (None: it does not exist).
        memory: available bytes of memory (None: unknown).
        folder: the current folder, into which runs are written.
        disk: free bytes on the disk of `folder`.
        write_speed: bytes per second of a small file that is synced to the disk (None: none was written).
        write_error: reason why the file could not be written.
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
    """Collect the facts of this host.

    Args:
        rank: number of this process.
        ranks: number of ranks on this host.
        write: whether to write a file in the current folder. One rank of each host does.
    """
    import torch
    import torch.distributed as dist

    from shardlab.train.launch.environment import launcher_of, usable_cpus
    from shardlab.train.world import versions

    backends = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available} if dist.is_available() else {}
    speed, error = _write_speed() if write else (None, None)
    return HostFacts(
        rank=rank,
        host=socket.gethostname(),
        ranks=ranks,
        versions=versions(),
        distributed=tuple(name for name, available in backends.items() if available()),
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
        memory=available_memory(),
        folder=os.getcwd(),
        disk=shutil.disk_usage(".").free,
        write_speed=speed,
        write_error=error,
    )


State = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """Result of a check, with the remedy of a problem.

    Attributes:
        check: name of the check.
        present: description of what the check found.
        remedy: advice if the state is not "ok".
        state: "ok", "warning" (training works, but slowly or not for long) or "error" (it does not work).
        host: name of the host; empty if the finding is about all hosts.
    """

    check: str
    present: str
    remedy: str = ""
    state: State = "ok"
    host: str = ""


PYTHON, TORCH = (3, 11), (2, 9)
"""Oldest versions that Shardlab runs on."""

FILES_NEEDED, FILES_WANTED = 256, 1024
SHARED_WANTED = 256 << 20
MEMORY_PER_RANK = 800 << 20
"""Bytes of memory of a rank that has imported torch and trains a small model."""

DISK_WANTED = 1 << 30
SLOW_DISK = 20e6

CheckResult = tuple[State, str, str] | str
"""State, description and remedy of a finding; or only the description if the state is "ok"."""


def _python(facts: HostFacts) -> CheckResult:
    text = facts.versions["python"] or ""
    return text if _number(text) >= PYTHON else ("error", text, "install Python 3.11 or later, and make .venv anew")


def _torch(facts: HostFacts) -> CheckResult:
    version = facts.versions["torch"] or ""
    return version if _number(version) >= TORCH else ("error", version or "missing", "pip install 'torch>=2.9'")


def _packages(facts: HostFacts) -> CheckResult:
    others = {name: version for name, version in facts.versions.items() if name not in ("python", "torch", "shardlab")}
    missing = [name for name, version in others.items() if version is None]
    if missing:
        return "error", f"{', '.join(missing)} missing", f"pip install {' '.join(missing)}"
    return ", ".join(f"{name} {version}" for name, version in others.items())


def _backend(facts: HostFacts) -> CheckResult:
    backend = "nccl" if facts.gpus else "gloo"
    backends = ", ".join(facts.distributed) or "none"
    if backend in facts.distributed:
        return f"{backend} (torch has {backends})"
    return "error", f"torch has {backends}", f"install a torch that is built with {backend}, from pytorch.org"


def _devices(facts: HostFacts) -> CheckResult:
    if facts.gpus and facts.ranks > len(facts.gpus):
        text = f"{counted(len(facts.gpus), 'GPU')} for {counted(facts.ranks, 'rank')}"
        fewer = f"start {counted(len(facts.gpus), 'rank')} on a host"
        if facts.launcher == "shardlab":
            return "warning", f"{text}: all compute on the CPU", fewer
        return "error", text, fewer
    if facts.gpus:
        return f"{len(facts.gpus)} x {facts.gpus[0]}"
    if facts.driver and facts.cuda is None:
        return "warning", "NVIDIA's driver, but torch is built for CPUs", "install a torch for CUDA, from pytorch.org"
    if facts.cuda is not None:
        remedy = "look at CUDA_VISIBLE_DEVICES and nvidia-smi" if facts.driver else "install NVIDIA's driver"
        return "warning", f"torch for CUDA {facts.cuda}, but no GPU", f"{remedy}, or train on CPUs"
    return "CPU"


def _cpus(facts: HostFacts) -> CheckResult:
    text = f"{counted(facts.cpus, 'CPU')} for {counted(facts.ranks, 'rank')}"
    if facts.ranks > facts.cpus:
        return "warning", text, "ask the scheduler for more CPUs per task, or start fewer ranks here"
    threads = int(facts.threads) if facts.threads and facts.threads.isdecimal() else 1
    if threads * facts.ranks > facts.cpus and facts.ranks > 1:
        return "warning", f"{text} of {threads} threads", f"set OMP_NUM_THREADS={facts.cpus // facts.ranks}"
    return text


def _launcher(facts: HostFacts) -> CheckResult:
    return "none: shardlab starts the ranks" if facts.launcher == "shardlab" else facts.launcher


def _open_files(facts: HostFacts) -> CheckResult:
    if facts.open_files is None:
        return "without limit"
    state = "error" if facts.open_files < FILES_NEEDED else "warning"
    if facts.open_files >= FILES_WANTED:
        return f"{facts.open_files:,}"
    return state, f"{facts.open_files:,}", f"ulimit -n {4 * FILES_WANTED}: each rank keeps connections to the others"


def _locked_memory(facts: HostFacts) -> CheckResult:
    if facts.locked_memory is None:
        return "without limit"
    limit = bytes_text(facts.locked_memory, 1)
    if facts.infiniband:
        return "warning", f"{limit}, with InfiniBand", "ulimit -l unlimited, or docker run --ulimit memlock=-1"
    return f"{limit} (matters for InfiniBand, which is not here)"


def _shared_memory(facts: HostFacts) -> CheckResult:
    remedy = "mount it larger: docker run --shm-size=1g, or mount -o remount,size=1g /dev/shm"
    if facts.shared_memory is None:
        return "warning", "no /dev/shm", "mount -t tmpfs tmpfs /dev/shm; NCCL and torch share memory there"
    free = f"{bytes_text(facts.shared_memory, 1)} free in /dev/shm"
    return ("warning", free, remedy) if facts.shared_memory < SHARED_WANTED else free


def _memory(facts: HostFacts) -> CheckResult:
    if facts.memory is None:
        return "not known"
    text = f"{bytes_text(facts.memory, 1)} available for {counted(facts.ranks, 'rank')}"
    if facts.memory < MEMORY_PER_RANK * facts.ranks:
        requirement = f"{bytes_text(MEMORY_PER_RANK, 1)} a rank at least"
        return "warning", text, f"start fewer ranks here, or free some: {requirement}"
    return text


def _disk(facts: HostFacts) -> CheckResult:
    text = f"{bytes_text(facts.disk, 1)} free"
    if facts.write_error is not None:
        return ("error", f"{facts.folder}: {facts.write_error}", "go to a folder that can be written, for runs")
    if facts.write_speed is not None:
        text += f", {facts.write_speed / 1e6:,.0f} MB/s"
    if facts.disk < DISK_WANTED:
        return "warning", text, f"free some space in {facts.folder}, or train elsewhere"
    if facts.write_speed is not None and facts.write_speed < SLOW_DISK:
        return "warning", text, "keep runs on a faster disk (--out): checkpoints will take long"
    return text


HOST_CHECKS: dict[str, Callable[[HostFacts], CheckResult]] = {
    "python": _python,
    "torch": _torch,
    "packages": _packages,
    "backend": _backend,
    "devices": _devices,
    "cpus": _cpus,
    "launcher": _launcher,
    "open files": _open_files,
    "locked memory": _locked_memory,
    "shared memory": _shared_memory,
    "memory": _memory,
    "disk": _disk,
}


def check_host(facts: HostFacts, host: str = "") -> Iterator[Finding]:
    """Yield the findings of all checks of a host."""
    for name, check in HOST_CHECKS.items():
        yield finding(name, check(facts), host)


def finding(check: str, result: CheckResult, host: str = "") -> Finding:
    """Return the result of a check as a finding."""
    if isinstance(result, str):
        return Finding(check, result, host=host)
    state, present, remedy = result
    return Finding(check, present, remedy, state, host)


def _limit(resource_kind: int) -> int | None:
    soft, _ = resource.getrlimit(resource_kind)
    return None if soft == resource.RLIM_INFINITY else soft


def _write_speed() -> tuple[float | None, str | None]:
    """Return the bytes per second of writing a small file into the current folder, or the reason why that fails."""
    try:
        with tempfile.TemporaryFile(dir=".") as file:
            began = time.monotonic()
            file.write(bytes(SAMPLE))
            file.flush()
            os.fsync(file.fileno())
            return SAMPLE / max(SHORTEST_SECONDS, time.monotonic() - began), None
    except OSError as error:
        return None, error.strerror or str(error)


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
