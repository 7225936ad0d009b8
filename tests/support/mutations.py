"""Mistakes put into correct tapes: each mutation yields programs that differ from a right one in one place.

`MUTATIONS` has all of them, by their names in words; each file beside this one has those of one idea.
"""

from __future__ import annotations

from tests.support import (
    mutations_of_communication,
    mutations_of_layers,
    mutations_of_ops,
    mutations_of_values,
)
from tests.support.mutating import MUTATIONS, changed, moved, places, with_tape

__all__ = [
    "MUTATIONS",
    "changed",
    "moved",
    "mutations_of_communication",
    "mutations_of_layers",
    "mutations_of_ops",
    "mutations_of_values",
    "places",
    "with_tape",
]
