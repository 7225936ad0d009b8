"""How much each rank sends in a step: how often, and how many bytes."""

from __future__ import annotations

from dataclasses import dataclass

from shardlab.check import Checked
from shardlab.program import Kind, OpKind, Spec
from shardlab.program.tape import COLLECTIVES


@dataclass
class Traffic:
    """What one rank sends in a step.

    Attributes:
        collectives: how many it takes part in with others.
        messages: how many it sends.
        weights: bytes of weights and of their gradients.
        activations: bytes of activations and of their gradients.
        others: bytes of anything else, such as a gradient's norm.
    """

    collectives: int = 0
    messages: int = 0
    weights: float = 0.0
    activations: float = 0.0
    others: float = 0.0

    @property
    def bytes(self) -> float:
        return self.weights + self.activations + self.others


def traffic(checked: Checked) -> list[Traffic]:
    """What each rank sends.

    Collectives are counted as rings move them, which is the least that is possible: of the whole value a rank sends
    (n - 1) / n in an all-gather or a reduce-scatter, and twice that in an all-reduce (nccl-tests, doc/PERFORMANCE.md;
    Rabenseifner 2004, "Optimization of collective reduction operations"). In an all-to-all it keeps its own n-th of
    what it gives.
    """
    return [_of_rank(checked, rank) for rank in range(checked.program.ranks)]


def _of_rank(checked: Checked, rank: int) -> Traffic:
    sent, sizes = Traffic(), checked.program.sizes
    for op in checked.program.tapes[rank]:
        if op.kind is OpKind.SEND:
            sent.messages += 1
            times = 1.0
        elif op.kind in COLLECTIVES and op.group is not None and len(op.group.ranks) > 1:
            sent.collectives += 1
            times = _times(op.kind, len(op.group.ranks))
        else:
            continue
        spec = checked.specs[rank][op.inputs[0]]
        _add(sent, spec, times * sizes.bytes(spec))
    return sent


def _times(kind: OpKind, members: int) -> float:
    """How often a rank sends what it puts in: the whole value, or of an all-gather its piece."""
    others = members - 1
    return {
        OpKind.ALL_GATHER: others,
        OpKind.REDUCE_SCATTER: others / members,
        OpKind.ALL_TO_ALL: others / members,
        OpKind.ALL_REDUCE: 2 * others / members,
    }[kind]


def _add(sent: Traffic, spec: Spec, amount: float) -> None:
    if spec.kind in (Kind.WEIGHT, Kind.GRAD_WEIGHT):
        sent.weights += amount
    elif spec.kind in (Kind.ACTIVATION, Kind.GRAD_ACTIVATION):
        sent.activations += amount
    else:
        sent.others += amount
