"""Bytes of a model's state that ZeRO leaves on each rank: a plan on a model that is nothing but parameters."""

from __future__ import annotations

from shardlab.predict.folding import fold
from shardlab.program import Mesh, OpKind, Sizes
from shardlab.program.precision import find_precision
from shardlab.strategies.plan import Plan
from shardlab.timeline.memory import CATEGORIES, Category, memory_in_bytes

LAYERS = 16
SHARD = ("dp_shard",)


def model_state_bytes(parameters: float, ranks: int, stage: int) -> int:
    """Bytes of parameters, gradients and optimizer state on each of some data-parallel ranks, in half precision.

    Gradients count as they stay from one microbatch to the next (Rajbhandari et al. 2020, arXiv 1910.02054, section 5).
    """
    each = round(parameters / LAYERS)
    sizes = Sizes((each,) * LAYERS, (2 * each,) * LAYERS, (0,) * (LAYERS + 1), (0,) * LAYERS)
    shard = SHARD if ranks > 1 else ()
    plan = Plan(
        Mesh(dp_shard=ranks),
        shard_parameters=shard if stage >= 3 else (),
        shard_gradients=shard if stage >= 2 else (),
        shard_optimizer=shard if stage >= 1 else (),
    )
    folded = fold(plan, find_precision("fp16").sizes(sizes), 2 * ranks)
    (memory,) = memory_in_bytes(folded, counters=True)
    kinds = [op.kind for op in folded.program.tapes[0]]
    place = {category: number for number, category in enumerate(CATEGORIES)}
    updated, second = kinds.index(OpKind.UPDATE), kinds.index(OpKind.LOAD_BATCH, kinds.index(OpKind.LOSS))
    kept = memory.counters[updated - 1 if stage >= 2 else second]
    state = memory.counters[updated - 1]
    gradients = kept[place[Category.GRADIENTS]]
    return state[place[Category.PARAMETERS]] + state[place[Category.OPTIMIZER]] + gradients
