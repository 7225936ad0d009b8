"""Layers that a plan computes again in the backward pass, instead of keeping what their forward pass made.

Of each run of such layers only the input is kept (of half-blocks the residual and the branch at the run's first norm, a
slice of the sequence if the plan cuts them so). Before its backward pass a run is computed forward again, with all
communication but that of its last layer's output, which nobody needs (Chen et al. 2016, arXiv 1604.06174, section 4;
Korthikanti et al. 2022, arXiv 2205.05198, section 5, where it is called full recomputation).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from shardlab.program import LayerKind, Sizes, UserError
from shardlab.strategies.plan import Plan


def blocks_of(sizes: Sizes) -> list[range]:
    """The layers of each of the model's blocks that can be computed again, in order.

    Of half-blocks, from a block's first norm up to the next block's; the embedding before them and the head after them
    keep what they need. Of a mixture, each block's experts. Other layers are blocks themselves.
    """
    if LayerKind.EXPERTS in sizes.kinds:
        return [range(l, l + 1) for l, kind in enumerate(sizes.kinds) if kind is LayerKind.EXPERTS]
    if LayerKind.NORM in sizes.kinds:
        return [range(start, stop) for start, stop in pairwise(sizes.blocks)]
    return [range(l, l + 1) for l in range(sizes.layers)]


def recomputed(plan: Plan, sizes: Sizes, stages: Sequence[range]) -> dict[int, range]:
    """The runs of layers that are computed again, each by its last layer; a block on two stages is two runs.

    Raises:
        UserError: when the plan names a block that the model does not have.
    """
    blocks = blocks_of(sizes)
    named = plan.recompute if isinstance(plan.recompute, tuple) else ()
    unknown = [number for number in named if not 0 <= number < len(blocks)]
    if unknown:
        raise UserError(f"recompute names block {unknown[0]}, but the model has blocks 0-{len(blocks) - 1}")
    again = blocks if plan.recompute == "full" else [blocks[number] for number in named]
    runs = [range(max(block.start, stage.start), min(block.stop, stage.stop)) for block in again for stage in stages]
    return {run[-1]: run for run in runs if run}


def backward_order(layers: range, runs: Mapping[int, range]) -> Iterator[int]:
    """The layers of a stage in the order of its backward pass, those of a run first forward, but for the last."""
    for layer in reversed(layers):
        yield from runs.get(layer, range(0))[:-1]
        yield layer
