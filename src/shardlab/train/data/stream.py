"""Sequences of tokens from one or more sources, in an order that depends only on the seed.

The sequences of a run are numbered over all steps, microbatches and ranks. The sequence with a given number depends
only on the seed, not on the strategy or the number of ranks. The position of a run in its data is therefore a single
number.

`SequenceStream` interleaves sources; `TokenRun` cuts one source into sequences. The order of an epoch is a permutation
that is computed number by number (`shuffle`), so no table of the whole data is ever built.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.unsignedinteger]
"""Array of tokens, (tokens,), with 1, 2 or 4 bytes for each token. It is usually memory-mapped."""

Numbers = NDArray[np.int64]

NO_STARTS: Numbers = np.empty(0, np.int64)


@dataclass(frozen=True)
class TokenRun:
    """Tokens of consecutive documents.

    Attributes:
        tokens: (tokens,).
        starts: (documents - 1,), ascending: index of the first token of every document but the first. A target that
            begins a document is not counted, since the text before it is of another document.
        sizes: (documents,): bytes of the text of each document (None: not counted).
        at_most: upper bound of the token numbers (None: unknown).
    """

    tokens: Tokens
    starts: Numbers = field(default_factory=lambda: NO_STARTS)
    sizes: Numbers | None = None
    at_most: int | None = None

    @property
    def largest(self) -> int:
        """Largest token number, or an upper bound of it."""
        return int(self.tokens.max(initial=0)) if self.at_most is None else self.at_most

    @property
    def documents(self) -> int:
        """Number of documents."""
        return len(self.starts) + 1

    def sequences(self, seq_len: int) -> int:
        """Return the number of sequences of `seq_len` tokens that are followed by a further token. An incomplete
        sequence at the end is left out.
        """
        return (len(self.tokens) - 1) // seq_len

    def count_targets(self, numbers: Numbers, seq_len: int) -> int:
        """Count the targets in some sequences. Targets that begin a document do not count."""
        first = numbers * seq_len
        starts = np.searchsorted(self.starts, first + seq_len, "right") - np.searchsorted(self.starts, first, "right")
        return numbers.size * seq_len - int(starts.sum())

    def cut(self, numbers: Numbers, seq_len: int) -> tuple[Numbers, Numbers]:
        """Return tokens and targets of some sequences, (numbers, seq_len) each. A target that does not count is -1."""
        first = numbers * seq_len
        sequences = np.asarray(self.tokens)[first[:, None] + np.arange(seq_len + 1)].astype(np.int64)
        tokens, targets = sequences[:, :-1].copy(), sequences[:, 1:].copy()  # targets are changed below
        if self.starts.size:
            lows, highs = (np.searchsorted(self.starts, start, "right") for start in (first, first + seq_len))
            for row, (low, high) in enumerate(zip(lows, highs, strict=True)):
                targets[row, self.starts[low:high] - first[row] - 1] = -1
        return tokens, targets


@dataclass(frozen=True)
class SequenceStream:
    """Sequences of several sources, interleaved.

    Attributes:
        runs: tokens of each source.
        shares: number of sequences of each source in every group of `sum(shares)` consecutive sequences. Each group is
            shuffled, even if an epoch ends within it.
    """

    runs: tuple[TokenRun, ...]
    shares: tuple[int, ...] = (1,)
    _located: dict[tuple[int, int, int | None], tuple[Numbers, Numbers]] = field(
        default_factory=dict[Any, Any], init=False, repr=False, compare=False
    )

    def count_targets(self, numbers: Numbers, seq_len: int, seed: int | None) -> int:
        """Count the targets in some sequences. Targets that begin a document do not count."""
        if not any(run.starts.size for run in self.runs):
            return numbers.size * seq_len
        sources, indices = self._locate(numbers, seq_len, seed)
        return sum(run.count_targets(indices[sources == source], seq_len) for source, run in enumerate(self.runs))

    def cut(self, numbers: Numbers, seq_len: int, seed: int | None) -> tuple[Numbers, Numbers]:
        """Return tokens and targets of the sequences with some numbers: (numbers, seq_len) each, -1 for a target that
        does not count.

        Args:
            numbers: numbers of sequences, (n,), each 0 or more, without an upper limit.
            seq_len: tokens of a sequence.
            seed: seed of the shuffles. Every epoch of a source contains each of its sequences once, in a new order.
                None: the order of the text.
        """
        sources, indices = self._locate(numbers, seq_len, seed)
        tokens, targets = np.empty((2, numbers.size, seq_len), np.int64)
        for source, run in enumerate(self.runs):
            mask = sources == source
            tokens[mask], targets[mask] = run.cut(indices[mask], seq_len)
        return tokens, targets

    def epochs(self, sequences: int, seq_len: int) -> list[float]:
        """Return the number of epochs of each source in the first `sequences` sequences."""
        runs_and_shares = zip(self.runs, self.shares, strict=True)
        return [sequences * share / sum(self.shares) / run.sequences(seq_len) for run, share in runs_and_shares]

    def sequences_before_repeat(self, seq_len: int) -> int:
        """Return the number of sequences before a source repeats one."""
        runs_and_shares = zip(self.runs, self.shares, strict=True)
        return sum(self.shares) * min(run.sequences(seq_len) // share for run, share in runs_and_shares)

    def _locate(self, numbers: Numbers, seq_len: int, seed: int | None) -> tuple[Numbers, Numbers]:
        """Return the source of each sequence, and its index among the sequences of that source.

        The sequences of a microbatch are few, and have consecutive numbers. LOCATED consecutive sequences are therefore
        located together, which takes no longer, and the result is kept for the following steps.
        """
        block, last = (int(extreme()) // LOCATED for extreme in (numbers.min, numbers.max)) if numbers.size else (0, 1)
        if block != last:
            return self._locate_all(numbers, seq_len, seed)
        if (key := (block, seq_len, seed)) not in self._located:
            self._located.clear()
            self._located[key] = self._locate_all(np.arange(block * LOCATED, (block + 1) * LOCATED), seq_len, seed)
        sources, indices = self._located[key]
        return sources[numbers - block * LOCATED], indices[numbers - block * LOCATED]

    def _locate_all(self, numbers: Numbers, seq_len: int, seed: int | None) -> tuple[Numbers, Numbers]:
        period = sum(self.shares)
        turns, slots = np.divmod(numbers, period)
        if seed is not None and period > 1:
            slots = shuffle(slots, period, "sources", seed, turns)
        ends = np.cumsum(self.shares)
        sources = np.searchsorted(ends, slots, "right")
        shares = np.array(self.shares)[sources]
        earlier = turns * shares + slots - (ends[sources] - shares)  # number of earlier sequences of this source
        indices = np.empty_like(earlier)
        for source, run in enumerate(self.runs):
            mask, size = sources == source, run.sequences(seq_len)
            epochs, index = np.divmod(earlier[mask], size)
            indices[mask] = index if seed is None else shuffle(index, size, f"source {source}", seed, epochs)
        return sources, indices


LOCATED = 1024
"""Number of sequences that are located at once."""

FINEST = 1000
"""Denominator to which weights of sources are rounded: a thousandth of their sum."""


def shares_from_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Return the smallest whole numbers in the ratio of the rounded weights; 0 for a weight that is too small."""
    total = math.fsum(weights)
    shares = [round(FINEST * weight / total) for weight in weights]
    common = math.gcd(*shares)
    return tuple(share // common for share in shares)


ROUNDS = 6
"""Rounds of the Feistel network in `shuffle`. Four give a pseudorandom permutation if the round function is random
(Luby and Rackoff 1988). Two more make up for a round function that is not."""


def shuffle(numbers: Numbers, size: int, purpose: str, seed: int, epochs: Numbers) -> Numbers:
    """Return the position of each number in the shuffle of its epoch.

    A Feistel network permutes the numbers of an even number of bits. A result that is too large is permuted again until
    it is not ("cycle walking"), so any range is permuted (Black and Rogaway 2002, "Ciphers with arbitrary finite
    domains", sections 4 and 5). The round function of the network is the finalizer of SplitMix64 (Steele, Lea and Flood
    2014).

    Args:
        numbers: numbers from 0 to size - 1, (n,).
        size: length of the range that is permuted.
        purpose, seed: name and seed of the shuffle. Shuffles that differ in one of them are independent.
        epochs: epoch of each number, (n,). Every epoch has another permutation.

    Returns:
        Positions, (n,). Over the numbers 0 to size - 1 of one epoch, each position occurs once.
    """
    base = int.from_bytes(hashlib.blake2b(repr((purpose, seed)).encode(), digest_size=8).digest(), "little")
    round_keys = _mix(_mix(epochs.astype(np.uint64) ^ np.uint64(base)) + _ROUND_NUMBERS)
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))  # bits; 4 ** half is less than 4 * size
    permuted = _permute(numbers.astype(np.uint64), round_keys, half)
    while (is_too_large := permuted >= size).any():
        permuted[is_too_large] = _permute(permuted[is_too_large], round_keys[:, is_too_large], half)
    return permuted.astype(np.int64)


_ROUND_NUMBERS = np.arange(ROUNDS, dtype=np.uint64)[:, None]


def _permute(numbers: NDArray[np.uint64], round_keys: NDArray[np.uint64], half: np.uint64) -> NDArray[np.uint64]:
    """Send numbers (n,) once through the network. `round_keys` is (ROUNDS, n)."""
    mask = np.uint64((1 << int(half)) - 1)
    left_half, right_half = numbers >> half, numbers & mask
    for keys in round_keys:
        left_half, right_half = right_half, left_half ^ (_mix(right_half ^ keys) & mask)
    return left_half << half | right_half


_INCREMENT, _FIRST_FACTOR, _SECOND_FACTOR, *_SHIFTS = np.array(
    [0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 30, 27, 31], np.uint64
)


def _mix(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hash 64-bit numbers so that every bit depends on all bits of the input. Arithmetic is modulo 2 ** 64."""
    first, second, third = _SHIFTS
    z = numbers + _INCREMENT
    z = (z ^ (z >> first)) * _FIRST_FACTOR
    z = (z ^ (z >> second)) * _SECOND_FACTOR
    return z ^ (z >> third)
