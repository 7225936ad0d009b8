"""A model cut for context parallelism, with attention between its layers, equals the whole in loss and gradients."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor

from shardlab.models import GPT, MLP, Blocks, Llama, cut
from shardlab.models.attention import Attend
from shardlab.models.tensors import Dropout, Share, layers_of, loss_of, to_blocks, to_layers, views
from shardlab.models.tensors.attention import attend, attend_backward, merge, rows_of, runs
from tests.models.small import Dimensions
from tests.models.tensors.comparing import error, fill_gradient, random_batch, random_flats, whole_step

SMALL: Dimensions = {"layers": 2, "hidden_size": 16, "vocab_size": 40, "seq_len": 12}
MODELS: list[Blocks] = [
    GPT(heads=4, **SMALL),
    GPT(heads=8, kv_heads=4, bias=False, **SMALL),
    MLP(ffn_hidden_size=20, dropout=0.3, **SMALL),
    Llama(heads=4, kv_heads=2, **SMALL),
    GPT(heads=4, rope_theta=1e3, activation="squared_relu", **SMALL),
]
TOKENS = [[0, 1, 2, 9, 10, 11], [3, 4, 5, 6, 7, 8]]
"""Of each of two ranks, in the balanced order."""


class Attended(torch.autograd.Function):
    """All ranks' queries that meet all ranks' keys and values, block by block."""

    @staticmethod
    def forward(ctx: Any, part: Attend, *inputs: Tensor) -> tuple[Tensor, ...]:
        queries, blocks = inputs[:2], inputs[2:]
        made = [
            merge(part, *(attend(part, q, kv, mine, theirs) for kv, theirs in zip(blocks, TOKENS, strict=True)))
            for q, mine in zip(queries, TOKENS, strict=True)
        ]
        ctx.part = part
        ctx.save_for_backward(*inputs, *made)
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        saved: tuple[Tensor, ...] = ctx.saved_tensors
        queries, blocks, made = (saved[i : i + 2] for i in (0, 2, 4))
        totals = [torch.zeros_like(x) for x in (*queries, *blocks)]
        for i, mine in enumerate(TOKENS):
            for j, theirs in enumerate(TOKENS):
                given = attend_backward(ctx.part, queries[i], blocks[j], made[i], gradients[i], mine, theirs)
                totals[i] += given[0]
                totals[2 + j] += given[1]
        return None, *totals


@pytest.mark.parametrize("whole", MODELS, ids=str)
def test_the_cut_model_equals_the_whole_in_loss_and_gradients(whole: Blocks) -> None:
    flats, (tokens, targets) = random_flats(whole), random_batch(whole, 4)
    dropout = Dropout(whole.dropout, 1, 2, 99, (3, 5))
    expected, theirs = whole_step(whole, flats, (tokens, targets))

    model = cut(whole, attention_apart=True)
    leaves = [
        [v.requires_grad_() for v in views(model.layout(layer), flat)]
        for layer, flat in enumerate(to_layers(model, flats))
    ]
    held = [rows_of(tokens.T, mine).T for mine in TOKENS]
    residuals: list[tuple[Tensor, ...]] = [(), ()]
    for number, (layer, its) in enumerate(zip(layers_of(model), model.signatures, strict=True)):
        made = [
            layer.run(leaves[number], (x, *(r if its.carries else ())), Share(tokens=mine), dropout)
            for x, r, mine in zip(held, residuals, TOKENS, strict=True)
        ]
        if its.projects:
            inputs = *(q for q, _ in made), *(kv for _, kv in made)
            held = list(cast("tuple[Tensor, ...]", Attended.apply(model.attention_after(number), *inputs)))
        else:
            held = [x for x, *_ in made]
        if its.carries:
            residuals = [each[1:] for each in made]
    losses = [loss_of(x, rows_of(targets.T, mine).T) for x, mine in zip(held, TOKENS, strict=True)]
    loss = torch.stack(losses).sum()
    loss.backward()

    assert error(loss.detach(), expected) <= 1e-12
    gradients = [
        fill_gradient(torch.zeros(layout.numel, dtype=torch.float64), layout, mine)
        for layout, mine in zip(map(model.layout, range(model.layers)), leaves, strict=True)
    ]
    assert all(error(a, b) <= 1e-12 for a, b in zip(to_blocks(model, gradients), theirs, strict=True))


def test_rows_of_neighbours_are_a_view() -> None:
    matrix = torch.arange(12.0).view(6, 2)
    assert rows_of(matrix, range(2, 5)).data_ptr() == matrix[2].data_ptr()
    assert torch.equal(rows_of(matrix, [0, 1, 4]), matrix[[0, 1, 4]])
    assert runs([3]) == [(0, 1)]
