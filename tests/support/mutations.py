"""Mistakes put into correct tapes: each mutation yields programs that differ from a correct one by one mistake.

`MUTATIONS` contains all of them by name. Each file `mutations_of_*` has those of one topic.
"""

from __future__ import annotations

from tests.support import (
    mutations_of_communication,
    mutations_of_layers,
    mutations_of_ops,
    mutations_of_values,
)
from tests.support.mutating import MUTATIONS, changed, move_op, places, with_tape

__all__ = [
    "MUTATIONS",
    "changed",
    "move_op",
    "mutations_of_communication",
    "mutations_of_layers",
    "mutations_of_ops",
    "mutations_of_values",
    "places",
    "with_tape",
]
