"""The table of passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from difflib import get_close_matches

from shardlab.check import Checked
from shardlab.errors import UserError
from shardlab.passes.bucket import bucket
from shardlab.passes.defer import defer
from shardlab.passes.early_copies import early_copies
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
        rewrite: makes other tapes of a program, by a number.
        numbers: those that are tried, unless one is given.
        means: what the number says ("": nothing).
    """

    name: str
    does: str
    rewrite: Callable[[Checked, int], Tapes]
    numbers: tuple[int, ...] = (1, 2, 4, 8)
    means: str = ""


AHEAD = "uses ahead"

PASSES = {
    each.name: each
    for each in (
        Pass("prefetch", "gathers weights ahead of their use", prefetch, means=AHEAD),
        Pass("copy-early", "overlaps copies to the host or the disk, and back", early_copies, means=AHEAD),
        Pass("receive-early", "posts receives before they are needed", early_receives, means=AHEAD),
        Pass("bucket", "makes one collective of small ones", bucket, (1, 2, 4, 8, 16, 32), "buckets at least"),
        Pass("defer", "awaits reductions of gradients late", defer, means="more under way"),
        Pass("update-early", "updates a layer as soon as its gradient is final", early_updates, (1,)),
    )
}
"""By name, in the order in which they are run."""


def find_passes(text: str) -> list[Pass]:
    """The passes that a text stands for, in the table's order.

    Args:
        text: `all`, `none`, or names with commas between them, such as `prefetch,bucket=4`; without a number of its
            own, a pass tries several.

    Raises:
        UserError: for a name that there is not, with the nearest one; for a number that is none.
    """
    if text in ("all", "none"):
        return list(PASSES.values()) if text == "all" else []
    found: dict[str, Pass] = {}
    for word in text.split(","):
        name, equals, number = word.strip().partition("=")
        if name not in PASSES:
            nearest = get_close_matches(name, PASSES, 1, 0)[0]
            raise UserError(f"there is no pass {name!r}; did you mean {nearest}? There are {', '.join(PASSES)}")
        found[name] = PASSES[name]
        if equals:
            if not number.isdecimal() or not int(number) or not PASSES[name].means:
                takes = f"a whole number from 1 on ({PASSES[name].means})" if PASSES[name].means else "no number"
                raise UserError(f"the pass {name} was given {number!r}; it takes {takes}")
            found[name] = replace(PASSES[name], numbers=(int(number),))
    return [found[name] for name in PASSES if name in found]
