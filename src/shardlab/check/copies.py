"""What several ranks have or compute alike, so that one can be compared with another while a program runs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable
from typing import NamedTuple

from shardlab.check.accumulation import InPlace
from shardlab.check.checked import Checked
from shardlab.check.drift import settled
from shardlab.program import Holds, Kind, Op, OpKind, Spec
from shardlab.program.world import gc_paused
from shardlab.rules.kind import ROW_KINDS
from shardlab.rules.pieces import bits

COMPARED = frozenset(
    {
        OpKind.FORWARD,
        OpKind.BACKWARD,
        OpKind.BACKWARD_INPUT,
        OpKind.BACKWARD_WEIGHT,
        OpKind.ATTEND,
        OpKind.ATTEND_BACKWARD,
        OpKind.LOSS,
    }
)
"""Ops whose results are compared."""

_CHANGING = frozenset({OpKind.ALL_REDUCE, OpKind.REDUCE, OpKind.REDUCE_SCATTER, OpKind.ADD, OpKind.SCALE})
"""Ops that make other weights of weights, beside an update."""


class Replica(NamedTuple):
    """Slices of a layer's weights that several ranks keep, equal bit by bit after every step."""

    layer: int
    holds: Holds
    ranks: tuple[int, ...]


def replicas_of(checked: Checked) -> list[Replica]:
    """List all replicas that stay equal as rounding is concerned, also in later steps (see `settled`), by layer."""
    with gc_paused():
        numbering = settled(checked)
    copies: dict[tuple[int, int], list[tuple[Holds, int]]] = defaultdict(list)  # (layer, number) -> where, on whom
    for rank, live in enumerate(numbering.live):
        for value, number in live.items():
            spec = checked.specs[rank][value]
            if spec.kind is Kind.WEIGHT:
                for holds, piece in numbering.numbers.within(number, spec.holds):
                    copies[spec.layer, piece].append((holds, rank))
    found: list[Replica] = []
    for (layer, _), held in sorted(copies.items()):
        of = math.lcm(*(holds.of for holds, _ in held))
        ranks_at: dict[int, set[int]] = defaultdict(set)
        for holds, rank in held:
            for piece in bits(holds.refined(of).mask):
                ranks_at[piece].add(rank)
        masks: dict[tuple[int, ...], int] = defaultdict(int)
        for piece, ranks in ranks_at.items():
            masks[tuple(sorted(ranks))] |= 1 << piece
        found += [Replica(layer, Holds(mask, of).simplified(), ranks) for ranks, mask in masks.items() if ranks[1:]]
    return found


class Result(NamedTuple):
    """A value that an op makes, when all microbatches are the same one.

    Attributes:
        op: its index on the tape.
        number: of the value.
        key: equal for results that must be equal, on whichever ranks.
    """

    op: int
    number: int
    key: Hashable


def results_of(checked: Checked) -> list[list[Result]]:
    """List, for each rank, the results that can be compared; none where a step changes weights by more than updates."""
    tapes, specs = checked.program.tapes, checked.specs
    if any(
        op.kind in _CHANGING and specs[rank][op.inputs[0]].kind is Kind.WEIGHT
        for rank, tape in enumerate(tapes)
        for op in tape
    ):
        return [[] for _ in tapes]
    return [_results(tape, specs[rank]) for rank, tape in enumerate(tapes)]


def _results(tape: list[Op], specs: dict[int, Spec]) -> list[Result]:
    accumulates = InPlace(tape).accumulates
    found: list[Result] = []
    for at, op in enumerate(tape):
        if op.kind not in COMPARED:
            continue
        older = accumulates.get(at)
        in_it = 0 if older is None else specs[older].microbatches.bit_count()
        given = tuple(_alike(specs[number]) for number in op.inputs)
        for place, number in enumerate(op.outputs):
            key = (op.kind, op.layer, op.holds, place, in_it, given, _alike(specs[number]))
            found.append(Result(at, number, key))
    return found


def _alike(spec: Spec) -> Hashable:
    """A value but for which microbatches it is of."""
    if spec.kind not in ROW_KINDS:
        return spec.form, spec.microbatches.bit_count()
    first = next(bits(spec.microbatches), 0)
    return spec.form, spec.cells >> (first * max(1, spec.form.space.sequence))


def compared_ranks(replicas: list[Replica], results: list[list[Result]]) -> bool:
    """Whether any two ranks keep or compute the same."""
    ranks_of: dict[Hashable, set[int]] = defaultdict(set)
    for rank, of_rank in enumerate(results):
        for result in of_rank:
            ranks_of[result.key].add(rank)
    return bool(replicas) or any(len(ranks) > 1 for ranks in ranks_of.values())
