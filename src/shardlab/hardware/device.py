"""A device, and how long it takes for a kernel: a roofline whose roof depends on the kernel's size.

A kernel takes its launch and then the longer of two times: its arithmetic at the FLOP/s that its shape can reach, and
its memory traffic at the bytes/s that its size can reach (Williams et al. 2009, "Roofline").

A product of matrices is cut into tiles, one at a time on each of the device's SMs, so it takes whole waves
of tiles: the last one may leave SMs idle, and tiles at the edge compute what nobody needs (NVIDIA's "Matrix
multiplication background user's guide", tile and wave quantization). A short inner dimension does not fill the
pipeline, and rows that are not whole 16-byte words are read slowly (the same guide).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import ceil

from shardlab.hardware.figure import CONSTANTS, Figure
from shardlab.models.kernels import FusedAttention, Kernel, Matmul, Pointwise
from shardlab.program import UserError
from shardlab.rules.dtype import bytes_of

TILES = tuple((int(rows), int(columns), float(speed)) for rows, columns, speed in CONSTANTS["tiles"].value)
"""Rows and columns of the tiles that a library chooses from, and how fast each is against the largest."""

MISALIGNED: float = CONSTANTS["misaligned"].value
MISALIGNED_BATCH: float = CONSTANTS["misaligned_batch"].value
"""The share of its speed that a product keeps if its rows are not whole 16-byte words, and that of many small ones."""


@dataclass(frozen=True)
class Efficiency:
    """Shares of its data sheet that a device reaches, one set for each type of device.

    Attributes:
        matmul: of the peak FLOP/s, by dtype, in a large product of matrices (clocks sag under that load).
        attention: of the peak FLOP/s, forward and backward, in each generation of fused attention kernels: "flash1"
            and "flash2" (Dao et al. 2022, arXiv 2205.14135; Dao 2023, arXiv 2307.08691), "cudnn" (the vendor's).
        memory: of the bandwidth, in a large pointwise kernel.
        launch: seconds from one kernel to the next.
        k_half: the inner dimension at which a product reaches half of its speed.
        bytes_half: bytes at which a pointwise kernel reaches half of its bandwidth.
        source: what they were fitted to, or where they are from.
        figures: by name, as in "matmul.bfloat16", where each is from.
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
    """One device of a cluster.

    Attributes:
        name: how it is asked for.
        flops: peak FLOP/s by dtype, dense; torch's names, and "float8".
        memory: bytes.
        bandwidth: bytes/s of its memory.
        sms: streaming multiprocessors: how many tiles it works on at once (a TPU's matrix units).
        efficiency: what it reaches of all this.
        source: where the figures are from.
        attention: the fused attention kernel that is run, one of the efficiency's; a recipe names it.
    """

    name: str
    flops: Mapping[str, float]
    memory: float
    bandwidth: float
    sms: int
    efficiency: Efficiency
    source: str
    attention: str = "flash2"

    def peak(self, dtype: str) -> float:
        """FLOP/s of the data sheet.

        Raises:
            UserError: the device does not compute in that dtype.
        """
        if dtype not in self.flops:
            raise UserError(f"{self.name} does not compute in {dtype}; it does in {', '.join(self.flops)}")
        return self.flops[dtype]

    def seconds(self, kernel: Kernel, dtype: str) -> float:
        """How long the kernel takes, its operands in `dtype`.

        In less than two bytes only products with parameters are computed, their first operand cast before; all else is
        in bfloat16 (of float8: Micikevicius et al. 2022, arXiv 2209.05433).

        Raises:
            UserError: the device does not compute in that dtype.
        """
        if (bytes := bytes_of(dtype)) < 2:
            self.peak(dtype)
            if not (isinstance(kernel, Matmul) and kernel.learned):
                return self.seconds(kernel, "bfloat16")
            cast = Pointwise("cast", (1 + bytes / 2) * kernel.batch * kernel.m * kernel.k, 0.0)  # of 2 bytes
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
        """Whether what a backward pass takes has in it that its gradient is added to an older one."""
        return False

    def overhead(self, op: str, dtype: str) -> float:
        """Seconds that an op of the tape takes beside its kernels: on a device that is kept busy, nothing."""
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
        # a block is 128 queries of one head; it walks the keys, and needs some to fill its pipeline
        blocks = kernel.sequences * kernel.heads * ceil(kernel.queries / 128)
        filled = blocks / (ceil(blocks / self.sms) * self.sms)
        filled *= kernel.keys / (kernel.keys + 2 * self.efficiency.k_half)
        return kernel.flops / (self.peak(dtype) * share * filled)

    def _memory(self, kernel: Kernel, dtype: str) -> float:
        moved = kernel.elements * bytes_of(dtype)
        small = self.efficiency.bytes_half if isinstance(kernel, Pointwise) else 0.0
        return (moved + small) / (self.bandwidth * self.efficiency.memory) if moved else 0.0


@cache
def alignment(kernel: Matmul, dtype: str) -> float:
    """The share of its speed that a product keeps if a row of its operands is not whole 16-byte words."""
    word = 16 // bytes_of(dtype)
    if kernel.k % word == 0 and kernel.n % word == 0:
        return 1.0
    return MISALIGNED if kernel.batch == 1 else MISALIGNED_BATCH
