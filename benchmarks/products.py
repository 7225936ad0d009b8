"""Products of a layer's matrices by oneDNN, beside torch's own, which are MKL's on x86: what layers run, and why.

    python benchmarks/products.py

Both ways take turns on the same tensors, in one thread. Ratios are oneDNN's time by torch's, medians over the turns:
of a linear map with a bias, and of the gradient of its input. The gradient of the weight is torch's either way.
`--json` prints them, with seconds, for other programs.
"""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from statistics import median

import torch
import torch.nn.functional as F
import tyro
from rich.console import Console
from rich.table import Table

from shardlab.models.tensors import onednn
from shardlab.train.heap import set_heap


@dataclass(frozen=True)
class Options:
    """Time products by oneDNN beside torch's own."""

    widths: tuple[int, ...] = (256, 768)
    """Features of the model: each block has matrices of width x 3 width, width x width, width x 4 width and back."""

    tokens: tuple[int, ...] = (256, 1024)
    """Rows of what is multiplied."""

    turns: int = 40
    """Calls of each way that are timed."""

    json: bool = False
    """Print JSON alone."""


@dataclass(frozen=True)
class Row:
    """A matrix, and the seconds of its products: the map, and the gradient of what it reads."""

    tokens: int
    inputs: int
    outputs: int
    forward: float
    forward_ratio: float
    backward: float
    backward_ratio: float


def timed(tokens: int, inputs: int, outputs: int, turns: int) -> Row:
    """Time one matrix."""
    x, gradient = torch.randn(tokens, inputs), torch.randn(tokens, outputs)
    weight, bias = torch.randn(outputs, inputs), torch.randn(outputs)
    took: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for turn in range(2 * (turns + 2)):
        ours, times = turn % 2 == 0, [time.perf_counter()]
        (onednn.linear_forward if ours else F.linear)(x, weight, bias)
        times.append(time.perf_counter())
        onednn.linear_backward(gradient, weight) if ours else gradient @ weight
        times.append(time.perf_counter())
        took[ours].append((times[1] - times[0], times[2] - times[1]))
    pairs = list(zip(took[True][2:], took[False][2:], strict=True))
    ratios = [median(a[part] / b[part] for a, b in pairs) for part in range(2)]
    forward, backward = (median(a[part] for a, _ in pairs) for part in range(2))
    return Row(tokens, inputs, outputs, forward, ratios[0], backward, ratios[1])


def main(options: Options) -> None:
    torch.set_num_threads(1)
    set_heap()
    shapes = [
        (tokens, *matrix)
        for width in options.widths
        for tokens in options.tokens
        for matrix in ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width))
    ]
    rows = [timed(*shape, options.turns) for shape in shapes]
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
