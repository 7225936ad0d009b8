"""A model cut for context parallelism, with attention between its layers, equals the whole in loss and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardlab.models import GPT, MLP, Blocks, Llama, cut
from shardlab.models.tensors import Dropout, Share, layers_of, loss_of, to_blocks, to_layers, views
from shardlab.models.tensors.attention import attend, attend_backward, merge
from shardlab.models.tensors.tokens import rows_of, runs
from tests.models.tensors.test_halves import batch, error, random_flats

SMALL = {"layers": 2, "hidden_size": 16, "vocab_size": 40, "seq_len": 12}
MODELS = [
    GPT(heads=4, **SMALL),
    GPT(heads=8, kv_heads=4, bias=False, **SMALL),
    MLP(ffn_hidden_size=20, dropout=0.3, **SMALL),
]
MODELS += [Llama(heads=4, kv_heads=2, **SMALL), GPT(heads=4, rope_theta=1e3, activation="squared_relu", **SMALL)]
TOKENS = [[0, 1, 2, 9, 10, 11], [3, 4, 5, 6, 7, 8]]
"""Of each of two ranks, in the balanced order."""


class Attended(torch.autograd.Function):
    """All ranks' queries that meet all ranks' keys and values, block by block."""

    @staticmethod
    def forward(ctx, part, *inputs: Tensor) -> tuple[Tensor, ...]:  # type: ignore[no-untyped-def]
        queries, blocks = inputs[:2], inputs[2:]
        made = [
            merge(part, *(attend(part, q, kv, mine, theirs) for kv, theirs in zip(blocks, TOKENS, strict=True)))
            for q, mine in zip(queries, TOKENS, strict=True)
        ]
        ctx.part = part
        ctx.save_for_backward(*inputs, *made)
        return tuple(made)

    @staticmethod
    def backward(ctx, *gradients: Tensor):  # type: ignore[no-untyped-def]
        queries, blocks, made = (ctx.saved_tensors[i : i + 2] for i in (0, 2, 4))
        totals = [torch.zeros_like(x) for x in (*queries, *blocks)]
        for i, mine in enumerate(TOKENS):
            for j, theirs in enumerate(TOKENS):
                given = attend_backward(ctx.part, queries[i], blocks[j], made[i], gradients[i], mine, theirs)
                totals[i] += given[0]
                totals[2 + j] += given[1]
        return None, *totals


@pytest.mark.parametrize("whole", MODELS, ids=str)
def test_the_cut_model_equals_the_whole_in_loss_and_gradients(whole: Blocks) -> None:
    flats, (tokens, targets) = random_flats(whole), batch(whole)
    dropout = Dropout(whole.dropout, 1, 2, 99, (3, 5))
    parameters = [[v.requires_grad_() for v in views(whole.layout(i), flat.clone())] for i, flat in enumerate(flats)]
    x = tokens
    for block, layer in enumerate(layers_of(whole)):
        x = layer(parameters[block], x, Dropout(whole.dropout, 1, 2, block, (3, 5)))
    expected = loss_of(x, targets)
    expected.backward()

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
            held = Attended.apply(model.attention_after(number), *(q for q, _ in made), *(kv for _, kv in made))
        else:
            held = [x for x, *_ in made]
        if its.carries:
            residuals = [tuple(each[1:]) for each in made]
    loss = sum(loss_of(x, rows_of(targets.T, mine).T) for x, mine in zip(held, TOKENS, strict=True))
    loss.backward()

    assert abs(loss.item() - expected.item()) <= 1e-12 * abs(expected.item())
    gradients = [torch.zeros(model.layout(layer).numel, dtype=torch.float64) for layer in range(model.layers)]
    for layer, flat in enumerate(gradients):
        for view, leaf in zip(views(model.layout(layer), flat), leaves[layer], strict=True):
            view.copy_(leaf.grad)
    for block, flat in enumerate(to_blocks(model, gradients)):
        ours = views(whole.layout(block), flat)
        theirs = [leaf.grad for leaf in parameters[block]]
        assert error(torch.cat([v.flatten() for v in ours]), torch.cat([v.flatten() for v in theirs])) <= 1e-12


def test_rows_of_neighbours_are_a_view() -> None:
    matrix = torch.arange(12.0).view(6, 2)
    assert rows_of(matrix, range(2, 5)).data_ptr() == matrix[2].data_ptr()
    assert torch.equal(rows_of(matrix, [0, 1, 4]), matrix[[0, 1, 4]])
    assert runs([3]) == [(0, 1)]
