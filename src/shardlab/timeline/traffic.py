"""Messages and bytes that each rank sends in a step."""

from __future__ import annotations

from dataclasses import dataclass

from shardlab.check import Checked
from shardlab.program import Kind, Op, OpKind, Spec
from shardlab.program.ops import COLLECTIVES, ROOTED
from shardlab.rules.kind import ROW_KINDS


@dataclass
class Traffic:
    """Traffic of one rank in a step.

    Attributes:
        collectives: how many it takes part in with others.
        messages: how many it sends.
        weights: bytes of weights and of their gradients.
        activations: bytes of activations, residuals, keys and values, and of their gradients.
        others: bytes of anything else, such as a gradient's norm or the loss's numbers.
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
    """Count what each rank sends in a step.

    Collectives are counted as rings move them, which is the least that is possible: of the whole value a rank sends
    (n - 1) / n in an all-gather or a reduce-scatter, and twice that in an all-reduce (nccl-tests, doc/PERFORMANCE.md;
    Rabenseifner 2004, "Optimization of collective reduction operations"). In an all-to-all it sends all that it puts in
    but its own share of 1 / n. A broadcast passes the whole value along a chain from the root, and a reduce towards it,
    so each member but the last sends it once; the root of a scatter sends all pieces but its own, and in a gather all
    others send theirs. A barrier moves nothing.
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
            times = _times(op, rank, op.group.ranks)
        else:
            continue
        if not times:
            continue
        spec = checked.specs[rank][(op.inputs or op.outputs)[0]]
        _add(sent, spec, times * sizes.bytes(spec))
    return sent


def _times(op: Op, rank: int, ranks: tuple[int, ...]) -> float:
    """How often a rank sends what it puts in, or passes on what it receives: the whole value, or a gather's piece."""
    members, others = len(ranks), len(ranks) - 1
    if op.kind is OpKind.BARRIER:
        return 0.0
    if op.kind in ROOTED:
        from_root = (ranks.index(rank) - ranks.index(op.root)) % members
        return {
            OpKind.BROADCAST: float(from_root < others),
            OpKind.SCATTER: 0.0 if from_root else others / members,
            OpKind.GATHER: float(from_root > 0),
            OpKind.REDUCE: float(from_root > 0),
        }[op.kind]
    return {
        OpKind.ALL_GATHER: others,
        OpKind.REDUCE_SCATTER: others / members,
        OpKind.ALL_TO_ALL: others / members,
        OpKind.ALL_REDUCE: 2 * others / members,
    }.get(op.kind, 1.0)


def _add(sent: Traffic, spec: Spec, amount: float) -> None:
    if spec.kind in (Kind.WEIGHT, Kind.GRAD_WEIGHT):
        sent.weights += amount
    elif spec.kind in ROW_KINDS and spec.kind is not Kind.STATS:
        sent.activations += amount
    else:
        sent.others += amount
