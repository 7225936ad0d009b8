"""A layer's flat parameters, as pieces of the indices that they are cut along, and back.

The flat buffer has a slice for each tuple of pieces, the last index counted fastest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from shardlab.rules.pieces import WHOLE, Holds, bits, mask_of
from shardlab.rules.spec import Space


def flat_slices(cut: Sequence[str], space: Space) -> int:
    """How many slices the flat parameters of a layer have that is cut along these indices."""
    return math.prod(space.count(index) for index in cut)


def pieces_of_flat(holds: Holds, cut: Sequence[str], space: Space) -> dict[str, int] | None:
    """The pieces of each index that is not whole in these flat slices; None if they are no such block.

    Args:
        holds: some of as many slices as `flat_slices` says.
        cut: the indices that the layer is cut along, outermost first.
        space: in what pieces these count.
    """
    pieces = dict.fromkeys(cut, 0)
    for place in bits(holds.mask):
        for index in reversed(cut):
            place, piece = divmod(place, space.count(index))
            pieces[index] |= 1 << piece
    if _mask(pieces, space) != holds.mask:
        return None
    return {index: mask for index, mask in pieces.items() if mask != space.full(index)}


def flat_of_pieces(pieces: Mapping[str, int], cut: Sequence[str], space: Space) -> Holds:
    """The flat slices that these pieces are; of an index that is not named, all.

    >>> flat_of_pieces({"head": 0b10}, ("expert", "head"), Space(1, 1, (("expert", 2), ("head", 2))))
    Holds(mask=10, of=4)
    """
    if not pieces:
        return WHOLE
    all = {index: pieces.get(index, space.full(index)) for index in cut}
    return Holds(_mask(all, space), flat_slices(cut, space)).simplified()


def _mask(pieces: Mapping[str, int], space: Space) -> int:
    """The flat slices of these pieces of every index, as a bit set."""
    places = [0]
    for index, mask in pieces.items():
        count = space.count(index)
        places = [base * count + piece for base in places for piece in bits(mask)]
    return mask_of(places)
