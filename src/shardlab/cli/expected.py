"""What a training should reach: its devices' peak, and the step time that is predicted."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from shardlab.cli.recipe_option import recipe_called
from shardlab.program import UserError

if TYPE_CHECKING:
    from shardlab.check import Checked
    from shardlab.hardware import Cluster
    from shardlab.predict.workload import Workload
    from shardlab.train.config import TrainingConfig
    from shardlab.train.job import Job


def cluster_here(ranks: int) -> Cluster | None:
    """The cluster that a run's ranks make: of a GPU that the tables know, or this machine as measured; else None."""
    from shardlab.execute.gpus import gpu_count
    from shardlab.hardware import Cluster, Profile, find_cluster
    from shardlab.measure.saving import this_machine

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
    from shardlab.hardware import DEVICES

    words = set(re.findall(r"[a-z0-9]+", name.lower()))
    fitting = [device for device in DEVICES if set(device.split("-")) <= words]
    return max(fitting, key=len, default="")


def peak_flops(config: TrainingConfig, compute: str) -> float | None:
    """FLOP/s of all devices of a run together, in the dtype that it computes in; ranks may share a CPU's cores.

    Of this machine the fastest product that `shardlab bench compute` has measured counts; of GPUs the data sheet.
    """
    from shardlab.train.binding import CpuShare, threads_of
    from shardlab.train.launch_environment import find_launch_environment

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
    from shardlab.predict.workload import Workload

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
