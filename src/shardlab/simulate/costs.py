"""How long each op takes."""

from __future__ import annotations

from dataclasses import dataclass

from shardlab.program import OpKind
from shardlab.program.tape import COLLECTIVES


@dataclass(frozen=True)
class Costs:
    """Time units of each op; the defaults are those of the LLM Training Puzzles (Rush 2023, `Model.event`).

    Attributes:
        forward, recompute, backward_input, backward_weight: for each microbatch acted on.
        attend, attend_backward: causal attention of whole sequences, for each microbatch acted on; of a block, its
            share of that work.
        loss_stats, loss, add, norm, update: for each op.
        collective: from the moment its last member arrives.
        send, recv: for each message; a receive starts no earlier than its send has ended.
        link_latency: whether a send's time is spent on the link alone, which carries any number of messages at once
            (as schedules are timed in papers). Otherwise messages take the streams of both ranks, one at a time.
    """

    forward: float = 1.0
    recompute: float = 1.0
    backward_input: float = 0.5
    backward_weight: float = 0.5
    attend: float = 1.0
    attend_backward: float = 1.0
    loss_stats: float = 0.0
    loss: float = 0.0
    add: float = 0.0
    norm: float = 0.0
    update: float = 0.5
    collective: float = 0.3
    send: float = 0.2
    recv: float = 0.2
    link_latency: bool = False

    @property
    def backward(self) -> float:
        """An unsplit backward pass: both halves."""
        return self.backward_input + self.backward_weight

    def duration(self, kind: OpKind, microbatches: float) -> float:
        """Time units of an op that acts on so many microbatches."""
        if kind in COLLECTIVES:
            return self.collective
        if kind in _FREE_OF_CHARGE:
            return 0.0
        each: float = getattr(self, kind.value)
        return each * microbatches if kind.value in _PER_MICROBATCH else each


_FREE_OF_CHARGE = frozenset({OpKind.LOAD_WEIGHT, OpKind.LOAD_OPT_STATE, OpKind.LOAD_BATCH, OpKind.WAIT, OpKind.FREE})
_ATTENTION = frozenset({"attend", "attend_backward"})
_PER_MICROBATCH = frozenset({"forward", "recompute", "backward", "backward_input", "backward_weight"} | _ATTENTION)

UNIT_COSTS = Costs()
