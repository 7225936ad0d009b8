"""Random numbers that are a function of what they are for, so that every strategy draws the same."""

from __future__ import annotations

import hashlib

import torch


def generator_of(purpose: str, *numbers: int) -> torch.Generator:
    """A CPU generator that depends on the purpose and the numbers alone, and on each of them.

    Hashed, since torch's CPU generator uses 32 bits of its seed, and neighbouring seeds should have nothing in common.
    """
    digest = hashlib.blake2b(repr((purpose, *numbers)).encode(), digest_size=4).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))
