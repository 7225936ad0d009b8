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
    if stages > 1 and (blocks + 2) % stages == 0 and (fewer_at_ends or blocks % stages):
        each = (blocks + 2) // stages
        counts = [each - 1, *[each] * (stages - 2), each - 1]
    else:
        each, more = divmod(blocks, stages)
        first = (stages - more + 1) // 2  # the stages that have one more lie in the middle
        counts = [each + (first <= stage < first + more) for stage in range(stages)]
    if not halves:
        return tuple(counts)
    counts = [2 * count for count in counts]
    counts[-1] += 1
    return tuple(counts)
