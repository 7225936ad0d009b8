"""Devices, and the time of a kernel on one: a roofline whose limits depend on the kernel's size.

A kernel takes its launch time and then the longer of two times: its arithmetic at the FLOP/s that its shape can reach,
and its memory traffic at the bytes/s that its size can reach (Williams et al. 2009, "Roofline").

A product of matrices is cut into tiles. Each of the device's SMs computes one tile at a time, so the product takes
whole waves of tiles: the last wave may leave SMs idle, and tiles at the edge compute unused elements (NVIDIA's "Matrix
multiplication background user's guide", tile and wave quantization). A short inner dimension does not fill the
pipeline, and rows that are not whole 16-byte words are read slowly (the same guide).

The parts, in order: `Figure`, a number with its source; `Efficiency` and `Device`; the tables of devices, nodes and
links, which are TOML files beside this one; formulas of other publications, for comparison with their figures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import cache
from math import ceil
from typing import Annotated, Any, cast

from shardlab.common.errors import find_by_name
from shardlab.common.fields import COUNT, Positive, read_settings, read_value
from shardlab.common.files import load_table
from shardlab.language import UserError
from shardlab.language.rules.kinds import bytes_of
from shardlab.models.layout import FusedAttention, Kernel, Matmul, Pointwise


@dataclass(frozen=True)
class Figure:
    """Figure of a recipe, a device or a link, with its source.

    Attributes:
        value: the number, or several.
        source: where it is described, or the basis of an assumption.
        fitted_to: the measurements to which it was fitted ("": it was not fitted).
        runs: ids of these measurements in a file of published runs; `*` matches any characters.
        assumed: whether it is an assumption: no source gives it, and it was not fitted to runs.
    """

    value: Any
    source: str = ""
    fitted_to: str = ""
    runs: tuple[str, ...] = ()
    assumed: bool = False


def figures_of(row: Mapping[str, Any], base: Mapping[str, Figure]) -> dict[str, Figure]:
    """Return the values in a table's row by name ("matmul.bfloat16"), with their sources from the row's list `fit`.

    Each entry of `fit` has `figures` (names, in which `*` matches any characters), and source, fitted_to, runs or
    assumed.

    Args:
        row: the whole row, with the values of its base.
        base: figures of the base, which apply to all values that the row does not change.
    """
    values = _leaves(row)
    figures = {name: figure for name, figure in base.items() if values.get(name) == figure.value}
    for entry in cast(list[dict[str, Any]], row.get("fit", [])):
        figure = {key: value for key, value in entry.items() if key != "figures"}
        for name, value in values.items():
            if any(fnmatch(name, pattern) for pattern in entry["figures"]):
                figures[name] = read_settings(Figure, {"value": value, **figure}, "fit", name)
    return figures


def _leaves(row: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, Mapping) and name != "figures":
            leaves |= _leaves(cast(Mapping[str, Any], value), f"{prefix}{name}.")
        elif isinstance(value, int | float) or (prefix and isinstance(value, list)):
            leaves[prefix + name] = value
    return leaves


CONSTANTS = read_value(
    Mapping[str, Figure], load_table("simulate/hardware/constants.toml")["constant"], "constants.toml", "constant"
)
"""Figures that all devices and links share, from `constants.toml`."""


TILES = tuple((int(rows), int(columns), float(speed)) for rows, columns, speed in CONSTANTS["tiles"].value)
"""(rows, columns) of the tiles that a library chooses from, and their speed relative to the largest tile."""

MISALIGNED: float = CONSTANTS["misaligned"].value
MISALIGNED_BATCH: float = CONSTANTS["misaligned_batch"].value
"""Fraction of a product's speed if its rows are not whole 16-byte words: for one product, and for many small ones."""


@dataclass(frozen=True)
class Efficiency:
    """Fractions of the data sheet's figures that a type of device reaches.

    Attributes:
        matmul: fraction of the peak FLOP/s in a large product of matrices, by dtype (clocks sag under that load).
        attention: fraction of the peak FLOP/s, forward and backward, for each generation of fused attention kernels:
            "flash1" and "flash2" (Dao et al. 2022, arXiv 2205.14135; Dao 2023, arXiv 2307.08691), "cudnn" (the
            vendor's).
        memory: fraction of the bandwidth in a large pointwise kernel.
        launch: seconds from one kernel to the next.
        k_half: the inner dimension at which a product reaches half of its speed.
        bytes_half: bytes at which a pointwise kernel reaches half of its bandwidth.
        source: the measurements to which these figures were fitted, or their source.
        figures: sources of single figures by name, such as "matmul.bfloat16".
    """

    matmul: Mapping[str, float]
    attention: Mapping[str, Sequence[float]]
    memory: float
    launch: float
    k_half: float
    bytes_half: float
    source: str
    figures: Mapping[str, Figure] = field(default_factory=dict[str, Figure], compare=False)


@dataclass(frozen=True, eq=False)
class Device:
    """Device of a cluster.

    Attributes:
        name: name on the command line.
        flops: peak FLOP/s without sparsity, by dtype (torch's names, and "float8").
        memory: bytes of memory.
        bandwidth: bytes/s of the memory.
        sms: number of streaming multiprocessors (a TPU's matrix units): tiles that it computes at once.
        efficiency: the fractions of these figures that it reaches.
        source: source of the figures.
        attention: generation of fused attention kernels, a key of `Efficiency.attention`. A recipe sets it.
    """

    name: str
    flops: Mapping[str, float]
    memory: Positive
    bandwidth: Positive
    sms: Annotated[int, COUNT]
    efficiency: Efficiency
    source: str
    attention: str = "flash2"

    def peak(self, dtype: str) -> float:
        """Return the FLOP/s of the data sheet.

        Raises:
            UserError: if the device does not compute in that dtype.
        """
        if dtype not in self.flops:
            raise UserError(f"{self.name} does not compute in {dtype}; it does in {', '.join(self.flops)}")
        return self.flops[dtype]

    def seconds(self, kernel: Kernel, dtype: str) -> float:
        """Return the seconds of a kernel with operands in `dtype`.

        In a dtype of less than two bytes only products with parameters are computed, after a cast of their first
        operand. All other kernels compute in bfloat16 (for float8: Micikevicius et al. 2022, arXiv 2209.05433).

        Raises:
            UserError: if the device does not compute in that dtype.
        """
        if (bytes := bytes_of(dtype)) < 2:
            self.peak(dtype)
            if not (isinstance(kernel, Matmul) and kernel.learned):
                return self.seconds(kernel, "bfloat16")
            cast = Pointwise("cast", (1 + bytes / 2) * kernel.batch * kernel.m * kernel.k, 0.0)  # each of 2 bytes
            return self._roofline(kernel, dtype) + self._memory(cast, "bfloat16")
        return self._roofline(kernel, dtype)

    def _roofline(self, kernel: Kernel, dtype: str) -> float:
        if isinstance(kernel, Matmul):
            busy = self._matmul(kernel, dtype)
        elif isinstance(kernel, FusedAttention):
            busy = self._attention(kernel, dtype)
        else:
            busy = 0.0
        return self.efficiency.launch + max(busy, self._memory(kernel, dtype))

    @property
    def adds_in_backward(self) -> bool:
        """Whether the time of a backward pass includes the addition of its gradient to an older one."""
        return False

    def overhead(self, op: str, dtype: str) -> float:
        """Return the seconds of an op in addition to its kernels: 0, since kernels are queued ahead."""
        return 0.0

    def _matmul(self, kernel: Matmul, dtype: str) -> float:
        reached = self.peak(dtype) * self.efficiency.matmul[dtype] * alignment(kernel, dtype)
        return min(
            ceil(kernel.batch * ceil(kernel.m / rows) * ceil(kernel.n / columns) / self.sms)
            * (2.0 * rows * columns * (kernel.k + self.efficiency.k_half) * self.sms / (reached * speed))
            for rows, columns, speed in TILES
        )

    def _attention(self, kernel: FusedAttention, dtype: str) -> float:
        share = self.efficiency.attention[self.attention][kernel.backward]
        # a block is 128 queries of one head; it loops over the keys, and needs some to fill its pipeline
        blocks = kernel.sequences * kernel.heads * ceil(kernel.queries / 128)
        filled = blocks / (ceil(blocks / self.sms) * self.sms)
        filled *= kernel.keys / (kernel.keys + 2 * self.efficiency.k_half)
        return kernel.flops / (self.peak(dtype) * share * filled)

    def _memory(self, kernel: Kernel, dtype: str) -> float:
        bytes = kernel.elements * bytes_of(dtype)
        small = self.efficiency.bytes_half if isinstance(kernel, Pointwise) else 0.0
        return (bytes + small) / (self.bandwidth * self.efficiency.memory) if bytes else 0.0


@cache
def alignment(kernel: Matmul, dtype: str) -> float:
    """Return the fraction of its speed that a matrix product reaches: below 1 if rows are not whole 16-byte words."""
    word = 16 // bytes_of(dtype)
    if (kernel.m if kernel.of_weight else kernel.k) % word == 0 and kernel.n % word == 0:
        return 1.0
    return MISALIGNED if kernel.batch == 1 else MISALIGNED_BATCH


def rows(file: str, table: str) -> dict[str, dict[str, Any]]:
    """Return the rows of a TOML table by name, each with its base's values for all fields that it does not set.

    Names in braces in `source` are replaced by the addresses of these pages in `pages.toml`.

    If a row has a list `fit`, `figures` of the result has the source of each figure (see `figures_of`).
    """
    pages = load_table("simulate/hardware/pages.toml")
    rows_by_name: dict[str, dict[str, Any]] = {}
    for name, row in load_table(f"simulate/hardware/{file}.toml")[table].items():
        base = rows_by_name.get(row.pop("base", ""), {})
        rows_by_name[name] = base | row
        if "fit" in row:
            rows_by_name[name]["figures"] = figures_of(base | row, base.get("figures", {}))
            del rows_by_name[name]["fit"]
    return {name: row | {"source": row["source"].format(**pages)} for name, row in rows_by_name.items()}


_EFFICIENCIES = {
    name: read_settings(Efficiency, row, "devices.toml", name) for name, row in rows("devices", "efficiency").items()
}

DEVICES = {
    name: Device(
        name=name,
        flops=row["flops"],
        memory=row["memory_gib"] * 2.0**30,
        bandwidth=row["bandwidth"],
        sms=row["sms"],
        efficiency=_EFFICIENCIES[row["efficiency"]],
        source=row["source"],
    )
    for name, row in rows("devices", "device").items()
}
"""Every device by name, from `devices.toml`."""

ALIASES: dict[str, str] = load_table("simulate/hardware/devices.toml")["alias"]


def find_device(name: str) -> Device:
    """Return the device with a name, ignoring case; "a100" is the one with 80 GB.

    Raises:
        UserError: if there is none; the message suggests the nearest names.
    """
    return find_by_name(DEVICES | {alias: DEVICES[device] for alias, device in ALIASES.items()}, name, "device")


GIB = 2.0**30


def algorithm_bandwidth(bytes: float, seconds: float) -> float:
    """Return size over time in bytes/s (NVIDIA/nccl-tests doc/PERFORMANCE.md, "Algorithm bandwidth").

    The size is that of the whole value: the reduced tensor, the gathered result, or the scattered input.
    """
    return bytes / seconds


def bus_factor(kind: str, ranks: int) -> float:
    """Return the ratio of a link's bandwidth to algorithm bandwidth (NVIDIA/nccl-tests doc/PERFORMANCE.md, "Summary").

    All_reduce 2(n - 1)/n; reduce_scatter, all_gather and all_to_all (n - 1)/n; broadcast and reduce 1. Gather and
    scatter, which that page leaves out, are (n - 1)/n in nccl-tests' own code (src/gather.cu, src/scatter.cu), and a
    message is 1 (src/sendrecv.cu).
    """
    if kind in ("broadcast", "reduce", "send_recv"):
        return 1.0
    return (2 if kind == "all_reduce" else 1) * (ranks - 1) / ranks


def bus_bandwidth(kind: str, bytes: float, ranks: int, seconds: float) -> float:
    """Return the bytes/s that each rank's link carried: algorithm bandwidth times the collective's factor."""
    return algorithm_bandwidth(bytes, seconds) * bus_factor(kind, ranks)


def cs336_bandwidth(kind: str, bytes: float, ranks: int, seconds: float) -> float | None:
    """Return the figure that CS336 (lecture 8, spring 2025) prints as "GB/s", in 2^30 bytes/s (None: none).

    For an all_reduce it is the bytes of the tensor times 2 (n - 1), over n times the duration: the bus bandwidth. For a
    reduce_scatter it is the bytes of the OUTPUT times (n - 1), over n times the duration. Bus bandwidth counts the
    whole input, which is n times as large, so this is bus bandwidth over n.

    Args:
        kind: the collective.
        bytes: bytes of the whole value; for a reduce_scatter, of one rank's input.
        ranks: number of ranks.
        seconds: duration.
    """
    if kind not in ("all_reduce", "reduce_scatter"):
        return None
    return bus_bandwidth(kind, bytes, ranks, seconds) / (ranks if kind == "reduce_scatter" else 1) / GIB
