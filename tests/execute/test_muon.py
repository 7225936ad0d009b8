"""Muon is torch's, in whatever matrices it finds in a layer's flat buffer."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import pytest
import torch

from shardlab.errors import UserError
from shardlab.execute.muon import Muon, orthogonal
from shardlab.execute.optimizer import matrices_of, muon_matrices
from shardlab.models import GPT, MoE, cut_for
from shardlab.models.layout import Parameter
from shardlab.program import Mesh


@pytest.mark.parametrize("shape", [(8, 8), (24, 8), (8, 24)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_torch_s_muon_to_the_bit(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ours, theirs = (torch.ones(shape, dtype=dtype) for _ in range(2))
    mine = Muon([{"params": [ours], "weight_decay": 0.1}], 0.01, 0.95)
    torchs = torch.optim.Muon(
        [theirs.requires_grad_()], lr=0.01, momentum=0.95, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    for _ in range(3):
        ours.grad = torch.randn(shape).to(dtype)
        theirs.grad = ours.grad.clone()
        mine.step()
        torchs.step()
    assert torch.equal(ours, theirs)


def test_float64_is_not_rounded_to_bfloat16() -> None:
    torch.manual_seed(0)
    matrix = torch.randn(6, 9, dtype=torch.float64)
    found = orthogonal(matrix)
    assert found.dtype is torch.float64
    assert torch.allclose(found, orthogonal(matrix.float()).double(), rtol=0, atol=0.05)
    values: torch.Tensor = torch.linalg.svdvals(found)
    assert values.min() > 0.6
    assert values.max() < 1.3


def test_queries_keys_and_values_and_every_expert_are_matrices_of_their_own() -> None:
    attention = Parameter("w", (12, 4), True, ("head", "width"), (4, 4, 4))
    experts = Parameter("w", (3, 8, 4), True, ("expert", "ffn", "width"), (4, 4), 1)
    assert [tuple(m.shape) for m in matrices_of(torch.zeros(48), attention)] == [(4, 4)] * 3
    assert [tuple(m.shape) for m in matrices_of(torch.zeros(96), experts)] == [(4, 4)] * 6


def test_embeddings_head_and_vectors_are_none() -> None:
    model = GPT(layers=1, hidden_size=8, heads=2, seq_len=8)
    found = muon_matrices(model, 0, model.layout(0).numel)
    names = ["attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight"]
    assert sorted(parameter.name for parameter in found.values()) == names


def test_expert_parallelism_leaves_matrices_whole_and_tensor_parallelism_does_not() -> None:
    model = MoE(layers=1, hidden_size=8, heads=2, seq_len=8)
    cut = cut_for(model, Mesh(ep=2))
    experts = [layer for layer in range(cut.layers) if cut.layout(layer).slices > 1]
    assert all(muon_matrices(cut, layer, cut.layout(layer).numel) for layer in experts)
    sliced = cut_for(model, Mesh(tp=2), planned=True)
    attention = next(layer for layer in range(sliced.layers) if sliced.run(layer).name.startswith("attention"))
    with pytest.raises(UserError, match=r"muon steps whole matrices, but .* of layer .* is cut among ranks"):
        muon_matrices(sliced, attention, sliced.layout(attention).numel)
