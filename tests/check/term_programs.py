"""Programs of experts that no plan writes."""

from __future__ import annotations

from dataclasses import replace

from shardlab.language import Mesh, Rank
from shardlab.strategies.plan.plan import Plan
from shardlab.strategies.plan.program import TracedRunner
from shardlab.strategies.plan.resolve import resolve


def terms_exchanged_mesh(ranks: int) -> Mesh:
    return Mesh(tp=ranks // 2, ep=2)


async def terms_exchanged(rank: Rank) -> None:
    """Expert and tensor parallelism whose experts' results, and their inputs' gradients, go home as terms: these are
    summed over `tp` where the tokens are, not where the experts are.
    """
    plan = resolve(Plan(rank.mesh), rank.sizes, len(rank.microbatches), rank.index)
    layers = {
        number: replace(
            layer,
            completions=layer.completions._replace(
                output=layer.completions.output[::-1], grad_input=layer.completions.grad_input[::-1]
            ),
        )
        for number, layer in plan.layers.items()
    }
    await TracedRunner(rank, replace(plan, layers=layers)).run()
