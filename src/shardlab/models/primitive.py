"""A primitive: one step of a model's arithmetic, on tensors that go by names.

Each primitive says once what it reads and makes, along which indices it may be cut, its parameters, its FLOPs and
kernels, and what is kept of it; `shardlab.models.tensors` computes it on torch, and a test holds the two
together. Everything else is a sum over primitives: a layer's sizes, its memory, its rules.

The tensors of a model go by these names: `x`, what most primitives read and make; `s`, the residual stream; `q` and
`kv`, queries, and keys and values; `gates`, `choices` and `slots`, what a router says of each token. A name is used
again and again: a primitive reads the last tensor that was made under it.

FLOPs are those of matrix products in the forward pass, an addition and a multiplication each (Narayanan et al. 2021,
arXiv 2104.04473, appendix: 24 T C^2 + 4 T^2 C a layer, and 2 T C V for the logits, for T tokens, C features and V
tokens of the vocabulary). As there, attention counts the whole T x T square although its upper half is masked;
look-ups, norms, softmax, activations and sums count 0. Kernels are the same arithmetic for a device to price; there a
fused attention counts only the pairs that it sees.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple

from shardlab.models.kernels import Kernel
from shardlab.models.layout import Parameter
from shardlab.rules.node import Node

Pieces = Mapping[str, int]
"""Into how many pieces each index is cut (1 where it is not named)."""


LARGE = 2**14
"""Elements of a weight from which on its product is worth a choice of kernels."""

RECOMPUTED_FROM = 2**17
"""Elements of a weight from which on an activation that it is multiplied by is computed again in the backward pass. It
takes a thirtieth of a step of a model with 128 features, and less of wider ones: products grow faster."""

INTEGERS = ("choices", "slots")
"""Tensors of integers."""


def piece(length: int, pieces: Pieces, index: str) -> int:
    """Elements of one piece of an index; the last one may be filled up."""
    return -(-length // pieces.get(index, 1))


@dataclass(frozen=True, kw_only=True)
class Primitive(ABC):
    """One step of a layer's arithmetic.

    Attributes:
        tokens: of a sequence, T.
    """

    einsum: ClassVar[str]
    """The tensors that it reads and makes, each with its indices: `x(ffn) -> x(width)`; {} is one of its fields."""
    whole: ClassVar[frozenset[str]] = frozenset()
    """Indices that it must hold whole, since it mixes them."""
    deals: ClassVar[frozenset[str]] = frozenset()
    """Indices of its result of which it may make some pieces alone."""
    mixes_tokens: ClassVar[bool] = False
    """Whether tokens of a sequence are mixed."""
    atomic: ClassVar[bool] = False
    """Whether its backward pass may add with atomics on a GPU, in no fixed order."""
    affine: ClassVar[bool] = False
    """Whether its backward pass adds a gradient of its own, as that of an auxiliary loss, to what follows from the
    gradient that it is given: then it multiplies its own by `Share.gradient_scale`. Otherwise the pass is linear."""

    product: ClassVar[bool] = False
    """Whether it multiplies by a weight, and what it reads is kept for that weight's gradient alone."""
    made_again: ClassVar[bool] = False
    """Whether its one result, made without parameters, is cheap to make again: so a product need not keep it."""

    tokens: int
    takes_own: bool = False

    @cached_property
    def reads(self) -> Mapping[str, str]:
        """The tensors that it reads, each with its indices."""
        return _tensors(self.einsum.format_map(vars(self)).split(" -> ")[0])

    @cached_property
    def makes(self) -> Mapping[str, str]:
        """The tensors that it makes, each with its indices."""
        return _tensors(self.einsum.format_map(vars(self)).split(" -> ")[1])

    def features(self, tensor: str) -> int:
        """Features of a token in a tensor that it makes."""
        raise AssertionError(f"{type(self).__name__} makes no {tensor}")

    def shape(self, tensor: str, rows: int) -> tuple[int, ...]:
        """Shape of a tensor that it makes of a microbatch of `rows` sequences, (rows, T, features) for most."""
        return (rows, self.tokens, self.features(tensor))

    def parameters(self) -> tuple[Parameter, ...]:
        """Its parameters."""
        return ()

    @property
    def borrows(self) -> tuple[str, ...]:
        """Names of parameters of the first block that it computes with as well: a tied embedding."""
        return ()

    def keeps(self) -> tuple[str, ...]:
        """The tensors, read or made, that its backward pass reads; not all are kept (`Run.made_again`)."""
        return ()

    def keeps_beside(self, rows: int) -> int:
        """Elements that are kept beside tensors that have names, for `rows` sequences: statistics, masks."""
        return self.mask(rows)

    def mask(self, rows: int) -> int:
        """Elements of those that are dropout masks."""
        return 0

    def keeps_for_weight(self) -> tuple[str, ...]:
        """The tensors that the second half of a split backward pass reads."""
        return tuple(self.reads) if self._has_matrix else ()

    def keeps_beside_for_weight(self, rows: int) -> int:
        """Elements that the second half reads beside tensors that have names, and gradients of those."""
        return 0

    def gradients_for_weight(self) -> tuple[str, ...]:
        """The tensors, made (or else read), whose gradients the second half reads."""
        return tuple(self.makes) if self._has_matrix else ()

    @property
    def _has_matrix(self) -> bool:
        """Whether a parameter's gradient is left to the second half: those of vectors are made in the first."""
        return any(len(parameter.shape) > 1 for parameter in self.parameters())

    @property
    def adds_to(self) -> str:
        """The tensor that it adds another one to, so that both have one gradient (empty: none)."""
        return ""

    def flops(self) -> int:
        """FLOPs of its forward pass on one sequence."""
        return 0

    @abstractmethod
    def kernels(self, sequences: int, tokens: int, pieces: Pieces) -> tuple[Kernel, ...]:
        """What its forward pass asks of a device.

        Args:
            sequences: of the microbatches that are computed together.
            tokens: of each sequence that are here, T at most.
            pieces: into which its indices are cut; one of them is computed.
        """

    def divides(self) -> tuple[tuple[str, str, int], ...]:
        """(index, what it counts, how many) for what must divide evenly where an index is cut."""
        return ()

    @cached_property
    def node(self) -> Node:
        """Its rule; integers have no gradient, and go where the tensors go that they are about."""
        weights = {parameter.name: " ".join(parameter.indices) for parameter in self.parameters()}
        reads, makes = (
            {name: indices for name, indices in tensors.items() if name not in INTEGERS}
            for tensors in (self.reads, self.makes)
        )
        return Node(
            type(self).__name__.lower(), reads, makes, weights | self._borrowed_indices(), self.whole,
            mixes_tokens=self.mixes_tokens, takes_own=self.takes_own, deals=self.deals, atomic=self.atomic,
            affine=self.affine,
        )  # fmt: skip

    def _borrowed_indices(self) -> dict[str, str]:
        return {}


def _tensors(written: str) -> dict[str, str]:
    """Tensors and their indices.

    >>> _tensors("x(expert ffn) slots")
    {'x': 'expert ffn', 'slots': ''}
    """
    return {name: indices or "" for name, indices in re.findall(r"(\w+)(?:\(([^)]*)\))?", written)}


class Step(NamedTuple):
    """A primitive in its place in a model.

    Attributes:
        primitive: what is computed.
        block: the block that it belongs to, which holds its parameters and draws its masks.
        place: where that is, as a reader knows it: `block 31, feed-forward`, `embedding`.
    """

    primitive: Primitive
    block: int
    place: str
