"""A measured machine in the place of a data sheet: kernels and collectives as its profile has them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from shardlab.hardware.device import Device, Efficiency
from shardlab.hardware.profile import AlphaBeta, Profile, Rate
from shardlab.models.kernels import Kernel, Matmul, Pointwise
from shardlab.program import UserError
from shardlab.program.ways import BY_MESSAGES
from shardlab.rules.dtype import bytes_of

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
    (see `shardlab.execute.collectives`), and have a line of their own."""
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
