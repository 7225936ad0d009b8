"""CPUs of this host, dealt to its ranks, and the threads on which each computes."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path

from shardlab.program import UserError
from shardlab.train.launch_environment import LaunchEnvironment

TOPOLOGY = Path("/sys/devices/system/cpu")


def usable_cpus(process: int = 0) -> list[int]:
    """CPUs on which a process (0: this one) may run, those of a core together, and cores of a socket together."""
    if sys.platform != "linux":
        return list(range(os.cpu_count() or 1))
    return sorted(os.sched_getaffinity(process), key=_position)


def _position(cpu: int) -> tuple[int, int, int]:
    folder = TOPOLOGY / f"cpu{cpu}" / "topology"
    try:
        package, core = (int((folder / name).read_text()) for name in ("physical_package_id", "core_id"))
    except OSError:
        return 0, cpu, cpu
    return package, core, cpu


def dealt(cpus: Sequence[int], ranks: int) -> list[list[int]]:
    """Deal CPUs to ranks, as evenly as can be: neighbours to each.

    >>> dealt([0, 1, 2, 3, 4], 2)
    [[0, 1], [2, 3, 4]]

    Raises:
        UserError: when there are fewer CPUs than ranks.
    """
    if len(cpus) < ranks:
        raise UserError(
            f"--bind gives each rank CPUs of its own, but {ranks} ranks are to share {len(cpus)}; "
            "start fewer ranks here, or leave out --bind"
        )
    bounds = [rank * len(cpus) // ranks for rank in range(ranks + 1)]
    return [list(cpus[start:stop]) for start, stop in pairwise(bounds)]


def bind(environment: LaunchEnvironment) -> None:
    """Keep this process, and the threads that it starts from now on, on CPUs that no other rank of this host has.

    Where the launcher has bound its ranks already, so that this one may use fewer CPUs than what started it, that
    stands.

    Raises:
        UserError: when there are too few CPUs, or the launcher does not say how many ranks are on this host.
    """
    if sys.platform != "linux":
        raise UserError("--bind works on Linux; leave it out here")
    cpus = usable_cpus()
    if len(cpus) < len(usable_cpus(os.getppid())):
        return
    if environment.local_world is None:
        raise UserError("--bind needs to know how many ranks are on this host; set LOCAL_WORLD_SIZE")
    os.sched_setaffinity(0, dealt(cpus, environment.local_world)[environment.local_rank])


@dataclass(frozen=True)
class CpuShare:
    """What a rank may compute on.

    Attributes:
        host: its name.
        cpus: numbers of the CPUs on which the rank may run.
        quota: CPUs whose time all processes of its container get together (None: no quota).
        asked: threads that somebody asks for by OMP_NUM_THREADS (None: nobody does).
    """

    host: str
    cpus: frozenset[int]
    quota: float | None
    asked: int | None

    @classmethod
    def of_this_process(cls) -> CpuShare:
        """The share of this process."""
        return cls(socket.gethostname(), frozenset(usable_cpus()), cpu_quota(), asked_threads(os.environ))


def threads_of(shares: Sequence[CpuShare]) -> int:
    """Threads on which each rank of a world computes: as many as the rank with the fewest CPUs of its own can use.

    Ranks of a host that may run on the same CPUs share them evenly. OMP_NUM_THREADS prevails. The number is the same
    on all ranks, because results of other numbers of threads differ in their last bits, and replicas are to be equal.

    Args:
        shares: of all ranks.

    >>> eight = frozenset(range(8))
    >>> threads_of([CpuShare("a", eight, None, None)] * 2), threads_of([CpuShare("a", eight, None, 3)] * 2)
    (4, 3)
    """
    hosts: dict[str, list[CpuShare]] = {}
    for share in shares:
        hosts.setdefault(share.host, []).append(share)
    return min(mine.asked or _threads_beside(mine, here) for here in hosts.values() for mine in here)


def _threads_beside(mine: CpuShare, here: Sequence[CpuShare]) -> int:
    """Threads for the CPUs of one rank, which may share them with others of its host."""
    cpus = len(mine.cpus) / sum(not mine.cpus.isdisjoint(share.cpus) for share in here)
    return max(1, int(cpus if mine.quota is None else min(cpus, mine.quota / len(here))))


def asked_threads(environ: Mapping[str, str]) -> int | None:
    """Threads that OMP_NUM_THREADS asks for; of a list, as nested regions have one, its first number."""
    first = environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) > 0 else None


def cpu_quota(groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """CPUs whose time the control groups of this process allow it, as containers are limited; None without a limit.

    Of version 2 (cpu.max, in the kernel's Documentation/admin-guide/cgroup-v2.rst), of the group and those above.
    """
    try:
        lines = groups.read_text().splitlines()
    except OSError:
        return None
    found: list[float] = []
    for line in lines:
        if line.startswith("0::"):
            folder = root / line.removeprefix("0::").strip().lstrip("/")
            for each in (folder, *folder.parents):
                if each.is_relative_to(root):
                    with suppress(OSError, ValueError):  # the topmost has no such file, nor has one "max"imum a number
                        quota, period = (each / "cpu.max").read_text().split()
                        found.append(int(quota) / int(period))
    return min(found, default=None)


def as_ranges(cpus: Iterable[int]) -> str:
    """Spell numbers of CPUs as `taskset` does.

    >>> as_ranges([0, 1, 2, 8])
    '0-2,8'
    """
    runs = [[cpu for _, cpu in run] for _, run in groupby(enumerate(sorted(cpus)), lambda pair: pair[1] - pair[0])]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
