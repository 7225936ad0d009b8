"""Tokens of a step that is planned, in sequences."""

from __future__ import annotations

from shardlab.cli.amounts import read_tokens
from shardlab.program import UserError

MOST_TOKENS = 16 * 2**20
"""Tokens of a step, if nobody says how many: no more than these, and no more than 16 sequences for each device."""


def sequences_of_step(tokens_per_step: str | None, global_batch: int | None, length: int, devices: int) -> int:
    """Sequences of a step's global batch.

    Args:
        tokens_per_step, global_batch: as the command line gives them (None: it leaves them out).
        length: tokens of a sequence.
        devices: of the cluster.

    Raises:
        UserError: when both are given, or the tokens are no whole sequences.
    """
    if global_batch is not None:
        if tokens_per_step is not None:
            raise UserError("both --tokens-per-step and --global-batch were given; give one of them")
        return global_batch
    if tokens_per_step is None:
        most = MOST_TOKENS // length // devices * devices or 1 << ((MOST_TOKENS // length) | 1).bit_length() - 1
        return min(16 * devices, most)
    tokens = read_tokens(tokens_per_step, "--tokens-per-step")
    sequences, rest = divmod(tokens, length)
    if rest or not sequences:
        near = f"{sequences} or {sequences + 1}" if sequences else "1"
        raise UserError(
            f"{tokens:,} tokens are not a whole number of sequences of {length:,} tokens; give --global-batch "
            f"{near} ({max(sequences, 1) * length:,} tokens)"
        )
    return sequences
