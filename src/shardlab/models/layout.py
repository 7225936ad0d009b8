"""Layout of a layer's parameters in its flat buffer, and the kernels of a layer.

`Parameter` and `Cut` describe one parameter and its slices; `LayerLayout` places all parameters of a layer in one
buffer. The second half describes the work of a layer as a list of kernels (`Matmul`, `FusedAttention`, `Pointwise`),
each with its arithmetic and the memory that it moves. These counts are the same on all devices.
`shardlab.simulate.hardware` turns them into time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import mul
from typing import NamedTuple

ALIGNMENT = 16
"""Alignment of a parameter in elements: 64 bytes of float32, one cache line."""


class Cut(NamedTuple):
    """Cut of a parameter: along `dim`, each of its `sections` is cut into `pieces` of equal length.

    A slice is one piece of every section, one after the other. Attention's matrix has three sections, for queries, keys
    and values. Without `sections`, the whole dim is one section, which is padded if it does not divide.
    """

    dim: int
    pieces: int
    sections: tuple[int, ...] = ()


class Parameter(NamedTuple):
    """One parameter of a layer.

    Attributes:
        name: name as in nanoGPT.
        shape: shape of the whole parameter.
        decayed: whether AdamW's weight decay acts on it.
        indices: name of the index of each dim. The names decide along which dims the parameter may be cut.
        sections: lengths of the parts of dim `section_dim`, such as queries, keys and values (empty: one part). Each
            part is cut separately.
        section_dim: number of the dim that has parts.
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
        """Whether Muon updates it: it is a matrix, or one for each expert, but not the embedding or the head."""
        return self.decayed and not {"vocab", "token"} & set(self.indices)

    def cuts(self, pieces: Mapping[str, int]) -> list[Cut]:
        """Return the cuts of the parameter, given the number of pieces of each index."""
        dim_pieces = [(dim, pieces.get(index, 1)) for dim, index in enumerate(self.indices)]
        return [
            Cut(dim, count, self.sections if dim == self.section_dim else ()) for dim, count in dim_pieces if count > 1
        ]

    def sliced(self, pieces: Mapping[str, int]) -> Parameter:
        """Return the parameter of one slice. All slices have the same shape."""
        counts = [pieces.get(index, 1) for index in self.indices]
        if all(count == 1 for count in counts):
            return self
        shape = tuple(-(-length // count) for length, count in zip(self.shape, counts, strict=True))
        return self._replace(shape=shape, sections=self.sections if counts[self.section_dim] == 1 else ())


@dataclass(frozen=True)
class LayerLayout:
    """Layout of one layer's flat buffer: its decayed parameters, then the others, each aligned to 64 bytes.

    Since the decayed parameters come first, an optimizer treats any slice of the buffer as at most two ranges.

    >>> bias, weight = Parameter("bias", (3,), False, ("out",)), Parameter("weight", (3, 7), True, ("out", "in"))
    >>> layout = LayerLayout([bias, weight])
    >>> [p.name for p in layout.parameters], layout.offsets, layout.numel, layout.decayed_numel
    (['weight', 'bias'], (0, 32), 48, 32)

    If parallelism cuts the layer, the buffer has one run for each slice, in which that slice's parameters are laid out
    like this. All runs are equally long.

    Attributes:
        parameters: the parameters of one slice, in the order of its run.
        slices: number of slices, and so of runs of the buffer.
    """

    parameters: tuple[Parameter, ...]
    slices: int = 1

    def __init__(self, parameters: Iterable[Parameter], slices: int = 1) -> None:
        ordered = sorted(parameters, key=lambda parameter: not parameter.decayed)  # the sort is stable
        object.__setattr__(self, "parameters", tuple(ordered))
        object.__setattr__(self, "slices", slices)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """First element of each parameter in a run."""
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
        """Elements of one slice's run, with the gaps that alignment leaves."""
        return sum(aligned(p.numel) for p in self.parameters)

    @property
    def numel(self) -> int:
        """Elements of the buffer, with gaps."""
        return self.slices * self.run_numel

    @cached_property
    def decayed_numel(self) -> int:
        """Elements of the first part of a run, with the decayed parameters and gaps."""
        return sum(aligned(p.numel) for p in self.parameters if p.decayed)

    @property
    def parameter_count(self) -> int:
        """Elements of the parameters, without gaps."""
        return self.slices * sum(p.numel for p in self.parameters)

    @property
    def matrix_count(self) -> int:
        """Elements of the parameters that Muon updates."""
        return self.slices * sum(p.numel for p in self.parameters if p.hidden_matrix)

    def padded(self, of: int) -> int:
        """Return the length of the buffer if its runs are padded so that it splits into `of` equal, aligned slices.

        If `of` is a multiple of `slices`, each of these slices lies in one run.
        """
        pieces = math.lcm(of, self.slices) // self.slices
        return self.slices * aligned(self.run_numel, pieces * ALIGNMENT)

    def decayed_runs(self, length: int) -> list[tuple[int, int]]:
        """Return the (start, stop) ranges of decayed parameters in a buffer of `length` elements."""
        run = length // self.slices
        return [(i * run, i * run + self.decayed_numel) for i in range(self.slices)]


def aligned(elements: int, to: int = ALIGNMENT) -> int:
    """Return the next multiple of `to`."""
    return -(-elements // to) * to


class Matmul(NamedTuple):
    """Batched product of matrices, (m, k) by (k, n).

    Attributes:
        m, n, k: rows and columns of the result, and the length of the sum.
        batch: number of independent products.
        learned: whether the second matrix is a parameter, so that its gradient is a weight gradient.
        bias: whether a learned row is added. Its gradient is a sum over the result's rows.
        backward: whether the result is a gradient. Such a product has transposed matrices and adds to its result, so it
            runs at another speed.
        of_weight: whether the result is the gradient of a parameter. Its sum is over tokens, and neither operand is
            contiguous along tokens.
    """

    m: int
    n: int
    k: int
    batch: int = 1
    learned: bool = True
    bias: bool = False
    backward: bool = False
    of_weight: bool = False

    @property
    def flops(self) -> float:
        """FLOPs: an addition and a multiplication for each term."""
        return 2.0 * self.batch * self.m * self.n * self.k

    @property
    def elements(self) -> float:
        """Number of elements read and written, each once."""
        return float(self.batch * (self.m * self.k + self.k * self.n + self.m * self.n))

    def backward_input(self) -> tuple[Kernel, ...]:
        """Return the kernels of the gradient of the first matrix, and of the second if it is an input too."""
        first = self._replace(n=self.k, k=self.n, bias=False, backward=True)
        return (first,) if self.learned else (first, self._second())

    def backward_weight(self) -> tuple[Kernel, ...]:
        """Return the kernels of the gradient of the second matrix, if it is a parameter, and of the bias."""
        bias = (Pointwise("bias", float(self.batch * self.m * self.n), 0.0, backward=True),) if self.bias else ()
        return (self._second(), *bias) if self.learned else ()

    def _second(self) -> Matmul:
        return self._replace(m=self.k, k=self.m, bias=False, backward=True, of_weight=self.learned)


class FusedAttention(NamedTuple):
    """Attention in one kernel, which stores no T x T matrix.

    Attributes:
        sequences: number of independent sequences.
        heads, kv_heads: heads of queries, and of keys and values.
        queries, keys: number of queries and of keys of a sequence.
        head_width: features of a head.
        seen: fraction of the (query, key) pairs that are not masked (about 1/2 of a causal square).
        backward: whether this is the backward pass. It computes five products for each pair instead of two (Dao 2023,
            arXiv 2307.08691, section 4.1), and moves queries, keys, values, output and their gradients.
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
        """FLOPs: an addition and a multiplication for each term, over the pairs that are not masked."""
        products = 5 if self.backward else 2
        pairs = self.seen * self.sequences * self.heads * self.queries * self.keys
        return 2.0 * products * pairs * self.head_width

    @property
    def elements(self) -> float:
        """Number of elements of queries, output, keys and values; in the backward pass, also of their gradients."""
        elements_per_head = self.sequences * self.head_width
        forward_elements = elements_per_head * (2 * self.heads * self.queries + 2 * self.kv_heads * self.keys)
        return float(2 * forward_elements if self.backward else forward_elements)

    def backward_input(self) -> tuple[Kernel, ...]:
        return (self._replace(backward=True),)

    def backward_weight(self) -> tuple[Kernel, ...]:
        return ()


LOOKUPS = ("embedding", "positions")
"""Pointwise kernels whose backward pass computes the gradient of a matrix, but of no input."""


class Pointwise(NamedTuple):
    """Element-wise kernel: norms, activations, dropout, sums, softmax, look-ups.

    It counts as one fused kernel, which reads its inputs once and writes its outputs once.

    Attributes:
        name: name of the computation.
        elements: elements read and written in the forward pass.
        back: elements read and written in the backward pass.
        backward: whether this is the backward pass.
    """

    name: str
    elements: float
    back: float
    backward: bool = False

    @property
    def flops(self) -> float:
        """Zero: its time depends on memory alone."""
        return 0.0

    def backward_input(self) -> tuple[Kernel, ...]:
        return () if self.name in LOOKUPS else self._back()

    def backward_weight(self) -> tuple[Kernel, ...]:
        """Return the kernels of the gradient of a look-up's matrix."""
        return self._back() if self.name in LOOKUPS else ()

    def _back(self) -> tuple[Kernel, ...]:
        return (Pointwise(self.name, self.back, 0.0, backward=True),) if self.back else ()


Kernel = Matmul | FusedAttention | Pointwise
"""Kernel of a device."""
