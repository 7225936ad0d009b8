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


# Attention step by step, for dropout.


def attention_with_dropout(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention step by step, since the fused op draws masks of its own; shapes (rows, heads, T, size)."""
    rows, heads, tokens, size = q.shape
    future = q.new_full((tokens, tokens), float("-inf")).triu_(1)
    q, k, v = (each.flatten(0, 1) for each in (q, k, v))
    scores = torch.baddbmm(future, q, k.transpose(1, 2), alpha=size**-0.5)
    return torch.bmm(scores.softmax(-1) * mask.flatten(0, 1), v).view(rows, heads, tokens, size)


# Rotary position embedding: pairs of a head's features, turned by angles that grow with the token's place.
#
# Feature 2i and its neighbour turn by place * theta^(-2i/size), as complex numbers (Su et al. 2021, arXiv 2104.09864,
# eq. 34; Llama's own code). So a query's product with a key depends on how far apart the two are.


def turned(features: Tensor, turns: Tensor, heads: int) -> Tensor:
    """Heads side by side, (rows, T, features), of which the first ones are turned; memory of its own.

    Args:
        features: of queries, then of keys, then of values.
        turns: of the tokens, as `turns` gives them.
        heads: how many are turned: those of queries and of keys.
    """
    assert len(turns) == features.shape[1], f"turns of {len(turns)} tokens, but {features.shape[1]} tokens are given"
    if not turns.is_complex():
        return _turned_by_parts(features, turns, heads)
    made = features.to(turns.dtype.to_real(), copy=True, memory_format=torch.contiguous_format)
    pairs = torch.view_as_complex(made.view(*made.shape[:-1], -1, turns.shape[-1], 2))  # (rows, T, heads, size / 2)
    pairs[..., :heads, :].mul_(turns)
    return made.to(features.dtype)


@lru_cache(maxsize=16)
def turns(
    theta: float,
    scaling: RopeScaling | None,
    size: int,
    tokens: range | tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Make e^(i angle) for tokens and pairs of features, (T, 1, size / 2), computed in float64.

    Args:
        theta: base of the angles.
        scaling: how slower frequencies are stretched (None: not).
        size: features of a head.
        tokens: the places in the sequence.
        dtype: of real and imaginary parts.
        device: of the result.
    """
    rates = theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    if scaling is not None:
        factor, low, high, context = scaling
        kept = ((context * rates / (2 * math.pi) - low) / (high - low)).clamp(0, 1)  # by turns within the context
        rates = rates * (kept + (1 - kept) / factor)
    angles = torch.tensor(tokens, dtype=torch.float64)[:, None, None] * rates
    return torch.polar(torch.ones_like(angles), angles).to(device, dtype.to_complex())


def turned_back(features: Tensor, turns: Tensor, heads: int) -> Tensor:
    """What `turned` is given, of what it gives; also the gradient of the one, of that of the other."""
    return turned(features, turns.conj(), heads)


def _turned_by_parts(features: Tensor, turns: Tensor, heads: int) -> Tensor:
    """Turn the pairs of the first heads in real numbers, for compilers that know no complex ones.

    Turns are the cosines and sines of the angles, (T, 1, size / 2, 2).
    """
    pairs = features.to(turns.dtype).view(*features.shape[:-1], -1, turns.shape[-2], 2)
    (even, odd), (cos, sin) = pairs[..., :heads, :, :].unbind(-1), turns.unbind(-1)
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1)
    return torch.cat([turned, pairs[..., heads:, :, :]], -3).flatten(-3).to(features.dtype)


# Keys and values of a text's earlier tokens, so that each new token is computed alone.


class KeysValues:
    """What one layer's attention keeps of a text: the keys and values of its tokens so far."""

    def __init__(self) -> None:
        self._room: Tensor | None = None
        self._length = 0

    def add(self, new: Tensor) -> Tensor:
        """Keep those of the next tokens, (rows, T, 2 kv_width); gives those of all tokens so far.

        Room is made for twice as many tokens when it ends, so that a text of n tokens copies no more than 2 n.
        """
        start, self._length = self._length, self._length + new.shape[1]
        if self._room is None or self._length > self._room.shape[1]:
            room = new.new_empty(len(new), 2 * self._length, new.shape[-1])
            if self._room is not None:
                room[:, :start] = self._room[:, :start]
            self._room = room
        self._room[:, start : self._length] = new
        return self._room[:, : self._length]


def can_cache(model: Model) -> bool:
    """Whether attention alone lets a model's tokens see one another; routing does not, where no expert drops one."""
    mixing = [step.primitive for run in model.runs for step in run.steps if step.primitive.mixes_tokens]
    return all(
        isinstance(each, Attend) or (isinstance(each, Routing) and each.router.capacity_factor is None)
        for each in mixing
    )


# Some tokens of a sequence: their rows of a matrix, and how numbers come to a device.


def runs(tokens: Sequence[int]) -> list[tuple[int, int]]:
    """Where runs of neighbours stand in an ascending list of tokens, as (start, stop).

    >>> runs([0, 1, 2, 9, 10])
    [(0, 3), (3, 5)]
    """
    breaks = [place for place, (a, b) in enumerate(pairwise(tokens), 1) if b != a + 1]
    return list(pairwise([0, *breaks, len(tokens)]))


def rows_of(matrix: Tensor, tokens: Sequence[int]) -> Tensor:
    """Some tokens' rows (dim 0); a view where they follow one another. Autograd keeps nothing for them."""
    pieces = [matrix[tokens[start] : tokens[stop - 1] + 1] for start, stop in runs(tokens)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


@lru_cache(maxsize=64)
def index_on(device: torch.device, numbers: range | tuple[int, ...]) -> Tensor:
    """Numbers as a tensor on a device, kept there: a list as an index would be copied, and waited for, at each use."""
    return torch.tensor(numbers, device=device)


def sent_to(device: torch.device, tensor: Tensor) -> Tensor:
    """A tensor of the host on a device; one that is there is given back. The host goes on at once: a GPU copies what is
    pinned by itself."""
    if tensor.device == device:
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
