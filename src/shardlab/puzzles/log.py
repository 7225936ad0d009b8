"""What a rank has done, as the puzzles write it down, and what it costs."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from shardlab.program import OpKind
from shardlab.timeline.costs import UNIT_COSTS

COLLECTIVES = {"allreduce": OpKind.ALL_REDUCE, "allgather": OpKind.ALL_GATHER, "scatterreduce": OpKind.REDUCE_SCATTER}
"""The kind of op that each collective is in the vocabulary of `shardlab.program`."""


@dataclass
class PuzzleEvent:
    """One thing that a rank did.

    Attributes:
        typ: forward, backward, loss, update, allreduce, allgather, scatterreduce or pass (a send or a receive).
        layer: the layer worked on; None for update and pass, the number of layers for loss.
        rank: who did it.
        time, length: when it started and how long it took, in forward passes of one microbatch through one layer.
        memory: elements alive on the rank when it started: in its stores, or in variables that it used later.
        batches: the microbatches of a forward or backward.
        to, source: the other rank of a pass.
    """

    typ: str
    layer: int | None
    rank: int
    time: float
    length: float
    memory: float
    batches: Set[int] = frozenset()
    to: int | None = None
    source: int | None = None

    @property
    def kind(self) -> OpKind:
        """What the event is in the vocabulary of `shardlab.program`."""
        if self.typ == "pass":
            return OpKind.RECV if self.to is None else OpKind.SEND
        return COLLECTIVES.get(self.typ) or OpKind(self.typ)

    @property
    def cost(self) -> float:
        """How long such an event takes: forward and backward by the microbatch, the others a constant."""
        duration = UNIT_COSTS.duration(self.kind, len(self.batches))
        return int(duration) if duration.is_integer() else duration

    @property
    def end(self) -> float:
        """When it ended, as the decimals that both summands are: 19.9, not 19.900000000000002."""
        return round(self.time + self.length, 6)
