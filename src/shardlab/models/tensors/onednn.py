"""Products with large weights by oneDNN or by torch's own kernels, whichever is faster for a shape on this machine.

Torch's own linear maps call MKL in float32 on x86, and torch has oneDNN beside it. Which of them takes less time
depends on the CPU, the shape and the direction, so `measured` times both, and `CHOICES` says which one computes.
Before anything is chosen, torch's own kernels compute. `shardlab.execute.products` makes all ranks choose alike.
`benchmarks/products.py` has both kernels side by side. Layers that torch.compile compiles do not come here.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from statistics import median
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlab.models.primitive import LARGE

AVAILABLE = torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()
"""Whether this torch has both."""

GAIN = 0.97
"""Part of the time of torch's own kernel that oneDNN's may take at most to be chosen: less would be noise."""

BUDGET = 0.03
"""Seconds after which no more turns of a product are timed."""

TURNS = range(3, 51)
"""Fewest and, before the end, most turns that are timed."""


class Product(NamedTuple):
    """Shape of a product with a weight (outputs, inputs).

    Attributes:
        rows: of the matrix that is multiplied.
        inputs, outputs: features that the linear map reads and makes.
        bias: whether a bias is added.
        backward: whether it is the gradient of what the map read, and not the map.
    """

    rows: int
    inputs: int
    outputs: int
    bias: bool
    backward: bool


CHOICES: dict[Product, bool | None] = {}
"""Whether oneDNN computes a product; None: it has come up, and nothing is chosen yet."""


def linear_forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute a linear map of `x` (..., inputs) to (..., outputs), by a weight (outputs, inputs) and a bias (outputs).

    Autograd does not go through it.
    """
    return onednn_linear(x, weight, bias) if _chosen(x, weight, bias is not None, False) else F.linear(x, weight, bias)


def linear_backward(gradient: Tensor, weight: Tensor) -> Tensor:
    """Compute the gradient of what a linear map read, of that of what it made."""
    return onednn_linear(gradient, weight.T) if _chosen(gradient, weight, False, True) else gradient @ weight


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute a linear map by oneDNN, in float32 on a CPU."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


@contextmanager
def choices(chosen: Mapping[Product, bool]) -> Generator[None, None, None]:
    """Compute by these choices within this, and by those that are made within it, but by no others."""
    before = CHOICES.copy()
    CHOICES.clear()
    CHOICES.update(chosen)
    try:
        yield
    finally:
        CHOICES.clear()
        CHOICES.update(before)


def measured(product: Product) -> bool:
    """Return whether oneDNN takes less time for a product than torch's own kernel, by the median of some turns."""
    if not AVAILABLE or not torch.backends.mkldnn.enabled:
        return False
    turns = timed(product, TURNS, BUDGET)
    return median(onednn / own for onednn, own in turns) < GAIN


def timed(product: Product, turns: range, budget: float) -> list[tuple[float, float]]:
    """Time a product by both kernels in turns, which begin with either.

    Args:
        product: its shape.
        turns: fewest and, before the end, most turns.
        budget: seconds after which no more turns begin.

    Returns:
        Seconds for which this thread had a core, in oneDNN's and in torch's own kernel, of each turn. What else the
        machine does takes other seconds, and threads that compute together meet at the end of a product.
    """
    rows, inputs, outputs, has_bias, backward = product
    weight, bias = torch.ones(outputs, inputs), torch.ones(outputs) if has_bias else None
    x = torch.ones(rows, outputs if backward else inputs)

    def seconds(onednn: bool) -> float:
        began = time.thread_time()
        if onednn:
            onednn_linear(x, weight.T if backward else weight, bias)
        elif backward:
            torch.matmul(x, weight)
        else:
            F.linear(x, weight, bias)
        return time.thread_time() - began

    for onednn in (True, False):
        seconds(onednn)  # the first call prepares the kernel
    found: list[tuple[float, float]] = []
    until = time.perf_counter() + budget
    while len(found) < turns.start or (len(found) < turns.stop - 1 and time.perf_counter() < until):
        first = len(found) % 2 == 0
        took = {onednn: seconds(onednn) for onednn in (first, not first)}
        found.append((took[True], took[False]))
    return found


def _chosen(x: Tensor, weight: Tensor, bias: bool, backward: bool) -> bool:
    """Return whether oneDNN computes a product; of a large one in float32 on a CPU, note that it has come up."""
    if weight.numel() < LARGE or x.dtype != torch.float32 or x.device.type != "cpu":
        return False
    outputs, inputs = weight.shape
    product = Product(x.numel() // x.shape[-1], inputs, outputs, bias, backward)
    onednn = CHOICES.setdefault(product, None)
    return bool(onednn and AVAILABLE and torch.backends.mkldnn.enabled)
