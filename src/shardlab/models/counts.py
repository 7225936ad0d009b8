"""How many parameters a model has, as trainers report it."""

from __future__ import annotations

from dataclasses import dataclass

from shardlab.models.model import Model

POSITIONS = "wpe.weight"
"""The parameter that holds learned position embeddings."""


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters of a model; a tied embedding counts once.

    Attributes:
        parameters: all.
        decayed, decayed_tensors: those on which weight decay acts, and in how many tensors they are.
        not_decayed, not_decayed_tensors: the others.
        without_positions: all but position embeddings, as nanoGPT's `get_num_params` counts.
    """

    parameters: int
    decayed: int
    decayed_tensors: int
    not_decayed: int
    not_decayed_tensors: int
    without_positions: int


def count_parameters(model: Model) -> ParameterCounts:
    """Count a model's parameters.

    >>> from shardlab.models import find_model
    >>> count_parameters(find_model("gpt2")).without_positions
    123653376
    """
    every = [each for layer in range(model.layers) for each in model.layout(layer).parameters]
    decayed = [each.numel for each in every if each.decayed]
    others = [each.numel for each in every if not each.decayed]
    positions = sum(each.numel for each in every if each.name == POSITIONS)
    total = sum(decayed) + sum(others)
    return ParameterCounts(total, sum(decayed), len(decayed), sum(others), len(others), total - positions)
