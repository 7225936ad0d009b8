"""Assumed figures that a prediction rests on: those that no source gives and no runs settle."""

from __future__ import annotations

from collections.abc import Iterator

from shardlab.hardware.figure import Figure
from shardlab.predict.workload import Workload


def assumed_figures(workload: Workload) -> dict[str, Figure]:
    """Assumed figures of the recipe, the device and the links that a step uses; as in "h100 attention.flash2"."""
    return {name: figure for name, figure in _used(workload) if figure.assumed}


def _used(workload: Workload) -> Iterator[tuple[str, Figure]]:
    recipe, cluster, ranks = workload.recipe, workload.cluster, workload.mesh.world
    for name, figure in recipe.figures.items():
        group, _, field = name.partition(".")
        communicates = group != "overlap" or ranks > 1
        held = name in ("memory.reserved", "memory.kept_when_full", "memory.context_bytes")
        if communicates and not (held and cluster.on_cpu) and getattr(getattr(recipe, group), field) == figure.value:
            yield f"{recipe.name} {name}", figure
    if cluster.profile is not None:
        return
    efficiency = cluster.device.efficiency
    used = {f"matmul.{workload.precision.compute}", f"attention.{recipe.kernels.attention}"}
    for name, figure in efficiency.figures.items():
        if name in used or "." not in name:
            yield f"{cluster.device.name} {name}", figure
    links = [cluster.intra_node] * (ranks > 1 < cluster.per_node) + [cluster.inter_node] * (ranks > cluster.per_node)
    for link in links:
        for name, figure in link.figures.items():
            if getattr(link, name) == figure.value:
                yield f"{link.name} {name}", figure
