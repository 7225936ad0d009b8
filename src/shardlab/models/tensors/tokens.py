"""Some tokens of a sequence: their rows of a matrix, and how numbers come to a device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor


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
