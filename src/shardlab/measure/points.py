"""Measured points, and the file that each is written into at once: an interrupted bench keeps it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardlab.hardware.collectives import COSTS
from shardlab.hardware.formulas import algorithm_bandwidth, bus_bandwidth, cs336_bandwidth

KINDS = (*COSTS, "send_recv")
"""Collectives that are measured; the last is one message from one rank to another."""


@dataclass(frozen=True)
class CollectivePoint:
    """One collective at one size.

    Attributes:
        kind: its name (see `KINDS`).
        ranks: of a group; all groups of the world work at once.
        bytes: of the whole value: what an all_gather or a gather results in, what a reduce_scatter or a scatter is
            given, one rank's input of an all_to_all; of a barrier none.
        seconds: of one call, the median over batches of the mean over calls and ranks.
        iterations: calls that were timed.
        wrong: elements of the results that were wrong, over all ranks.
    """

    kind: str
    ranks: int
    bytes: int
    seconds: float
    iterations: int
    wrong: int

    @property
    def algorithm_bandwidth(self) -> float:
        """Bytes per second."""
        return algorithm_bandwidth(self.bytes, self.seconds)

    @property
    def bus_bandwidth(self) -> float:
        """Bytes per second."""
        return bus_bandwidth(self.kind, self.bytes, self.ranks, self.seconds)

    @property
    def cs336_bandwidth(self) -> float | None:
        """Bandwidth as CS336 computes it, in 2^30 bytes per second; None if it does not."""
        return cs336_bandwidth(self.kind, self.bytes, self.ranks, self.seconds)


@dataclass(frozen=True)
class OverlapPoint:
    """A collective in steps that compute: products of matrices, which take about as long as it does, or longer.

    Attributes:
        kind, ranks, bytes: as of `CollectivePoint`.
        alone: seconds of the collective, called again and again.
        compute: seconds of the products of a step.
        communication: what the collective adds where it is waited for between products; no less than `alone`.
        together: seconds of a step that starts it, computes the products, and then waits for it.
    """

    kind: str
    ranks: int
    bytes: int
    alone: float
    compute: float
    communication: float
    together: float

    @property
    def overlap(self) -> float:
        """The share of what could be hidden, the shorter of the two, that was: 1 if both together take the longer one's
        time, 0 if they take the sum. Below 0 they slow each other down.
        """
        return (self.compute + self.communication - self.together) / min(self.compute, self.communication)

    @property
    def lag(self) -> float:
        """Seconds that ranks which computed before lose where they meet, beside the collective itself."""
        return self.communication - self.alone

    @property
    def lost(self) -> float:
        """Seconds by which both together take longer than the longer one."""
        return max(0.0, self.together - max(self.compute, self.alone))

    @property
    def contention(self) -> float:
        """Seconds lost for each one in which both went on: 0 if neither slows the other down, 1 if they take turns, and
        more if the cores have more to do then than for each by itself."""
        return self.lost / min(self.compute, self.alone)


KernelWork = tuple[str, float, float]
"""A kernel's family (see `hardware.Profile`), its FLOPs, and the bytes that it moves."""


@dataclass(frozen=True)
class LayerPoint:
    """One op of a training step on one layer.

    Attributes:
        layer: what the layer is: "embedding", "norm", "attention", "mlp", "head", "first block", ...
        op: the op's name on the tape: "forward", "backward", "backward_input", ...
        width: features of a token.
        rows, tokens: sequences of the microbatch, and tokens of each.
        elements: parameters of the layer, padded.
        dtype: of weights and activations.
        processes: that computed at once, each on its own device or core.
        seconds: of one call, the median over steps, mean over processes.
        fastest: seconds of the fastest calls: far below `seconds` if the machine was busy with something else.
        kernels: what it runs: (family, FLOPs, bytes) of each.
    """

    layer: str
    op: str
    width: int
    rows: int
    tokens: int
    elements: int
    dtype: str
    processes: int
    seconds: float
    fastest: float
    kernels: tuple[KernelWork, ...]

    @property
    def flops(self) -> float:
        return sum(flops for _, flops, _ in self.kernels)


@dataclass(frozen=True)
class PeakPoint:
    """The fastest matrix product that was found.

    Attributes:
        dtype: of both matrices.
        processes: that computed at once.
        size: rows and columns of both matrices.
        flops: per second, of one process.
        threads: of each process.
    """

    dtype: str
    processes: int
    size: int
    flops: float
    threads: int = 1


Point = CollectivePoint | OverlapPoint | LayerPoint | PeakPoint

POINTS: dict[str, type[Any]] = {
    "collective": CollectivePoint,
    "overlap": OverlapPoint,
    "layer": LayerPoint,
    "peak": PeakPoint,
}


def append(path: Path, point: Point) -> None:
    """Write a point at the end of a file."""
    name = next(name for name, kind in POINTS.items() if isinstance(point, kind))
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"point": name, **asdict(point)}) + "\n")


def read_points(path: Path) -> list[Point]:
    """Read all points of a file; none if there is no file. A last line that was cut off is left out."""
    if not path.exists():
        return []
    points: list[Point] = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n"):
            fields = json.loads(line)
            kind = POINTS[fields.pop("point")]
            if "kernels" in fields:
                fields["kernels"] = tuple(tuple(kernel) for kernel in fields["kernels"])
            points.append(kind(**fields))
    return points
