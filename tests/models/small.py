"""Keyword arguments of small models, typed for any architecture that takes them."""

from __future__ import annotations

from typing import TypedDict


class Dimensions(TypedDict):
    """What every model has."""

    layers: int
    hidden_size: int
    vocab_size: int
    seq_len: int


class WithHeads(Dimensions):
    """What every model with attention has."""

    heads: int
