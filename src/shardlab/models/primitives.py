"""The primitives that most models are made of: look-up, norm, linear map, activation, sum with the residual stream."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar, Literal, get_args

from shardlab.models.kernels import Kernel, Matmul, Pointwise
from shardlab.models.layout import Parameter
from shardlab.models.primitive import Pieces, Primitive, piece

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
