"""Times as a person writes them, the same for every flag."""

from __future__ import annotations

import math
import re

TICK = 1e-9
"""Seconds that anything measured takes at least: clocks are coarse, and a virtual machine's that is being moved can
stand still."""

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}

A_TIME = "a time, such as 90s, 10m, 2h, 1d, 1:30:00 or 1-12:00:00"
"""What to give where `seconds_of` knows no time."""


def seconds_of(words: str) -> float | None:
    """Seconds of a number with a unit, or of [DAYS-]HOURS:MINUTES:SECONDS; None if it is neither.

    After DAYS- minutes and seconds may be left out, as schedulers write it.

    >>> seconds_of("90s"), seconds_of("1.5h"), seconds_of("1:30:00"), seconds_of("1-12:00:00"), seconds_of("90")
    (90.0, 5400.0, 5400.0, 129600.0, None)
    """
    if clock := re.fullmatch(r"([0-9]{1,9}):([0-5][0-9]):([0-5][0-9])", words):
        hours, minutes, seconds = map(float, clock.groups())
        return 3600 * hours + 60 * minutes + seconds
    if dated := re.fullmatch(r"([0-9]{1,6})-((?:[01]?[0-9]|2[0-3])(?::[0-5][0-9]){0,2})", words):
        hours, minutes, seconds = map(float, [*dated[2].split(":"), 0, 0][:3])
        return 86400 * float(dated[1]) + 3600 * hours + 60 * minutes + seconds
    try:
        found = float(words[:-1]) * UNITS[words[-1:]]
    except (ValueError, KeyError):
        return None
    return found if 0 <= found < math.inf else None
