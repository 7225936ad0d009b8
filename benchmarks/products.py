"""Compare the matrix products of a layer by oneDNN with torch's own kernels, which are MKL's on x86.

    python benchmarks/products.py

Both take turns on the same tensors in one thread, as when a run chooses between them. Ratios are medians over the turns
of oneDNN's time over torch's, for a linear map with a bias and for the gradient of its input. If a ratio is less than
0.97, a run uses oneDNN. The gradient of the weight always uses torch. `--json` prints the ratios with the seconds.
"""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from statistics import median

import torch
import tyro
from rich.console import Console
from rich.table import Table

from shardlab.models.tensors.compute import Product, time_kernels
from shardlab.train.launch.ranks import set_heap


@dataclass(frozen=True)
class Options:
    """Time matrix products of oneDNN and of torch."""

    widths: tuple[int, ...] = (256, 768)
    """Features of the model: each block has matrices of width x 3 width, width x width, width x 4 width and back."""

    tokens: tuple[int, ...] = (256, 1024)
    """Rows of the input."""

    turns: int = 40
    """Calls of each kernel that are timed."""

    json: bool = False
    """Print JSON alone."""


@dataclass(frozen=True)
class Row:
    """A matrix, and the seconds of its products: the linear map, and the gradient of its input."""

    tokens: int
    inputs: int
    outputs: int
    forward: float
    forward_ratio: float
    backward: float
    backward_ratio: float


def row_of(tokens: int, inputs: int, outputs: int, turns: int) -> Row:
    """Time one matrix."""
    found: list[float] = []
    for backward in (False, True):
        product = Product(tokens, inputs, outputs, not backward, backward)
        pairs = time_kernels(product, range(turns, turns + 1), math.inf)
        found += [median(onednn for onednn, _ in pairs), median(onednn / own for onednn, own in pairs)]
    return Row(tokens, inputs, outputs, *found)


def main(options: Options) -> None:
    torch.set_num_threads(1)
    set_heap()
    shapes = [
        (tokens, *matrix)
        for width in options.widths
        for tokens in options.tokens
        for matrix in ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width))
    ]
    rows = [row_of(*shape, options.turns) for shape in shapes]
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    table = Table(box=None, header_style="dim")
    for heading in ("tokens", "inputs", "outputs", "forward ms", "ratio", "input's gradient ms", "ratio"):
        table.add_column(heading, justify="right")
    for row in rows:
        sizes = (f"{size:,}" for size in (row.tokens, row.inputs, row.outputs))
        parts = ((row.forward, row.forward_ratio), (row.backward, row.backward_ratio))
        table.add_row(*sizes, *(text for ms, ratio in parts for text in (f"{1000 * ms:.2f}", f"{ratio:.2f}")))
    Console(highlight=False).print(table)


if __name__ == "__main__":
    main(tyro.cli(Options))
