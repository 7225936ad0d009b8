"""A profile: what `shardlab bench` measured on one machine, in a file.

Times are `launch + bytes * per byte` for communication; for a kernel, launch, arithmetic and memory together.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from shardlab.common.files import cache_folder, parsed, write_whole
from shardlab.language import UserError
from shardlab.language.pass_names import BY_MESSAGES, NO_LAG, Lag
from shardlab.language.rules.kinds import bytes_of
from shardlab.models.layout import Kernel, Matmul, Pointwise
from shardlab.simulate.hardware.device import Device, Efficiency

VERSION = 7

Measured = TypeVar("Measured", "AlphaBeta", "Rate", "Lag")


@dataclass(frozen=True)
class Machine:
    """Marks that tell machines apart, without a name of the host.

    Attributes:
        processor: the CPU's or the GPU's model.
        places: how many ranks have one to themselves: CPU cores, or devices.
        torch: its version.
        backend: of torch.distributed: "gloo" or "nccl".
    """

    processor: str
    places: int
    torch: str
    backend: str


@dataclass(frozen=True)
class AlphaBeta:
    """Alpha and beta: seconds to start, and seconds for each byte."""

    alpha: float
    beta: float

    def seconds(self, bytes: float) -> float:
        return self.alpha + self.beta * bytes


@dataclass(frozen=True)
class Rate:
    """Rate of a family of kernels: seconds to start, FLOP/s, and bytes/s of memory; 0 where it does not matter."""

    launch: float
    flops: float
    bytes: float

    def seconds(self, flops: float, bytes: float) -> float:
        """Sum of the terms: what a linear fit finds, and what a core does that waits for its memory."""
        computing = flops / self.flops if self.flops else 0.0
        moving = bytes / self.bytes if self.bytes else 0.0
        return self.launch + computing + moving


@dataclass(frozen=True)
class FastestProduct:
    """The fastest product of matrices: FLOP/s of one process, and the threads on which it computes."""

    flops: float
    threads: int


@dataclass(frozen=True)
class Profile:
    """Measurements of one machine.

    Attributes:
        machine: on what.
        collectives: by the collective's name and the number of ranks, from when all have come; bytes are those of the
            whole value; of large sums apart (see `shardlab.simulate.hardware.profile.way_of`).
        messages: from one rank to another; None if they were not measured.
        kernels: by family and dtype, while all places are busy. Families are "matmul", "attention", "update",
            "pointwise", "pointwise:NAME" for one pointwise kernel of its own speed, all but the update's also with
            "_backward" at the end; "op:NAME", whose launch is what each op of that name takes beside its kernels; and
            "op:NAME:entry", of half a backward pass, for each entry of a matrix (see `shardlab.models.layer.Run`).
        memory: bytes that all ranks have together, or each device.
        layers: the raw points that the kernels were fitted to, as measured.
        alone: `kernels` while one place is busy and has the memory to itself.
        contention: seconds that compute loses for each second in which a collective is in flight: 0 if they do not
            meet, 1 if they take turns.
        lag: what a rank loses beside that where it waits for a collective or a message; measured of collectives.
        peaks: by dtype and the number of processes that computed at once.
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
        """FLOP/s that so many ranks reach at most, together; None if nothing was measured in this dtype.

        Ranks that were not measured as such have their share of the fastest that all places together have reached.

        Args:
            threads: of each rank; as many as all places have CPUs compute at once.
        """
        exact = self.peaks.get((dtype, ranks))
        if exact is not None and exact.threads == threads:
            return exact.flops * ranks
        found = {processes: peak for (measured, processes), peak in self.peaks.items() if measured == dtype}
        if not found:
            return None
        most = max(found)
        return found[most].flops / found[most].threads * min(ranks * threads, max(most * found[most].threads, 1))

    def write(self, path: Path | None = None) -> Path:
        """Write it as JSON, by default where `read` looks; returns where."""
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
        write_whole(path, json.dumps(data, indent=1) + "\n")
        return path

    @classmethod
    def read(cls, path: Path | None = None, *, here: Machine | None = None, other_machine: bool = False) -> Profile:
        """Read a profile.

        Args:
            path: the file; by default the one that `shardlab bench` wrote last.
            here: this machine; without it, nothing is compared.
            other_machine: take the profile although it is from another one.

        Raises:
            UserError: there is no such file, it is not a profile, or it is from another machine.
        """
        path = path or default_path()
        try:
            data = parsed(json.loads, path.read_text(encoding="utf-8"))
            version = data["version"]
            profile = profile_of(data) if version == VERSION else None
        except FileNotFoundError:
            raise UserError(
                f"there is no profile at {path}; shardlab bench measures this machine and writes one"
            ) from None
        except (KeyError, TypeError, AttributeError):
            raise UserError(f"{path} is not a profile: it has not its entries; shardlab bench writes one") from None
        except (OSError, ValueError) as error:
            raise UserError(f"{path} is not a profile ({error}); shardlab bench writes one") from None
        if profile is None:
            raise UserError(f"{path} is a profile of version {version}, not {VERSION}; run shardlab bench again")
        if here is not None and not other_machine and here != profile.machine:
            raise UserError(
                f"{path} is from another machine: {differences(profile.machine, here)}; --other-machine takes it anyway"
            )
        return profile


def profile_of(data: dict[str, Any]) -> Profile:
    """The profile in a file's data.

    Raises:
        KeyError, TypeError, ValueError: it is not one.
    """
    machine, memory = Machine(**data["machine"]), number(data["memory"])
    if machine.places < 1 or memory == 0:
        raise ValueError(f"{machine.places} places for ranks, {memory:.0f} bytes of memory")
    return Profile(
        machine=machine,
        collectives={(row["kind"], int(row["ranks"])): _figures(AlphaBeta, row) for row in data["collectives"]},
        messages=_figures(AlphaBeta, data["messages"]) if data["messages"] else None,
        kernels=_rates(data["kernels"]),
        memory=memory,
        layers=data["layers"],
        alone=_rates(data["alone"]),
        contention=number(data["contention"]),
        lag=_figures(Lag, data["lag"]),
        peaks={  # which earlier files of this version lack
            (row["dtype"], int(row["processes"])): FastestProduct(number(row["flops"]), int(row["threads"]))
            for row in data.get("peaks", [])
        },
    )


def number(value: Any) -> float:
    """A measured figure.

    Raises:
        ValueError: it is not one.
    """
    figure = float(value)
    if not 0 <= figure < float("inf"):
        raise ValueError(f"{value} is no measured figure")
    return figure


def _figures(kind: type[Measured], row: Mapping[str, Any]) -> Measured:
    """A line or a rate, of a row that has its figures by name."""
    return kind(*(number(row[each.name]) for each in fields(kind)))


def _rates(rows: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], Rate]:
    return {(row["family"], row["dtype"]): _figures(Rate, row) for row in rows}


def rate_rows(rates: Mapping[tuple[str, str], Rate]) -> list[dict[str, Any]]:
    """Rates for a JSON file."""
    return [{"family": family, "dtype": dtype, **asdict(rate)} for (family, dtype), rate in sorted(rates.items())]


def differences(there: Machine, here: Machine) -> str:
    """How two machines differ, in words."""
    mine = asdict(here)
    return ", ".join(
        f"{key} {value} there, {mine[key]} here" for key, value in asdict(there).items() if value != mine[key]
    )


def default_path() -> Path:
    """Where this machine's profile lies: $XDG_CACHE_HOME or ~/.cache, then shardlab/profile.json."""
    return cache_folder() / "profile.json"


# A measured machine in the place of a data sheet: kernels and collectives as its profile has them.


LARGE_SUMS = "large_all_reduce"
"""All-reduces that go around a ring, in a profile."""


@dataclass(frozen=True, eq=False)
class MeasuredDevice(Device):
    """A device whose kernels take what a profile says."""

    profile: Profile = field(kw_only=True)

    def seconds(self, kernel: Kernel, dtype: str) -> float:
        """How long the kernel takes, its operands in `dtype`.

        Raises:
            UserError: no kernel of its family was measured in that dtype.
        """
        return self._rate(kernel, dtype).seconds(kernel.flops, kernel.elements * bytes_of(dtype))

    @property
    def adds_in_backward(self) -> bool:
        """True: the backward pass was measured with its additions."""
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
    """The names under which a profile may have the kernel, the nearest first."""
    if isinstance(kernel, Pointwise):
        names = ("update",) if kernel.name == "adamw" else (f"pointwise:{kernel.name}", "pointwise")
    else:
        names = ("matmul",) if isinstance(kernel, Matmul) else ("attention",)
    return (*(f"{name}_backward" for name in names), *names) if kernel.backward else names


def device_of_profile(profile: Profile) -> MeasuredDevice:
    """The device that the profile was measured on; its peaks are the fastest product and the best that a kernel is
    said to reach, or without a limit where small layers alone were measured, which memory holds up."""
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


def way_of(kind: str, bytes: float, ranks: int) -> str:
    """What a profile calls a collective of this size: sums of more than a member receives by messages go another way
    (see `shardlab.execute.transport.collectives`), and have a line of their own."""
    return LARGE_SUMS if kind == "all_reduce" and (ranks - 1) * bytes > BY_MESSAGES else kind


def measured_seconds(profile: Profile, kind: str, bytes: float, ranks: int) -> float:
    """How long a collective takes: between two measured group sizes on the straight line, outside them as the nearest.

    Raises:
        UserError: the collective was not measured.
    """
    if ranks == 1:
        return 0.0
    name = way_of(kind, bytes, ranks)
    if not any(name == measured for measured, _ in profile.collectives):
        name = kind  # no sum so large was measured
    lines: dict[int, AlphaBeta] = {size: line for (found, size), line in profile.collectives.items() if found == name}
    if not lines:
        raise UserError(f"the profile has no {kind}; measure it: shardlab bench collectives")
    below = max((size for size in lines if size <= ranks), default=min(lines))
    above = min((size for size in lines if size >= ranks), default=max(lines))
    low, high = lines[below].seconds(bytes), lines[above].seconds(bytes)
    return low if below == above else low + (high - low) * (ranks - below) / (above - below)
