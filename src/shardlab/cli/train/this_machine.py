"""What one rank decides for all, before they compute."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shardlab.check import Checked
from shardlab.cli.plan_options import recipe_called
from shardlab.common.text import bytes_text
from shardlab.language import UserError
from shardlab.language.rules.refusals import DISK, PLACES
from shardlab.simulate.timeline.memory import peak_elsewhere_in_bytes
from shardlab.train.launch.environment import find_launch_environment

if TYPE_CHECKING:
    from shardlab.simulate.hardware import Cluster
    from shardlab.simulate.predict.workload import Workload
    from shardlab.train.config import TrainingConfig
    from shardlab.train.job import Job


def of_first_rank(choose: Callable[[], str], timeout: float | None = None) -> str:
    """What the first of the ranks that a launcher has started chooses; without a launcher, what this process does.

    All ranks call it. Hosts that were measured each by itself would choose differently.

    Args:
        timeout: seconds that the others wait for it, and it for them (None: those of `JOINING`).

    Raises:
        UserError: on every rank, what the first one raises; or when they do not meet.
    """
    world = find_launch_environment(os.environ)
    if world is None or world.world == 1:
        return choose()
    from shardlab.train.launch.commands import Together  # which needs torch
    from shardlab.train.launch.ranks import JOINING, start_limit

    together = Together(world, JOINING.start if timeout is None else start_limit(timeout))
    found = together.all(choose if together.rank == 0 else str)
    return together.exchange(found)[0]


def require_room(proof: Checked, ranks: Sequence[int]) -> None:
    """Refuse a program that keeps more in a place than is free there.

    Args:
        proof: the program.
        ranks: those of this host.

    Raises:
        UserError: with the bytes that it takes and that there are.
    """
    named = {op.place for tape in proof.program.tapes for op in tape}
    for place in (place for place in PLACES if place in named):
        taken = sum(peak_elsewhere_in_bytes(proof, place)[rank] for rank in ranks)
        free, where = free_room(place)
        if taken and free is not None and taken > free:
            remedy = "set TMPDIR to another folder, or offload less" if place == DISK else "offload less"
            raise UserError(
                f"{len(ranks)} ranks need {bytes_text(taken)} on the {place}, but {where} has only "
                f"{bytes_text(free)} free; {remedy}"
            )


def free_room(place: str) -> tuple[int | None, str]:
    """Bytes that are free in a place, None where the system does not say, and what has them."""
    if place == DISK:
        folder = tempfile.gettempdir()
        return shutil.disk_usage(folder).free, folder
    told = Path("/proc/meminfo")
    lines = told.read_text().splitlines() if told.exists() else []  # Linux alone has it
    free = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
    return free, "this host's memory"


def cluster_here(ranks: int) -> Cluster | None:
    """The cluster that a run's ranks make: of a GPU that the tables know, or this machine as measured; else None."""
    from shardlab.execute.requirements import gpu_count
    from shardlab.measure.profile import this_machine
    from shardlab.simulate.hardware import Cluster, Profile, find_cluster

    try:
        return Cluster.of_profile(Profile.read(None, here=this_machine()))
    except UserError:
        if not gpu_count():
            return None
    import torch

    try:
        return find_cluster(f"{device_called(torch.cuda.get_device_name(0))}x{ranks}")
    except UserError:
        return None


def device_called(name: str) -> str:
    """The device of the tables that a GPU's own name means, the most specific one; nothing if there is none.

    >>> device_called("NVIDIA H100 80GB HBM3"), device_called("NVIDIA A100-SXM4-40GB"), device_called("NVIDIA GB200")
    ('h100', 'a100-40gb', 'gb200')
    """
    from shardlab.simulate.hardware import DEVICES

    words = set(re.findall(r"[a-z0-9]+", name.lower()))
    fitting = [device for device in DEVICES if set(device.split("-")) <= words]
    return max(fitting, key=len, default="")


def peak_flops(config: TrainingConfig, compute: str) -> float | None:
    """FLOP/s of all devices of a run together, in the dtype that it computes in; ranks may share a CPU's cores.

    Of this machine the fastest product that `shardlab bench compute` has measured counts; of GPUs the data sheet.
    """
    from shardlab.train.launch.environment import CpuShare, find_launch_environment, threads_of

    ranks = config.plan.ranks
    cluster = cluster_here(ranks)
    if cluster is None or compute not in cluster.device.flops:
        return None
    if cluster.profile is None or not cluster.on_cpu:
        return cluster.device.peak(compute) * min(ranks, cluster.size)
    launched = find_launch_environment(os.environ)
    here = ranks if launched is None else min(ranks, launched.local_world or ranks)
    peak = cluster.profile.peak_flops(compute, here, threads_of([CpuShare.of_this_process()] * here))
    return None if peak is None else peak * ranks / here


def workload_of(job: Job, cluster: Cluster, recipe: str | None = None) -> Workload:
    """A job's step on a cluster, as a recipe runs it: the very program that ranks run.

    Args:
        recipe: by name (None: Shardlab's own).
    """
    from shardlab.simulate.predict.workload import Workload

    def trace(*_: object) -> Checked:
        return job.checked()

    entry = job.entry
    return Workload(
        entry.grid(job.ranks) if entry.plan is None else entry.plan(job.ranks),
        job.model,
        cluster,
        job.microbatches,
        job.micro_batch_size,
        job.numbers,
        trace,
        entry.columns,
        recipe_called(recipe),
        optimizer=job.optimizer,
        ema=job.ema is not None,
        passes="none",  # those of the job have been run
        tiles=entry.tiles_on(job.ranks),
    )


def predicted_seconds(job: Job) -> float | str:
    """Seconds that a step should take here, or why that cannot be said."""
    cluster = cluster_here(job.ranks)
    if cluster is None:
        return "this machine is not measured yet (see shardlab bench)"
    try:
        return workload_of(job, cluster).estimate().step
    except UserError as error:
        return str(error)
