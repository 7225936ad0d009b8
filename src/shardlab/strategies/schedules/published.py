"""Pipeline schedules of papers, each a generator of the actions of one rank, as in the figure of its paper.

In order: GPipe and 1F1B with one stage on each rank, two schedules with several stages on each rank, two zero-bubble
schedules that split the backward pass, and two schedules whose stages form a V.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import count, pairwise, repeat

from shardlab.strategies.schedules.actions import Action, Backward, BackwardInput, BackwardWeight, Forward


def gpipe(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> Iterator[Action]:
    """GPipe: all forward passes, then all backward passes. A rank keeps the activations of all microbatches.

    Source: Huang et al. 2019, arXiv 1811.06965, fig. 2c.
    """
    yield from (Forward(rank, i) for i in range(microbatches))
    yield from (Backward(rank, i) for i in range(microbatches))


def one_f_one_b(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> Iterator[Action]:
    """1F1B: after a warm-up, forward and backward passes alternate. A rank keeps at most ranks - rank microbatches.

    Source: PipeDream-Flush, Narayanan et al. 2021, arXiv 2104.04473, fig. 4.
    """
    warmup = min(ranks - rank - 1, microbatches)
    yield from (Forward(rank, i) for i in range(warmup))
    for i in range(microbatches - warmup):
        yield Forward(rank, warmup + i)
        yield Backward(rank, i)
    yield from (Backward(rank, i) for i in range(microbatches - warmup, microbatches))


def breadth_first(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> Iterator[Action]:
    """Breadth-first: a stage runs all microbatches before the rank's next stage begins.

    Sharded weights are therefore gathered once for each stage and direction.

    Source: Lamy-Poirier 2022, arXiv 2211.05953, fig. 4.
    """
    stages = range(rank, ranks * stages_per_rank, ranks)
    yield from (Forward(stage, i) for stage in stages for i in range(microbatches))
    yield from (Backward(stage, i) for stage in reversed(stages) for i in range(microbatches))


def interleaved(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> Iterator[Action]:
    """Interleaved 1F1B: each rank has several small stages, and runs each group of microbatches through them in turn.

    A group has at least as many microbatches as there are ranks, and groups differ by at most one. If there are fewer
    microbatches than ranks, they form one group. Therefore any number of microbatches works (Megatron-LM needs a
    multiple of the ranks).

    Source: Narayanan et al. 2021, arXiv 2104.04473, section 2.2 and fig. 4.
    """
    groups = _groups(microbatches, ranks)
    loops = range(stages_per_rank)
    forward = [Forward(loop * ranks + rank, i) for group in groups for loop in loops for i in group]
    backward = [Backward(loop * ranks + rank, i) for group in groups for loop in reversed(loops) for i in group]
    ahead = 2 if stages_per_rank > 1 else 1  # with one stage on each rank, this is 1F1B
    warmup = min((ranks - rank - 1) * ahead + (stages_per_rank - 1) * len(groups[0]), len(forward))
    yield from forward[:warmup]
    for i in range(len(forward) - warmup):
        yield forward[warmup + i]
        yield backward[i]
    yield from backward[len(forward) - warmup :]


def zb_h1(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> Iterator[Action]:
    """ZB-H1: every rank needs the memory that 1F1B needs on the first rank, and has a third of the bubble of 1F1B.

    The bubble has this length if the forward pass and both halves of the backward pass take the same time.

    Source: Qi et al. 2023, arXiv 2401.10241, fig. 3, top.
    """
    return _late_weights(rank, microbatches, warmup=ranks - rank - 1, late=rank)


def zb_h2(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> Iterator[Action]:
    """ZB-H2: twice the warm-up and nearly twice the memory of ZB-H1, no bubble if all three passes are equally long.

    Source: Qi et al. 2023, arXiv 2401.10241, fig. 3, bottom.
    """
    return _late_weights(rank, microbatches, warmup=2 * (ranks - rank - 1), late=2 * rank)


def zb_v(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> Iterator[Action]:
    """ZB-V: stages form a V, with two on each rank, so the first rank also has the last stage. Memory is that of 1F1B.

    The figure needs at least 2 * ranks - 1 microbatches. For fewer, the actions of missing microbatches are left out.
    The order stays valid, because microbatches do not depend on each other.

    Source: Qi et al. 2023, arXiv 2401.10241, section 6 and fig. 8.
    """
    down, up = rank, 2 * ranks - 1 - rank
    f_down, i_down, w_down = (passes(kind, down) for kind in (Forward, BackwardInput, BackwardWeight))
    f_up, i_up, w_up = (passes(kind, up) for kind in (Forward, BackwardInput, BackwardWeight))
    ranks_below = ranks - rank - 1
    w_left = in_phases((rank, [w_down, w_up]), (ranks_below + 1, [w_down]))
    figure = in_phases(
        (2 * ranks_below + 1, [f_down]),
        (rank, [f_up, f_down]),
        (ranks_below + 1, [f_up, i_up, w_up]),
        (max(microbatches - ranks - ranks_below, rank), [f_down, i_down, w_down, f_up, i_up, w_up]),
        (ranks_below, [i_down, w_down, f_up, i_up, w_up]),
        (rank, [i_down, i_up]),
        (ranks_below + 1, [i_down, w_left]),
        (2 * rank, [w_left]),
    )
    return (action for action in figure if action.microbatch < microbatches)


def dualpipe_v(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> Iterator[Action]:
    """DualPipe-V: stages form a V as in ZB-V. Forward and backward passes alternate, so one hides the other's messages.

    Backward passes are split only at the start and at the end, where another rank waits for the input half. The source
    needs at least 2 * ranks microbatches. For fewer, actions of missing microbatches are left out.

    Source: github.com/deepseek-ai/DualPipe, half of the DualPipe of DeepSeek-V3 (2024, arXiv 2412.19437, fig. 5).
    """
    for action in _dualpipe_v_order(rank, ranks, max(microbatches, 2 * ranks)):
        if action.microbatch < microbatches:
            yield action


Pass = Iterator[Action]
"""Passes of one kind of one stage, a microbatch at a time."""


def passes(kind: Callable[[int, int], Action], stage: int, microbatches: Iterator[int] | None = None) -> Pass:
    """Return the passes of one kind of a stage, from microbatch 0. Two kinds may share the iterator `microbatches`."""
    return map(kind, repeat(stage), microbatches or count())


def in_phases(*phases: tuple[int, list[Pass]]) -> Iterator[Action]:
    """Yield the phases of a schedule.

    Args:
        phases: for each phase, the number of repetitions, and iterators over passes. Each repetition takes the next
            pass of every iterator.
    """
    for times, turn in phases:
        for _ in range(times):
            yield from map(next, turn)


def _groups(microbatches: int, ranks: int) -> list[range]:
    """Return consecutive groups of at least `ranks` microbatches (or one group of all), larger groups first."""
    count = max(1, microbatches // ranks)
    size, larger = divmod(microbatches, count)
    starts = [i * size + min(i, larger) for i in range(count + 1)]
    return [range(a, b) for a, b in pairwise(starts)]


def _late_weights(rank: int, microbatches: int, warmup: int, late: int) -> Iterator[Action]:
    """Yield 1F1B with split backward passes, where the last `late` weight halves fill the bubble at the end."""
    warmup, late = min(warmup, microbatches), min(late, microbatches)
    yield from (Forward(rank, i) for i in range(warmup))
    for i in range(microbatches):
        if warmup + i < microbatches:
            yield Forward(rank, warmup + i)
        yield BackwardInput(rank, i)
        if i >= late:
            yield BackwardWeight(rank, i - late)
    yield from (BackwardWeight(rank, i) for i in range(microbatches - late, microbatches))


def _dualpipe_v_order(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    down, up = rank, 2 * ranks - 1 - rank
    next_down, next_up = count(), count()  # whole backward passes and input halves share one sequence of microbatches
    f_down, f_up = passes(Forward, down), passes(Forward, up)
    b_down, b_up = passes(Backward, down, next_down), passes(Backward, up, next_up)
    i_down, i_up = passes(BackwardInput, down, next_down), passes(BackwardInput, up, next_up)
    halves: deque[Action] = deque()
    weight = (BackwardWeight(half.stage, half.microbatch) for half in iter(halves.popleft, None))
    ranks_below, position = ranks - rank - 1, rank + 1
    for action in in_phases(
        (2 * ranks_below, [f_down]),
        (position, [f_down, f_up]),
        (ranks_below, [i_up, weight, f_up]),
        (microbatches - 2 * ranks + position, [f_down, b_up, f_up, b_down]),
        (ranks_below, [b_up, f_up, b_down]),
        (position // 2, [b_up, b_down]),
        (position % 2, [b_up, i_down]),
        (position // 2, [i_up, i_down]),
        (ranks_below, [weight, i_down]),
        (position, [weight]),
    ):
        if isinstance(action, BackwardInput):
            halves.append(action)
        yield action
