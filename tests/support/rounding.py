"""The judge with sums that depend on their order, as in floating point: finds replicas that end up different."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import reduce
from unittest.mock import patch

from shardlab.check import Checked
from shardlab.check.in_place import InPlace
from shardlab.language import Kind, Op, OpKind
from tests.support import interpreter_collectives, judged_compute
from tests.support import interpreter_collectives as judged_roots
from tests.support.interpreter import Interpreter
from tests.support.interpreter_rank import JudgedRank
from tests.support.pieces import PRIME, Array, Piece
from tests.support.toy_network import Network


def replicas_apart(checked: Checked) -> set[int]:
    """Layers whose weights or optimizer states differ between two ranks after the step."""
    interpreter = Interpreter(checked.program)
    with _rounding([InPlace(tape).fused for tape in checked.program.tapes]):
        interpreter.judge()
    values_of: dict[tuple[Kind, int, int], set[int]] = defaultdict(set)
    for rank, specs in zip(interpreter.ranks, checked.specs, strict=True):
        for number, piece in rank.memory.items():
            spec = specs[number]
            for element, value in zip(piece.positions, piece.data.tolist(), strict=True):
                values_of[spec.kind, spec.layer, element].add(value)
    return {layer for (_, layer, _), values in values_of.items() if len(values) > 1}


def _added(one: Array, other: Array) -> Array:
    """A sum that is commutative but not associative, as for floats."""
    return (one + other + one * other % PRIME * ((one + other) % PRIME)) % PRIME


def _fused(older: Array, newer: Array) -> Array:
    """A gradient that its backward pass adds to an older one, with one rounding."""
    return (older + newer + older * older % PRIME * newer) % PRIME


def _summed(pieces: list[Piece]) -> Piece:
    return replace(pieces[0], data=reduce(_added, [piece.data for piece in pieces]))


@contextmanager
def _rounding(fused: Sequence[Mapping[int, tuple[int, int]]]) -> Generator[None, None, None]:
    """Round sums; `fused` gives for each rank the ADDs that backward passes perform, with their gradients."""

    def add(rank: JudgedRank, op: Op, network: Network, microbatches: int) -> None:
        pair = fused[rank.index].get(rank.at)
        older, newer = (rank.read(number) for number in pair or op.inputs)
        total = _summed([older, newer]) if pair is None else replace(older, data=_fused(older.data, newer.data))
        rank.write(op.outputs[0], total)

    with ExitStack() as patches:
        for user in (interpreter_collectives, judged_roots):
            patches.enter_context(patch.object(user, "summed", _summed))
        patches.enter_context(patch.dict(judged_compute.COMPUTE, {OpKind.ADD: add}))
        yield
