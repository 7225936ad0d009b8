"""Some tokens of a sequence: their rows of a matrix."""

from __future__ import annotations

from collections.abc import Sequence
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
