"""DualPipe-V: DeepSeek's DualPipe (2024, arXiv 2412.19437, fig. 5) cut in half, github.com/deepseek-ai/DualPipe."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import count

from shardlab.strategies.schedules.actions import Action, Backward, BackwardInput, BackwardWeight, Forward
from shardlab.strategies.schedules.phases import in_phases, passes


def dualpipe_v(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> Iterator[Action]:
    """DualPipeV: stages in a V as in ZB-V, but a forward always meets a backward, so one hides the other's
    communication.

    Backward passes are in halves only where somebody waits: before the first whole ones and after the last. The source
    wants 2 * ranks microbatches or more, one for each stage; of fewer, the order is what is left of that for 2 * ranks.
    """
    for action in _in_order(rank, ranks, max(microbatches, 2 * ranks)):
        if action.microbatch < microbatches:
            yield action


def _in_order(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    down, up = rank, 2 * ranks - 1 - rank
    next_down, next_up = count(), count()  # whole backward passes and first halves take turns
    f_down, f_up = passes(Forward, down), passes(Forward, up)
    b_down, b_up = passes(Backward, down, next_down), passes(Backward, up, next_up)
    i_down, i_up = passes(BackwardInput, down, next_down), passes(BackwardInput, up, next_up)
    halves: deque[Action] = deque()
    weight = (BackwardWeight(half.stage, half.microbatch) for half in iter(halves.popleft, None))
    below, above = ranks - rank - 1, rank + 1
    for action in in_phases(
        (2 * below, [f_down]),
        (above, [f_down, f_up]),
        (below, [i_up, weight, f_up]),
        (microbatches - 2 * ranks + above, [f_down, b_up, f_up, b_down]),
        (below, [b_up, f_up, b_down]),
        (above // 2, [b_up, b_down]),
        (above % 2, [b_up, i_down]),
        (above // 2, [i_up, i_down]),
        (below, [weight, i_down]),
        (above, [weight]),
    ):
        if isinstance(action, BackwardInput):
            halves.append(action)
        yield action
