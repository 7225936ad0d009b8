"""Numbers that values may be in, by torch's names."""

from __future__ import annotations

import re

DTYPES = ("float64", "float32", "bfloat16", "float16")
"""What a value may be cast to: numbers that every backend moves and adds."""


def bytes_of(dtype: str) -> float:
    """Bytes of an element, which a dtype's name says.

    >>> bytes_of("bfloat16"), bytes_of("float4")
    (2.0, 0.5)
    """
    found = re.search(r"\d+", dtype)
    assert found is not None, f"{dtype} does not say its bits"
    return int(found[0]) / 8
