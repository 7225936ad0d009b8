"""Sequences of tokens from one source or several, in an order that is a function of the seed alone.

The sequences of a run are numbered over all steps, microbatches and ranks. Which one has which number depends on the
seed and the number only: not on the strategy, and not on how many ranks there are. So a run's place in its data is one
number.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.unsignedinteger]
"""(tokens,) of one byte, two or four each, mostly mapped from a file."""

NO_STARTS: Numbers = np.empty(0, np.int64)


@dataclass(frozen=True)
class TokenRun:
    """Tokens of documents that follow one another.

    Attributes:
        tokens: (tokens,).
        starts: (documents - 1,), ascending: where each document but the first begins. A target that begins a document
            does not count, since nothing before it tells of it.
        sizes: (documents,): bytes of the text of each (None: nobody has counted them).
        at_most: no token is larger (None: nobody has looked).
    """

    tokens: Tokens
    starts: Numbers = field(default_factory=lambda: NO_STARTS)
    sizes: Numbers | None = None
    at_most: int | None = None

    @property
    def largest(self) -> int:
        """The largest token, or one that none is larger than."""
        return int(self.tokens.max(initial=0)) if self.at_most is None else self.at_most

    @property
    def documents(self) -> int:
        """How many there are."""
        return len(self.starts) + 1

    def sequences(self, seq_len: int) -> int:
        """How many sequences it is cut into, each with the token that follows it; the rest at its end is left out."""
        return (len(self.tokens) - 1) // seq_len

    def counted(self, numbers: Numbers, seq_len: int) -> int:
        """Targets that count in some of its sequences."""
        first = numbers * seq_len
        inside = np.searchsorted(self.starts, first + seq_len, "right") - np.searchsorted(self.starts, first, "right")
        return numbers.size * seq_len - int(inside.sum())

    def cut(self, numbers: Numbers, seq_len: int) -> tuple[Numbers, Numbers]:
        """Tokens and targets of some of its sequences: (numbers, seq_len) each; a target that does not count is -1."""
        tokens, targets = np.empty((2, numbers.size, seq_len), np.int64)
        for row, start in enumerate((numbers * seq_len).tolist()):
            sequence = self.tokens[start : start + seq_len + 1]
            tokens[row], targets[row] = sequence[:-1], sequence[1:]
            low, high = np.searchsorted(self.starts, (start, start + seq_len), "right")
            targets[row, self.starts[low:high] - start - 1] = -1
        return tokens, targets


@dataclass(frozen=True)
class SequenceStream:
    """Sequences of several sources by turns.

    Attributes:
        runs: one for each source.
        shares: how many of every `sum(shares)` sequences in a row, a turn, come from each source. Within a turn they
            are shuffled, also those of an epoch's end and of the next one's beginning.
    """

    runs: tuple[TokenRun, ...]
    shares: tuple[int, ...] = (1,)

    def counted(self, numbers: Numbers, seq_len: int, seed: int | None) -> int:
        """Targets that count in some sequences."""
        if not any(run.starts.size for run in self.runs):
            return numbers.size * seq_len
        sources, places = self._found(numbers, seq_len, seed)
        return sum(run.counted(places[sources == source], seq_len) for source, run in enumerate(self.runs))

    def cut(self, numbers: Numbers, seq_len: int, seed: int | None) -> tuple[Numbers, Numbers]:
        """Tokens and targets of the sequences with some numbers: (numbers, seq_len) each, -1 where none counts.

        Args:
            numbers: (n,), from 0 on without end.
            seed: of the shuffles: each epoch of a source has every one of its sequences once, in an order of its own.
                None: in the order of the text.
        """
        sources, places = self._found(numbers, seq_len, seed)
        tokens, targets = np.empty((2, numbers.size, seq_len), np.int64)
        for source, run in enumerate(self.runs):
            mine = sources == source
            tokens[mine], targets[mine] = run.cut(places[mine], seq_len)
        return tokens, targets

    def epochs(self, sequences: int, seq_len: int) -> list[float]:
        """How often each source has been gone through after so many sequences; 1 for each of its sequences once."""
        each = zip(self.runs, self.shares, strict=True)
        return [sequences * share / sum(self.shares) / run.sequences(seq_len) for run, share in each]

    def once(self, seq_len: int) -> int:
        """The most sequences in a row of which no source gives one twice."""
        each = zip(self.runs, self.shares, strict=True)
        return sum(self.shares) * min(run.sequences(seq_len) // share for run, share in each)

    def _found(self, numbers: Numbers, seq_len: int, seed: int | None) -> tuple[Numbers, Numbers]:
        """The source of each sequence, and which of the source's sequences it is."""
        together = sum(self.shares)
        turns, slots = np.divmod(numbers, together)
        if seed is not None:
            slots = shuffled(slots, together, "sources", seed, turns)
        ends = np.cumsum(self.shares)
        sources = np.searchsorted(ends, slots, "right")
        shares = np.array(self.shares)[sources]
        drawn = turns * shares + slots - (ends[sources] - shares)  # of this source before
        places = np.empty_like(drawn)
        for source, run in enumerate(self.runs):
            mine, size = sources == source, run.sequences(seq_len)
            epochs, place = np.divmod(drawn[mine], size)
            places[mine] = place if seed is None else shuffled(place, size, f"source {source}", seed, epochs)
        return sources, places


FINEST = 1000
"""Weights of sources are rounded to a part in so many."""


def shares_of(weights: Sequence[float]) -> tuple[int, ...]:
    """Whole numbers in the ratio of the weights, as small as they can be; 0 where a weight is too small."""
    total = math.fsum(weights)
    shares = [round(FINEST * weight / total) for weight in weights]
    common = math.gcd(*shares)
    return tuple(share // common for share in shares)


# Shuffles without a table: permutations that are computed number by number, however many numbers there are.
#
# A Feistel network permutes the numbers of an even count of bits; numbers that come out too large are sent through it
# again until they are not ("cycle walking"), so it permutes any range (Black and Rogaway 2002, "Ciphers with
# arbitrary finite domains", sections 4 and 5). Its round function is the finaliser of SplitMix64 (Steele, Lea and
# Flood 2014).


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
