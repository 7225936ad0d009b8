"""Machine of a training: choices for all hosts, free memory, peak speed, and predicted step time.

`choose_on_first_rank` makes all ranks use the choice of the first one. `require_free_memory` refuses offloading that
exceeds a host's free memory. `cluster_here` describes this machine as a cluster, from which `peak_flops` and
`predicted_seconds` derive their results.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from shardlab.check import Checked
from shardlab.cli.plan_options import recipe_called
from shardlab.common.memory import available_memory
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


def choose_on_first_rank(choose: Callable[[], str], timeout: float | None = None) -> str:
    """Make a choice on the first rank of a launcher, and return it on all ranks. Without a launcher, just make it.

    All ranks must call this. If each rank chose by itself, hosts with different profiles could choose differently.

    Args:
        choose: function that makes the choice. Only the first rank calls it.
        timeout: seconds that ranks wait for each other (None: those of `RENDEZVOUS`).

    Raises:
        UserError: if `choose` raises it on the first rank (then on every rank), or if the ranks do not find each other.
    """
    world = find_launch_environment(os.environ)
    if world is None or world.world == 1:
        return choose()
    from shardlab.train.launch.commands import RankExchange  # which needs torch
    from shardlab.train.launch.ranks import RENDEZVOUS, start_limit

    exchange = RankExchange(world, RENDEZVOUS.start if timeout is None else start_limit(timeout))
    choice = exchange.all(choose if exchange.rank == 0 else str)
    return exchange.exchange(choice)[0]


def require_free_memory(proof: Checked, ranks: Sequence[int]) -> None:
    """Refuse a program that offloads more bytes to the host or the disk than are free.

    Args:
        proof: checked program.
        ranks: numbers of the ranks on this host.

    Raises:
        UserError: with the required and the free bytes.
    """
    places = {op.place for tape in proof.program.tapes for op in tape}
    for place in (place for place in PLACES if place in places):
        needed_bytes = sum(peak_elsewhere_in_bytes(proof, place)[rank] for rank in ranks)
        free, location = free_bytes(place)
        if needed_bytes and free is not None and needed_bytes > free:
            remedy = "set TMPDIR to another folder, or offload less" if place == DISK else "offload less"
            raise UserError(
                f"{len(ranks)} ranks need {bytes_text(needed_bytes)} on the {place}, but {location} has only "
                f"{bytes_text(free)} free; {remedy}"
            )


def free_bytes(place: str) -> tuple[int | None, str]:
    """Return the free bytes of the host or the disk (None: unknown), and its name for messages."""
    if place == DISK:
        folder = tempfile.gettempdir()
        return shutil.disk_usage(folder).free, folder
    return available_memory(), "this host's memory"


def cluster_here(ranks: int) -> Cluster | None:
    """Return a cluster that describes this machine, from its profile or the table of GPUs (None: neither has it)."""
    from shardlab.execute.requirements import gpu_count
    from shardlab.measure.profile import this_machine
    from shardlab.simulate.hardware import Cluster, Profile, find_cluster

    try:
        return Cluster.of_profile(Profile.read(None, this_machine=this_machine()))
    except UserError:
        if not gpu_count():
            return None
    import torch

    try:
        return find_cluster(f"{device_called(torch.cuda.get_device_name(0))}x{ranks}")
    except UserError:
        return None


def device_called(name: str) -> str:
    """Return the device of the tables that matches the name a GPU reports, or "". The most specific match wins.

    >>> device_called("NVIDIA H100 80GB HBM3"), device_called("NVIDIA A100-SXM4-40GB"), device_called("NVIDIA GB200")
    ('h100', 'a100-40gb', 'gb200')
    """
    from shardlab.simulate.hardware import DEVICES

    words = set(re.findall(r"[a-z0-9]+", name.lower()))
    devices = [device for device in DEVICES if set(device.split("-")) <= words]
    return max(devices, key=len, default="")


def peak_flops(config: TrainingConfig, compute: str) -> float | None:
    """Return the peak FLOP/s of all devices of a run, or None if it is unknown.

    The peak of a CPU is the speed of the fastest matrix product that `shardlab bench compute` measured on as many cores
    as a rank has. The peak of a GPU is taken from its data sheet.

    Args:
        compute: dtype of the matrix products.
    """
    from shardlab.train.launch.environment import CpuShare, find_launch_environment, threads_of

    ranks = config.plan.ranks
    cluster = cluster_here(ranks)
    if cluster is None or compute not in cluster.device.flops:
        return None
    if cluster.profile is None or not cluster.on_cpu:
        return cluster.device.peak(compute) * min(ranks, cluster.size)
    launched = find_launch_environment(os.environ)
    local_ranks = ranks if launched is None else min(ranks, launched.local_world or ranks)
    peak = cluster.profile.peak_flops(compute, local_ranks, threads_of([CpuShare.of_this_process()] * local_ranks))
    return None if peak is None else peak * ranks / local_ranks


def workload_of(job: Job, cluster: Cluster, recipe: str | None = None) -> Workload:
    """Return the workload of a job on a cluster. It has exactly the program that the ranks run.

    Args:
        recipe: name of the recipe (None: Shardlab's own).
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
        passes="none",  # the program of the job is already rewritten
        tiles=entry.tiles_on(job.ranks),
    )


def predicted_seconds(job: Job) -> float | str:
    """Return the predicted seconds of a step on this machine, or the reason why there is no prediction."""
    cluster = cluster_here(job.ranks)
    if cluster is None:
        return "this machine is not measured yet (see shardlab bench)"
    try:
        return workload_of(job, cluster).estimate().step
    except UserError as error:
        return str(error)
