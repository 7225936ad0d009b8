"""Profiles: the measurements of `shardlab bench` on one machine, and the JSON file that stores them.

The time of a communication is a start and a time per byte (`AlphaBeta`). The time of a kernel is the sum of its launch,
its arithmetic and its memory traffic (`Rate`). `MeasuredDevice` and `measured_seconds`, at the end, price kernels and
collectives by a profile instead of data sheets.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from shardlab.common.fields import COUNT, Amount, Positive, read_settings, read_table
from shardlab.common.files import cache_folder, parse_document, write_atomically
from shardlab.language import UserError
from shardlab.language.pass_names import MOST_BYTES_BY_MESSAGES, NO_LAG, Lag
from shardlab.language.rules.kinds import bytes_of
from shardlab.models.layout import Kernel, Matmul, Pointwise
from shardlab.simulate.hardware.device import Device, Efficiency

VERSION = 7


@dataclass(frozen=True)
class Machine:
    """Properties that distinguish machines, without the host's name.

    Attributes:
        processor: model of the CPU or the GPU.
        places: number of CPU cores or devices; each rank has one.
        torch: version of PyTorch.
        backend: backend of torch.distributed: "gloo" or "nccl".
    """

    processor: str
    places: Annotated[int, COUNT]
    torch: str
    backend: str


@dataclass(frozen=True)
class AlphaBeta:
    """Time of a communication: `alpha` seconds to start, and `beta` seconds for each byte."""

    alpha: Amount
    beta: Amount

    def seconds(self, bytes: float) -> float:
        return self.alpha + self.beta * bytes


@dataclass(frozen=True)
class Rate:
    """Speed of a family of kernels: seconds to launch, FLOP/s, and bytes/s of memory (0: the term does not count)."""

    launch: Amount
    flops: Amount
    bytes: Amount

    def seconds(self, flops: float, bytes: float) -> float:
        """Return the sum of the terms: the fit is linear, and a core does not compute while it waits for memory."""
        computing = flops / self.flops if self.flops else 0.0
        moving = bytes / self.bytes if self.bytes else 0.0
        return self.launch + computing + moving


@dataclass(frozen=True)
class FastestProduct:
    """Fastest product of matrices: FLOP/s of one process, and the number of its threads."""

    flops: Amount
    threads: int


@dataclass(frozen=True)
class Profile:
    """Measurements of one machine.

    Attributes:
        machine: the machine that was measured.
        collectives: times of collectives from the arrival of the last member, by name and number of ranks. Their bytes
            are those of the whole value. Large all-reduces have separate names (see `profiled_name`).
        messages: time of a message from one rank to another (None: not measured).
        kernels: speeds of kernels while all cores or devices are busy, by family and dtype. Families are "matmul",
            "attention", "update", "pointwise", and "pointwise:NAME" for a pointwise kernel with a separate speed. All
            but "update" also exist with the suffix "_backward". For the key "op:NAME", `launch` is the time that each
            op of this name takes in addition to its kernels.
        memory: bytes that all CPU ranks share, or that each device has.
        layers: measured times of layers, to which the rates in `kernels` were fitted.
        alone: the same as `kernels`, measured while one core or device is busy and the others are idle.
        contention: seconds that compute loses for each second in which a collective is in flight: 0 if they share no
            resource, 1 if they take turns.
        lag: time that a rank loses at a wait for a collective or a message, beyond the wait and `contention`. It is
            measured only on collectives.
        peaks: FLOP/s of one process in the fastest matrix product, by dtype and number of processes that compute at
            once.
    """

    machine: Machine
    collectives: Mapping[tuple[str, int], AlphaBeta]
    messages: AlphaBeta | None
    kernels: Mapping[tuple[str, str], Rate]
    memory: float
    layers: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    alone: Mapping[tuple[str, str], Rate] = field(default_factory=dict[tuple[str, str], Rate])
    contention: float = 0.0
    lag: Lag = NO_LAG
    peaks: Mapping[tuple[str, int], FastestProduct] = field(default_factory=dict[tuple[str, int], FastestProduct])

    def peak_flops(self, dtype: str, ranks: int, threads: int) -> float | None:
        """Return the FLOP/s that ranks reach together (None: nothing was measured in this dtype).

        If these numbers of ranks and threads were not measured together, the result is the FLOP/s of one thread in the
        measurement with most processes, times the number of threads of all ranks.

        Args:
            dtype: the dtype.
            ranks: number of ranks.
            threads: threads of each rank. No more threads compute at once than there are CPUs.
        """
        exact = self.peaks.get((dtype, ranks))
        if exact is not None and exact.threads == threads:
            return exact.flops * ranks
        peaks = {processes: peak for (measured, processes), peak in self.peaks.items() if measured == dtype}
        if not peaks:
            return None
        processes_at_peak = max(peaks)
        return (
            peaks[processes_at_peak].flops
            / peaks[processes_at_peak].threads
            * min(ranks * threads, max(processes_at_peak * peaks[processes_at_peak].threads, 1))
        )

    def write(self, path: Path | None = None) -> Path:
        """Write the profile as JSON, by default to the path that `read` uses, and return the path."""
        path = path or default_path()
        data = {
            "version": VERSION,
            "machine": asdict(self.machine),
            "memory": self.memory,
            "contention": self.contention,
            "lag": asdict(self.lag),
            "messages": asdict(self.messages) if self.messages else None,
            "collectives": [
                {"kind": kind, "ranks": ranks, **asdict(line)}
                for (kind, ranks), line in sorted(self.collectives.items())
            ],
            "kernels": rate_rows(self.kernels),
            "alone": rate_rows(self.alone),
            "peaks": [
                {"dtype": dtype, "processes": processes, **asdict(peak)}
                for (dtype, processes), peak in sorted(self.peaks.items())
            ],
            "layers": self.layers,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(data, indent=1) + "\n")
        return path

    @classmethod
    def read(
        cls, path: Path | None = None, *, this_machine: Machine | None = None, other_machine: bool = False
    ) -> Profile:
        """Read a profile.

        Args:
            path: the file (None: the one that `shardlab bench` wrote last).
            this_machine: this machine (None: accept any).
            other_machine: accept a profile of another machine.

        Raises:
            UserError: if there is no such file, it is not a profile, or it is of another machine.
        """
        path = path or default_path()
        try:
            data = parse_document(json.loads, path.read_text(encoding="utf-8"))
            version = read_table(data, "it").get("version")
            profile = profile_of(data) if version in (None, VERSION) else None
        except FileNotFoundError:
            raise UserError(
                f"there is no profile at {path}; shardlab bench measures this machine and writes one"
            ) from None
        except (OSError, ValueError) as error:
            raise UserError(f"{path} is not a profile ({error}); shardlab bench writes one") from None
        if profile is None:
            raise UserError(f"{path} is a profile of version {version}, not {VERSION}; run shardlab bench again")
        if this_machine is not None and not other_machine and this_machine != profile.machine:
            raise UserError(
                f"{path} is from another machine: {differences(profile.machine, this_machine)}; "
                "--other-machine takes it anyway"
            )
        return profile


def profile_of(data: dict[str, Any]) -> Profile:
    """Return the profile in a file's data.

    Raises:
        UserError: if it is not a profile.
    """
    file = read_settings(ProfileFile, data, "", strict=False)
    return Profile(
        machine=file.machine,
        collectives={(row.kind, row.ranks): AlphaBeta(row.alpha, row.beta) for row in file.collectives},
        messages=file.messages,
        kernels=_rates(file.kernels),
        memory=file.memory,
        layers=list(file.layers),
        alone=_rates(file.alone),
        contention=file.contention,
        lag=file.lag,
        peaks={(row.dtype, row.processes): FastestProduct(row.flops, row.threads) for row in file.peaks},
    )


@dataclass(frozen=True, kw_only=True)
class CollectiveRow(AlphaBeta):
    """Entry of a profile's file: the time of a collective."""

    kind: str
    ranks: int


@dataclass(frozen=True, kw_only=True)
class RateRow(Rate):
    """Entry of a profile's file: the speed of a family of kernels."""

    family: str
    dtype: str


@dataclass(frozen=True, kw_only=True)
class PeakRow(FastestProduct):
    """Entry of a profile's file: the fastest product of matrices."""

    dtype: str
    processes: int


@dataclass(frozen=True, kw_only=True)
class ProfileFile:
    """Entries of a profile's file. Earlier files of this version lack `peaks`."""

    version: int
    machine: Machine
    memory: Positive
    contention: Amount
    lag: Lag
    messages: AlphaBeta | None
    collectives: tuple[CollectiveRow, ...]
    kernels: tuple[RateRow, ...]
    alone: tuple[RateRow, ...]
    peaks: tuple[PeakRow, ...] = ()
    layers: tuple[Any, ...]


def _rates(rows: Iterable[RateRow]) -> dict[tuple[str, str], Rate]:
    return {(row.family, row.dtype): Rate(row.launch, row.flops, row.bytes) for row in rows}


def rate_rows(rates: Mapping[tuple[str, str], Rate]) -> list[dict[str, Any]]:
    """Return rates as rows of a JSON file."""
    return [{"family": family, "dtype": dtype, **asdict(rate)} for (family, dtype), rate in sorted(rates.items())]


def differences(measured: Machine, this_machine: Machine) -> str:
    """Return the properties in which two machines differ, as text."""
    properties = asdict(this_machine)
    return ", ".join(
        f"{key} {value} there, {properties[key]} here"
        for key, value in asdict(measured).items()
        if value != properties[key]
    )


def default_path() -> Path:
    """Return the path of this machine's profile: $XDG_CACHE_HOME or ~/.cache, then shardlab/profile.json."""
    return cache_folder() / "profile.json"


LARGE_SUMS = "large_all_reduce"
"""Name in a profile of all-reduces that are large enough for a ring."""


@dataclass(frozen=True, eq=False)
class MeasuredDevice(Device):
    """Device whose kernels are priced by a profile."""

    profile: Profile = field(kw_only=True)

    def seconds(self, kernel: Kernel, dtype: str) -> float:
        """Return the seconds of a kernel with operands in `dtype`.

        Raises:
            UserError: if no kernel of its family was measured in that dtype.
        """
        return self._rate(kernel, dtype).seconds(kernel.flops, kernel.elements * bytes_of(dtype))

    @property
    def adds_in_backward(self) -> bool:
        """Always true: the backward pass was measured with its additions."""
        return True

    def overhead(self, op: str, dtype: str) -> float:
        rate = self.profile.kernels.get((f"op:{op}", dtype))
        return rate.launch if rate else 0.0

    def _rate(self, kernel: Kernel, dtype: str) -> Rate:
        names = families(kernel)
        for name in names:
            rate = self.profile.kernels.get((name, dtype))
            if rate is not None:
                return rate
        raise UserError(f"the profile has no {names[0]} in {dtype}; measure it: shardlab bench compute")


def families(kernel: Kernel) -> tuple[str, ...]:
    """Return the families to which a kernel may belong in a profile, the most specific first."""
    if isinstance(kernel, Pointwise):
        names = ("update",) if kernel.name == "adamw" else (f"pointwise:{kernel.name}", "pointwise")
    else:
        names = ("matmul",) if isinstance(kernel, Matmul) else ("attention",)
    return (*(f"{name}_backward" for name in names), *names) if kernel.backward else names


def device_of_profile(profile: Profile) -> MeasuredDevice:
    """Return the device on which a profile was measured.

    Its peak FLOP/s are those of the fastest matrix product, or of the fastest kernel if that is faster. The peak is
    infinite if only small layers were measured, which are bound by memory.
    """
    flops: dict[str, float] = {}
    for (_, dtype), rate in profile.kernels.items():
        flops[dtype] = max(flops.get(dtype, 0.0), rate.flops)
    for (dtype, _), peak in profile.peaks.items():
        if dtype in flops:
            flops[dtype] = max(flops[dtype], peak.flops)
    flops = {dtype: best or math.inf for dtype, best in flops.items()}
    bandwidth = max((rate.bytes for rate in profile.kernels.values()), default=0.0)
    reached = Efficiency(
        dict.fromkeys(flops, 1.0),
        {"flash2": (1.0, 1.0)},
        memory=1.0,
        launch=0.0,
        k_half=0.0,
        bytes_half=0.0,
        source="measured",
    )
    name = profile.machine.processor
    return MeasuredDevice(name, flops, profile.memory, bandwidth, 1, reached, "shardlab bench", profile=profile)


def profiled_name(kind: str, bytes: float, ranks: int) -> str:
    """Return the name under which a profile lists a collective of this size.

    All-reduces in which a member would receive more than `MOST_BYTES_BY_MESSAGES` bytes use a ring (see
    `shardlab.execute.transport.collectives`), and have a separate name.
    """
    return LARGE_SUMS if kind == "all_reduce" and (ranks - 1) * bytes > MOST_BYTES_BY_MESSAGES else kind


def measured_seconds(profile: Profile, kind: str, bytes: float, ranks: int) -> float:
    """Return the seconds of a collective, interpolated between the two nearest of the measured group sizes.

    Below the smallest and above the largest measured size, they are the seconds of that size.

    Raises:
        UserError: if the collective was not measured.
    """
    if ranks == 1:
        return 0.0
    name = profiled_name(kind, bytes, ranks)
    if not any(name == measured for measured, _ in profile.collectives):
        name = kind  # no all-reduce of this size was measured
    lines: dict[int, AlphaBeta] = {
        size: line for (collective, size), line in profile.collectives.items() if collective == name
    }
    if not lines:
        raise UserError(f"the profile has no {kind}; measure it: shardlab bench collectives")
    smaller = max((size for size in lines if size <= ranks), default=min(lines))
    larger = min((size for size in lines if size >= ranks), default=max(lines))
    low, high = lines[smaller].seconds(bytes), lines[larger].seconds(bytes)
    return low if smaller == larger else low + (high - low) * (ranks - smaller) / (larger - smaller)
