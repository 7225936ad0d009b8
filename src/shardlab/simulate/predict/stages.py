"""Pipeline stages of equal cost, as nanotron assigns a model's blocks to them (`models/base.py`, `build_model`)."""

from __future__ import annotations

from shardlab.models import Blocks


def modules_of_stages(model: Blocks, stages: int) -> list[list[str]] | None:
    """Return the modules of each stage: "embedding", "block", "norm", "head", "cast" and "loss".

    The result is None if the last stage would have no module.

    Modules are assigned in order. Stage `s` of `n` ends with the first module that brings the cost of all modules so
    far above `(s + 1) / n` of the total. Costs are those of `get_block_compute_costs`: the number of parameters in the
    matrices of a block or of the head.
    """
    block = 4 * model.hidden_size**2 + 3 * model.hidden_size * _ffn_of(model)
    head = model.vocab_size * model.hidden_size
    modules = [("embedding", 0), *[("block", block)] * model.layers, ("norm", 0), ("head", head), ("cast", 0)]
    total = model.layers * block + head
    by_stage: list[list[str]] = [[] for _ in range(stages)]
    stage = cost = 0
    for name, module_cost in (*modules, ("loss", 0)):
        by_stage[stage].append(name)
        cost += module_cost
        if cost * stages > total * (stage + 1):
            stage += 1
    return by_stage if by_stage[-1] else None


def stages_by_cost(model: Blocks, stages: int, *, halves: bool) -> tuple[int, ...]:
    """Return the `layers_per_stage` of a plan whose stages cost about the same. The first stages get more blocks.

    The head and the loss are one layer of a plan, on the last stage. A stage that would have no layers takes one from
    the longest stage before it. If nanotron would leave the last stage empty, which it refuses, the result is (), an
    even split.

    >>> from shardlab.models import Llama
    >>> llama = Llama(layers=32, hidden_size=4096, heads=32, ffn_hidden_size=14336, vocab_size=131072)
    >>> stages_by_cost(llama, 2, halves=False), stages_by_cost(llama, 4, halves=True)
    ((18, 14), (18, 18, 16, 13))

    Args:
        halves: whether the layers of the plan are half-blocks, two for each block and one for the final norm and head.
    """
    by_stage = modules_of_stages(model, stages)
    if by_stage is None:
        return ()
    counts = [(1 + halves) * modules.count("block") for modules in by_stage]
    counts[-1] += halves
    for stage in range(stages - 1, 0, -1):
        if not counts[stage]:
            longest = max(range(stage), key=lambda other: (counts[other], other))
            counts[stage], counts[longest] = 1, counts[longest] - 1
    return tuple(counts)


def _ffn_of(model: Blocks) -> int:
    return int(getattr(model, "hidden", 4 * model.hidden_size))
