"""Where each parameter of a layer lies in the layer's one flat buffer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import mul
from typing import NamedTuple

ALIGNMENT = 16
"""Elements between the places where a parameter may start: 64 bytes of float32, one cache line."""


class Cut(NamedTuple):
    """How a parameter is sliced: along `dim`, each of its `sections` into `pieces` of equal length.

    A slice is its piece of every section, one after the other. Attention's matrix has three sections, for queries, keys
    and values; no `sections` means one. A single section that does not divide is cut as if it were longer (by padding).
    """

    dim: int
    pieces: int
    sections: tuple[int, ...] = ()


class Parameter(NamedTuple):
    """One parameter of a layer.

    Attributes:
        name: as in nanoGPT.
        shape: of the whole parameter.
        decayed: whether AdamW's weight decay acts on it.
        indices: the name of each dim, which says along what it may be cut.
        sections: lengths of the sections of dim `section_dim` (none: one), which are cut alike.
        section_dim: the dim that has sections.
    """

    name: str
    shape: tuple[int, ...]
    decayed: bool
    indices: tuple[str, ...]
    sections: tuple[int, ...] = ()
    section_dim: int = 0

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def hidden_matrix(self) -> bool:
        """Whether Muon steps it: a matrix, or one for each expert, but no embedding and no head."""
        return self.decayed and not {"vocab", "token"} & set(self.indices)

    def cuts(self, pieces: Mapping[str, int]) -> list[Cut]:
        """How it is sliced where each index is cut into so many pieces."""
        named = [(dim, pieces.get(index, 1)) for dim, index in enumerate(self.indices)]
        return [Cut(dim, count, self.sections if dim == self.section_dim else ()) for dim, count in named if count > 1]

    def sliced(self, pieces: Mapping[str, int]) -> Parameter:
        """One slice of it; all have one shape."""
        counts = [pieces.get(index, 1) for index in self.indices]
        if all(count == 1 for count in counts):
            return self
        shape = tuple(-(-length // count) for length, count in zip(self.shape, counts, strict=True))
        return self._replace(shape=shape, sections=self.sections if counts[self.section_dim] == 1 else ())


@dataclass(frozen=True)
class LayerLayout:
    """The flat buffer of one layer: its decayed parameters, then the others, each on a 64-byte boundary.

    With the decayed ones in front, an optimizer treats a whole layer, or any slice of it, as at most two runs.

    >>> bias, weight = Parameter("bias", (3,), False, ("out",)), Parameter("weight", (3, 7), True, ("out", "in"))
    >>> layout = LayerLayout([bias, weight])
    >>> [p.name for p in layout.parameters], layout.offsets, layout.numel, layout.decayed_numel
    (['weight', 'bias'], (0, 32), 48, 32)

    A layer that tensor parallelism cuts has one such run for every slice, all alike, one after the other.

    Attributes:
        parameters: of one slice, in the buffer's order, whichever order they were given in.
        slices: runs of the buffer.
    """

    parameters: tuple[Parameter, ...]
    slices: int = 1

    def __init__(self, parameters: Iterable[Parameter], slices: int = 1) -> None:
        ordered = sorted(parameters, key=lambda parameter: not parameter.decayed)  # stable
        object.__setattr__(self, "parameters", tuple(ordered))
        object.__setattr__(self, "slices", slices)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The element of a run at which each parameter starts."""
        return (0, *accumulate(aligned(p.numel) for p in self.parameters))[:-1]

    @cached_property
    def places(self) -> tuple[tuple[tuple[int, ...], tuple[int, ...], int], ...]:
        """Shape, strides and offset of each parameter in a run."""
        strides = [tuple(accumulate(p.shape[:0:-1], mul, initial=1))[::-1] for p in self.parameters]
        return tuple(
            (p.shape, stride, offset) for p, stride, offset in zip(self.parameters, strides, self.offsets, strict=True)
        )

    @cached_property
    def run_numel(self) -> int:
        """Elements of one slice's run, gaps included."""
        return sum(aligned(p.numel) for p in self.parameters)

    @property
    def numel(self) -> int:
        """Elements of the buffer, gaps included."""
        return self.slices * self.run_numel

    @cached_property
    def decayed_numel(self) -> int:
        """Elements of a run's front part, which holds the decayed parameters; gaps included."""
        return sum(aligned(p.numel) for p in self.parameters if p.decayed)

    @property
    def parameter_count(self) -> int:
        """Elements of the parameters, without the gaps."""
        return self.slices * sum(p.numel for p in self.parameters)

    @property
    def matrix_count(self) -> int:
        """Elements of the parameters that Muon steps."""
        return self.slices * sum(p.numel for p in self.parameters if p.hidden_matrix)

    def padded(self, of: int) -> int:
        """Elements of the buffer once its runs are lengthened so that it splits into `of` equal, aligned slices.

        Each of them lies in one run if `of` is a multiple of `slices`.
        """
        pieces = math.lcm(of, self.slices) // self.slices
        return self.slices * aligned(self.run_numel, pieces * ALIGNMENT)

    def decayed_runs(self, length: int) -> list[tuple[int, int]]:
        """Where the decayed parameters lie, as (start, stop), in a buffer whose runs fill `length` elements."""
        run = length // self.slices
        return [(i * run, i * run + self.decayed_numel) for i in range(self.slices)]


def aligned(elements: int, to: int = ALIGNMENT) -> int:
    """The next multiple of `to`."""
    return -(-elements // to) * to


# The work of a layer as a device sees it: a list of kernels, each with its arithmetic and the memory that it moves.
#
# A device says how long a kernel takes (`shardlab.simulate.hardware`). What is counted here is the same on all of
# them.


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
