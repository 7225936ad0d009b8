"""The judge with sums that mind their order, as those of floating point do: which replicas end apart."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from functools import reduce
from unittest.mock import patch

from shardlab.check import Checked
from shardlab.program import Kind
from tests.support import judged_collectives, judged_compute, judged_roots
from tests.support.interpreter import Interpreter
from tests.support.pieces import PRIME, Array, Piece


def replicas_apart(checked: Checked) -> set[int]:
    """The layers of whose weights or optimizer states two ranks end with other numbers."""
    judged = Interpreter(checked.program)
    with _rounding():
        judged.judge()
    found: dict[tuple[Kind, int, int], set[int]] = defaultdict(set)
    for rank, specs in zip(judged.ranks, checked.specs, strict=True):
        for number, piece in rank.memory.items():
            spec = specs[number]
            for element, value in zip(piece.where, piece.data.tolist(), strict=True):
                found[spec.kind, spec.layer, element].add(value)
    return {layer for (_, layer, _), values in found.items() if len(values) > 1}


def _added(one: Array, other: Array) -> Array:
    """Commutes and does not associate, as a sum of floats."""
    return (one + other + one * other % PRIME * ((one + other) % PRIME)) % PRIME


def _summed(pieces: list[Piece]) -> Piece:
    return replace(pieces[0], data=reduce(_added, [piece.data for piece in pieces]))


@contextmanager
def _rounding() -> Generator[None, None, None]:
    users = (judged_compute, judged_collectives, judged_roots)
    patches = [patch.object(user, "summed", _summed) for user in users]
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in patches:
            each.stop()
