"""Passes by name: which there are, and which a text stands for. `shardlab.passes` has what they do."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from shardlab.errors import UserError, unknown
from shardlab.program.field_types import word

PASS_NAMES = {
    "prefetch": "uses ahead",
    "copy-early": "uses ahead",
    "receive-early": "uses ahead",
    "bucket": "buckets at least",
    "defer": "more under way",
    "update-early": "",
}
"""Every pass, in the order in which they are run, and what its number means ("": it takes none)."""

PASSES_FIELD = replace(word(), metavar="all|none|NAME,...")
"""The field of a plan that names passes."""


class NamedPass(NamedTuple):
    """A pass that is asked for; without a number (None), it is to find the best one."""

    name: str
    number: int | None


def named_passes(text: str) -> list[NamedPass]:
    """The passes that a text stands for, in the order in which they are run.

    >>> named_passes("bucket=4, prefetch")
    [NamedPass(name='prefetch', number=None), NamedPass(name='bucket', number=4)]

    Args:
        text: `all`, `none`, or names with commas between them, each perhaps with its number.

    Raises:
        UserError: for a name that there is not, with the nearest one; for a number that is none.
    """
    if text in ("all", "none"):
        return [NamedPass(name, None) for name in PASS_NAMES] if text == "all" else []
    found: dict[str, int | None] = {}
    for each in text.split(","):
        name, equals, number = each.strip().partition("=")
        if name not in PASS_NAMES:
            raise unknown("pass", name, ("all", "none", *PASS_NAMES))
        means = PASS_NAMES[name]
        if equals and not (means and number.isdecimal() and int(number)):
            takes = f"a whole number, 1 or more ({means})" if means else "no number"
            raise UserError(f"the pass {name} was given {number!r}; it takes {takes}")
        found[name] = int(number) if equals else None
    return [NamedPass(name, found[name]) for name in PASS_NAMES if name in found]
