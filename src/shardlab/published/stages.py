"""How many layers each pipeline stage of a published run had, where its source says so in words."""

from __future__ import annotations


def layers_per_stage(blocks: int, stages: int, fewer_at_ends: bool, halves: bool) -> tuple[int, ...]:
    """The `layers_per_stage` of a plan.

    Where blocks do not divide, but would with two more, the first and the last stage have one fewer, as their embedding
    and head take time as well (Megatron's standalone embedding; Llama 3, arXiv 2407.21783, section 3.3.2).

    >>> layers_per_stage(10, 4, fewer_at_ends=True, halves=False)
    (2, 3, 3, 2)

    Args:
        blocks: of the model.
        stages: of the pipeline.
        fewer_at_ends: whether the first and the last stage are said to have one block fewer.
        halves: whether a plan counts pairs of a norm and a body, two a block and one for the head.
    """
    each, rest = divmod(blocks + 2, stages)
    if each == 1 and not rest and halves:  # the ends have no block, so their neighbours share half of one with them
        pairs = 2 * blocks - 1
        return (1, *_even(pairs, stages - 2), 1)
    if each > 1 and not rest and (fewer_at_ends or blocks % stages):
        counts = [each - 1, *[each] * (stages - 2), each - 1]
    else:
        counts = _even(blocks, stages)
    if not halves:
        return tuple(counts)
    counts = [2 * count for count in counts]
    counts[-1] += 1
    return tuple(counts)


def _even(count: int, stages: int) -> list[int]:
    """Deal blocks to stages as evenly as can be; stages that have one more lie in the middle."""
    each, more = divmod(count, stages)
    first = (stages - more + 1) // 2
    return [each + (first <= stage < first + more) for stage in range(stages)]
