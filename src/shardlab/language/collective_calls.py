"""Collectives as their members call them: the properties on which members must agree, and each member's result.

`collective_results` derives the members' results from their inputs. A broadcast gives the root's value to all members.
A scatter cuts parameters into equal slices, and a batch into equal runs of whole microbatches. A gather concatenates
the members' pieces, and a reduce sums their values; only the root gets the result. A barrier moves nothing. Tracing and
the check both use these functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, overload

from shardlab.common.errors import About, Refused
from shardlab.common.text import counted
from shardlab.language.mesh import Group
from shardlab.language.ops import COLLECTIVES, ROOT_GIVES, ROOT_RECEIVES, ROOTED, Combiner, OpKind
from shardlab.language.rules import collectives
from shardlab.language.rules.kinds import Kind, Reduction, bits, mask_of
from shardlab.language.rules.layer_rules import Rules
from shardlab.language.rules.spec import Spec
from shardlab.language.tape import ExpectedValue

_CUT = frozenset({Kind.WEIGHT, Kind.OPT_STATE, Kind.GRAD_WEIGHT})
_DEALT = frozenset({Kind.ACTIVATION, Kind.GRAD_ACTIVATION})
_ALIKE = COLLECTIVES - ROOTED - {OpKind.BARRIER}
"""Collectives in which every member gives a value and receives one."""

Specs = Sequence[Spec | None]

BARRIER, BROADCAST, SCATTER = OpKind.BARRIER, OpKind.BROADCAST, OpKind.SCATTER
ALL_TO_ALL, REDUCE_SCATTER = OpKind.ALL_TO_ALL, OpKind.REDUCE_SCATTER
UNION, SUM = Combiner.UNION, Reduction.SUM

_REDUCES = frozenset({OpKind.REDUCE, OpKind.ALL_REDUCE})


class Call(NamedTuple):
    """Properties of a collective, apart from its values, on which all members must agree.

    Attributes:
        kind: the kind of op.
        root: number of the only rank that gives a value (BROADCAST, SCATTER) or receives the result (GATHER, REDUCE);
            -1: no root.
        reduction: how the members' values are combined.
    """

    kind: OpKind
    root: int = -1
    reduction: Reduction = Reduction.SUM

    @property
    def suffix(self) -> str:
        """Reduction and root as text, such as ` by mean with root 2`."""
        by = f" by {self.reduction.value}" if self.reduction is not SUM else ""
        return by + (f" with root {self.root}" if self.root >= 0 else "")

    def __str__(self) -> str:
        return self.kind.value + self.suffix


call_of = lru_cache(maxsize=1 << 10)(Call)
"""Cached `Call`: equal calls are one object."""


def call_text(call: Call, spec: Spec | None) -> str:
    """Return a member's call with its input as text: `reduce(grad_weights[1] (microbatch 0)) with root 2`."""
    return str(call) if spec is None else f"{call.kind.value}({spec}){call.suffix}"


def require_valid_call(call: Call, ranks: Sequence[int]) -> None:
    """Refuse a root that is not a member, and a root or a reduction for an op that takes none."""
    kind, root, reduction = call
    if kind in ROOTED:
        if root not in ranks:
            names = ", ".join(map(str, ranks))
            fault = f"the root is rank {root}, but the group has the ranks {names}"
            raise Refused("wrong root", kind.value, fault, "name one of them")
    elif root != -1:
        raise Refused("wrong root", kind.value, f"names root {root}, but it has none", "name no root")
    if reduction is not SUM and kind not in _REDUCES:
        remedy = "take reduce or all_reduce for anything but a sum"
        raise Refused("no reduction", kind.value, f"is by {reduction.value}", remedy)


def calls_match(one: Call, spec: Spec | None, other: Call, other_spec: Spec | None) -> bool:
    """Return whether two members issue the same call with values of the same kind and layer.

    A member without a value (None) matches every value.

    Args:
        one, spec: the call and the value of the first member.
        other, other_spec: the call and the value of the second member.
    """
    if one != other:
        return False
    if spec is None or other_spec is None or spec[0] is other_spec[0]:
        return True
    return spec[0].kind is other_spec[0].kind and spec[0].layer == other_spec[0].layer


def disagreement(
    call: Call, spec: Spec | None, group: Group, first_rank: int, first_op: int, first_text: str
) -> Refused:
    """Return the refusal of a member's call that differs from the call of the first member to arrive.

    Args:
        call, spec: the refused call, and the value that its member passes to it (None: no value).
        first_rank, first_op, first_text: the first member's number, the index of its op, and the text of its call.
    """
    about = About(f"{call_text(call, spec)} on {group}", -1 if spec is None else spec.layer)
    fault = (
        f"rank {first_rank} meets it with {first_text} (its op {first_op}); all members of a group must issue its "
        "collectives in one order, of one kind and for one layer"
    )
    remedy = "issue the same collective there: look for an `if` or a loop that differs between these ranks"
    return Refused("other order", about, fault, remedy)


def value_counts(call: Call, rank: int) -> tuple[int, int]:
    """Return the number of values, 0 or 1, that a member gives to a collective, and the number that it receives."""
    kind = call.kind
    if kind in _ALIKE:
        return 1, 1
    is_root = rank == call.root
    if kind is BARRIER:
        return 0, 0
    if kind is BROADCAST:
        return int(is_root), int(not is_root)
    return int(is_root or kind not in ROOT_GIVES), int(is_root or kind not in ROOT_RECEIVES)


def collective_results(call: Call, inputs: Specs, ranks: Sequence[int], rules: Rules) -> Specs:
    """Derive the members' results from their inputs, both in group order.

    Raises:
        Refused: if the values do not belong together, or a contribution would be lost or counted twice.
    """
    kind, root, _ = call
    if kind is BARRIER:
        return [None] * len(ranks)
    specs = [spec for spec in inputs if spec is not None]
    if kind is BROADCAST:
        return [None if rank == root else specs[0] for rank in ranks]
    if kind is SCATTER:
        return _scattered(specs[0], len(ranks))
    if kind is ALL_TO_ALL:
        first = specs[0]
        indices = rules.indices.get((first.kind, first.layer), ())
        return collectives.all_to_all(first.about(kind.row.name), specs, MemberNames(ranks), indices)
    combined = unite_members(call, specs, ranks)
    if kind is REDUCE_SCATTER:
        return collectives.scatter(specs[0].about(kind.row.name), combined, len(ranks))
    if kind not in ROOT_RECEIVES:
        return [combined] * len(ranks)
    return [combined if rank == root else None for rank in ranks]


def unite_members(call: Call, specs: Sequence[Spec], ranks: Sequence[int]) -> Spec:
    """Derive the sum or the concatenation of the members' values. For a REDUCE_SCATTER this is the uncut sum.

    Raises:
        Refused: as `collective_results` does.
    """
    op, names = specs[0].about(call.kind.row.name), MemberNames(ranks)
    if call.kind.row.combines is UNION:
        return collectives.gather(op, specs, names)
    if call.reduction is not SUM:
        return collectives.reduce_replicas(op, call.reduction, specs, names)
    return collectives.reduce(op, specs, names)


class MemberNames(Sequence[str]):
    """Names of a group's members, or of pieces, for messages. Each name is built when it is read."""

    def __init__(self, ranks: Sequence[int], noun: str = "rank") -> None:
        self._ranks = ranks
        self._noun = noun

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        ranks, noun = self._ranks[index], self._noun
        return f"{noun} {ranks}" if isinstance(ranks, int) else [f"{noun} {rank}" for rank in ranks]

    def __len__(self) -> int:
        return len(self._ranks)


def require_expected_value(call: Call, expected: ExpectedValue, spec: Spec) -> None:
    """Refuse a root's value that differs from the value expected by the receiving rank."""
    actual = ExpectedValue.of(spec)
    if expected != actual:
        fault = f"expected {expected}, but rank {call.root} gave {actual}"
        raise Refused("other message", About(str(call), expected.layer), fault, "make both mean the same")


def require_expected_message(source: int, expected: ExpectedValue, spec: Spec) -> None:
    """Refuse a message that differs from the one expected by the receive."""
    actual = ExpectedValue.of(spec)
    if expected != actual:
        fault = (
            f"expected {expected}, but the next message on this channel is {actual}; messages between two ranks arrive "
            "in the order they were sent"
        )
        remedy = f"make rank {source}'s sends and this rank's receives agree"
        raise Refused("other message", About(f"recv from rank {source}", expected.layer), fault, remedy)


def _scattered(spec: Spec, parts: int) -> list[Spec]:
    """Cut parameters into equal slices, or a batch into equal runs of microbatches."""
    op = spec.about("scatter")
    if spec.kind in _CUT:
        return collectives.scatter(op, spec, parts)
    if spec.kind not in _DEALT:
        remedy = "scatter weights, optimizer states, activations and their gradients"
        raise Refused("wrong kind", op, f"{spec} was given", remedy)
    microbatches, slices_each = list(bits(spec.microbatches)), spec.form.space.sequence
    run_length, rest = divmod(len(microbatches), parts)
    if rest:
        fault = f"{spec} has {counted(len(microbatches), 'microbatch')}, no multiple of {parts}"
        raise Refused("does not divide", op, fault, "give each rank the same number of whole microbatches")
    runs = [mask_of(microbatches[place * run_length : (place + 1) * run_length]) for place in range(parts)]
    return [
        Spec(spec.form, mask_of(cell for cell in bits(spec.cells) if run >> cell // slices_each & 1)) for run in runs
    ]
