"""A timeline in characters, for a terminal or a pipe."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.text import Text

from shardlab.cli.activity import Activity, Shares
from shardlab.program import OpKind
from shardlab.program.colors import HUES
from shardlab.program.ops import BOOKKEEPING

SIGNS = {kind: (kind.row.sign, HUES[kind.row.color].terminal) for kind in OpKind if kind not in BOOKKEEPING}
"""Capital letters are compute, and small ones compute beside communication; other signs are communication."""

IDLE, MIXED = ".", "~"

MOST = 0.5
"""A sign stands for what takes at least this share of its cell's time."""

NAMED_SHARE = 0.01
"""The legend names every kind of op that takes at least this share of some rank's time, shown in a row or not."""

GAP = 3
"""Blanks between two of the legend's entries."""


def rank_row(activity: Activity, start: float, end: float, width: int) -> Text:
    """Row of signs for a rank between two moments; each shows what takes most of its cell, or that nothing does."""
    return _row(activity.shares(start, end, width))


def unseen(activity: Activity, start: float, end: float, width: int) -> float:
    """The share of a stretch of time in which a row shows something else than what is done."""
    shares = activity.shares(start, end, width)
    every = [*shares.compute.values(), *shares.exposed.values(), shares.idle]
    most = np.max(every, axis=0)
    return float(1 - np.where(most >= MOST - TINY, most, 0.0).mean())


TINY = 1e-9
"""Rounding errors of shares."""


def _row(shares: Shares) -> Text:
    row = Text()
    columns = {**shares.compute, **shares.exposed}
    computing = sum(shares.compute.values(), np.zeros_like(shares.idle))
    for cell, idle in enumerate(shares.idle):
        kind = max(columns, key=lambda kind: columns[kind][cell], default=None)
        if kind is not None and columns[kind][cell] >= MOST - TINY:
            sign, color = SIGNS[kind]
            beside = kind in shares.compute and shares.hidden[cell] >= MOST * computing[cell] - TINY
            row.append(sign.lower() if beside else sign, color)
        elif idle >= MOST - TINY:
            row.append(IDLE, "dim")
        else:
            row.append(MIXED, "dim")
    return row


def legend(rows: list[Text], ranks: Sequence[Activity], width: int) -> Text:
    """Legend of some rows: what their signs mean, and the share of the ranks' time that each takes.

    Args:
        rows: what is printed.
        ranks: all ranks, shown or not.
        width: of the terminal, in characters; no line is longer.
    """
    shown = {character for row in rows for character in row.plain}
    totals = [rank.totals() for rank in ranks]
    meanings: list[Text] = []
    for kind, (sign, color) in SIGNS.items():
        shares = [total.get(kind, 0.0) for total in totals]
        if shown & {sign, sign.lower()} or max(shares, default=0) >= NAMED_SHARE:
            meanings.append(_meaning(sign, color, kind.value.replace("_", "-"), shares))
    hidden = [rank.hidden for rank in ranks]
    if shown & {sign.lower() for sign, _ in SIGNS.values() if sign.isupper()} or max(hidden, default=0) >= NAMED_SHARE:
        meanings.append(_meaning("small letter:", "dim", "communicates as well", hidden))
    idle = [rank.idle for rank in ranks]
    if IDLE in shown or max(idle, default=0) >= NAMED_SHARE:
        meanings.append(_meaning(IDLE, "dim", "waits", idle))
    if MIXED in shown:
        meanings.append(Text(f"{MIXED} several, none for half of it", "dim"))
    if meanings:
        meanings[0].append(" of a rank's time", "dim")
    lines: list[Text] = []
    for meaning in meanings:
        if lines and lines[-1].cell_len + GAP + meaning.cell_len <= width:
            lines[-1].append(" " * GAP).append(meaning)
        else:
            lines.append(meaning)
    return Text("\n").join(lines)


def _meaning(sign: str, color: str, name: str, shares: Sequence[float]) -> Text:
    """`F forward 33%`, or `F forward 28-33%` or `F forward up to 1%` of ranks that differ."""
    low, high = (f"{share:.0%}" if share >= NAMED_SHARE or not share else "<1%" for share in (min(shares), max(shares)))
    text = high
    if low != high:
        text = f"{low.removesuffix('%')}-{high}" if min(shares) >= NAMED_SHARE else f"up to {high}"
    return Text.assemble((sign, color), (f" {name} {text}", "dim"))
