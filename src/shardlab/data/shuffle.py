"""Shuffles without a table: permutations that are computed number by number, however many numbers there are.

A Feistel network permutes the numbers of an even count of bits; numbers that come out too large are sent through it
again until they are not ("cycle walking"), so it permutes any range (Black and Rogaway 2002, "Ciphers with arbitrary
finite domains", sections 4 and 5). Its round function is the finaliser of SplitMix64 (Steele, Lea and Flood 2014).
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

ROUNDS = 6
"""Four make a pseudorandom permutation if the round function is random (Luby and Rackoff 1988); two more for ours."""

Numbers = NDArray[np.int64]


def shuffled(numbers: Numbers, size: int, purpose: str, seed: int, epochs: Numbers) -> Numbers:
    """Where each of some numbers below `size` stands in the shuffle of its epoch.

    Args:
        numbers: (n,), each from 0 to size - 1.
        purpose, seed: of the shuffles; others have nothing in common with them.
        epochs: (n,), the epoch of each number; every epoch has a permutation of its own.

    Returns:
        (n,); the numbers 0 to size - 1 of one epoch give each of 0 to size - 1 once.
    """
    base = int.from_bytes(hashlib.blake2b(repr((purpose, seed)).encode(), digest_size=8).digest(), "little")
    keys = _mixed(epochs.astype(np.uint64) ^ np.uint64(base))
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))  # bits; 4 ** half is less than 4 * size
    found = _permuted(numbers.astype(np.uint64), keys, half)
    while (outside := found >= size).any():
        found[outside] = _permuted(found[outside], keys[outside], half)
    return found.astype(np.int64)


def _permuted(numbers: NDArray[np.uint64], keys: NDArray[np.uint64], half: np.uint64) -> NDArray[np.uint64]:
    mask = np.uint64((1 << int(half)) - 1)
    left, right = numbers >> half, numbers & mask
    for number in range(ROUNDS):
        left, right = right, left ^ (_mixed(right ^ _mixed(keys + np.uint64(number))) & mask)
    return left << half | right


def _mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """64 bits, each of which depends on all that are given; arithmetic is modulo 2 ** 64."""
    z = numbers + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
