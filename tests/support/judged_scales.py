"""By what gradients have been multiplied since the loss made them: affine layers add their own gradient times that."""

from __future__ import annotations

from collections.abc import Iterable

from shardlab.language import Op, OpKind
from tests.support.judged_rank import JudgedRank
from tests.support.pieces import PRIME, BrokenTape, Piece

UNLIKE = 0
"""In place of the scale of what was made from values of several scales."""

_GRADIENTS = {
    OpKind.BACKWARD: slice(1, None, 3),
    OpKind.BACKWARD_INPUT: slice(1, None, 3),
    OpKind.BACKWARD_WEIGHT: slice(1, 2),
    OpKind.ATTEND_BACKWARD: slice(3, 4),
}
"""Which of an op's inputs are gradients; of others all."""


def scale_made(rank: JudgedRank, op: Op, microbatches: int) -> int:
    """The scale of what an op makes of what lives."""
    if op.kind is OpKind.LOSS:
        return 1
    given = op.inputs[_GRADIENTS.get(op.kind, slice(None))]
    scale = common_scale(rank.memory[number] for number in given if number in rank.memory)
    return scale * number_of(op, microbatches) % PRIME if op.kind is OpKind.SCALE else scale


def common_scale(pieces: Iterable[Piece]) -> int:
    """The scale of what is made from pieces."""
    scales = {piece.scale for piece in pieces} or {1}
    return scales.pop() if len(scales) == 1 else UNLIKE


def number_of(op: Op, microbatches: int) -> int:
    """The number of an op's factor. Counts of tokens are any numbers: another one for each set of microbatches."""
    factor = op.factor
    if factor is None:
        raise BrokenTape("the factor is not told")
    number = factor.ratio.numerator * pow(factor.ratio.denominator, -1, PRIME)
    for mask, power in factor.tokens:
        if not 0 < mask < 1 << microbatches:
            raise BrokenTape("there are no such microbatches")
        number = number * pow(1000 + 77 * mask * mask, power, PRIME) % PRIME
    return number % PRIME
