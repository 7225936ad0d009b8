"""V-Half and V-Min: schedules with about half and a third of the memory of 1F1B, each made from a building block.

A building block is the timetable of one microbatch, in slots of the length of one pass. The stages form a V: of p
ranks, rank r has stage r on the way down and stage 2 p - 1 - r on the way up. So a block has two forward passes (F) and
two input halves of backward passes (I) on each rank. The block of V-Half for three ranks:

    rank 0   F . . . . . . F I . . . . . . . I
    rank 1   . . F . . . F . . . I . . . . I .
    rank 2   . . . . F F . . . . . . I . I . .

A rank holds the activations of a stage from its forward pass to its backward pass: rank 0 for 16 slots in stage 0 and
for 1 slot in stage 5. If a microbatch starts every six slots, the rank holds the activations of (16 + 1) / 6 passes on
average. Because of the V, a rank that holds the activations of one stage for longer holds those of its other stage for
less time, and the sum is the same on all ranks. The shape of the block therefore sets the memory. A schedule is made in
the three steps of the paper:

1. Repeat the block for each microbatch. No two passes of a rank meet in a slot.
2. Put the weight halves of the backward passes into the free slots.
3. Move passes of the beginning and the end to earlier slots (reordering in the paper) as far as the memory allows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import accumulate, count

from shardlab.strategies.schedules.actions import Action, BackwardInput, BackwardWeight, Forward

PERIOD = 6
"""Slots between the starts of two microbatches: three passes for each of a rank's two stages."""

Timetable = dict[int, Action]
"""Actions of one rank by slot."""

Block = Callable[[int, int], tuple[int, int, int, int]]
"""Function from (rank, ranks) to the slots of its passes of one microbatch: the forward passes of the stages on the way
down and up, then the input halves of their backward passes, up and down."""


def v_half(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> Iterator[Action]:
    """V-Half: every rank holds at most (ranks + 2) // 2 microbatches. The bubble is at most half of that of 1F1B.

    The limit of the bubble holds if there are at least as many microbatches as ranks, and if the forward pass and both
    halves of the backward pass take the same time. The table in docs/schedules.md has the exact bubble.

    Source: Qi et al. 2024, arXiv 2405.15362, fig. 4. The slots are those of `stable_pattern_v_half` in
    github.com/sail-sg/zero-bubble-pipeline-parallelism.
    """
    return iter(_orders(_v_half_block, (ranks + 2) // 2, ranks, microbatches)[rank])


def v_min(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> Iterator[Action]:
    """V-Min: every rank holds at most (ranks + 4) // 3 microbatches. The bubble is at most 2/3 of that of 1F1B.

    The limit of the bubble holds under the same conditions as for V-Half. If the three passes take different times, the
    bubble may grow with the number of microbatches.

    Source: Qi et al. 2024, arXiv 2405.15362, fig. 4. The slots are those of `stable_pattern_v_min` in
    github.com/sail-sg/zero-bubble-pipeline-parallelism.
    """
    return iter(_orders(_v_min_block, (ranks + 4) // 3, ranks, microbatches)[rank])


def _v_half_block(rank: int, ranks: int) -> tuple[int, int, int, int]:
    gap = 3 if ranks % 2 == 0 else 0  # without it, two passes would share a slot
    return 2 * rank, 3 * ranks - rank - 2, 3 * ranks + gap + 2 * rank - 1, 6 * ranks + gap - rank - 2


def _v_min_block(rank: int, ranks: int) -> tuple[int, int, int, int]:
    gap = 2 if ranks % 3 == 0 else 0  # without it, two passes would share a slot
    return rank, 2 * ranks - rank - 1, 2 * ranks + gap + rank, 4 * ranks + gap - rank - 1


@cache
def _orders(block: Block, memory: int, ranks: int, microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """Return the actions of all ranks, each of which holds the activations of at most `memory` microbatches."""
    timetables = [_repeat(block(rank, ranks), rank, ranks, microbatches) for rank in range(ranks)]
    for timetable in timetables:
        _add_weight_halves(timetable)
        _remove_late_weight_halves(timetable)  # frees slots for input halves, which other ranks need
    first, *_, last = block(0, ranks)
    # Steady phase: rank 0 has its first gradient, and still starts microbatches.
    steady = range(last, first + PERIOD * (microbatches - 1))
    _move_earlier(timetables, steady, 2 * memory)
    for timetable in timetables:
        _add_weight_halves(timetable)
    return tuple(tuple(timetable[slot] for slot in sorted(timetable)) for timetable in timetables)


def _repeat(slots: tuple[int, int, int, int], rank: int, ranks: int, microbatches: int) -> Timetable:
    down, up = rank, 2 * ranks - 1 - rank
    passes = (Forward, down), (Forward, up), (BackwardInput, up), (BackwardInput, down)
    return {
        slot + PERIOD * i: kind(stage, i)
        for i in range(microbatches)
        for slot, (kind, stage) in zip(slots, passes, strict=True)
    }


def _add_weight_halves(timetable: Timetable) -> None:
    """Put each missing weight half into the first free slot after its input half, in the order of the input halves."""
    present = set(timetable.values())
    end = max(timetable)
    pending: deque[Action] = deque()
    for slot in count():
        action = timetable.get(slot)
        if isinstance(action, BackwardInput):
            weight = BackwardWeight(action.stage, action.microbatch)
            pending.extend([weight] if weight not in present else [])
        elif action is None and pending:
            timetable[slot] = pending.popleft()
        if slot >= end and not pending:
            return


def _remove_late_weight_halves(timetable: Timetable) -> None:
    """Remove the weight halves after the last forward pass: from then on, the memory no longer grows."""
    last = max(slot for slot, action in timetable.items() if isinstance(action, Forward))
    for slot, action in list(timetable.items()):
        if slot > last and isinstance(action, BackwardWeight):
            del timetable[slot]


def _move_earlier(timetables: Sequence[Timetable], steady: range, limit: int) -> None:
    """Move each action of the warm-up and the cool-down to the first free slot after the actions on which it depends.

    A forward pass moves only so far that its rank never holds the activations of more than `limit` passes. The steady
    phase between warm-up and cool-down keeps the order of the block, which also suits passes of unequal length.
    """
    activation_counts = [_activations_held(timetable) for timetable in timetables]
    slots: dict[Action, int] = {}
    for slot, rank in sorted((slot, rank) for rank, timetable in enumerate(timetables) for slot in timetable):
        timetable = timetables[rank]
        action = timetable[slot]
        slots[action] = slot
        if slot in steady:
            continue
        start = 1 + max((slots[needed] for needed in _needs(action, 2 * len(timetables))), default=-1)
        for earlier in range(start, slot):
            fits = not isinstance(action, Forward) or max(activation_counts[rank][earlier:slot]) < limit
            if earlier not in timetable and fits:
                timetable[earlier] = timetable.pop(slot)
                slots[action] = earlier
                for index in range(earlier, slot):
                    activation_counts[rank][index] += _change(action)
                break


def _activations_held(timetable: Timetable) -> list[int]:
    """Return, for each slot, the number of forward passes up to it less the number of weight halves."""
    actions = map(timetable.get, range(max(timetable) + 1))
    return list(accumulate(map(_change, actions)))


def _change(action: Action | None) -> int:
    return isinstance(action, Forward) - isinstance(action, BackwardWeight)


def _needs(action: Action, stages: int) -> Iterator[Action]:
    """Yield the actions on which an action depends, and the same pass of the previous microbatch."""
    stage, i = action.stage, action.microbatch
    if i:
        yield type(action)(stage, i - 1)
    if isinstance(action, BackwardWeight):
        yield BackwardInput(stage, i)
    elif isinstance(action, BackwardInput):
        yield Forward(stage, i)
        if stage + 1 < stages:
            yield BackwardInput(stage + 1, i)
    elif stage:
        yield Forward(stage - 1, i)
