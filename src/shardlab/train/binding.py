"""CPU cores of this host, dealt to its ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
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


def as_ranges(cpus: Iterable[int]) -> str:
    """Spell numbers of CPUs as `taskset` does.

    >>> as_ranges([0, 1, 2, 8])
    '0-2,8'
    """
    runs = [[cpu for _, cpu in run] for _, run in groupby(enumerate(sorted(cpus)), lambda pair: pair[1] - pair[0])]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
