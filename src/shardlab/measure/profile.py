"""Profile of this machine, updated with new measurements, and the JSON of a measurement.

New measurements replace older ones of the same kind; the rest of the profile stays. `updated_profile` and `save` make
the profile that the simulator reads. `as_json` has all measured points, and the fits that follow from them.
"""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from shardlab.common.files import processor_name
from shardlab.execute.requirements import gpu_count
from shardlab.language import UserError
from shardlab.measure.fits import (
    CollectivePoint,
    LayerPoint,
    OverlapPoint,
    PeakPoint,
    Point,
    errors_by_layer,
    fit_contention,
    fit_kernels,
    fit_lag,
    fit_lines,
    rate_errors,
)
from shardlab.simulate.hardware import Machine, Profile
from shardlab.simulate.hardware.cluster import cores
from shardlab.simulate.hardware.profile import FastestProduct, differences, rate_rows


def this_machine() -> Machine:
    """Return a description by which this machine is distinguished from others."""
    if gpus := gpu_count():
        import torch

        return Machine(torch.cuda.get_device_name(0), gpus, version("torch"), "nccl")
    return Machine(processor_name(), cores(), version("torch"), "gloo")


def updated_profile(points: Sequence[Point], old: Profile | None = None) -> Profile:
    """Return a profile with the fits of measurements, completed by an older profile of this machine.

    If layers were measured with several numbers of processes, `kernels` has the rates of the largest number, and
    `alone` those of one process.
    """
    profile = old or Profile(this_machine(), {}, None, {}, memory_here())
    lines = {key: fitted.line for key, fitted in fit_lines(points).items()}
    messages = lines.pop(("send_recv", 2), profile.messages)
    profile = replace(profile, collectives={**profile.collectives, **lines}, messages=messages)
    overlaps = [point for point in points if isinstance(point, OverlapPoint)]
    if overlaps:
        profile = replace(profile, contention=fit_contention(overlaps), lag=fit_lag(overlaps))
    fastest = [point for point in points if isinstance(point, PeakPoint)]
    measured = {(point.dtype, point.processes): FastestProduct(point.flops, point.threads) for point in fastest}
    profile = replace(profile, peaks={**profile.peaks, **measured})
    layers = [point for point in points if isinstance(point, LayerPoint)]
    if not layers:
        return profile
    max_processes = max(point.processes for point in layers)
    kernels = fit_kernels([point for point in layers if point.processes == max_processes])
    alone = fit_kernels([point for point in layers if point.processes == 1])
    return replace(
        profile,
        kernels={**profile.kernels, **kernels},
        alone={**profile.alone, **alone},
        layers=[asdict(point) for point in layers],
    )


def save(points: Sequence[Point], path: Path | None = None) -> Path:
    """Write measurements into this machine's profile, and return its path.

    At the default path, a profile of another machine or of another version of torch is replaced.

    Raises:
        UserError: if `path` is given and the file has other contents.
    """
    return updated_profile(points, profile_to_update(path)).write(path)


def profile_to_update(path: Path | None = None) -> Profile | None:
    """Read the profile of this machine from a file; None if the file has none.

    Raises:
        UserError: if `path` is given and the file has other contents.
    """
    has_file = path is not None and path.exists()
    try:
        old = Profile.read(path)
    except UserError:
        if has_file:
            raise
        return None
    if old.machine == (machine := this_machine()):
        return old
    if has_file:
        raise UserError(
            f"{path} is from another machine: {differences(old.machine, machine)}; give --profile another file"
        )
    return None


def memory_here() -> float:
    """Return the bytes of memory of this host, which all its ranks share, or of its first GPU if it has GPUs."""
    if gpu_count():
        import torch

        return float(torch.cuda.mem_get_info(0)[1])
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def as_json(points: Sequence[Point]) -> dict[str, Any]:
    """Return points and fits as JSON, in seconds, bytes, FLOPs and bytes/s. Errors are relative.

    Only `cs336_bandwidth` is in GiB/s.
    """
    return {
        "machine": asdict(this_machine()),
        "collectives": [
            {
                **asdict(point),
                "algorithm_bandwidth": point.algorithm_bandwidth,
                "bus_bandwidth": point.bus_bandwidth,
                "cs336_bandwidth": point.cs336_bandwidth,
            }
            for point in points
            if isinstance(point, CollectivePoint)
        ],
        "overlap": [{**asdict(point), "overlap": point.overlap} for point in points if isinstance(point, OverlapPoint)],
        "fits": [
            {"kind": kind, "ranks": ranks, **asdict(fit.line), "errors": asdict(fit.errors), "doubt": fit.doubt}
            for (kind, ranks), fit in fit_lines(points).items()
        ],
        "peaks": [asdict(point) for point in points if isinstance(point, PeakPoint)],
        "layers": [{**asdict(point), "flops": point.flops} for point in points if isinstance(point, LayerPoint)],
        "kernels": [_kernels(crowd) for crowd in crowds(points)],
    }


def crowds(points: Sequence[Point]) -> list[list[LayerPoint]]:
    """Return the points of layers in a list for each number of processes, the largest number first."""
    layers = [point for point in points if isinstance(point, LayerPoint)]
    counts = sorted({point.processes for point in layers}, reverse=True)
    return [[point for point in layers if point.processes == count] for count in counts]


def _kernels(layers: Sequence[LayerPoint]) -> dict[str, Any]:
    rates = fit_kernels(layers)
    by_layer = errors_by_layer(layers, rates)
    return {
        "processes": layers[0].processes,
        "rates": rate_rows(rates),
        "errors": asdict(rate_errors(layers, rates)),
        "errors_by_layer": [{"layer": layer, "op": op, **asdict(e)} for (layer, op), e in by_layer.items()],
    }
