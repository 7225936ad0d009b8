"""Interface of whatever can be simulated: tapes, and what is known of their values and communications."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from shardlab.program import Program, Spec
from shardlab.program.matching import Communication


class Traced(Protocol):
    """A checked program, or a folded one, whose unlike ranks alone were traced (see `folding`).

    A tape's place among the tapes is its row; a member of a communication names its row.
    """

    @property
    def program(self) -> Program: ...
    @property
    def specs(self) -> Sequence[Mapping[int, Spec]]: ...
    @property
    def communications(self) -> Sequence[Communication]: ...
    @property
    def communication_of(self) -> Sequence[Mapping[int, int]]: ...


def rank_of(program: Program, row: int) -> int:
    """The number of the rank whose tape stands in a row: its own, or of folded tapes that of a pipeline's first."""
    return row * (program.mesh.world // program.ranks)


def stands_for(program: Program, row: int) -> range:
    """The ranks for which a row stands: one, or of folded tapes those of its pipeline stage."""
    each = program.mesh.world // program.ranks
    return range(row * each, (row + 1) * each)
