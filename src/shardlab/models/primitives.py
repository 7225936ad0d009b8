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
from enum import IntEnum
from functools import cached_property
from typing import ClassVar, Literal, NamedTuple, get_args

from shardlab.language.rules.layer_graph import Node
from shardlab.models.layout import Kernel, Matmul, Parameter, Pointwise

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

    @property
    def _has_matrix(self) -> bool:
        """Whether a parameter's gradient is left to the second half: those of vectors are made in the first."""
        return any(len(parameter.shape) > 1 for parameter in self.parameters())

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


# The primitives that most models are made of: look-up, norm, linear map, activation, sum with the residual stream.


Activation = Literal["gelu", "gelu_tanh", "squared_relu", "swiglu"]
"""Exact GELU; GELU by tanh (Hendrycks and Gimpel 2016, arXiv 1606.08415; GPT-2's own); max(x, 0)^2 (So et al.
2021, arXiv 2109.08668); silu(gate) * up (Shazeer 2020, arXiv 2002.05202)."""

ACTIVATIONS: tuple[str, ...] = get_args(Activation)


class DropoutSite(IntEnum):
    """The places of a block where elements are dropped."""

    EMBEDDING = 0
    ATTENTION = 1
    ATTENTION_OUTPUT = 2
    FEED_FORWARD_OUTPUT = 3
    SHARED_EXPERTS_OUTPUT = 4


@dataclass(frozen=True, kw_only=True)
class Lookup(Primitive):
    """Tokens (rows, T) to their rows of the embedding, `x` (rows, T, C). Of a slice of the vocabulary, the tokens of
    other slices give zero.
    """

    einsum: ClassVar[str] = "x -> x(width)"
    atomic: ClassVar[bool] = True

    hidden_size: int
    vocab_size: int

    def features(self, tensor: str) -> int:
        return self.hidden_size

    def parameters(self) -> tuple[Parameter, ...]:
        return (Parameter("wte.weight", (self.vocab_size, self.hidden_size), True, ("vocab", "width")),)

    def keeps(self) -> tuple[str, ...]:
        return ("x",)

    def divides(self) -> tuple[tuple[str, str, int], ...]:
        return (("width", "width", self.hidden_size),)

    def kernels(self, sequences: int, tokens: int, pieces: Pieces) -> tuple[Kernel, ...]:
        """Kernels of the look-up. Its backward pass makes a gradient of the whole matrix and adds the tokens' rows to
        it."""
        hidden_size = piece(self.hidden_size, pieces, "width")
        elements, matrix = sequences * tokens * hidden_size, piece(self.vocab_size, pieces, "vocab") * hidden_size
        return (Pointwise("embedding", 2 * elements, 3 * elements + matrix),)


@dataclass(frozen=True, kw_only=True)
class Embed(Primitive):
    """The embedding `x` to the residual stream `s`: learned positions are added if there are any; dropout."""

    einsum: ClassVar[str] = "x(width) -> s(width)"

    hidden_size: int
    positions: bool
    drops: bool

    def features(self, tensor: str) -> int:
        return self.hidden_size

    def parameters(self) -> tuple[Parameter, ...]:
        if not self.positions:
            return ()
        return (Parameter("wpe.weight", (self.tokens, self.hidden_size), True, ("token", "width")),)

    def mask(self, rows: int) -> int:
        return self.drops * rows * self.tokens * self.hidden_size

    def keeps_for_weight(self) -> tuple[str, ...]:
        return ()

    def gradients_for_weight(self) -> tuple[str, ...]:
        return ("x",) if self.positions else ()

    @property
    def adds_to(self) -> str:
        return "" if self.drops else "s"

    def kernels(self, sequences: int, tokens: int, pieces: Pieces) -> tuple[Kernel, ...]:
        elements, matrix = sequences * tokens * self.hidden_size, tokens * self.hidden_size
        positions = (Pointwise("positions", 2 * elements + matrix, elements + matrix),) if self.positions else ()
        dropout = (Pointwise("dropout", 3 * elements, 3 * elements),) if self.drops else ()
        return (*positions, *dropout)


@dataclass(frozen=True, kw_only=True)
class Norm(Primitive):
    """The residual stream `s`, normalised, to `x`: a LayerNorm, or an RMSNorm (Zhang and Sennrich 2019, arXiv
    1910.07467), which has no bias.

    Attributes:
        eps: added to the variance, or to the mean square.
    """

    einsum: ClassVar[str] = "s(width) -> x(width)"
    whole: ClassVar[frozenset[str]] = frozenset({"width"})

    name: str
    hidden_size: int
    rms: bool
    bias: bool
    eps: float = 1e-5

    def features(self, tensor: str) -> int:
        return self.hidden_size

    def parameters(self) -> tuple[Parameter, ...]:
        ends = ("weight", "bias") if self.bias and not self.rms else ("weight",)
        return tuple(Parameter(f"{self.name}.{end}", (self.hidden_size,), False, ("width",)) for end in ends)

    def keeps(self) -> tuple[str, ...]:
        return ("s",)

    def keeps_beside(self, rows: int) -> int:
        """1/deviation of each token, and of a LayerNorm the mean."""
        return rows * self.tokens * (1 if self.rms else 2)

    def kernels(self, sequences: int, tokens: int, pieces: Pieces) -> tuple[Kernel, ...]:
        elements = sequences * tokens * self.hidden_size
        return (Pointwise("rms_norm" if self.rms else "layer_norm", 2 * elements, 3 * elements),)


@dataclass(frozen=True, kw_only=True)
class Linear(Primitive):
    """A linear map of `x`: of each token's `inputs` features, `outputs` features.

    Attributes:
        name: of its parameters, without "weight" and "bias".
        read, made: names of the tensors, where they are not `x`.
        out_index, in_index: names of the features made and read.
        sections: of the outputs that are cut alike.
    """

    einsum: ClassVar[str] = "{read}({in_index}) -> {made}({out_index})"
    product: ClassVar[bool] = True

    name: str
    outputs: int
    inputs: int
    bias: bool
    out_index: str
    in_index: str
    sections: tuple[int, ...] = ()
    read: str = "x"
    made: str = "x"

    def features(self, tensor: str) -> int:
        return self.outputs

    def parameters(self) -> tuple[Parameter, ...]:
        out, indices = self.out_index, (self.out_index, self.in_index)
        weight = Parameter(f"{self.name}.weight", (self.outputs, self.inputs), True, indices, self.sections)
        bias = Parameter(f"{self.name}.bias", (self.outputs,), False, (out,), self.sections)
        return (weight, bias) if self.bias else (weight,)

    def keeps(self) -> tuple[str, ...]:
        return (self.read,)

    def flops(self) -> int:
        return 2 * self.tokens * self.inputs * self.outputs

    def kernels(self, sequences: int, tokens: int, pieces: Pieces) -> tuple[Kernel, ...]:
        outputs, inputs = piece(self.outputs, pieces, self.out_index), piece(self.inputs, pieces, self.in_index)
        return (Matmul(sequences * tokens, outputs, inputs, bias=self.bias),)


@dataclass(frozen=True, kw_only=True)
class Scores(Linear):
    """A score (logit) for every token of the vocabulary. If `tied`, the scores are products with the token embedding,
    and there is no matrix of its own. A slice takes its own part of the gradient of gathered logits.
    """

    takes_own: bool = True

    tied: bool

    def parameters(self) -> tuple[Parameter, ...]:
        return () if self.tied else super().parameters()

    @property
    def borrows(self) -> tuple[str, ...]:
        return ("wte.weight",) if self.tied else ()

    def keeps_for_weight(self) -> tuple[str, ...]:
        return ("x",)

    def gradients_for_weight(self) -> tuple[str, ...]:
        return ("x",)

    def _borrowed_indices(self) -> dict[str, str]:
        return {"wte.weight": "vocab width"} if self.tied else {}


@dataclass(frozen=True, kw_only=True)
class Activate(Primitive):
    """An activation function, from the features that a linear map makes for it to the `hidden` that the next one takes.

    SwiGLU takes two features for each: all gates, then all that they multiply.

    Attributes:
        tensor, index: names of what it reads and makes, and of its features.
    """

    einsum: ClassVar[str] = "{tensor}({index}) -> {tensor}({index})"
    made_again: ClassVar[bool] = True

    activation: Activation
    hidden: int
    tensor: str = "x"
    index: str = "ffn"

    def features(self, tensor: str) -> int:
        return self.hidden

    def keeps(self) -> tuple[str, ...]:
        return (self.tensor,)

    def divides(self) -> tuple[tuple[str, str, int], ...]:
        return ((self.index, "hidden features", self.hidden),)

    def kernels(self, sequences: int, tokens: int, pieces: Pieces) -> tuple[Kernel, ...]:
        return (activation_kernel(self.activation, sequences * tokens, piece(self.hidden, pieces, self.index)),)


def activation_kernel(activation: Activation, rows: int, hidden: int) -> Pointwise:
    """The activation function on rows of what a linear map made for it."""
    before, after = rows * features_of(activation, hidden), rows * hidden
    return Pointwise(activation, before + after, 2 * before + after)


def features_of(activation: Activation, hidden: int) -> int:
    """Features that a linear map makes for `hidden` features after the activation."""
    return 2 * hidden if activation == "swiglu" else hidden


@dataclass(frozen=True, kw_only=True)
class Add(Primitive):
    """A branch `x` to the residual stream `s`: the last linear map's bias is added if there is one, dropout, the sum.

    Attributes:
        branch: the branch's name, where it is not `x`.
        bias: the name of the bias (empty: none).
        site: where elements are dropped.
    """

    einsum: ClassVar[str] = "{branch}(width) s(width) -> s(width)"

    hidden_size: int
    bias: str
    drops: bool
    site: DropoutSite
    branch: str = "x"

    def features(self, tensor: str) -> int:
        return self.hidden_size

    def parameters(self) -> tuple[Parameter, ...]:
        return (Parameter(self.bias, (self.hidden_size,), False, ("width",)),) if self.bias else ()

    def mask(self, rows: int) -> int:
        return self.drops * rows * self.tokens * self.hidden_size

    @property
    def adds_to(self) -> str:
        return "" if self.drops else "s"

    def kernels(self, sequences: int, tokens: int, pieces: Pieces) -> tuple[Kernel, ...]:
        """Kernels of the addition. Its backward pass also sums what norm and residual give to the gradient."""
        elements = sequences * tokens * self.hidden_size
        bias = (Pointwise("bias", 2 * elements, elements),) if self.bias else ()
        return (*bias, Pointwise("residual", (3 + self.drops) * elements, (3 + 3 * self.drops) * elements))


def feed_forward(
    tokens: int, hidden_size: int, hidden: int, bias: bool, activation: Activation
) -> tuple[Primitive, ...]:
    """Two linear maps with an activation between them; the second one's bias is added with the residual."""
    features = features_of(activation, hidden)
    sections = (hidden, hidden) if features > hidden else ()
    up = Linear(
        tokens=tokens, name="mlp.c_fc", outputs=features, inputs=hidden_size, bias=bias,
        out_index="ffn", in_index="width", sections=sections,
    )  # fmt: skip
    down = Linear(
        tokens=tokens,
        name="mlp.c_proj",
        outputs=hidden_size,
        inputs=hidden,
        bias=False,
        out_index="width",
        in_index="ffn",
    )
    return up, Activate(tokens=tokens, activation=activation, hidden=hidden), down
