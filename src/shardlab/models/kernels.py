"""The work of a layer as a device sees it: a list of kernels, each with its arithmetic and the memory that it moves.

A device says how long a kernel takes (`shardlab.hardware`). What is counted here is the same on all of them.
"""

from __future__ import annotations

from typing import NamedTuple


class Matmul(NamedTuple):
    """A product of matrices, (m, k) by (k, n), so many at once.

    Attributes:
        m, n, k: rows of the result, its columns, and what is summed over.
        batch: how many independent products.
        learned: whether the second matrix is a parameter, so that its gradient is the weight's.
        bias: whether a learned row is added as well; its gradient is a sum over the result's rows.
        backward: whether it makes a gradient, which runs at another speed: of transposed matrices, added to others.
    """

    m: int
    n: int
    k: int
    batch: int = 1
    learned: bool = True
    bias: bool = False
    backward: bool = False

    @property
    def flops(self) -> float:
        """An addition and a multiplication for each term."""
        return 2.0 * self.batch * self.m * self.n * self.k

    @property
    def elements(self) -> float:
        """Read and written, each once."""
        return float(self.batch * (self.m * self.k + self.k * self.n + self.m * self.n))

    def backward_input(self) -> tuple[Kernel, ...]:
        """The gradient of the first matrix, and of the second if it is an input too."""
        first = self._replace(n=self.k, k=self.n, bias=False, backward=True)
        return (first,) if self.learned else (first, self._second())

    def backward_weight(self) -> tuple[Kernel, ...]:
        """The gradient of the second matrix, if it is a parameter, and of the bias."""
        bias = (Pointwise("bias", float(self.batch * self.m * self.n), 0.0, backward=True),) if self.bias else ()
        return (self._second(), *bias) if self.learned else ()

    def _second(self) -> Matmul:
        return self._replace(m=self.k, k=self.m, bias=False, backward=True)


class FusedAttention(NamedTuple):
    """Softmax of scaled products of queries and keys, times values, in one kernel that keeps no T x T matrix.

    Attributes:
        sequences: how many, each on its own.
        heads, kv_heads: of queries, and of keys and values.
        queries, keys: tokens of a sequence that ask, and that are asked.
        head_width: features of a head.
        seen: the part of the queries x keys pairs that is not masked (about 1/2 of a causal square).
        backward: whether this is the backward pass: five products for each pair instead of two (Dao 2023, arXiv
            2307.08691, section 4.1), and queries, keys, values, output and their gradients moved.
    """

    sequences: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_width: int
    seen: float
    backward: bool = False

    @property
    def flops(self) -> float:
        """An addition and a multiplication for each term, over the pairs that are seen."""
        products = 5 if self.backward else 2
        pairs = self.seen * self.sequences * self.heads * self.queries * self.keys
        return 2.0 * products * pairs * self.head_width

    @property
    def elements(self) -> float:
        """Queries and output, keys and values; on the way back also their gradients."""
        each = self.sequences * self.head_width
        passed = each * (2 * self.heads * self.queries + 2 * self.kv_heads * self.keys)
        return float(2 * passed if self.backward else passed)

    def backward_input(self) -> tuple[Kernel, ...]:
        return (self._replace(backward=True),)

    def backward_weight(self) -> tuple[Kernel, ...]:
        return ()


LOOKUPS = ("embedding", "positions")
"""Pointwise kernels whose backward pass makes a matrix's gradient, and none of an input."""


class Pointwise(NamedTuple):
    """What goes through memory element by element: norms, activations, dropout, sums, softmax, look-ups.

    Counted as by one fused kernel, which reads what goes in and writes what comes out once.

    Attributes:
        name: what is computed.
        elements: read and written in the forward pass.
        back: read and written in the backward pass.
        backward: whether this is the backward pass.
    """

    name: str
    elements: float
    back: float
    backward: bool = False

    @property
    def flops(self) -> float:
        """Zero: memory is what takes the time."""
        return 0.0

    def backward_input(self) -> tuple[Kernel, ...]:
        return () if self.name in LOOKUPS else self._back()

    def backward_weight(self) -> tuple[Kernel, ...]:
        """The gradient of the matrix, of a look-up."""
        return self._back() if self.name in LOOKUPS else ()

    def _back(self) -> tuple[Kernel, ...]:
        return (Pointwise(self.name, self.back, 0.0, backward=True),) if self.back else ()


Kernel = Matmul | FusedAttention | Pointwise
"""One thing that a device runs."""
