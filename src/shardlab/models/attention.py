"""Primitives of causal attention: the projection to queries, keys and values; the attention; and the output map."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from shardlab.models.layout import FusedAttention, Kernel, Matmul, Parameter, Pointwise
from shardlab.models.primitives import Linear, Pieces, Primitive, piece

RopeScaling = tuple[float, float, float, int]
"""Scaling of rotary frequencies: factor, low and high frequency factor, and the original context length. As in Llama
3.1, a frequency with fewer than `low` turns in that context is divided by the factor, a frequency with more than `high`
turns is unchanged, and frequencies in between are interpolated linearly (meta-llama/llama-models, llama3/model.py,
apply_scaling)."""


@dataclass(frozen=True, kw_only=True)
class GroupedHeads(Primitive):
    """Primitive whose heads share keys and values in groups, if there are fewer `kv_heads` than heads.

    Grouped queries: Ainslie et al. 2023, arXiv 2305.13245.

    Attributes:
        heads, kv_heads: heads of queries, and of keys and values.
        head_dim: features of a head.
    """

    heads: int
    kv_heads: int
    head_dim: int

    @property
    def width(self) -> int:
        """Features of all queries of a token."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Features of all keys of a token. Its values have as many."""
        return self.kv_heads * self.head_dim

    def features(self, tensor: str) -> int:
        return self.width if tensor == "q" else 2 * self.kv_width


@dataclass(frozen=True, kw_only=True)
class Projection(GroupedHeads):
    """Linear map of normalised features `x` to queries `q` (rows, T, width), and keys and values `kv` (rows, T, 2
    kv_width).

    Tensor parallelism splits it by heads.

    Attributes:
        hidden_size: features C of a token.
        rope_theta: base of the rotary embedding of queries and keys (Su et al. 2021, arXiv 2104.09864; None: no rotary
            embedding).
        rope_scaling: scaling of the slower frequencies of the rotary embedding (None: no scaling).
    """

    einsum: ClassVar[str] = "x(width) -> q(head) kv(head)"
    product: ClassVar[bool] = True

    hidden_size: int
    bias: bool
    rope_theta: float | None
    rope_scaling: RopeScaling | None = None

    @property
    def outputs(self) -> int:
        """Features of a token's queries, keys and values."""
        return self.width + 2 * self.kv_width

    def parameters(self) -> tuple[Parameter, ...]:
        shape, sections = (self.outputs, self.hidden_size), (self.width, self.kv_width, self.kv_width)
        weight = Parameter("attn.c_attn.weight", shape, True, ("head", "width"), sections)
        bias = Parameter("attn.c_attn.bias", (self.outputs,), False, ("head",), sections)
        return (weight, bias) if self.bias else (weight,)

    def keeps(self) -> tuple[str, ...]:
        return ("x",)

    def gradients_for_weight(self) -> tuple[str, ...]:
        return ()

    def keeps_beside_for_weight(self, rows: int) -> int:
        """Return the number of elements in the gradient of queries, keys and values together."""
        return rows * self.tokens * self.outputs

    def divides(self) -> tuple[tuple[str, str, int], ...]:
        return (("head", "heads", self.heads), ("head", "key/value heads", self.kv_heads))

    def flops(self) -> int:
        return 2 * self.tokens * self.hidden_size * self.outputs

    def kernels(self, sequences: int, tokens: int, pieces: Pieces) -> tuple[Kernel, ...]:
        """Return the kernels of one product, then of the rotation of queries and keys."""
        rows = sequences * tokens
        product = Matmul(rows, piece(self.outputs, pieces, "head"), self.hidden_size, bias=self.bias)
        if self.rope_theta is None:
            return (product,)
        rotated_elements = piece(2 * rows * (self.width + self.kv_width), pieces, "head")
        return product, Pointwise("rotary", rotated_elements, rotated_elements)


@dataclass(frozen=True, kw_only=True)
class HeadNorm(GroupedHeads):
    """RMSNorm of every head's query and key, then their rotation (Henry et al. 2020, arXiv 2010.04245).

    Each head has a separate weight. The primitive is cut by heads, like the projection before it.

    Attributes:
        eps: number added to the mean square.
        rope_theta, rope_scaling: as in `Projection`, which does not rotate if this primitive follows.
    """

    einsum: ClassVar[str] = "q(head) kv(head) -> q(head) kv(head)"

    eps: float
    rope_theta: float | None
    rope_scaling: RopeScaling | None = None

    def parameters(self) -> tuple[Parameter, ...]:
        sizes = {"attn.q_norm.weight": self.width, "attn.k_norm.weight": self.kv_width}
        return tuple(Parameter(name, (size,), False, ("head",)) for name, size in sizes.items())

    def keeps(self) -> tuple[str, ...]:
        return ("q", "kv")

    def keeps_beside(self, rows: int) -> int:
        """Return the number of saved elements: 1/deviation of each head's query and key."""
        return rows * self.tokens * (self.heads + self.kv_heads)

    def kernels(self, sequences: int, tokens: int, pieces: Pieces) -> tuple[Kernel, ...]:
        elements = piece(sequences * tokens * (self.width + self.kv_width), pieces, "head")
        norm = Pointwise("rms_norm", 2 * elements, 3 * elements)
        return (norm,) if self.rope_theta is None else (norm, Pointwise("rotary", 2 * elements, 2 * elements))


@dataclass(frozen=True, kw_only=True)
class Attend(GroupedHeads):
    """Causal scaled dot product attention of queries `q` to keys and values `kv`, with result `x` (rows, T,
    width).

    Without dropout, it is one fused op that saves the log-sum-exp of each head's rows. With dropout, it saves three T x
    T matrices of each head. It is cut by heads.

    Attributes:
        drops: whether dropout acts on the probabilities of attention.
        value_dim: features of a head's value (None: as many as of a query).
    """

    einsum: ClassVar[str] = "q(head) kv(head) -> x(head)"
    atomic: ClassVar[bool] = True
    mixes_tokens: ClassVar[bool] = True

    drops: bool
    value_dim: int | None = None

    @property
    def value_size(self) -> int:
        """Features of a head's value."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def values_width(self) -> int:
        """Features of all values of a token."""
        return self.kv_heads * self.value_size

    @property
    def result_width(self) -> int:
        """Features of the mixed values of a token."""
        return self.heads * self.value_size

    def heads_of(self, pieces: int) -> Attend:
        """Return this primitive with the heads of one piece only."""
        if pieces == 1:
            return self
        return replace(self, heads=self.heads // pieces, kv_heads=self.kv_heads // pieces)

    def features(self, tensor: str) -> int:
        return self.result_width

    def keeps(self) -> tuple[str, ...]:
        return () if self.drops else ("q", "kv", "x")

    def keeps_beside(self, rows: int) -> int:
        if self.drops:
            return rows * self.tokens * (2 * self.width + self.result_width) + 3 * self.mask(rows)
        return rows * self.heads * self.tokens

    def mask(self, rows: int) -> int:
        return self.drops * rows * self.heads * self.tokens**2

    def flops(self) -> int:
        return 2 * (self.tokens**2 * (self.width + self.result_width))

    def kernels(self, sequences: int, tokens: int, pieces: Pieces) -> tuple[Kernel, ...]:
        """Return the kernels for all tokens' queries, keys and values."""
        visible_share = (tokens + 1) / (2 * tokens)  # the causal triangle, with its diagonal
        return self.kernels_between(sequences, tokens, tokens, visible_share, pieces)

    def kernels_between(
        self, sequences: int, queries: int, keys: int, visible_share: float, pieces: Pieces
    ) -> tuple[Kernel, ...]:
        """Return the kernels for some tokens' queries and some tokens' keys and values.

        Without dropout they are fused. With dropout each step is a kernel, because masks are drawn for the T x T
        square; then all pairs are computed, including masked ones.

        Args:
            sequences: sequences of the microbatches that are computed together.
            queries, keys: numbers of queries and of keys of each sequence.
            visible_share: fraction of the (query, key) pairs whose query is not before the key.
            pieces: number of pieces of the heads.
        """
        size, heads = self.head_dim, piece(self.heads, pieces, "head")
        if not self.drops:
            kv_heads = piece(self.kv_heads, pieces, "head")
            mean = (size + self.value_size) // 2  # of the two products, one has as many features as a value
            return (FusedAttention(sequences, heads, kv_heads, queries, keys, mean, visible_share),)
        squares = sequences * heads
        scores = squares * queries * keys
        return (
            Matmul(queries, keys, size, squares, learned=False),
            Pointwise("softmax", 2 * scores, 3 * scores),
            Pointwise("dropout", 3 * scores, 3 * scores),
            Matmul(queries, self.value_size, keys, squares, learned=False),
        )


@dataclass(frozen=True, kw_only=True)
class LatentSizes:
    """Sizes of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    Attributes:
        hidden_size: features C of a token.
        heads: number of heads.
        q_rank, kv_rank: features of the queries' latent (None: queries are projected from the token), and of the keys'
            and values' latent.
        nope_dim, rope_dim: features of a head's query and key without and with rotation. All heads share one rotated
            key.
        value_dim: features of a head's value.
    """

    hidden_size: int
    heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int

    @property
    def head_dim(self) -> int:
        """Features of a head's query and key."""
        return self.nope_dim + self.rope_dim

    @property
    def normed(self) -> tuple[int, ...]:
        """Features of each latent that is normalised."""
        return (self.kv_rank,) if self.q_rank is None else (self.q_rank, self.kv_rank)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the weights of these norms."""
        return tuple(f"attn.{name}_latent_norm.weight" for name in ("q", "kv")[-len(self.normed) :])

    @property
    def q_inputs(self) -> int:
        """Number of the leading features in the output of `Latents`: those from which queries are projected."""
        return self.hidden_size if self.q_rank is None else self.q_rank

    @property
    def outputs(self) -> int:
        """Features of a token after the projection: the latents, and the shared key before its rotation."""
        return sum(self.normed) + self.rope_dim


@dataclass(frozen=True, kw_only=True)
class Latents(Primitive):
    """Linear map of normalised features `x` to `x`: the queries' latent, that of keys and values, and the shared key.

    Each latent is normalised (RMSNorm). If there is no latent of queries, the features themselves come first.
    """

    einsum: ClassVar[str] = "x(width) -> x(latent)"
    whole: ClassVar[frozenset[str]] = frozenset({"width", "latent"})
    product: ClassVar[bool] = True

    sizes: LatentSizes
    eps: float

    def features(self, tensor: str) -> int:
        return self.sizes.q_inputs + self.sizes.kv_rank + self.sizes.rope_dim

    def parameters(self) -> tuple[Parameter, ...]:
        sizes = self.sizes
        weight = (sizes.outputs, sizes.hidden_size)
        sections = (*sizes.normed[:-1], sizes.kv_rank + sizes.rope_dim)
        return (
            Parameter("attn.latents.weight", weight, True, ("latent", "width"), sections if len(sections) > 1 else ()),
            *(
                Parameter(name, (size,), False, ("latent",))
                for name, size in zip(sizes.names, sizes.normed, strict=True)
            ),
        )

    def keeps(self) -> tuple[str, ...]:
        return ("x",)

    def keeps_beside(self, rows: int) -> int:
        """Return the number of saved elements: the features before their norms, and 1/deviation of each latent."""
        return rows * self.tokens * (self.sizes.outputs + len(self.sizes.normed))

    def gradients_for_weight(self) -> tuple[str, ...]:
        return ()

    def keeps_beside_for_weight(self, rows: int) -> int:
        """Return the number of elements in the gradient of the projected features."""
        return rows * self.tokens * self.sizes.outputs

    def flops(self) -> int:
        return 2 * self.tokens * self.sizes.hidden_size * self.sizes.outputs

    def kernels(self, sequences: int, tokens: int, pieces: Pieces) -> tuple[Kernel, ...]:
        rows, elements = sequences * tokens, sequences * tokens * sum(self.sizes.normed)
        product = Matmul(rows, self.sizes.outputs, self.sizes.hidden_size)
        return product, Pointwise("rms_norm", 2 * elements, 3 * elements)


@dataclass(frozen=True, kw_only=True)
class LatentProjection(Primitive):
    """Linear maps of latents `x` to queries `q`, and to keys and values `kv`, with the rotation of their last features.

    It is cut by heads.

    Attributes:
        rope_theta, rope_scaling: base of the rotary embedding, and scaling of its slower frequencies (see
            `Projection`).
    """

    einsum: ClassVar[str] = "x(latent) -> q(head) kv(head)"
    whole: ClassVar[frozenset[str]] = frozenset({"latent"})
    product: ClassVar[bool] = True

    sizes: LatentSizes
    rope_theta: float
    rope_scaling: RopeScaling | None = None

    def features(self, tensor: str) -> int:
        sizes = self.sizes
        return sizes.heads * (sizes.head_dim if tensor == "q" else sizes.head_dim + sizes.value_dim)

    def parameters(self) -> tuple[Parameter, ...]:
        sizes, queries = self.sizes, self.features("q")
        keys, values = sizes.heads * sizes.nope_dim, sizes.heads * sizes.value_dim
        indices = ("head", "latent")
        return (
            Parameter("attn.latent_q.weight", (queries, sizes.q_inputs), True, indices),
            Parameter("attn.latent_kv.weight", (keys + values, sizes.kv_rank), True, indices, (keys, values)),
        )

    def keeps(self) -> tuple[str, ...]:
        return ("x",)

    def gradients_for_weight(self) -> tuple[str, ...]:
        return ()

    def keeps_beside_for_weight(self, rows: int) -> int:
        """Return the number of elements in the gradients of both products' results."""
        return rows * self.tokens * sum(parameter.shape[0] for parameter in self.parameters())

    def divides(self) -> tuple[tuple[str, str, int], ...]:
        return (("head", "heads", self.sizes.heads),)

    def flops(self) -> int:
        return 2 * self.tokens * sum(parameter.numel for parameter in self.parameters())

    def kernels(self, sequences: int, tokens: int, pieces: Pieces) -> tuple[Kernel, ...]:
        """Return the kernels of both products, then of the rotation, which writes whole keys."""
        rows, sizes = sequences * tokens, self.sizes
        products = [
            Matmul(rows, piece(parameter.shape[0], pieces, "head"), parameter.shape[1])
            for parameter in self.parameters()
        ]
        rotated_elements = piece(2 * rows * sizes.heads * (sizes.rope_dim + sizes.head_dim), pieces, "head")
        return *products, Pointwise("rotary", rotated_elements, rotated_elements)


def latent_attention(
    tokens: int, sizes: LatentSizes, drops: bool, eps: float, rope_theta: float, rope_scaling: RopeScaling | None
) -> tuple[Primitive, ...]:
    """Return the primitives of multi-head latent attention, which expand keys and values for all heads."""
    output = Linear(
        tokens=tokens, name="attn.c_proj", outputs=sizes.hidden_size, inputs=sizes.heads * sizes.value_dim, bias=False,
        out_index="width", in_index="head",
    )  # fmt: skip
    attend = Attend(
        tokens=tokens, heads=sizes.heads, kv_heads=sizes.heads, head_dim=sizes.head_dim, drops=drops,
        value_dim=sizes.value_dim,
    )  # fmt: skip
    projection = LatentProjection(tokens=tokens, sizes=sizes, rope_theta=rope_theta, rope_scaling=rope_scaling)
    return Latents(tokens=tokens, sizes=sizes, eps=eps), projection, attend, output


def attention(
    tokens: int,
    hidden_size: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    bias: bool,
    drops: bool,
    rope_theta: float | None,
    rope_scaling: RopeScaling | None,
    norm_eps: float | None,
) -> tuple[Primitive, ...]:
    """Return the primitives of an attention: projection, attention, and the map back to the residual stream.

    The sum with the residual stream adds the bias of the last map. With `norm_eps`, queries and keys are normalised.
    """
    projection = Projection(
        tokens=tokens, hidden_size=hidden_size, heads=heads, kv_heads=kv_heads, head_dim=head_dim, bias=bias,
        rope_theta=rope_theta if norm_eps is None else None, rope_scaling=rope_scaling,
    )  # fmt: skip
    output = Linear(
        tokens=tokens, name="attn.c_proj", outputs=hidden_size, inputs=heads * head_dim, bias=False,
        out_index="width", in_index="head",
    )  # fmt: skip
    attend = Attend(tokens=tokens, heads=heads, kv_heads=kv_heads, head_dim=head_dim, drops=drops)
    if norm_eps is None:
        return projection, attend, output
    norm = HeadNorm(
        tokens=tokens, heads=heads, kv_heads=kv_heads, head_dim=head_dim, eps=norm_eps, rope_theta=rope_theta,
        rope_scaling=rope_scaling,
    )  # fmt: skip
    return projection, norm, attend, output
