"""Attention: what it is made of, and its arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from shardlab.models.kernels import FusedAttention, Kernel, Matmul, Pointwise
from shardlab.models.layout import Cut, Parameter
from shardlab.models.part import Part


@dataclass(frozen=True)
class Attention(Part):
    """Norm, causal scaled dot product attention, projection, dropout; added to the residual stream.

    With fewer `kv_heads` than heads, neighbouring heads share keys and values (grouped queries, Ainslie et al. 2023,
    arXiv 2305.13245). Without dropout, attention is one fused op that keeps the log-sum-exp of each head's rows; with
    it, three T x T matrices a head: the softmax, its mask, and the product of both. Sliced by heads.

    Attributes:
        heads, kv_heads: of queries, and of keys and values.
        rope_theta: base of the rotary embedding of queries and keys (Su et al. 2021, arXiv 2104.09864; none: None).
    """

    title = "attention"
    norm_name = "ln_1"
    added = "attn.c_proj.bias"

    heads: int
    kv_heads: int
    rope_theta: float | None = field(default=None, kw_only=True)

    @property
    def kv_width(self) -> int:
        """Features of all keys of a token, and of all values."""
        return self.width // self.heads * self.kv_heads

    @property
    def features(self) -> int:
        """Features of a token's queries, keys and values."""
        return self.width + 2 * self.kv_width

    def heads_of(self, slices: int) -> Attention:
        """As if the heads of one slice of so many were all."""
        return replace(self, width=self.width // slices, heads=self.heads // slices, kv_heads=self.kv_heads // slices)

    def parameters(self) -> list[Parameter]:
        c, kv = self.width, self.kv_width
        features = self.linear("attn.c_attn", self.features, c, Cut(0, (c, kv, kv)))
        return [*self.norm(), *features, *self.linear("attn.c_proj", c, c, Cut(1))]

    def saved(self) -> int:
        return self.norm_saved + self.body_saved() + self.drops * self.stream

    def saved_for_weight(self) -> int:
        return self.norm_saved + self.body_saved_for_weight() + 2 * self.stream

    def body_saved_for_weight(self) -> int:
        mixed, queries_keys_values = self.stream, self.block * self.features
        return mixed + queries_keys_values

    def body_saved(self) -> int:
        mixed = self.stream  # with dropout, shared keys and values are kept once for each head
        queries_keys_values = 3 * self.stream if self.drops else self.block * self.features
        scores = self.heads * self.block * (3 * self.block if self.drops else 1)
        return queries_keys_values + scores + mixed

    def flops(self) -> int:
        t, c = self.block, self.width
        return 2 * t * c * self.features + 2 * (2 * t * t * c) + 2 * t * c * c

    def body_kernels(self, sequences: int, tokens: int, slices: int = 1) -> tuple[Kernel, ...]:
        seen = (tokens + 1) / (2 * tokens)  # the causal triangle, with its diagonal
        return (
            *self.projection_kernels(sequences, tokens, slices),
            *self.mixing_kernels(sequences, tokens, tokens, seen, slices),
            *self.output_kernels(sequences, tokens, slices),
        )

    def projection_kernels(self, sequences: int, tokens: int, slices: int = 1) -> tuple[Kernel, ...]:
        """Queries, keys and values; queries and keys rotated."""
        rows = sequences * tokens
        features = Matmul(rows, self.features // slices, self.width, bias=self.bias)
        if self.rope_theta is None:
            return (features,)
        turned = 2 * rows * (self.width + self.kv_width) // slices
        return features, Pointwise("rotary", turned, turned)

    def mixing_kernels(
        self, sequences: int, queries: int, keys: int, seen: float, slices: int = 1
    ) -> tuple[Kernel, ...]:
        """What queries make of keys and values.

        Fused without dropout. With it step by step, as masks are drawn for the T x T square; then all pairs are
        computed, also those that are not seen.
        """
        size, heads = self.width // self.heads, self.heads // slices
        if not self.drops:
            return (FusedAttention(sequences, heads, self.kv_heads // slices, queries, keys, size, seen),)
        squares = sequences * heads
        scores = squares * queries * keys
        return (
            Matmul(queries, keys, size, squares, learned=False),
            Pointwise("softmax", 2 * scores, 3 * scores),
            Pointwise("dropout", 3 * scores, 3 * scores),
            Matmul(queries, size, keys, squares, learned=False),
        )

    def output_kernels(self, sequences: int, tokens: int, slices: int = 1) -> tuple[Kernel, ...]:
        """The projection onto the residual stream."""
        return (Matmul(sequences * tokens, self.width, self.width // slices),)

    def sliceable(self) -> dict[str, int]:
        return {"heads": self.heads, "key/value heads": self.kv_heads}
