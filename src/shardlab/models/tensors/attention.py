"""Causal attention in parts, for context parallelism, and the helpers that attention needs on every rank.

- `attend` lets some tokens' queries attend to some tokens' keys and values. `merge` combines two such outputs, and
  `attend_backward` is the backward pass of one part. The output of a part is the mixed values and the log-sum-exp of
  each query's scores, with which parts can be merged in any order (Dao et al. 2022, arXiv 2205.14135, section 3.1). The
  backward pass of a part needs no other part (ibid., appendix B.2: dS = P * (dP - rowsum(dO * O)), where O is the
  merged output).
- `rotations` and `rotate` are rotary position embeddings.
- `KeyValueCache` keeps keys and values of earlier tokens while text is generated.

Shapes: queries are (rows, T, width), one head's features after another's. Keys and values are (rows, T', 2 x
kv_width), all keys before all values; values may be narrower than keys. The output is (rows, T, result_width + heads):
the mixed values, then each head's log-sum-exp, in float32 or float64. With tensor parallelism, all of these have one
slice's heads, and so has `primitive` (`Attend.heads_of`). `tokens` are ascending positions in the sequence. `mask`
multiplies the softmax, (rows, heads, T, T').
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from shardlab.models.attention import Attend, RopeScaling
from shardlab.models.mixture import Routing
from shardlab.models.model import Model


def attend(
    primitive: Attend,
    queries: Tensor,
    keys_values: Tensor,
    tokens: Sequence[int],
    key_tokens: Sequence[int],
    mask: Tensor | None = None,
) -> Tensor:
    """Attend to these keys and values only. Queries for which all keys are masked get 0 and a log-sum-exp of -inf."""
    q, (k, v) = _heads(primitive, queries, primitive.heads), _keys_and_values(primitive, keys_values)
    mixed = q.new_zeros(*q.shape[:-1], primitive.value_size)
    lse = q.new_full(q.shape[:-1], float("-inf"))
    for rows, columns in _visible(tokens, key_tokens):
        scores = _scores(q[..., rows, :], k[..., columns, :], tokens[rows], key_tokens[columns])
        lse[..., rows] = scores.logsumexp(-1)
        weights = (scores - _finite(lse[..., rows])[..., None]).exp_()
        if mask is not None:
            weights = weights * _grouped(primitive, mask)[..., rows, columns]
        mixed[..., rows, :] = weights @ v[..., columns, :]
    return torch.cat([_tokens(mixed), _tokens(lse[..., None])], -1)


def merge(primitive: Attend, a: Tensor, b: Tensor) -> Tensor:
    """Merge the outputs for two disjoint sets of keys and values into the output for both."""
    c = primitive.result_width
    lse_a, lse_b = a[..., c:], b[..., c:]
    lse = torch.logaddexp(lse_a, lse_b)
    shift = _finite(lse)
    share_a, share_b = (
        (part_lse - shift).exp_().repeat_interleave(primitive.value_size, -1) for part_lse in (lse_a, lse_b)
    )
    return torch.cat([(a[..., :c] * share_a).add_(b[..., :c] * share_b), lse], -1)


def attend_backward(
    primitive: Attend,
    queries: Tensor,
    keys_values: Tensor,
    attention_output: Tensor,
    gradient: Tensor,
    tokens: Sequence[int],
    key_tokens: Sequence[int],
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return one part's terms of the queries' gradient, and of the keys' and values' gradient.

    Args:
        attention_output: the merged output for all keys and values that the queries see.
        gradient: gradient of the merged output; its entries for the log-sum-exp are not read.
    """
    c = primitive.result_width
    q, (k, v) = _heads(primitive, queries, primitive.heads), _keys_and_values(primitive, keys_values)
    parts = attention_output[..., :c], attention_output[..., c:]
    mixed, lse = (_heads(primitive, part, primitive.heads) for part in parts)
    grad = _heads(primitive, gradient[..., :c], primitive.heads)
    inner = (grad * mixed).sum(-1, keepdim=True)
    grad_q = torch.zeros_like(q)
    grad_k, grad_v = (q.new_zeros(part.shape) for part in (k, v))
    scale = q.shape[-1] ** -0.5
    for rows, columns in _visible(tokens, key_tokens):
        scores = _scores(q[..., rows, :], k[..., columns, :], tokens[rows], key_tokens[columns])
        weights = (scores - lse[..., rows, :]).exp_()
        grad_weights = grad[..., rows, :] @ v[..., columns, :].mT
        dropped = weights
        if mask is not None:
            mask_part = _grouped(primitive, mask)[..., rows, columns]
            dropped, grad_weights = weights * mask_part, grad_weights * mask_part
        grad_v[..., columns, :] += (dropped.mT @ grad[..., rows, :]).sum(2, keepdim=True)
        grad_scores = weights * (grad_weights - inner[..., rows, :]) * scale
        grad_q[..., rows, :] = grad_scores @ k[..., columns, :]
        grad_k[..., columns, :] += (grad_scores.mT @ q[..., rows, :]).sum(2, keepdim=True)
    grad_keys_values = torch.cat([_tokens(grad_k), _tokens(grad_v)], -1)
    return _tokens(grad_q).to(queries.dtype), grad_keys_values.to(keys_values.dtype)


def attention_with_dropout(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Compute attention with a given dropout mask, (rows, heads, T, T). All other shapes are (rows, heads, T, size).

    The fused op cannot be used, because it draws its own mask.
    """
    rows, heads, tokens, size = q.shape
    future = q.new_full((tokens, tokens), float("-inf")).triu_(1)
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    scores = torch.baddbmm(future, q, k.transpose(1, 2), alpha=size**-0.5)
    return torch.bmm(scores.softmax(-1) * mask.flatten(0, 1), v).view(rows, heads, tokens, -1)


def rotate(features: Tensor, turns: Tensor, heads: int) -> Tensor:
    """Apply the rotary position embedding to queries and keys (Su et al. 2021, arXiv 2104.09864, eq. 34).

    Features 2i and 2i + 1 of a head, as a complex number, are rotated by position * theta^(-2i/size). So the product of
    a query and a key depends on their positions only by their distance.

    Args:
        features: (rows, T, features) of queries, then of keys, then of values.
        turns: rotations of the tokens, from `rotations`.
        heads: number of heads to rotate: queries' and keys' heads together.

    Returns:
        A new tensor of the same shape.
    """
    tokens = features.shape[1]
    assert len(turns) == tokens, f"rotations of {len(turns)} tokens, but {tokens} tokens are given"
    if not turns.is_complex():
        return _rotate_by_parts(features, turns, heads)
    output = features.to(turns.dtype.to_real(), copy=True, memory_format=torch.contiguous_format)
    pairs = torch.view_as_complex(output.view(*output.shape[:-1], -1, turns.shape[-1], 2))  # (rows, T, heads, size / 2)
    pairs[..., :heads, :].mul_(turns)
    return output.to(features.dtype)


@lru_cache(maxsize=16)
def rotations(
    theta: float,
    scaling: RopeScaling | None,
    size: int,
    tokens: range | tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Return e^(i angle) for tokens and pairs of features, (T, 1, size / 2), computed in float64.

    Args:
        theta: base of the angles.
        scaling: scaling of the slower frequencies (None: no scaling).
        size: features of a head.
        tokens: positions in the sequence.
        dtype: dtype of the real and the imaginary part.
        device: device of the result.
    """
    rates = theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    if scaling is not None:
        factor, low, high, context = scaling
        unscaled = ((context * rates / (2 * math.pi) - low) / (high - low)).clamp(
            0, 1
        )  # by rotations within the context
        rates = rates * (unscaled + (1 - unscaled) / factor)
    angles = torch.tensor(tokens, dtype=torch.float64)[:, None, None] * rates
    return torch.polar(torch.ones_like(angles), angles).to(device, dtype.to_complex())


def rotate_back(features: Tensor, turns: Tensor, heads: int) -> Tensor:
    """Undo `rotate`. Each of the two functions is the backward pass of the other."""
    return rotate(features, turns.conj(), heads)


class KeyValueCache:
    """Keys and values of a text's tokens in one layer, so that only new tokens are computed."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None
        self._length = 0

    def add(self, new: Tensor) -> Tensor:
        """Append keys and values of the next tokens, (rows, T, 2 kv_width). Return the keys and values of all tokens.

        A full buffer is replaced by one for twice as many tokens, so a text of n tokens copies at most 2 n of them.
        """
        start, self._length = self._length, self._length + new.shape[1]
        if self._buffer is None or self._length > self._buffer.shape[1]:
            larger = new.new_empty(len(new), 2 * self._length, new.shape[-1])
            if self._buffer is not None:
                larger[:, :start] = self._buffer[:, :start]
            self._buffer = larger
        self._buffer[:, start : self._length] = new
        return self._buffer[:, : self._length]


def can_cache(model: Model) -> bool:
    """Return whether generation can use a `KeyValueCache`: if tokens interact only in attention.

    Routing makes tokens interact if experts have a limited capacity.
    """
    mixing = [primitive for run in model.runs for primitive in run.primitives if primitive.mixes_tokens]
    return all(
        isinstance(primitive, Attend) or (isinstance(primitive, Routing) and primitive.router.capacity_factor is None)
        for primitive in mixing
    )


def consecutive_runs(tokens: Sequence[int]) -> list[tuple[int, int]]:
    """Return the runs of consecutive numbers in an ascending list of tokens, as (start, stop) indices.

    >>> consecutive_runs([0, 1, 2, 9, 10])
    [(0, 3), (3, 5)]
    """
    breaks = [place for place, (a, b) in enumerate(pairwise(tokens), 1) if b != a + 1]
    return list(pairwise([0, *breaks, len(tokens)]))


def select_rows(matrix: Tensor, tokens: Sequence[int]) -> Tensor:
    """Return some tokens' rows (dim 0), as a view if the tokens are consecutive, for which autograd saves nothing."""
    pieces = [matrix[tokens[start] : tokens[stop - 1] + 1] for start, stop in consecutive_runs(tokens)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


@lru_cache(maxsize=64)
def index_tensor(device: torch.device, numbers: range | tuple[int, ...]) -> Tensor:
    """Return an index tensor on a device, cached. A list as an index would cause a blocking copy at each use."""
    return torch.tensor(numbers, device=device)


def to_device(device: torch.device, tensor: Tensor) -> Tensor:
    """Move a tensor to a device. The host does not wait, since a GPU copies from pinned memory."""
    if tensor.device == device:
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _visible(tokens: Sequence[int], key_tokens: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """Yield, for each run of consecutive queries, the slice of them and of the keys not later than the last of them."""
    for start, stop in consecutive_runs(tokens):
        if visible := bisect_right(key_tokens, tokens[stop - 1]):
            yield slice(start, stop), slice(visible)


def _scores(q: Tensor, k: Tensor, tokens: Sequence[int], key_tokens: Sequence[int]) -> Tensor:
    """Return scores (rows, kv heads, group, T, T'), -inf if the key comes after the query."""
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    if key_tokens[-1] <= tokens[0]:
        return scores
    places, key_places = (index_tensor(q.device, _hashable(positions)) for positions in (tokens, key_tokens))
    return scores.masked_fill_(key_places > places[:, None], float("-inf"))


def _hashable(numbers: Sequence[int]) -> range | tuple[int, ...]:
    return numbers if isinstance(numbers, range) else tuple(numbers)


def _heads(primitive: Attend, x: Tensor, heads: int) -> Tensor:
    """Reshape (rows, T, features of all heads) to (rows, kv heads, heads of each, T, features of one)."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x.view(*x.shape[:2], primitive.kv_heads, heads // primitive.kv_heads, -1).permute(0, 2, 3, 1, 4)


def _keys_and_values(primitive: Attend, keys_values: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values, each (rows, kv heads, 1, T', size)."""
    keys, values = keys_values.split_with_sizes((primitive.kv_width, primitive.values_width), -1)
    return _heads(primitive, keys, primitive.kv_heads), _heads(primitive, values, primitive.kv_heads)


def _tokens(x: Tensor) -> Tensor:
    """Reshape (rows, kv heads, heads of each, T, size) to (rows, T, features)."""
    return x.flatten(1, 2).transpose(1, 2).flatten(2)


def _grouped(primitive: Attend, mask: Tensor) -> Tensor:
    """View (rows, heads, T, T') as (rows, kv heads, heads of each, T, T')."""
    return mask.view(len(mask), primitive.kv_heads, -1, *mask.shape[2:])


def _finite(lse: Tensor) -> Tensor:
    """Replace -inf by 0, because -inf - -inf is NaN."""
    return lse.masked_fill(lse.isneginf(), 0)


def _rotate_by_parts(features: Tensor, turns: Tensor, heads: int) -> Tensor:
    """Rotate in real numbers, for compilers without complex numbers.

    `turns` are the cosines and sines of the angles, (T, 1, size / 2, 2).
    """
    pairs = features.to(turns.dtype).view(*features.shape[:-1], -1, turns.shape[-2], 2)
    (even, odd), (cos, sin) = pairs[..., :heads, :, :].unbind(-1), turns.unbind(-1)
    rotated = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1)
    return torch.cat([rotated, pairs[..., heads:, :, :]], -3).flatten(-3).to(features.dtype)
