"""The table of passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches

from shardlab.check import Checked
from shardlab.errors import UserError
from shardlab.passes.defer import defer
from shardlab.passes.early_receives import early_receives
from shardlab.passes.early_updates import early_updates
from shardlab.passes.prefetch import prefetch
from shardlab.passes.rewriting import Tapes


@dataclass(frozen=True)
class Pass:
    """One way to a better program.

    Attributes:
        name: what the command line calls it.
        does: in a few words.
        candidates: its tapes, from the mildest on.
    """

    name: str
    does: str
    candidates: Callable[[Checked], Iterator[Tapes]]


PASSES = {
    each.name: each
    for each in (
        Pass("prefetch", "gathers weights ahead of their use", prefetch),
        Pass("receive-early", "posts receives before they are needed", early_receives),
        Pass("defer", "awaits reductions of gradients late", defer),
        Pass("update-early", "updates a layer as soon as its gradient is final", early_updates),
    )
}
"""By name, in the order in which they are run."""


def find_passes(text: str) -> list[Pass]:
    """The passes that `all`, `none` or names with commas between them stand for, in the table's order.

    Raises:
        UserError: for a name that there is not, with the nearest one.
    """
    if text in ("all", "none"):
        return list(PASSES.values()) if text == "all" else []
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in PASSES:
            nearest = get_close_matches(name, PASSES, 1, 0)[0]
            raise UserError(f"there is no pass {name!r}; did you mean {nearest}? There are {', '.join(PASSES)}")
    return [each for name, each in PASSES.items() if name in names]
