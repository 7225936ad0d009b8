"""ZB-H1 and ZB-H2: 1F1B with the backward pass in two halves (Qi et al. 2023, arXiv 2401.10241, fig. 3)."""

from __future__ import annotations

from collections.abc import Iterator

from shardlab.strategies.schedules.actions import Action, BackwardInput, BackwardWeight, Forward


def zb_h1(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> Iterator[Action]:
    """ZB-H1: on every rank what 1F1B holds on the first, and a third of its bubble where all three passes take as
    long."""
    return _late_weights(rank, microbatches, warmup=ranks - rank - 1, late=rank)


def zb_h2(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> Iterator[Action]:
    """Twice the warm-up and nearly twice the memory; no bubble where all three passes take as long."""
    return _late_weights(rank, microbatches, warmup=2 * (ranks - rank - 1), late=2 * rank)


def _late_weights(rank: int, microbatches: int, warmup: int, late: int) -> Iterator[Action]:
    """1F1B, but so many weight halves wait for the end, where they fill what would be a bubble."""
    warmup, late = min(warmup, microbatches), min(late, microbatches)
    yield from (Forward(rank, i) for i in range(warmup))
    for i in range(microbatches):
        if warmup + i < microbatches:
            yield Forward(rank, warmup + i)
        yield BackwardInput(rank, i)
        if i >= late:
            yield BackwardWeight(rank, i - late)
    yield from (BackwardWeight(rank, i) for i in range(microbatches - late, microbatches))
