"""1F1B (Narayanan et al. 2019, PipeDream-Flush; fig. 4 of arXiv 2104.04473)."""

from __future__ import annotations

from collections.abc import Iterator

from shardlab.strategies.schedules.actions import Action, Backward, Forward


def one_f_one_b(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> Iterator[Action]:
    """1F1B: after a warm-up, one forward then one backward; at most ranks - rank microbatches are ever held."""
    warmup = min(ranks - rank - 1, microbatches)
    yield from (Forward(rank, i) for i in range(warmup))
    for i in range(microbatches - warmup):
        yield Forward(rank, warmup + i)
        yield Backward(rank, i)
    yield from (Backward(rank, i) for i in range(microbatches - warmup, microbatches))
