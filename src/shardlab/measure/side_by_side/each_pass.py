"""Our program as it is written and after each of its passes, step by step in turns, in the same processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
import torch.distributed as dist

from shardlab.measure.side_by_side.pairs import Size, StrategyPair
from shardlab.measure.side_by_side.results import LOSSES_AGREE, Side, Spread, error_of, spread_of
from shardlab.measure.side_by_side.sides import makers
from shardlab.measure.side_by_side.turns import in_turns


@dataclass(frozen=True)
class PassTurns:
    """The timed steps of a program as it was written, and as each pass left it.

    Attributes:
        sides: of each.
        losses: of each, the mean loss of every step, those before the timed ones included.
    """

    sides: list[Side]
    losses: list[list[float]]

    @property
    def loss_error(self) -> float:
        """The largest difference of a loss from that of the program as it was written, relative to it."""
        return max(error_of(each, self.losses[0]) for each in self.losses)

    @property
    def agrees(self) -> bool:
        """Whether all of them train alike; only then do their times say anything."""
        return self.loss_error <= LOSSES_AGREE

    @property
    def gains(self) -> list[Spread]:
        """By what share of a step each pass made it shorter than the one beside it, before the pass."""
        return [gain(after, before) for before, after in pairwise(self.sides)]

    @property
    def gain(self) -> Spread:
        """That of all passes together."""
        return gain(self.sides[-1], self.sides[0])


def gain(after: Side, before: Side) -> Spread:
    """By what share one side's steps are shorter than another's of the same turn."""
    return spread_of([1 - a / b for a, b in zip(after.seconds, before.seconds, strict=True)])


def time_passes_rank(
    rank: int, device: torch.device, pair: StrategyPair, size: Size, passes: Sequence[str], turns: int
) -> PassTurns:
    """One rank's part of timing a pair's program; every rank gives the same.

    Args:
        passes: for each variant, first as it is written, what rewrites it.
        turns: steps of each that are timed.
    """
    ranks = dist.get_world_size()
    makes = {each: makers(replace(pair, passes=each), size, ranks, rank, device)["ours"] for each in passes}
    orders = [passes, passes[::-1]]
    sides, losses = in_turns(makes, orders, turns, device)
    return PassTurns([sides[each] for each in passes], [losses[each] for each in passes])
