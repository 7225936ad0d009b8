"""Ranks of a run: their hosts and devices, and checks that all of them have the same inputs.

`RunningWorld` is shown when a run starts, and recorded in run.json. `require_agreement` compares the programs, data and
checkpoints of the ranks, and `ranks_without_folder` finds ranks that do not see the output folder.
"""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import os
import platform
import secrets
import socket
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table

from shardlab.check import Checked
from shardlab.common.files import PART_SUFFIX
from shardlab.common.text import counted, listed
from shardlab.execute.requirements import gpu_count
from shardlab.execute.transport.collectives import gather_objects
from shardlab.language import Mesh
from shardlab.train.history import writing
from shardlab.train.launch.environment import as_ranges, asked_threads, launcher_of, usable_cpus

VERSIONED = ("shardlab", "torch", "numpy", "safetensors")
"""Packages whose versions run.json records."""

SHOWN = 16
"""Largest number of ranks that the table shows. run.json has all of them."""


@dataclass(frozen=True)
class RankPlace:
    """Host and device of a rank.

    Attributes:
        rank: number of the rank.
        host, device: host and device on which the rank runs.
        mesh: coordinate of the rank on each mesh axis that is longer than 1.
        cpus: CPUs on which the rank may run, such as 0-3.
        threads: number of threads for the rank's computations on the CPU.
    """

    rank: int
    host: str
    device: str
    mesh: dict[str, int]
    cpus: str = ""
    threads: int = 1


@dataclass(frozen=True)
class RunningWorld:
    """All ranks of a run.

    Attributes:
        places: host and device of each rank, in order.
        backend: backend of torch.distributed.
        launcher: program that started the ranks.
        versions: versions of Python and of packages on rank 0; None for a package that is not installed.
    """

    places: list[RankPlace]
    backend: str
    launcher: str
    versions: dict[str, str | None]

    @classmethod
    def gather(cls, rank: int, device: torch.device, mesh: Mesh) -> RunningWorld:
        """Gather the places of all ranks. Every rank calls this."""
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
        coordinates = {axis: mesh.coordinate(rank, axis) for axis in mesh.used}
        cpus, threads = as_ranges(usable_cpus()), torch.get_num_threads()
        place = RankPlace(rank, socket.gethostname(), f"{device} ({name})", coordinates, cpus, threads)
        return cls(gather_objects(place), str(dist.get_backend()), launcher_of(os.environ), versions())

    @property
    def bound(self) -> bool:
        """Whether ranks of the same host run on different CPUs."""
        hosts = {place.host for place in self.places}
        pinned = {(place.host, place.cpus) for place in self.places}
        return len(hosts) < len(pinned) == len(self.places)

    def print(self, console: Console) -> None:
        """Print a row for each rank, and below them a line with the facts that all ranks have in common."""
        table = Table(box=box.SIMPLE_HEAD if console.is_terminal else None, pad_edge=False, show_edge=False)
        axes = list(self.places[0].mesh)
        bound = ["cpus"] * self.bound
        for name in ("rank", "host", "device", *bound, *axes):
            table.add_column(name, justify="left" if name in ("host", "device") else "right", overflow="fold")
        for place in self.places[:SHOWN]:
            cpus, mesh = [place.cpus] * len(bound), [str(place.mesh[axis]) for axis in axes]
            table.add_row(str(place.rank), place.host, place.device, *cpus, *mesh)
        console.print(table)
        if (omitted := len(self.places) - SHOWN) > 0:
            console.print(f"and {omitted} more, in run.json", highlight=False)
        versions = ", ".join(f"{name} {number}" for name, number in self.versions.items() if number)
        threads_text = f", {counted(self.places[0].threads, 'thread')} each" if self.backend == "gloo" else ""
        line, whole = f"{self.backend}, started by {self.launcher}{threads_text}; {versions}", not console.is_terminal
        console.print(line, highlight=False, soft_wrap=whole)
        if self.backend == "gloo" and (threads := self.places[0].threads) > 1 and (busy := busy_cpus()):
            line = (
                f"{busy} were busy in the last minute; if that was other work, each op waits for the slowest of its "
                f"{threads} threads, and OMP_NUM_THREADS=1 may be faster"
            )
            console.print(line, highlight=False, soft_wrap=whole)
        if self.backend == "gloo" and (gpus := gpu_count()):
            ranks, noun = counted(len(self.places), "rank"), "GPU" if gpus == 1 else "GPUs"
            line = f"{ranks} on {counted(gpus, 'GPU')}: all compute on the CPU; --ranks {gpus} takes the {noun}"
            console.print(line, highlight=False, soft_wrap=whole)


def busy_cpus() -> str:
    """Return how many CPUs were busy in the last minute, as text; empty if fewer than half of all.

    The text is also empty if the user has chosen the number of threads (`OMP_NUM_THREADS`).
    """
    load, cpus = os.getloadavg()[0], os.cpu_count() or 1
    if asked_threads(os.environ) is not None or load < cpus / 2:
        return ""
    return f"about {min(load, cpus):.1f} of {cpus} CPUs"


def versions() -> dict[str, str | None]:
    """Return the versions of Python and of the packages in VERSIONED; None for a package that is not installed."""
    return {"python": platform.python_version(), **{name: _version(name) for name in VERSIONED}}


def ranks_without_folder(folder: Path, patience: float) -> str:
    """Find the ranks that do not see the files that rank 0 writes into a folder. Every rank calls this.

    Args:
        folder: folder of the run, which rank 0 has made.
        patience: seconds after which a file that another host has written should be visible.

    Returns:
        A sentence with the ranks and their hosts; empty if every rank sees the folder.

    Raises:
        UserError: on rank 0, if the folder cannot be written, as on a full disk.
    """
    token, rank = [secrets.token_hex(8)], dist.get_rank()
    mark = folder / f"seen-by-all{PART_SUFFIX}"
    if rank == 0:
        with writing(mark):
            mark.write_text(token[0])
    dist.broadcast_object_list(token, 0)  # after this, the file is written
    deadline = time.monotonic() + patience
    while not (sees := _has_text(mark, token[0])) and time.monotonic() < deadline:
        time.sleep(0.1)
    results = gather_objects((sees, socket.gethostname()))
    if rank == 0:
        mark.unlink()
    blind = {rank: host for rank, (sees, host) in enumerate(results) if not sees}
    if not blind:
        return ""
    hosts = ", ".join(dict.fromkeys(blind.values()))
    return (
        f"{folder.absolute()}, which rank 0 has made on {results[0][1]}, is not seen by rank {listed(blind)} "
        f"(on {hosts}); name a folder that all hosts share with --out, by an absolute path if they run in different "
        "folders"
    )


def require_agreement(checked: Checked, data: str, resumed: str = "") -> None:
    """Check that all ranks have traced the same tapes, read the same data and resume from the same checkpoint.

    Unequal tapes would silently give wrong numbers, since gloo sums whatever it receives.

    Args:
        checked: program of this rank.
        data: identity of its data, such as a hash.
        resumed: path of its checkpoint, if there is one.

    Raises:
        RuntimeError: if some ranks differ from rank 0; the message names them.
    """
    all_inputs = gather_objects((checked.program.fingerprint(), data, resumed))
    for difference, index in (("another program", 0), ("other data", 1), ("another checkpoint", 2)):
        others = [rank for rank, inputs in enumerate(all_inputs) if inputs[index] != all_inputs[0][index]]
        if others:
            raise RuntimeError(
                f"rank {', '.join(map(str, others))} has {difference} than rank 0; "
                "run the same files, with the same Python, on every host"
            )


def _version(package: str) -> str | None:
    """Return the version of a package; None if it runs from a folder without being installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _has_text(path: Path, text: str) -> bool:
    try:
        return path.read_text() == text
    except OSError:
        return False
