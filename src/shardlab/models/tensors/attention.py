"""Causal attention of some tokens' queries to some tokens' keys and values, in parts that are put together exactly.

A part keeps, beside what it mixed, the log-sum-exp of each query's scores; from these two, parts are merged in any
order (Dao et al. 2022, arXiv 2205.14135, section 3.1), and the backward pass of each part needs no other's (there,
appendix B.2: with O what all parts together mixed, dS = P * (dP - rowsum(dO * O))).

Shapes: queries (rows, T, C), features of one head after those of another; keys and values (rows, T', 2 x kv_width), all
keys before all values; the output (rows, T, C + heads): the mixed values, then each head's log-sum-exp, in float32 at
least. With tensor parallelism all of this is of one slice's heads; `primitive` is as if these were all (`heads_of`).
`tokens` are the places in the sequence, ascending. `mask` multiplies the softmax, (rows, heads, T, T').
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# torch leaves some of its annotations out.

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shardlab.models.attention import Attend
from shardlab.models.tensors.tokens import index_on, runs


def attend(
    primitive: Attend,
    queries: Tensor,
    keys_values: Tensor,
    tokens: Sequence[int],
    key_tokens: Sequence[int],
    mask: Tensor | None = None,
) -> Tensor:
    """What the queries make of these keys and values alone; 0, and -inf, where they see none of them."""
    q, (k, v) = _heads(primitive, queries, primitive.heads), _keys_and_values(primitive, keys_values)
    mixed, lse = torch.zeros_like(q), q.new_full(q.shape[:-1], float("-inf"))
    for rows, seen in _visible(tokens, key_tokens):
        scores = _scores(q[..., rows, :], k[..., seen, :], tokens[rows], key_tokens[seen])
        lse[..., rows] = scores.logsumexp(-1)
        weights = (scores - _finite(lse[..., rows])[..., None]).exp_()
        if mask is not None:
            weights = weights * _grouped(primitive, mask)[..., rows, seen]
        mixed[..., rows, :] = weights @ v[..., seen, :]
    return torch.cat([_tokens(mixed), _tokens(lse[..., None])], -1)


def merge(primitive: Attend, a: Tensor, b: Tensor) -> Tensor:
    """Merge the outputs for two disjoint sets of keys and values into the output for both."""
    c = primitive.hidden_size
    lse_a, lse_b = a[..., c:], b[..., c:]
    lse = torch.logaddexp(lse_a, lse_b)
    shift = _finite(lse)
    size = c // primitive.heads
    share_a, share_b = ((each - shift).exp_().repeat_interleave(size, -1) for each in (lse_a, lse_b))
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
    """What these keys and values give to the queries' gradient, and these queries to the keys' and values'.

    Args:
        attention_output: to all keys and values that the queries see.
        gradient: of the loss with respect to it; that of the log-sum-exp is not read.
    """
    c = primitive.hidden_size
    q, (k, v) = _heads(primitive, queries, primitive.heads), _keys_and_values(primitive, keys_values)
    made = attention_output[..., :c], attention_output[..., c:]
    mixed, lse = (_heads(primitive, each, primitive.heads) for each in made)
    grad = _heads(primitive, gradient[..., :c], primitive.heads)
    inner = (grad * mixed).sum(-1, keepdim=True)
    grad_q = torch.zeros_like(q)
    grad_k, grad_v = (q.new_zeros(each.shape) for each in (k, v))
    scale = q.shape[-1] ** -0.5
    for rows, seen in _visible(tokens, key_tokens):
        scores = _scores(q[..., rows, :], k[..., seen, :], tokens[rows], key_tokens[seen])
        weights = (scores - lse[..., rows, :]).exp_()
        grad_weights = grad[..., rows, :] @ v[..., seen, :].mT
        dropped = weights
        if mask is not None:
            kept = _grouped(primitive, mask)[..., rows, seen]
            dropped, grad_weights = weights * kept, grad_weights * kept
        grad_v[..., seen, :] += (dropped.mT @ grad[..., rows, :]).sum(2, keepdim=True)
        grad_scores = weights * (grad_weights - inner[..., rows, :]) * scale
        grad_q[..., rows, :] = grad_scores @ k[..., seen, :]
        grad_k[..., seen, :] += (grad_scores.mT @ q[..., rows, :]).sum(2, keepdim=True)
    grad_keys_values = torch.cat([_tokens(grad_k), _tokens(grad_v)], -1)
    return _tokens(grad_q).to(queries.dtype), grad_keys_values.to(keys_values.dtype)


def _visible(tokens: Sequence[int], key_tokens: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """Runs of neighbouring queries, each with the keys that the last of them sees: later ones cost nothing."""
    for start, stop in runs(tokens):
        if seen := bisect_right(key_tokens, tokens[stop - 1]):
            yield slice(start, stop), slice(seen)


def _scores(q: Tensor, k: Tensor, tokens: Sequence[int], key_tokens: Sequence[int]) -> Tensor:
    """(rows, kv heads, group, T, T'), -inf where a key comes after its query."""
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    if key_tokens[-1] <= tokens[0]:
        return scores
    places, key_places = (index_on(q.device, _hashable(each)) for each in (tokens, key_tokens))
    return scores.masked_fill_(key_places > places[:, None], float("-inf"))


def _hashable(numbers: Sequence[int]) -> range | tuple[int, ...]:
    return numbers if isinstance(numbers, range) else tuple(numbers)


def _heads(primitive: Attend, x: Tensor, heads: int) -> Tensor:
    """(rows, T, features of so many heads) to (rows, kv heads, heads of each, T, features of one)."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x.view(*x.shape[:2], primitive.kv_heads, heads // primitive.kv_heads, -1).permute(0, 2, 3, 1, 4)


def _keys_and_values(primitive: Attend, keys_values: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values, each (rows, kv heads, 1, T', size)."""
    keys, values = keys_values.chunk(2, -1)
    return _heads(primitive, keys, primitive.kv_heads), _heads(primitive, values, primitive.kv_heads)


def _tokens(x: Tensor) -> Tensor:
    """(rows, kv heads, heads of each, T, size) to (rows, T, features)."""
    return x.flatten(1, 2).transpose(1, 2).flatten(2)


def _grouped(primitive: Attend, mask: Tensor) -> Tensor:
    """(rows, heads, T, T') to (rows, kv heads, heads of each, T, T')."""
    return mask.view(len(mask), primitive.kv_heads, -1, *mask.shape[2:])


def _finite(lse: Tensor) -> Tensor:
    """What to subtract from scores: 0 where there are none, for -inf less -inf is not a number."""
    return lse.masked_fill(lse.isneginf(), 0)
