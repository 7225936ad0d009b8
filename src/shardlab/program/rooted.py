"""The rules of all collectives as their members call them: with a root, a reduction, or no value at all.

A root's value is broadcast with its whole spec, or cut: scattered parameters as a reduce_scatter cuts them, scattered
batches into runs of whole microbatches. A gather unites *holds* and a reduction unites *sums*, as all_gather and
all_reduce do, on the root alone. A barrier carries nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

from shardlab.program import transfer
from shardlab.program.errors import Refused
from shardlab.program.sizes import LayerKind
from shardlab.program.tape import COLLECTIVES, ROOT_GIVES, ROOT_RECEIVES, ROOTED, Message, OpKind
from shardlab.program.uniting import unite_replicas
from shardlab.program.values import Holds, Kind, Reduction, Spec, bits, mask_of

_CUT = frozenset({Kind.WEIGHT, Kind.OPT_STATE, Kind.GRAD_WEIGHT})
_DEALT = frozenset({Kind.ACTIVATION, Kind.GRAD_ACTIVATION})
_ALIKE = COLLECTIVES - ROOTED - {OpKind.BARRIER}
"""Every member gives a value and receives one."""

_REDUCES = frozenset({OpKind.REDUCE, OpKind.ALL_REDUCE})


class Call(NamedTuple):
    """What the members of a collective must agree on, besides the value.

    Attributes:
        kind: of the op.
        root: the rank that alone gives or receives (-1: none).
        reduction: what becomes of the members' values.
    """

    kind: OpKind
    root: int = -1
    reduction: Reduction = Reduction.SUM

    @property
    def how(self) -> str:
        by = f" by {self.reduction.value}" if self.reduction is not Reduction.SUM else ""
        return by + (f" with root {self.root}" if self.root >= 0 else "")

    def __str__(self) -> str:
        return self.kind.value + self.how


def said(call: Call, spec: Spec | None) -> str:
    """A member's part, with what it gives: `reduce(grad_weights[1] (microbatch 0)) with root 2`."""
    return str(call) if spec is None else f"{call.kind.value}({spec}){call.how}"


def want_sound(call: Call, ranks: Sequence[int]) -> None:
    """Refuse a root that is no member, or one or a reduction where the op has none."""
    kind, root, reduction = call
    if kind in ROOTED:
        if root not in ranks:
            names = ", ".join(map(str, ranks))
            raise Refused(
                f"{kind.value}: the root is rank {root}, but the group has the ranks {names}; name one of them."
            )
    elif root != -1:
        raise Refused(f"{kind.value}: names root {root}, but it has none.")
    if reduction is not Reduction.SUM and kind not in _REDUCES:
        raise Refused(f"{kind.value}: is by {reduction.value}; only reduce and all_reduce are by anything but a sum.")


def agree(one: Call, gave: Spec | None, other: Call, gives: Spec | None) -> bool:
    """Whether two members can meet: in one call, for values of one kind and layer."""
    if one != other:
        return False
    return gave is None or gives is None or (gave.kind is gives.kind and gave.layer == gives.layer)


def values_of(call: Call, rank: int) -> tuple[int, int]:
    """How many values a member gives, and how many it receives."""
    kind = call.kind
    if kind in _ALIKE:
        return 1, 1
    is_root = rank == call.root
    if kind is OpKind.BARRIER:
        return 0, 0
    if kind is OpKind.BROADCAST:
        return int(is_root), int(not is_root)
    return int(is_root or kind not in ROOT_GIVES), int(is_root or kind not in ROOT_RECEIVES)


def collective(
    call: Call, given: Sequence[Spec | None], ranks: Sequence[int], layers: int, kinds: Sequence[LayerKind] = ()
) -> Sequence[Spec | None]:
    """What each member receives, in group order, of what each has given as `values_of` says."""
    kind, root, reduction = call
    if kind in _ALIKE and reduction is Reduction.SUM:
        return transfer.collective(kind, cast("Sequence[Spec]", given), ranks, layers, kinds)
    if kind is OpKind.BARRIER:
        return [None] * len(ranks)
    if kind in ROOT_GIVES:
        (spec,) = [spec for spec in given if spec is not None]
        if kind is OpKind.SCATTER:
            return _scattered(spec, len(ranks))
        return [None if rank == root else spec for rank in ranks]
    specs = [spec for spec in given if spec is not None]
    if reduction is Reduction.SUM:
        received = transfer.collective(kind, specs, ranks, layers, kinds)
    else:
        name = f"{kind.value}({specs[0].kind.value}[{specs[0].layer}])"
        received = [unite_replicas(name, reduction, specs, [f"rank {rank}" for rank in ranks])] * len(ranks)
    if kind not in ROOT_RECEIVES:
        return received
    return [spec if rank == root else None for rank, spec in zip(ranks, received, strict=True)]


def _scattered(spec: Spec, parts: int) -> list[Spec]:
    """Equal slices of parameters, or equal runs of microbatches."""
    op = f"scatter({spec.kind.value}[{spec.layer}])"
    if spec.kind in _CUT:
        return [spec._replace(holds=holds) for holds in spec.holds.split(parts)]
    if spec.kind not in _DEALT:
        raise Refused(
            f"{op}: {spec} was given; weights, optimizer states, activations and their gradients are scattered."
        )
    microbatches, slices = list(bits(spec.microbatches)), spec.grid.sequence
    each, rest = divmod(len(microbatches), parts)
    if rest:
        raise Refused(
            f"{op}: {spec} has {len(microbatches)} microbatches, which do not divide among {parts} ranks; a scatter "
            "deals whole microbatches, equally many to each."
        )
    runs = [mask_of(microbatches[place * each : (place + 1) * each]) for place in range(parts)]
    return [
        spec._replace(holds=Holds(mask_of(p for p in bits(spec.holds.mask) if run >> p // slices & 1), spec.holds.of))
        for run in runs
    ]


def want_expected(call: Call, expected: Message, spec: Spec) -> None:
    """Refuse what comes from a root if it is not what the receiving rank meant."""
    got = transfer.message_of(spec)
    if expected != got:
        raise Refused(f"{call}: expected {expected}, but rank {call.root} gave {got}; make both mean the same.")
