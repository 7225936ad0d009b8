"""Checks of one host: each judges its facts, and names what is wrong with them and the remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from shardlab.doctor.facts import HostFacts
from shardlab.doctor.finding import Finding, State
from shardlab.rules.pieces import counted

PYTHON, TORCH = (3, 11), (2, 9)
"""Oldest versions that Shardlab runs on."""

FILES_NEEDED, FILES_WANTED = 256, 1024
SHARED_WANTED = 256 << 20
MEMORY_PER_RANK = 800 << 20
"""Bytes of a rank that has imported torch and trains something small."""

DISK_WANTED = 1 << 30
SLOW_DISK = 20e6

Judged = tuple[State, str, str] | str
"""State, what is there and the remedy; or only what is there, which is well."""


def _python(facts: HostFacts) -> Judged:
    found = facts.versions["python"] or ""
    return found if _number(found) >= PYTHON else ("error", found, "install Python 3.11 or later, and make .venv anew")


def _torch(facts: HostFacts) -> Judged:
    found = facts.versions["torch"] or ""
    return found if _number(found) >= TORCH else ("error", found or "missing", "pip install 'torch>=2.9'")


def _packages(facts: HostFacts) -> Judged:
    others = {name: found for name, found in facts.versions.items() if name not in ("python", "torch", "shardlab")}
    missing = [name for name, found in others.items() if found is None]
    if missing:
        return "error", f"{', '.join(missing)} missing", f"pip install {' '.join(missing)}"
    return ", ".join(f"{name} {found}" for name, found in others.items())


def _backend(facts: HostFacts) -> Judged:
    wanted = "nccl" if facts.gpus else "gloo"
    found = ", ".join(facts.distributed) or "none"
    if wanted in facts.distributed:
        return f"{wanted} (torch has {found})"
    return "error", f"torch has {found}", f"install a torch that is built with {wanted}, from pytorch.org"


def _devices(facts: HostFacts) -> Judged:
    if facts.gpus and facts.ranks > len(facts.gpus):
        found = f"{counted(len(facts.gpus), 'GPU')} for {counted(facts.ranks, 'rank')}"
        fewer = f"start {counted(len(facts.gpus), 'rank')} on a host"
        if facts.launcher == "shardlab":
            return "warning", f"{found}: all compute on the CPU", fewer
        return "error", found, fewer
    if facts.gpus:
        return f"{len(facts.gpus)} x {facts.gpus[0]}"
    if facts.driver and facts.cuda is None:
        return "warning", "NVIDIA's driver, but torch is built for CPUs", "install a torch for CUDA, from pytorch.org"
    if facts.cuda is not None:
        remedy = "look at CUDA_VISIBLE_DEVICES and nvidia-smi" if facts.driver else "install NVIDIA's driver"
        return "warning", f"torch for CUDA {facts.cuda}, but no GPU", f"{remedy}, or train on CPUs"
    return "CPU"


def _cpus(facts: HostFacts) -> Judged:
    found = f"{counted(facts.cpus, 'CPU')} for {counted(facts.ranks, 'rank')}"
    if facts.ranks > facts.cpus:
        return "warning", found, "ask the scheduler for more CPUs per task, or start fewer ranks here"
    threads = int(facts.threads) if facts.threads and facts.threads.isdecimal() else 1
    if threads * facts.ranks > facts.cpus and facts.ranks > 1:
        return "warning", f"{found} of {threads} threads", f"set OMP_NUM_THREADS={facts.cpus // facts.ranks}"
    return found


def _launcher(facts: HostFacts) -> Judged:
    return "none: shardlab starts the ranks" if facts.launcher == "shardlab" else facts.launcher


def _open_files(facts: HostFacts) -> Judged:
    if facts.open_files is None:
        return "without limit"
    state = "error" if facts.open_files < FILES_NEEDED else "warning"
    if facts.open_files >= FILES_WANTED:
        return f"{facts.open_files:,}"
    return state, f"{facts.open_files:,}", f"ulimit -n {4 * FILES_WANTED}: each rank keeps connections to the others"


def _locked_memory(facts: HostFacts) -> Judged:
    if facts.locked_memory is None:
        return "without limit"
    found = f"{_size(facts.locked_memory)}"
    if facts.infiniband:
        return "warning", f"{found}, with InfiniBand", "ulimit -l unlimited, or docker run --ulimit memlock=-1"
    return f"{found} (matters for InfiniBand, which is not here)"


def _shared_memory(facts: HostFacts) -> Judged:
    remedy = "mount it larger: docker run --shm-size=1g, or mount -o remount,size=1g /dev/shm"
    if facts.shared_memory is None:
        return "warning", "no /dev/shm", "mount -t tmpfs tmpfs /dev/shm; NCCL and torch share memory there"
    found = f"{_size(facts.shared_memory)} free in /dev/shm"
    return ("warning", found, remedy) if facts.shared_memory < SHARED_WANTED else found


def _memory(facts: HostFacts) -> Judged:
    if facts.memory is None:
        return "not known"
    found = f"{_size(facts.memory)} available for {counted(facts.ranks, 'rank')}"
    if facts.memory < MEMORY_PER_RANK * facts.ranks:
        wants = f"{_size(MEMORY_PER_RANK)} a rank at least"
        return "warning", found, f"start fewer ranks here, or free some: {wants}"
    return found


def _disk(facts: HostFacts) -> Judged:
    found = f"{_size(facts.disk)} free"
    if facts.write_error is not None:
        return (
            "error",
            f"{facts.folder}: {facts.write_error}",
            "go to a folder that can be written, for runs",
        )
    if facts.write_speed is not None:
        found += f", {facts.write_speed / 1e6:,.0f} MB/s"
    if facts.disk < DISK_WANTED:
        return "warning", found, f"free some space in {facts.folder}, or train elsewhere"
    if facts.write_speed is not None and facts.write_speed < SLOW_DISK:
        return "warning", found, "keep runs on a faster disk (--out): checkpoints will take long"
    return found


HOST_CHECKS: dict[str, Callable[[HostFacts], Judged]] = {
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


def examined(facts: HostFacts, host: str = "") -> Iterator[Finding]:
    """Judge a host by all checks."""
    for name, check in HOST_CHECKS.items():
        yield finding(name, check(facts), host)


def finding(check: str, judged: Judged, host: str = "") -> Finding:
    """A check's judgement as a finding."""
    if isinstance(judged, str):
        return Finding(check, judged, host=host)
    state, present, remedy = judged
    return Finding(check, present, remedy, state, host)


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())


def _size(bytes: int) -> str:
    return f"{bytes / 2**30:,.1f} GiB" if bytes >= 2**30 else f"{bytes / 2**20:,.1f} MiB"
