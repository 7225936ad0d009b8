"""Primitives: single steps of a model's arithmetic, on tensors with names.

Each primitive declares its input and output tensors, the indices along which it may be cut, its parameters, its FLOPs
and kernels, and the tensors that its backward pass reads. `shardlab.models.tensors` computes each primitive on torch,
and tests compare this computation with what the primitive declares. The sizes, the memory and the rules of a model's
layers follow from their primitives.

`Primitive` is the base, and `Step` is a primitive at its position in a model. Below them are the primitives that most
models consist of: look-up, norm, linear map, activation, and sum with the residual stream.

The tensors of a model have these names: `x`, which most primitives read and make; `s`, the residual stream; `q`, the
queries; `kv`, the keys and values; `gates`, `choices` and `slots`, the results of a router. Names are reused: a
primitive reads the last tensor that was made under a name.

FLOPs are those of the matrix products in the forward pass; an addition and a multiplication count 1 each (Narayanan et
al. 2021, arXiv 2104.04473, appendix: 24 T C^2 + 4 T^2 C a layer, and 2 T C V for the logits, for T tokens, C features
and V tokens of the vocabulary). As in that paper, attention counts the whole T x T square although its upper half is
masked; look-ups, norms, softmax, activations and sums count 0. Kernels describe the same arithmetic as a device
executes it: a fused attention counts only pairs that are not masked.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import ClassVar, Literal, NamedTuple

from shardlab.language.rules.layer_graph import Node
from shardlab.models.layout import Kernel, Matmul, Parameter, Pointwise

Pieces = Mapping[str, int]
"""Number of pieces of each index (1 if it is not named)."""


LARGE = 2**14
"""Smallest weight, in elements, for which a choice between kernels for its product pays off."""

RECOMPUTED_FROM = 2**17
"""Smallest weight, in elements, whose input is recomputed in the backward pass if this input is the result of an
activation function. The recomputation takes a thirtieth of a step of a model with 128 features, and less in wider
models, because products grow faster."""

INTEGERS = ("choices", "slots")
"""Names of tensors of integers."""


def piece(length: int, pieces: Pieces, index: str) -> int:
    """Return the elements of one piece of an index. The last piece may be padded."""
    return -(-length // pieces.get(index, 1))


@dataclass(frozen=True, kw_only=True)
class Primitive(ABC):
    """One step of a layer's arithmetic.

    Attributes:
        tokens: number of tokens T of a sequence.
        takes_own: whether a slice's backward pass cuts the slice's part out of a gradient of the whole output.
    """

    einsum: ClassVar[str]
    """Input and output tensors, each with its indices: `x(ffn) -> x(width)`. The name of a field in braces is replaced
    with the field's value."""
    whole: ClassVar[frozenset[str]] = frozenset()
    """Indices that must not be cut, because the primitive mixes their elements."""
    deals: ClassVar[frozenset[str]] = frozenset()
    """Indices of the output, such as `expert` in a dispatch, of which a program may compute only some pieces."""
    mixes_tokens: ClassVar[bool] = False
    """Whether the primitive mixes the tokens of a sequence."""
    atomic: ClassVar[bool] = False
    """Whether the backward pass may add with atomics on a GPU, in no fixed order."""
    affine: ClassVar[bool] = False
    """Whether the backward pass adds a gradient that does not depend on the output's gradient, such as that of an
    auxiliary loss, multiplied by `Share.gradient_scale`. Otherwise the backward pass is linear."""

    product: ClassVar[bool] = False
    """Whether the primitive is a product with a weight, whose input is saved only for the weight's gradient."""
    made_again: ClassVar[bool] = False
    """Whether the primitive has no parameters and a single output that is cheap to recompute, so that a product which
    reads this output need not save it."""

    tokens: int
    takes_own: bool = False

    @cached_property
    def reads(self) -> Mapping[str, str]:
        """Tensors that the primitive reads, each with its indices."""
        return _tensors(self.einsum.format_map(vars(self)).split(" -> ")[0])

    @cached_property
    def makes(self) -> Mapping[str, str]:
        """Tensors that the primitive makes, each with its indices."""
        return _tensors(self.einsum.format_map(vars(self)).split(" -> ")[1])

    def features(self, tensor: str) -> int:
        """Return the features of a token in an output tensor."""
        raise AssertionError(f"{type(self).__name__} makes no {tensor}")

    def shape(self, tensor: str, rows: int) -> tuple[int, ...]:
        """Return the shape of an output tensor for `rows` sequences, which is (rows, T, features) for most."""
        return (rows, self.tokens, self.features(tensor))

    def parameters(self) -> tuple[Parameter, ...]:
        """Parameters of the primitive."""
        return ()

    @property
    def borrows(self) -> Mapping[str, str]:
        """Parameters of the first block that the primitive also uses, each with its indices: a tied embedding."""
        return {}

    def keeps(self) -> tuple[str, ...]:
        """Inputs and outputs that the backward pass reads. Some are not saved but recomputed (see `Run.made_again`)."""
        return ()

    def keeps_beside(self, rows: int) -> int:
        """Return the number of saved elements other than named tensors, for `rows` sequences: statistics, masks."""
        return self.mask(rows)

    def mask(self, rows: int) -> int:
        """Return the number of elements of dropout masks, a part of `keeps_beside`."""
        return 0

    def keeps_for_weight(self) -> tuple[str, ...]:
        """Tensors that the second half of a split backward pass reads."""
        return tuple(self.reads) if self._has_matrix else ()

    def keeps_beside_for_weight(self, rows: int) -> int:
        """Return the number of other elements that the second half reads: neither named tensors nor their gradients."""
        return 0

    def gradients_for_weight(self) -> tuple[str, ...]:
        """Tensors whose gradients the second half reads. A name stands for an input if no output has this name."""
        return tuple(self.makes) if self._has_matrix else ()

    @property
    def adds_to(self) -> str:
        """Name of the output, if its gradient is also that of the inputs that the primitive sums ("": it is not)."""
        return ""

    def flops(self) -> int:
        """FLOPs of the forward pass on one sequence."""
        return 0

    @abstractmethod
    def kernels(self, sequences: int, tokens: int, pieces: Pieces) -> tuple[Kernel, ...]:
        """Return the kernels of the forward pass.

        Args:
            sequences: sequences of the microbatches that are computed together.
            tokens: tokens of each sequence on this rank, at most T.
            pieces: number of pieces of each index, one of which is computed.
        """

    def divides(self) -> tuple[tuple[str, str, int], ...]:
        """Conditions for a cut, as (index, noun, count): the count must be a multiple of the index's pieces."""
        return ()

    @cached_property
    def node(self) -> Node:
        """The primitive for the rules of layers. Tensors of integers are left out, since they have no gradient."""
        weights = {parameter.name: " ".join(parameter.indices) for parameter in self.parameters()}
        reads, makes = (
            {name: indices for name, indices in tensors.items() if name not in INTEGERS}
            for tensors in (self.reads, self.makes)
        )
        return Node(
            type(self).__name__.lower(), reads, makes, {**weights, **self.borrows}, self.whole,
            mixes_tokens=self.mixes_tokens, takes_own=self.takes_own, deals=self.deals, atomic=self.atomic,
            affine=self.affine,
        )  # fmt: skip

    @property
    def _has_matrix(self) -> bool:
        """Whether any parameter is a matrix.

        The second half of a split backward pass computes the gradients of matrices. The first half has already computed
        those of vectors.
        """
        return any(len(parameter.shape) > 1 for parameter in self.parameters())


class Step(NamedTuple):
    """Primitive at its position in a model.

    Attributes:
        primitive: the primitive.
        block: number of the block that has the primitive's parameters and dropout masks.
        place: the position as text: `block 31, feed-forward`, `embedding`.
    """

    primitive: Primitive
    block: int
    place: str


Activation = Literal["gelu", "gelu_tanh", "squared_relu", "swiglu", "geglu"]
"""Activation functions: exact GELU; GELU by tanh (Hendrycks and Gimpel 2016, arXiv 1606.08415; as in GPT-2); max(x,
0)^2 (So et al. 2021, arXiv 2109.08668); silu(gate) * up and GELU by tanh(gate) * up (Shazeer 2020, arXiv
2002.05202)."""


GATED = ("swiglu", "geglu")
"""Activation functions with two input features for each hidden one."""


class DropoutSite(IntEnum):
    """Position of a dropout in a block."""

    EMBEDDING = 0
    ATTENTION = 1
    ATTENTION_OUTPUT = 2
    FEED_FORWARD_OUTPUT = 3
    SHARED_EXPERTS_OUTPUT = 4


@dataclass(frozen=True, kw_only=True)
class Lookup(Primitive):
    """Look-up of tokens (rows, T) in the embedding, with output `x` (rows, T, C).

    In a slice of the vocabulary, tokens of other slices give zero.
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
        """Return the kernels of the look-up. Its backward pass sets a gradient of the whole matrix to zero, and adds
        the tokens' rows.
        """
        hidden_size = piece(self.hidden_size, pieces, "width")
        elements, matrix = sequences * tokens * hidden_size, piece(self.vocab_size, pieces, "vocab") * hidden_size
        return (Pointwise("embedding", 2 * elements, 3 * elements + matrix),)


@dataclass(frozen=True, kw_only=True)
class ResidualSum(Primitive):
    """Sum that makes the residual stream `s` (rows, T, C), with dropout of an input.

    Attributes:
        hidden_size: features C of a token.
        drops: whether there is dropout.
    """

    hidden_size: int
    drops: bool

    def features(self, tensor: str) -> int:
        return self.hidden_size

    def mask(self, rows: int) -> int:
        return self.drops * rows * self.tokens * self.hidden_size

    @property
    def adds_to(self) -> str:
        return "" if self.drops else "s"


@dataclass(frozen=True, kw_only=True)
class Embed(ResidualSum):
    """Start of the residual stream `s`: the embedding `x`, plus learned positions if there are any, with dropout."""

    einsum: ClassVar[str] = "x(width) -> s(width)"

    positions: bool

    def parameters(self) -> tuple[Parameter, ...]:
        if not self.positions:
            return ()
        return (Parameter("wpe.weight", (self.tokens, self.hidden_size), True, ("token", "width")),)

    def keeps_for_weight(self) -> tuple[str, ...]:
        return ()

    def gradients_for_weight(self) -> tuple[str, ...]:
        return ("x",) if self.positions else ()

    def kernels(self, sequences: int, tokens: int, pieces: Pieces) -> tuple[Kernel, ...]:
        elements, matrix = sequences * tokens * self.hidden_size, tokens * self.hidden_size
        positions = (Pointwise("positions", 2 * elements + matrix, elements + matrix),) if self.positions else ()
        dropout = (Pointwise("dropout", 3 * elements, 3 * elements),) if self.drops else ()
        return (*positions, *dropout)


@dataclass(frozen=True, kw_only=True)
class Norm(Primitive):
    """Norm of the residual stream `s`, with output `x`: a LayerNorm, or an RMSNorm without bias (Zhang and Sennrich
    2019, arXiv 1910.07467).

    Attributes:
        eps: number added to the variance, or to the mean square.
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
        """Return the number of saved elements: 1/deviation of each token, and for a LayerNorm also its mean."""
        return rows * self.tokens * (1 if self.rms else 2)

    def kernels(self, sequences: int, tokens: int, pieces: Pieces) -> tuple[Kernel, ...]:
        elements = sequences * tokens * self.hidden_size
        return (Pointwise("rms_norm" if self.rms else "layer_norm", 2 * elements, 3 * elements),)


@dataclass(frozen=True, kw_only=True)
class Linear(Primitive):
    """Linear map of `x`, from `inputs` features of each token to `outputs` features.

    Attributes:
        name: prefix of the parameters' names, before "weight" and "bias".
        read, made: names of the input and the output tensor, `x` by default.
        out_index, in_index: index names of the output and the input features.
        sections: lengths of the sections of the outputs, each of which is cut separately (empty: one section).
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
    """Score (logit) of every token of the vocabulary.

    If `tied`, the scores are products with the token embedding, without a separate matrix. If the vocabulary is sliced
    and the logits have been gathered, the backward pass of a slice reads only its part of the logits' gradient.
    """

    takes_own: bool = True

    tied: bool

    def parameters(self) -> tuple[Parameter, ...]:
        return () if self.tied else super().parameters()

    @property
    def borrows(self) -> Mapping[str, str]:
        return {"wte.weight": "vocab width"} if self.tied else {}

    def keeps_for_weight(self) -> tuple[str, ...]:
        return ("x",)

    def gradients_for_weight(self) -> tuple[str, ...]:
        return ("x",)


@dataclass(frozen=True, kw_only=True)
class Activate(Primitive):
    """Activation function, from the features of the linear map before it to the `hidden` features of the one after it.

    A gated function has two input features for each hidden one: first all gates, then all values that they multiply.

    Attributes:
        tensor, index: name of the tensor that is read and of the result, and name of the index of their features.
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
    """Return the kernel of the activation function on `rows` rows of a linear map's output."""
    input_elements, output_elements = rows * features_of(activation, hidden), rows * hidden
    name = "swiglu" if activation in GATED else activation  # recipes give one count of kernels for both
    return Pointwise(name, input_elements + output_elements, 2 * input_elements + output_elements)


def features_of(activation: Activation, hidden: int) -> int:
    """Return the number of features before the activation for `hidden` features after it."""
    return 2 * hidden if activation in GATED else hidden


@dataclass(frozen=True, kw_only=True)
class Add(ResidualSum):
    """Sum of a branch `x` with the residual stream `s`: the bias of the last linear map, dropout, then the sum.

    Attributes:
        branch: name of the branch, `x` by default.
        bias: name of the bias ("": none).
        site: position of the dropout.
    """

    einsum: ClassVar[str] = "{branch}(width) s(width) -> s(width)"

    bias: str
    site: DropoutSite
    branch: str = "x"

    def parameters(self) -> tuple[Parameter, ...]:
        return (Parameter(self.bias, (self.hidden_size,), False, ("width",)),) if self.bias else ()

    def kernels(self, sequences: int, tokens: int, pieces: Pieces) -> tuple[Kernel, ...]:
        """Return the kernels of the addition. Its backward pass also sums the gradients from the norm and the residual
        stream.
        """
        elements = sequences * tokens * self.hidden_size
        bias = (Pointwise("bias", 2 * elements, elements),) if self.bias else ()
        return (*bias, Pointwise("residual", (3 + self.drops) * elements, (3 + 3 * self.drops) * elements))


def feed_forward(
    tokens: int, hidden_size: int, hidden: int, bias: bool, activation: Activation, *, shared: bool = False
) -> tuple[Primitive, ...]:
    """Return two linear maps of `x` with an activation between them.

    Args:
        tokens: number of tokens T of a sequence.
        hidden_size: features C of a token.
        hidden: features between the two maps.
        bias: whether the maps have biases. The sum with the residual stream adds the second bias, unless `shared`.
        activation: activation function.
        shared: whether these are the experts of a mixture that process all tokens. Their result is the branch `y`,
            because the router reads `x` after them. Every rank computes all of their features, so these have another
            index name than features that are cut.
    """
    features = features_of(activation, hidden)
    name, tensor, index = ("mlp.shared", "y", "shared") if shared else ("mlp", "x", "ffn")
    up = Linear(
        tokens=tokens, name=f"{name}.c_fc", outputs=features, inputs=hidden_size, bias=bias,
        out_index=index, in_index="width", sections=(hidden, hidden) if features > hidden else (), made=tensor,
    )  # fmt: skip
    down = Linear(
        tokens=tokens, name=f"{name}.c_proj", outputs=hidden_size, inputs=hidden, bias=bias and shared,
        out_index="width", in_index=index, read=tensor, made=tensor,
    )  # fmt: skip
    return up, Activate(tokens=tokens, activation=activation, hidden=hidden, tensor=tensor, index=index), down


def _tensors(text: str) -> dict[str, str]:
    """Parse tensors with their indices.

    >>> _tensors("x(expert ffn) slots")
    {'x': 'expert ffn', 'slots': ''}
    """
    return {name: indices or "" for name, indices in re.findall(r"(\w+)(?:\(([^)]*)\))?", text)}
