"""Residual streams that lie in what layers keep, and so take no room of their own.

`shardlab.timeline.memory.MemoryLedger` says when that is. A pass of a sample is measured beside the sample's other
layers, so it is corrected where the layer before it, on the rank that is outlined, keeps more or less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardlab.predict.passes import Crest, Held, Pass
from shardlab.program import Kind
from shardlab.strategies.rank_plan import Keeps, RankPlan


def layers_given_kept(plan: RankPlan, alike: Sequence[int], saves: Sequence[bool]) -> frozenset[int]:
    """The layers that are given a residual stream which lies in what the layer that makes it keeps.

    Args:
        plan: of the rank that has both layers.
        alike: for each layer, the one whose sizes it has.
        saves: whether a layer's saved activations have the residual stream in them (see `Sizes.saves_residual`).
    """
    return frozenset(
        port.layer
        for number, layer in plan.layers.items()
        if saves and saves[alike[number]] and layer.keeps == "all"
        for port in plan.model.layers[number].outputs
        if port.kind is Kind.RESIDUAL
    )


def corrected(done: Pass, keeps: Keeps, bytes: int, slot: int) -> Pass:
    """A forward pass at whose end so many bytes more are held, since its residual stream was not measured as it is.

    A layer that keeps all has read the residual by then. Others read it as something that may be there for longer than
    what layers keep, so that it takes room from the layer's own op on.

    Args:
        done: the pass of a sample.
        keeps: what the layer keeps.
        bytes: of the residual stream; below 0 where the sample's takes room that the rank's does not.
        slot: the category that these count in, by its place.
    """
    before, main, after = done.crests
    crests = before, main if keeps == "all" else _higher(main, bytes, slot), _higher(after, bytes, slot)
    return replace(done, held=_more(done.held, bytes, slot), crests=crests)


def _higher(crest: Crest | None, bytes: int, slot: int) -> Crest | None:
    return crest and crest._replace(bytes=crest.bytes + bytes, held=_more(crest.held, bytes, slot))


def _more(held: Held, bytes: int, slot: int) -> Held:
    return (*held[:slot], held[slot] + bytes, *held[slot + 1 :])
