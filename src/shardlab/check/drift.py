"""Replicas that drift: copies of a weight that are updated from values which are equal only up to rounding.

The check proves exact arithmetic, in which the order of a sum does not matter. In floating point it does: copies that
each rank updates from a sum of its own lose their equality bit by bit, and nothing brings them together again.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

from shardlab.check.checked import Checked
from shardlab.check.numbering import FUSED_ADD, Loaded, Numbering
from shardlab.check.numbers import SUMS, Numbers
from shardlab.program import Holds, Kind, OpKind
from shardlab.program.world import gc_paused
from shardlab.rules.pieces import listed


class Drift(NamedTuple):
    """Copies of some layers' weights that may not stay equal.

    Attributes:
        kind: `weights`; or `opt_states`, where those alone drift.
        layers: which layers'.
        groups: ranks whose copies stay equal, for each way in which a copy is updated.
        cause: what differs, and what to do.
    """

    kind: str
    layers: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]
    cause: str

    def as_dict(self) -> dict[str, Any]:
        """Get its fields and the whole sentence, for JSON."""
        return {**self._asdict(), "text": str(self)}

    def __str__(self) -> str:
        alone = all(len(ranks) == 1 for ranks in self.groups)
        groups = [sorted(ranks[0] for ranks in self.groups)] if alone else self.groups
        ranks = " against ".join(map(listed, groups))
        return f"replicas of {self.kind}[{listed(self.layers)}] on ranks {ranks} may drift: {self.cause}."


class Copy(NamedTuple):
    """Slices of a parameter on a rank, all of one number."""

    holds: Holds
    number: int
    rank: int


FOLLOWS = "other weights, which drift, enter their gradients; mend those, and these stay equal"
"""The cause of a drift that begins a step after another one."""


def drifts_of(checked: Checked) -> list[Drift]:
    """List all replicas of a program that may drift, layer by layer; those that drift alike are listed together."""
    with gc_paused():
        numbering = Numbering(checked)
        found = _drifts(numbering, _copies(numbering))
        if not found:
            return []
        known = {layer for drift in found for layer in drift.layers}
        later = settled(checked)
        follow = {key: copies for key, copies in _copies(later).items() if key[1] not in known}
        return found + [drift._replace(cause=FOLLOWS) for drift in _drifts(later, follow)]


def settled(checked: Checked) -> Numbering:
    """Number the values of a step so late that no more copies fall apart: what drifts is not equal when it begins."""
    numbering, classes = Numbering(checked), dict[Loaded, list[tuple[Holds, int]]]()
    while any(map(_apart, _copies(numbering).values())):
        before, classes = classes, _classes(numbering)
        if classes == before:
            break
        numbering = Numbering(checked, classes)
    return numbering


def _copies(numbering: Numbering) -> dict[tuple[Kind, int], list[Copy]]:
    """List the copies of weights and optimizer states that a step leaves, by kind and layer."""
    checked = numbering.checked
    copies: dict[tuple[Kind, int], list[Copy]] = defaultdict(list)
    for rank, live in enumerate(numbering.live):
        for value, number in live.items():
            spec = checked.specs[rank][value]
            if spec.step == 1 and spec.kind in _LOADS:
                pieces = numbering.numbers.within(number, spec.holds)
                copies[spec.kind, spec.layer] += [Copy(holds, piece, rank) for holds, piece in pieces]
    return copies


_LOADS = {Kind.WEIGHT: OpKind.LOAD_WEIGHT, Kind.OPT_STATE: OpKind.LOAD_OPT_STATE}


def _classes(numbering: Numbering) -> dict[Loaded, list[tuple[Holds, int]]]:
    """Label what ranks load in the next step: equal labels are equal bits. Labels count from 0 in each layer."""
    found: dict[Loaded, list[tuple[Holds, int]]] = {}
    labels: dict[tuple[Kind, int], dict[int, int]] = defaultdict(dict)
    for rank, live in enumerate(numbering.live):
        for value, number in live.items():
            spec = numbering.checked.specs[rank][value]
            if spec.kind in _LOADS:
                known = labels[spec.kind, spec.layer]
                pieces = numbering.numbers.within(number, spec.holds)
                found[rank, _LOADS[spec.kind], spec.layer, spec.holds] = [
                    (holds, known.setdefault(piece, len(known))) for holds, piece in pieces
                ]
    return found


def _drifts(numbering: Numbering, copies: Mapping[tuple[Kind, int], list[Copy]]) -> list[Drift]:
    found: dict[tuple[Kind, tuple[tuple[int, ...], ...], str], list[int]] = defaultdict(list)
    drifting: set[int] = set()
    for kind, layer in sorted(copies, key=lambda key: (key[0] is Kind.OPT_STATE, key[1])):
        apart = _apart(copies[kind, layer])
        if apart and layer not in drifting:
            drifting.add(layer)
            first = apart[0].holds.mask & -apart[0].holds.mask  # other elements may be sums of other values
            cause = _cause(numbering.numbers, sorted({copy.number for copy in apart if copy.holds.mask & first}))
            found[kind, _groups(apart), cause].append(layer)
    return [Drift(kind.value, tuple(layers), groups, cause) for (kind, groups, cause), layers in found.items()]


def _apart(copies: list[Copy]) -> list[Copy]:
    """List the parts of all copies that have other numbers on other ranks, in pieces of one size."""
    numbers = {copy.number for copy in copies}
    if len(numbers) == 1:
        return []
    of = math.lcm(*[copy.holds.of for copy in copies])
    fine = [copy._replace(holds=copy.holds.refined(of)) for copy in copies]
    whole = dict.fromkeys(numbers, 0)
    for holds, number, _ in fine:
        whole[number] |= holds.mask
    once = twice = 0
    for mask in whole.values():
        twice |= once & mask
        once |= mask
    cut = [copy._replace(holds=Holds(copy.holds.mask & twice, of)) for copy in fine]
    return [copy for copy in cut if copy.holds.mask]


def _groups(apart: list[Copy]) -> tuple[tuple[int, ...], ...]:
    """Ranks by what they have."""
    has: dict[int, set[tuple[Holds, int]]] = defaultdict(set)
    for holds, number, rank in apart:
        has[rank].add((holds, number))
    groups: dict[frozenset[tuple[Holds, int]], list[int]] = defaultdict(list)
    for rank in sorted(has):
        groups[frozenset(has[rank])].append(rank)
    return tuple(map(tuple, groups.values()))


def _cause(numbers: Numbers, drifting: list[int]) -> str:
    """Say what the copies were updated from, and how to make it the same."""
    how, given = zip(*[numbers.keys[number] for number in drifting], strict=True)
    if any(each[0] is not OpKind.UPDATE for each in how):
        return "they were made alike again on some ranks only; do so on all, by an all_reduce by mean or a broadcast"
    gradients, weights, _ = (set(each) for each in zip(*given, strict=True))
    if len(gradients) > 1:
        if len({tuple(numbers.terms(gradient)) for gradient in gradients}) == 1:
            if len({_fused(numbers, gradient) for gradient in gradients}) > 1:
                return (
                    "some ranks add a gradient within its backward pass, where nothing else reads it, and others "
                    "afterwards; read it on all of them or on none, or all_reduce the sums by mean"
                )
            return (
                "their gradients were summed in different orders; all_reduce the gradients, or sum them on one rank "
                "and broadcast the sum"
            )
        return (
            "their gradients were computed apart, and are equal only up to rounding; all_reduce the gradients by mean, "
            "or compute them on one rank and broadcast them"
        )
    if len({each[2:4] for each in how}) > 1:
        return (
            "they are updated in other places, or as other numbers of whole matrices; keep the same slices in the same "
            "place on all ranks"
        )
    if len(set(how)) > 1:
        return (
            "the norms that clip their gradients were computed apart; all_reduce the norm, or sum it on one rank and "
            "broadcast it"
        )
    assert len(weights) > 1
    return "the weights differ before the update; use the weights as they were loaded"


def _fused(numbers: Numbers, gradient: int) -> int:
    """Count the gradients in a sum that their backward passes have added to the older ones."""
    left, count = [gradient], 0
    while left:
        what, terms = numbers.keys[left.pop()]
        if what[0] in SUMS:
            count += what == FUSED_ADD
            left.extend(terms)
    return count
