"""Interleaved 1F1B (Narayanan et al. 2021, arXiv 2104.04473, section 2.2 and fig. 4)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from shardlab.strategies.schedules.actions import Action, Backward, Forward


def interleaved(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> Iterator[Action]:
    """1F1B over several small stages a rank: a group of microbatches passes one stage, then the same group the next.

    Groups have at least as many microbatches as there are ranks, and differ by one at most, so that any number of
    microbatches will do (Megatron-LM wants a multiple of the ranks).
    """
    groups = _groups(microbatches, ranks)
    loops = range(stages_per_rank)
    forward = [Forward(loop * ranks + rank, i) for group in groups for loop in loops for i in group]
    backward = [Backward(loop * ranks + rank, i) for group in groups for loop in reversed(loops) for i in group]
    ahead = 2 if stages_per_rank > 1 else 1  # with one stage a rank it is 1F1B
    warmup = min((ranks - rank - 1) * ahead + (stages_per_rank - 1) * len(groups[0]), len(forward))
    yield from forward[:warmup]
    for i in range(len(forward) - warmup):
        yield forward[warmup + i]
        yield backward[i]
    yield from backward[len(forward) - warmup :]


def _groups(microbatches: int, ranks: int) -> list[range]:
    """Consecutive microbatches in groups of at least `ranks`, the larger groups first."""
    count = max(1, microbatches // ranks)
    size, larger = divmod(microbatches, count)
    starts = [i * size + min(i, larger) for i in range(count + 1)]
    return [range(a, b) for a, b in pairwise(starts)]
