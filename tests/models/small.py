"""Keyword arguments of small models, typed for any architecture that takes them."""

from __future__ import annotations

from typing import TypedDict


class Dimensions(TypedDict):
    """Arguments of every model."""

    layers: int
    hidden_size: int
    vocab_size: int
    seq_len: int


class WithHeads(Dimensions):
    """Arguments of every model with attention."""

    heads: int
