"""The indices along which parameters are cut: what a piece is called, and how pieces become whole."""

from __future__ import annotations

from typing import NamedTuple


class Index(NamedTuple):
    """An index of tensors and parameters.

    Attributes:
        piece: what a reader calls one piece of it.
        together: how what is cut along it becomes whole, as advice.
        gathered: whether pieces lie side by side and may be gathered; otherwise each rank keeps its own.
        exchanged: whether pieces may be dealt to other ranks while cells are put together, and back.
        stacked: whether each piece has matrices of its own; others cut matrices.
    """

    piece: str
    together: str
    gathered: bool = False
    exchanged: bool = False
    stacked: bool = False


INDICES = {
    "ffn": Index("feed-forward slice", "all_gather the slices, which lie side by side", gathered=True),
    "width": Index("feature slice", "all_gather the slices, which lie side by side", gathered=True),
    "vocab": Index("vocabulary slice", "all_gather the slices, which lie side by side", gathered=True),
    "head": Index(
        "head slice", "heads stay where they are, since attention and the layer after it take their own", exchanged=True
    ),
    "expert": Index("expert", "exchange the experts' buffers by all_to_all", exchanged=True, stacked=True),
}
"""Every index along which parameters may be cut."""


def piece_of(index: str) -> str:
    """What a reader calls one piece of an index."""
    known = INDICES.get(index)
    return known.piece if known else index
