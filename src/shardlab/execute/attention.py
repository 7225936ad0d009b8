"""Attention over sequences that are cut: what its ops do to the registers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from shardlab.execute.state import State
from shardlab.models.attention import Attend
from shardlab.models.primitives import DropoutSite
from shardlab.models.tensors import attention
from shardlab.program import Op, Spec
from shardlab.rules.spec import share_of

Instruction = Callable[[], None]


def attend(state: State, at: int, op: Op) -> Instruction:
    """Queries that meet one lot of keys and values."""
    (queries, keys_values), (output,), values = op.inputs, op.outputs, state.values
    part, mask = _heads(state, op.layer, state.specs[queries]), _mask(state, op)
    tokens, key_tokens = (state.shapes.tokens(state.specs[number]) for number in (queries, keys_values))

    def run() -> None:
        values[output] = attention.attend(part, values[queries], values[keys_values], tokens, key_tokens, mask())

    return run


def attend_backward(state: State, at: int, op: Op) -> Instruction:
    """What one lot of keys and values gives to the queries' gradient, and they to its."""
    (queries, keys_values, attention_output, gradient), outputs, values = op.inputs, op.outputs, state.values
    part, mask = _heads(state, op.layer, state.specs[queries]), _mask(state, op)
    tokens, key_tokens = (state.shapes.tokens(state.specs[number]) for number in (queries, keys_values))

    def run() -> None:
        q, kv, mixed, grad = (values[number] for number in (queries, keys_values, attention_output, gradient))
        made = attention.attend_backward(part, q, kv, mixed, grad, tokens, key_tokens, mask())
        values[outputs[0]], values[outputs[1]] = made

    return run


def merge(state: State, op: Op) -> Instruction:
    """The sum of what queries have met of two lots of keys and values."""
    (a, b), (output,), values = op.inputs, op.outputs, state.values
    part = _heads(state, op.layer - 1, state.specs[a])
    return lambda: values.__setitem__(output, attention.merge(part, values[a], values[b]))


def _heads(state: State, layer: int, spec: Spec) -> Attend:
    """The attention of the heads that a value is of."""
    share = share_of(spec.form)
    return state.model.attention_after(layer).heads_of(share.denominator // share.numerator)


def _mask(state: State, op: Op) -> Callable[[], Tensor | None]:
    """Dropout's mask of these queries and keys: drawn whole, as on one device, then cut."""
    queries, keys_values = (state.specs[number] for number in op.inputs[:2])
    whole, step = state.model.attention_after(op.layer), state.model.run(op.layer).attend
    assert step is not None
    shape = (queries.microbatches.bit_count() * state.shapes.rows, whole.heads, whole.tokens, whole.tokens)
    tokens, key_tokens = (torch.tensor(state.shapes.tokens(spec)) for spec in (queries, keys_values))
    count = _heads(state, op.layer, queries).heads
    pieces = queries.pieces("head")  # neighbours, of which the first says where these heads begin
    first = whole.heads * ((pieces & -pieces).bit_length() - 1) // queries.form.space.count("head")
    like = torch.empty(0, dtype=state.exact, device=state.settings.device)

    def mask() -> Tensor | None:
        dropout = state.dropout(op)
        if dropout is None:
            return None
        drawn = replace(dropout, layer=step.block).mask(DropoutSite.ATTENTION, shape, like)
        return drawn[:, first : first + count, tokens[:, None].to(drawn.device), key_tokens.to(drawn.device)]

    return mask
