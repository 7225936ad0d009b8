"""Mistakes put into correct tapes: each mutation yields programs that differ from a right one in one place.

`MUTATIONS` has all of them, by their names in words; each file beside this one has those of one idea.
"""

from __future__ import annotations

from tests.support import (
    mutations_of_attention,
    mutations_of_collectives,
    mutations_of_directions,
    mutations_of_dtypes,
    mutations_of_exchanges,
    mutations_of_halves,
    mutations_of_hops,
    mutations_of_kept,
    mutations_of_lives,
    mutations_of_messages,
    mutations_of_norms,
    mutations_of_ops,
    mutations_of_parts,
    mutations_of_places,
    mutations_of_roots,
    mutations_of_routing,
    mutations_of_slices,
    mutations_of_ties,
    mutations_of_writing,
)
from tests.support.mutating import MUTATIONS, changed, moved, places, with_tape

__all__ = [
    "MUTATIONS",
    "changed",
    "moved",
    "mutations_of_attention",
    "mutations_of_collectives",
    "mutations_of_directions",
    "mutations_of_dtypes",
    "mutations_of_exchanges",
    "mutations_of_halves",
    "mutations_of_hops",
    "mutations_of_kept",
    "mutations_of_lives",
    "mutations_of_messages",
    "mutations_of_norms",
    "mutations_of_ops",
    "mutations_of_parts",
    "mutations_of_places",
    "mutations_of_roots",
    "mutations_of_routing",
    "mutations_of_slices",
    "mutations_of_ties",
    "mutations_of_writing",
    "places",
    "with_tape",
]
