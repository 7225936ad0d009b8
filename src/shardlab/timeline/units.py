"""Bytes, shares and times for a reader."""

from __future__ import annotations

import math

UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
"""Largest first."""


def bytes_text(bytes: float, digits: int = 2) -> str:
    """Write bytes in the largest unit that they fill.

    >>> bytes_text(3 * 2**29), bytes_text(5_000_000), bytes_text(80 * 2**30, digits=0)
    ('1.50 GiB', '4.77 MiB', '80 GiB')
    """
    unit, size = unit_of(bytes)
    return f"{bytes / size:,.{digits}f} {unit}"


def room_text(bytes: float) -> str:
    """Write how much memory a device has: without digits where these would be zeros.

    >>> room_text(80 * 2**30), room_text(1.2 * 2**30)
    ('80 GiB', '1.20 GiB')
    """
    return bytes_text(bytes).replace(".00 ", " ")


def unit_of(bytes: float) -> tuple[str, int]:
    """Find the largest unit that so many bytes fill, and its size in bytes."""
    return next((unit for unit in UNITS if bytes >= unit[1]), UNITS[-1])


def share_text(share: float) -> str:
    """Write a share in percent with one decimal, or as many as show two digits of a small one.

    >>> share_text(0.421), share_text(0.00012), share_text(0)
    ('42.1%', '0.012%', '0.0%')
    """
    percent = 100 * share
    decimals = 1 if percent >= 1 or percent <= 0 else 1 - math.floor(math.log10(percent))
    return f"{percent:,.{decimals}f}%"


def seconds_text(seconds: float) -> str:
    """`3.46 s`, `125.8 ms`, `93.1 us`."""
    if seconds >= 1:
        return f"{seconds:#,.3g} s" if seconds < 100 else f"{seconds:,.0f} s"
    return f"{seconds * 1e3:.4g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.4g} us"


def moment_text(moment: float, end: float, length: float) -> str:
    """A moment of a step that ends at `end`, with as many digits as tell moments of a stretch of it apart.

    >>> moment_text(1.2345, 2.75, 0.005), moment_text(0.0125, 0.125, 0.125), moment_text(0, 1, 1)
    ('1.234500 s', '12.5 ms', '0')

    Args:
        moment, end, length: in seconds; `length` is that of the stretch.
    """
    if not moment:
        return "0"
    size, unit = (1.0, "s") if end >= 1 else (1e3, "ms") if end >= 1e-3 else (1e6, "us")
    digits = max(0, 3 - math.floor(math.log10(length * size)))
    return f"{moment * size:,.{digits}f} {unit}"
