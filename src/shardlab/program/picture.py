"""Registry of pictures that things show in a notebook. Nothing is drawn here: whoever can draw registers how."""

from __future__ import annotations

from functools import singledispatch
from typing import Literal

ColorBy = Literal["pass", "layer"]
"""What the colour of a box in a timeline tells: which pass it is, or which layer."""


@singledispatch
def picture(thing: object) -> str | None:
    """An SVG of a thing, or None if nobody has registered how its type is drawn."""
    del thing
    return None
