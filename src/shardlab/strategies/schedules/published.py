"""GPipe (Huang et al. 2019, arXiv 1811.06965, fig. 2c)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import count, pairwise, repeat

from shardlab.strategies.schedules.actions import Action, Backward, BackwardInput, BackwardWeight, Forward


def gpipe(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> Iterator[Action]:
    """Yield all forward passes, then all backward passes: every microbatch is held at once."""
    yield from (Forward(rank, i) for i in range(microbatches))
    yield from (Backward(rank, i) for i in range(microbatches))


# 1F1B (Narayanan et al. 2019, PipeDream-Flush; fig. 4 of arXiv 2104.04473).


def one_f_one_b(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> Iterator[Action]:
    """1F1B: after a warm-up, one forward then one backward; at most ranks - rank microbatches are ever held."""
    warmup = min(ranks - rank - 1, microbatches)
    yield from (Forward(rank, i) for i in range(warmup))
    for i in range(microbatches - warmup):
        yield Forward(rank, warmup + i)
        yield Backward(rank, i)
    yield from (Backward(rank, i) for i in range(microbatches - warmup, microbatches))


# Breadth-first: looped stages, each taking all microbatches at once (Lamy-Poirier 2022, arXiv 2211.05953, fig. 4).


def breadth_first(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> Iterator[Action]:
    """Let all microbatches pass a stage before the next one begins, so sharded weights are gathered once a stage."""
    stages = range(rank, ranks * stages_per_rank, ranks)
    yield from (Forward(stage, i) for stage in stages for i in range(microbatches))
    yield from (Backward(stage, i) for stage in reversed(stages) for i in range(microbatches))


# Interleaved 1F1B (Narayanan et al. 2021, arXiv 2104.04473, section 2.2 and fig. 4).


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


# ZB-H1 and ZB-H2: 1F1B with the backward pass in two halves (Qi et al. 2023, arXiv 2401.10241, fig. 3).


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


# ZB-V: zero bubble with the memory of 1F1B (Qi et al. 2023, arXiv 2401.10241, section 6 and fig. 8).


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


# DualPipe-V: DeepSeek's DualPipe (2024, arXiv 2412.19437, fig. 5) cut in half, github.com/deepseek-ai/DualPipe.


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


# Phases of a schedule on a V: each is some passes taken in turn, as its figure is read.


Pass = Iterator[Action]
"""One kind of pass of one stage: its next microbatch each time."""


def passes(kind: Callable[[int, int], Action], stage: int, microbatches: Iterator[int] | None = None) -> Pass:
    """A stage's passes of one kind, from microbatch 0 on; kinds that share `microbatches` take turns at them."""
    return map(kind, repeat(stage), microbatches or count())


def in_phases(*phases: tuple[int, list[Pass]]) -> Iterator[Action]:
    """Take the passes of each phase in turn, as many times as it says."""
    for times, turn in phases:
        for _ in range(times):
            yield from map(next, turn)
