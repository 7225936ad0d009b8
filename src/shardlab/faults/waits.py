"""Who waits for whom in what, from the ranks' positions on their tapes: nobody has to be asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from shardlab.check import Checked, check_forward, forward_only
from shardlab.execute.progress import TapePosition
from shardlab.program import Op, OpKind
from shardlab.program.ops import COMMUNICATION
from shardlab.rules.pieces import microbatches_text

LineOf = Callable[[int, int], str]
"""The strategy's file and line that wrote an op, by rank and op, as ` (FILE:LINE)`; empty where that is not known."""


@dataclass(frozen=True)
class RankWait:
    """Where a rank is, in words.

    Attributes:
        what: the op; `waits in ...`, `is in ...`.
        blockers: ranks that it waits for; none where it computes.
        come: whether all that it waits for have issued their part, so that the network is to deliver it.
    """

    what: str
    blockers: tuple[int, ...] = ()
    come: bool = False


class Tapes:
    """The tapes that positions are on.

    Args:
        checked: the program that trains.
        line_of: see `LineOf`.
    """

    def __init__(self, checked: Checked, line_of: LineOf) -> None:
        self._checked = checked
        self._line_of = line_of

    @cached_property
    def _half(self) -> Checked:
        return check_forward(forward_only(self._checked))

    def waits(self, positions: Mapping[int, TapePosition | None]) -> dict[int, RankWait]:
        """Say of each rank what it waits in for whom.

        Args:
            positions: of the ranks that can be seen; None before the first tape.
        """
        return {rank: self._wait(rank, positions) for rank in positions}

    def _wait(self, rank: int, positions: Mapping[int, TapePosition | None]) -> RankWait:
        here = positions[rank]
        if here is None:
            return RankWait("has not begun")
        checked = self._half if here.evaluates else self._checked
        tape = checked.program.tapes[rank]
        if here.op >= here.length:
            behind = tuple(
                other for other in positions if other != rank and self._not_done(other, positions, here.round)
            )
            return RankWait(
                f"is at the end of {'an evaluation' if here.evaluates else f'step {here.step + 1}'}", behind
            )
        if here.length != len(tape):  # of a batch ramp's earlier steps, or a sample
            return RankWait(f"is in op {here.op} of {here.length} of another program")
        line = "" if here.evaluates else self._line_of(rank, here.op)
        name = "evaluation" if here.evaluates else "step"
        where = f"{name} {here.step + 1}, op {here.op} of {len(tape)}{line}: "
        op = tape[here.op]
        if op.kind is not OpKind.WAIT:
            verb = "starts" if op.kind in COMMUNICATION else "is in"
            return RankWait(f"{where}{verb} {op_text(checked, rank, op)}")
        communication = checked.communications[checked.communication_of[rank][op.handle]]
        issued = next(each.op for each in communication.participants if each.rank == rank)
        others = [each for each in communication.participants if each.rank != rank]
        missing = tuple(
            each.rank
            for each in others
            if each.rank not in positions or _before(positions[each.rank], here.round, each.op)
        )
        what = f"{where}waits in {op_text(checked, rank, tape[issued])}"
        return RankWait(what, missing or tuple(each.rank for each in others), not missing)

    @staticmethod
    def _not_done(rank: int, positions: Mapping[int, TapePosition | None], tape_round: int) -> bool:
        """Whether a rank is still in a round, or before it."""
        at = positions[rank]
        if at is None or at.round != tape_round:
            return at is None or at.round < tape_round
        return at.op < at.length


def _before(position: TapePosition | None, tape_round: int, op: int) -> bool:
    """Whether a rank has not done an op of a round yet."""
    return position is None or (position.round, position.op) <= (tape_round, op)


def op_text(checked: Checked, rank: int, op: Op) -> str:
    """An op with its layer and microbatches: `backward(layer 3) of microbatch 1`."""
    numbers = [*op.inputs, *op.outputs]
    found = [checked.specs[rank][number].microbatches for number in numbers if number in checked.specs[rank]]
    about = next((mask for mask in found if mask), 0)
    text = str(op)
    return text if not about or "microbatch" in text else f"{text} of {microbatches_text(about)}"


def culprits(waits: Mapping[int, RankWait]) -> list[int]:
    """Ranks for which others wait and that wait for nobody themselves; none where all wait in a circle."""
    wanted = {rank for wait in waits.values() if not wait.come for rank in wait.blockers}
    return sorted(rank for rank in wanted if rank not in waits or not waits[rank].blockers)
