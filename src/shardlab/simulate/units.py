"""Bytes and shares for a reader."""

from __future__ import annotations

import math

UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
"""Largest first."""


def bytes_text(bytes: float, digits: int = 2) -> str:
    """In the largest unit of which there is one.

    >>> bytes_text(3 * 2**29), bytes_text(5_000_000), bytes_text(80 * 2**30, digits=0)
    ('1.50 GiB', '4.77 MiB', '80 GiB')
    """
    unit, size = unit_of(bytes)
    return f"{bytes / size:,.{digits}f} {unit}"


def unit_of(bytes: float) -> tuple[str, int]:
    """The largest unit of which there is one, and how many bytes it has."""
    return next((unit for unit in UNITS if bytes >= unit[1]), UNITS[-1])


def share_text(share: float) -> str:
    """In percent with one decimal, or as many as show two digits of a small share.

    >>> share_text(0.421), share_text(0.00012), share_text(0)
    ('42.1%', '0.012%', '0.0%')
    """
    percent = 100 * share
    decimals = 1 if percent >= 1 or percent <= 0 else 1 - math.floor(math.log10(percent))
    return f"{percent:,.{decimals}f}%"
