"""ZB-V: zero bubble with the memory of 1F1B (Qi et al. 2023, arXiv 2401.10241, section 6 and fig. 8)."""

from __future__ import annotations

from collections.abc import Iterator

from shardlab.strategies.schedules.actions import Action, BackwardInput, BackwardWeight, Forward
from shardlab.strategies.schedules.phases import in_phases, passes


def zb_v(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> Iterator[Action]:
    """Two stages a rank, on the way down a V and up again, so that the first rank begins to go backward itself.

    The figure is for at least 2 ranks - 1 microbatches. Of fewer, the first ones are taken from it: as microbatches
    never wait for each other, what is left of a good order is a good order.
    """
    down, up = rank, 2 * ranks - 1 - rank
    f_down, i_down, w_down = (passes(kind, down) for kind in (Forward, BackwardInput, BackwardWeight))
    f_up, i_up, w_up = (passes(kind, up) for kind in (Forward, BackwardInput, BackwardWeight))
    below = ranks - rank - 1
    w_left = in_phases((rank, [w_down, w_up]), (below + 1, [w_down]))
    figure = in_phases(
        (2 * below + 1, [f_down]),
        (rank, [f_up, f_down]),
        (below + 1, [f_up, i_up, w_up]),
        (max(microbatches - ranks - below, rank), [f_down, i_down, w_down, f_up, i_up, w_up]),
        (below, [i_down, w_down, f_up, i_up, w_up]),
        (rank, [i_down, i_up]),
        (below + 1, [i_down, w_left]),
        (2 * rank, [w_left]),
    )
    return (action for action in figure if action.microbatch < microbatches)
