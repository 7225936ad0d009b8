"""A timeline in characters, for a terminal or a pipe."""

from __future__ import annotations

from collections import defaultdict

from rich.text import Text

from shardlab.program import OpKind
from shardlab.program.tape import COMMUNICATION
from shardlab.simulate import Event

SIGNS = {
    OpKind.FORWARD: ("F", "green"),
    OpKind.RECOMPUTE: ("R", "green"),
    OpKind.BACKWARD: ("B", "blue"),
    OpKind.BACKWARD_INPUT: ("I", "blue"),
    OpKind.BACKWARD_WEIGHT: ("W", "cyan"),
    OpKind.ATTEND: ("A", "green"),
    OpKind.ATTEND_BACKWARD: ("G", "blue"),
    OpKind.UPDATE: ("U", "bold"),
    OpKind.ALL_GATHER: ("+", "yellow"),
    OpKind.REDUCE_SCATTER: ("/", "magenta"),
    OpKind.ALL_REDUCE: ("=", "red"),
    OpKind.ALL_TO_ALL: ("x", "cyan"),
    OpKind.BROADCAST: ("*", "yellow"),
    OpKind.SCATTER: (":", "magenta"),
    OpKind.GATHER: ("&", "yellow"),
    OpKind.REDUCE: ("-", "red"),
    OpKind.BARRIER: ("|", "dim"),
    OpKind.SEND: (">", "yellow"),
    OpKind.RECV: ("<", "magenta"),
}
"""Capital letters are compute, and small ones compute while a communication runs; other signs are communication."""

IDLE = "."

GAP = 3
"""Blanks between two of the legend's entries."""


def rank_row(events: list[Event], end: float, width: int) -> Text:
    """One rank: each character stands for what took most of its share of the time, and not for waiting while there is
    compute in it."""
    cells: list[dict[OpKind, float]] = [defaultdict(float) for _ in range(width)]
    for event in events:
        if event.kind not in SIGNS or not end:
            continue
        start, stop = event.start / end * width, event.end / end * width
        for cell in range(int(start), min(width, int(stop) + 1)):
            cells[cell][event.kind] += min(stop, cell + 1) - max(start, cell)
    row = Text()
    for shares in cells:
        row.append(*_sign(shares))
    return row


def _sign(shares: dict[OpKind, float]) -> tuple[str, str]:
    compute = {kind: share for kind, share in shares.items() if kind not in COMMUNICATION and share > 1e-9}
    talk = {kind: share for kind, share in shares.items() if kind in COMMUNICATION and share > 1e-9}
    idle = 1 - sum(compute.values())
    share = sum(compute.values())
    talks = sum(talk.values()) >= max(share, 0.5 * idle)
    if compute and (share >= 0.5 or not talks):
        sign, color = SIGNS[max(compute, key=lambda kind: compute[kind])]
        overlaps = sum(talk.values()) > max(idle, 0.0) + 0.25
        return (sign.lower() if overlaps else sign), color
    if talk and talks:
        return SIGNS[max(talk, key=lambda kind: talk[kind])]
    return IDLE, "dim"


def legend(rows: list[Text], width: int) -> Text:
    """What the signs of some rows mean, in lines of at most `width`."""
    shown = {character for row in rows for character in row.plain}
    meanings = [
        Text.assemble((sign, color), (f" {kind.value.replace('_', '-')}", "dim"))
        for kind, (sign, color) in SIGNS.items()
        if shown & {sign, sign.lower()}
    ]
    if shown & {sign.lower() for sign, _ in SIGNS.values() if sign.isalpha()}:
        meanings.append(Text("small letter: communicates as well", "dim"))
    if IDLE in shown:
        meanings.append(Text(f"{IDLE} waits", "dim"))
    lines: list[Text] = []
    for meaning in meanings:
        if lines and lines[-1].cell_len + GAP + meaning.cell_len <= width:
            lines[-1].append(" " * GAP).append(meaning)
        else:
            lines.append(meaning)
    return Text("\n").join(lines)
