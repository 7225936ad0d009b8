"""Matrices that Muon steps whole lie in pieces in a layer's flat buffer, as the model is cut."""

from __future__ import annotations

from math import prod

import pytest
import torch
from torch import Tensor

from shardlab.models import GPT, Blocks, CutModel, Llama, MoE, cut_for
from shardlab.models.matrices import WholeMatrix, matrices_of
from shardlab.models.tensors import to_layers
from shardlab.models.tensors.flat import named_views
from shardlab.program import Mesh

GPT_1 = GPT(layers=1, hidden_size=8, heads=2, seq_len=8)
LLAMA = Llama(layers=2, hidden_size=16, heads=4, kv_heads=2, seq_len=8)
MOE = MoE(layers=2, hidden_size=8, heads=2, seq_len=8, experts=4)


def test_embeddings_head_and_vectors_are_none() -> None:
    found = matrices_of(GPT_1.run(0), GPT_1.layout(0).numel)
    names = ["attn.c_attn.weight"] * 3 + ["attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight"]
    assert sorted(matrix.name for matrix in found) == names


def test_queries_keys_and_values_and_every_expert_are_matrices_of_their_own() -> None:
    attention = [m for m in matrices_of(GPT_1.run(0), GPT_1.layout(0).numel) if m.name == "attn.c_attn.weight"]
    assert [matrix.shape for matrix in attention] == [(8, 8)] * 3
    experts = [m for m in matrices_of(MOE.run(0), MOE.layout(0).numel) if m.name == "mlp.experts.c_fc.weight"]
    assert [matrix.shape for matrix in experts] == [(32, 8)] * 4


@pytest.mark.parametrize(
    ("model", "mesh"),
    [
        (GPT_1, Mesh(tp=2)),
        (LLAMA, Mesh(tp=2)),
        (MOE, Mesh(ep=2)),
        (MOE, Mesh(tp=2, ep=2)),
        (MOE, Mesh(tp=2, ep=2, cp=2)),
    ],
    ids=str,
)
def test_pieces_of_a_cut_model_make_the_whole_model_s_matrices(model: Blocks, mesh: Mesh) -> None:
    cut = cut_for(model, mesh, planned=True)
    assert isinstance(cut, CutModel)
    wholes = [torch.randperm(model.layout(layer).numel).double() for layer in range(model.layers)]
    for layer, flat in enumerate(wholes):  # nothing in the gaps, which a cut model has elsewhere
        kept = torch.zeros_like(flat)
        for name, view in named_views(model.layout(layer), kept).items():
            view.copy_(named_views(model.layout(layer), flat)[name])
        flat.copy_(kept)
    expected = [made(m, flat) for layer, flat in enumerate(wholes) for m in matrices_of(model.run(layer), len(flat))]
    found: list[Tensor] = []
    for layer, flat in enumerate(to_layers(cut, wholes)):
        runs = cut.layout(layer).slices
        longer = torch.cat([torch.cat([run, torch.zeros(48)]) for run in flat.chunk(runs)])  # as a sharded one may be
        found += [made(matrix, longer) for matrix in matrices_of(cut.run(layer), len(longer))]
    assert sorted(map(rows, found)) == sorted(map(rows, expected))


def made(matrix: WholeMatrix, flat: Tensor) -> Tensor:
    whole = torch.cat([flat[start : start + matrix.size].view(matrix.piece) for start in matrix.starts], matrix.dim)
    assert tuple(whole.shape) == matrix.shape
    return whole


def rows(matrix: Tensor) -> list[list[float]]:
    return [[float(each) for each in row] for row in matrix]


def test_an_orthogonal_step_s_kernels_are_three_products_in_each_of_five_rounds() -> None:
    matrix = WholeMatrix("w", (64, 16), 0, (0,))
    assert len(matrix.kernels()) == 15
    assert sum(kernel.flops for kernel in matrix.kernels()) == 5 * (4 * 16 * 16 * 64 + 2 * 16**3)
    assert prod(matrix.piece) == matrix.size
