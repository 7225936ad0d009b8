"""The kinds of value, and what is taken of several ranks' values."""

from __future__ import annotations

from enum import Enum


class Kind(Enum):
    """The kinds of value; a kind's text is the name of the store that keeps it."""

    WEIGHT = "weights"
    OPT_STATE = "opt_states"
    ACTIVATION = "activations"
    GRAD_ACTIVATION = "grad_activations"
    GRAD_WEIGHT = "grad_weights"
    DIRECTION = "directions"
    RESIDUAL = "residuals"
    GRAD_RESIDUAL = "grad_residuals"
    ROUTING = "routing"
    GRAD_ROUTING = "grad_routing"
    STATS = "stats"
    QUERIES = "queries"
    KEYS_VALUES = "keys_values"
    GRAD_QUERIES = "grad_queries"
    GRAD_KEYS_VALUES = "grad_keys_values"
    SCALAR = "scalars"
    SAVED = "saved"
    SAVED_FOR_WEIGHT = "saved_for_weight"

    __hash__ = object.__hash__  # an Enum's own hash is Python code, and kinds are dictionary keys on the hot path


ROW_KINDS = frozenset(
    {
        Kind.ACTIVATION,
        Kind.GRAD_ACTIVATION,
        Kind.RESIDUAL,
        Kind.GRAD_RESIDUAL,
        Kind.ROUTING,
        Kind.GRAD_ROUTING,
        Kind.STATS,
        Kind.QUERIES,
        Kind.KEYS_VALUES,
        Kind.GRAD_QUERIES,
        Kind.GRAD_KEYS_VALUES,
        Kind.SAVED,
        Kind.SAVED_FOR_WEIGHT,
    }
)
"""Kinds whose pieces are batch rows; the pieces of the others are slices of a layer's flat parameters (of a scalar,
of all layers' one after the other)."""


AUTOGRAD_KINDS = frozenset({Kind.SAVED, Kind.SAVED_FOR_WEIGHT})
"""What layers keep between passes; no program holds it."""


class Reduction(Enum):
    """What REDUCE and ALL_REDUCE make of the members' values, element by element."""

    SUM = "sum"
    MEAN = "mean"
    MIN = "min"
    MAX = "max"

    __hash__ = object.__hash__  # as of kinds


WORDS = {
    Kind.ACTIVATION: "activation",
    Kind.RESIDUAL: "residual",
    Kind.ROUTING: "routing",
    Kind.QUERIES: "queries",
    Kind.KEYS_VALUES: "keys and values",
    Kind.GRAD_ACTIVATION: "gradient",
    Kind.GRAD_RESIDUAL: "residual's gradient",
    Kind.GRAD_ROUTING: "routing's gradient",
    Kind.GRAD_QUERIES: "gradient of queries",
    Kind.GRAD_KEYS_VALUES: "gradient of keys and values",
}
"""What messages call values of a kind."""
