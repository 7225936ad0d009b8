"""Damage to a checkpoint's files, each with what a resumed run has to say of it."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

Damage = Callable[[Path, random.Random], None]


def flip_a_bit(path: Path, chance: random.Random) -> None:
    """Flip one bit somewhere in a file."""
    data = bytearray(path.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def cut_off(path: Path, chance: random.Random) -> None:
    """Cut a file off somewhere, as a disk does that was full."""
    data = path.read_bytes()
    path.write_bytes(data[: chance.randrange(len(data))])


def remove(path: Path, chance: random.Random) -> None:
    """Remove a file."""
    path.unlink()


DAMAGES: dict[str, Damage] = {"a flipped bit": flip_a_bit, "a file cut off": cut_off, "a missing file": remove}
