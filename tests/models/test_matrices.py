"""Matrices that Muon steps whole lie in pieces in a layer's flat buffer, as the model is cut."""

from __future__ import annotations

from dataclasses import fields
from math import prod

import pytest
import torch
from torch import Tensor

from shardlab.language import Mesh
from shardlab.models import GPT, Blocks, CutModel, Llama, Mixtral, Model, MoE, cut_for
from shardlab.models.layer import Run
from shardlab.models.matrices import AUTOGRAD, EXECUTOR, WholeMatrix, kept_activations, kept_elements, matrices_of
from shardlab.models.matrices import SavedActivations as Kept
from shardlab.models.primitives import Norm
from shardlab.models.tensors import to_layers
from shardlab.models.tensors.weights import named_views

GPT_1 = GPT(layers=1, hidden_size=8, heads=2, seq_len=8)
LLAMA = Llama(layers=2, hidden_size=16, heads=4, kv_heads=2, seq_len=8)
MOE = MoE(layers=2, hidden_size=8, heads=2, seq_len=8, experts=4)


def test_embeddings_head_and_vectors_are_none() -> None:
    matrices = matrices_of(GPT_1.run(0), GPT_1.layout(0).numel)
    names = ["attn.c_attn.weight"] * 3 + ["attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight"]
    assert sorted(matrix.name for matrix in matrices) == names


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
        without_gaps = torch.zeros_like(flat)
        for name, view in named_views(model.layout(layer), without_gaps).items():
            view.copy_(named_views(model.layout(layer), flat)[name])
        flat.copy_(without_gaps)
    expected = [
        whole_matrix(m, flat) for layer, flat in enumerate(wholes) for m in matrices_of(model.run(layer), len(flat))
    ]
    matrices: list[Tensor] = []
    for layer, flat in enumerate(to_layers(cut, wholes)):
        runs = cut.layout(layer).slices
        longer = torch.cat([torch.cat([run, torch.zeros(48)]) for run in flat.chunk(runs)])  # as a sharded one may be
        matrices += [whole_matrix(matrix, longer) for matrix in matrices_of(cut.run(layer), len(longer))]
    assert sorted(map(rows, matrices)) == sorted(map(rows, expected))


def whole_matrix(matrix: WholeMatrix, flat: Tensor) -> Tensor:
    whole = torch.cat([flat[start : start + matrix.size].view(matrix.piece) for start in matrix.starts], matrix.dim)
    assert tuple(whole.shape) == matrix.shape
    return whole


def rows(matrix: Tensor) -> list[list[float]]:
    return [[float(number) for number in row] for row in matrix]


def test_an_orthogonal_step_s_kernels_are_three_products_in_each_of_five_rounds() -> None:
    matrix = WholeMatrix("w", (64, 16), 0, (0,))
    assert len(matrix.kernels()) == 15
    assert sum(kernel.flops for kernel in matrix.kernels()) == 5 * (4 * 16 * 16 * 64 + 2 * 16**3)
    assert prod(matrix.piece) == matrix.size


# Memory that kernels on a GPU keep: each choice alone, against its definition.


S, H, HEADS, ROWS = 256, 256, 4, 3
"""Tokens, features, attention heads, and sequences of a microbatch."""

GPT3 = GPT(layers=3, hidden_size=H, heads=HEADS, seq_len=S, dropout=0.1)
LLAMA_of_kept = Llama(layers=3, hidden_size=H, heads=HEADS, seq_len=S, ffn_hidden_size=4 * H)


def halves_of(model: GPT | Llama) -> CutModel:
    cut = cut_for(model, Mesh(tp=2), planned=True)
    assert isinstance(cut, CutModel)
    return cut


def is_norm(run: Run) -> bool:
    return isinstance(run.steps[-1].primitive, Norm)


def elements(model: Model, setting: Kept, element: int = 2) -> list[int]:
    return [kept_elements(model, layer, ROWS, setting, element) for layer in range(model.layers)]


@pytest.mark.parametrize(
    "model", [GPT3, LLAMA_of_kept, halves_of(GPT3), halves_of(LLAMA_of_kept)], ids=lambda model: type(model).__name__
)
def test_without_a_choice_all_is_kept_that_autograd_keeps_and_by_our_executor_less(model: Model) -> None:
    assert elements(model, EXECUTOR) == [model.run(layer).saved(ROWS) for layer in range(model.layers)]
    assert elements(model, AUTOGRAD) == [
        model.run(layer).saved(ROWS, made_again=False) for layer in range(model.layers)
    ]
    whole = tuple(model.microbatch_elements(index, ROWS) for index in range(model.layers + 1))
    assert kept_activations(model, ROWS, AUTOGRAD, 2) == whole


def test_with_masks_of_a_byte_a_layer_keeps_what_korthikanti_counts() -> None:
    """34 sbh + 5 a s^2 b bytes in half precision (arXiv 2205.05198, eq. 1), its input included; and what norms keep."""
    layer = 2 * (kept_elements(GPT3, 1, ROWS, Kept(mask=1.0), 2) + ROWS * S * H)
    norms = 2 * 2 * (2 * ROWS * S)  # of two norms mean and deviation of each token
    counted = 34 * S * ROWS * H + 5 * HEADS * S**2 * ROWS
    assert counted < layer <= counted + norms


def test_a_mask_takes_less_the_wider_an_element_is() -> None:
    masks = HEADS * S**2 + 2 * S * H  # of the scores, and of both branches
    for element in (2, 4):
        difference = kept_elements(GPT3, 1, ROWS, AUTOGRAD, element) - kept_elements(
            GPT3, 1, ROWS, Kept(mask=1.0), element
        )
        assert difference == ROWS * masks * (1 - 1 / element)
    assert (
        sum(elements(halves_of(GPT3), AUTOGRAD)) - sum(elements(halves_of(GPT3), Kept(mask=1.0)))
        == 3 * ROWS * masks / 2
    )
    assert elements(LLAMA_of_kept, Kept(mask=1.0)) == elements(LLAMA_of_kept, AUTOGRAD), "nothing drops out"


def test_a_branch_that_is_not_kept_leaves_the_residual_alone() -> None:
    model = halves_of(GPT3)
    stay = kept_activations(model, ROWS, Kept(branch=False), 2)
    for layer, run in enumerate(model.runs):
        entering = model.microbatch_elements(layer, ROWS)
        assert stay[layer] == (0 if is_norm(run) else entering)
    assert elements(model, Kept(branch=False)) == elements(model, AUTOGRAD)


@pytest.mark.parametrize("slices", [1, 2, 8])
def test_gathered_inputs_are_kept_as_slices_under_sequence_parallelism(slices: int) -> None:
    model = halves_of(GPT3)
    stay = kept_activations(model, ROWS, Kept(gathered=False), slices)
    for layer, run in enumerate(model.runs):
        entering = model.microbatch_elements(layer, ROWS)
        sliced = not is_norm(run) and layer > 0
        assert stay[layer] == (entering // slices if sliced else entering)


@pytest.mark.parametrize("model", [LLAMA_of_kept, halves_of(LLAMA_of_kept)], ids=["whole", "halves"])
def test_swiglu_in_two_kernels_keeps_what_is_between_them(model: Model) -> None:
    assert sum(elements(model, Kept(activated=True))) - sum(elements(model, AUTOGRAD)) == 3 * ROWS * S * 4 * H
    assert elements(GPT3, Kept(activated=True)) == elements(GPT3, AUTOGRAD), "GELU is one kernel"


def test_swiglu_of_experts_in_two_kernels_keeps_what_is_between_them_for_each_slot() -> None:
    model = Mixtral(layers=2, hidden_size=8, heads=2, seq_len=8, experts=4, ffn_hidden_size=24, capacity_factor=None)
    slots = 4 * ROWS * 8  # without a capacity factor, each token has a slot in each expert
    assert sum(elements(model, Kept(activated=True))) - sum(elements(model, AUTOGRAD)) == 2 * slots * 24


def test_of_every_second_product_a_block_keeps_attention_and_the_odd_products() -> None:
    """The products are queries, keys, values, output, gate, up and down. Kept are keys, output and up, and attention's
    result."""
    products = S * H + S * H + S * 4 * H  # keys and output, up
    result = S * H
    middle = kept_elements(LLAMA_of_kept, 1, ROWS, Kept(again="per-op"), 2)
    assert middle <= ROWS * (products + result + S * H)
    assert middle < kept_elements(LLAMA_of_kept, 1, ROWS, AUTOGRAD, 2) / 2
    stay = kept_activations(halves_of(LLAMA_of_kept), ROWS, Kept(again="per-op"), 1)
    inner = list(zip(halves_of(LLAMA_of_kept).runs, stay[:-1], strict=True))[1:-1]
    assert all(not size for run, size in inner if not is_norm(run))


@pytest.mark.parametrize("model", [GPT3, LLAMA_of_kept, halves_of(GPT3), halves_of(LLAMA_of_kept)], ids=str)
def test_results_of_activation_functions_are_recomputed(model: Model) -> None:
    difference = sum(elements(model, AUTOGRAD)) - sum(elements(model, EXECUTOR))
    assert difference == 3 * ROWS * S * 4 * H


def test_a_product_that_nobody_reads_is_the_feed_forwards_last() -> None:
    for model in (LLAMA_of_kept, halves_of(LLAMA_of_kept)):
        difference = sum(elements(model, Kept(again="per-op", unread=True))) - sum(
            elements(model, Kept(again="per-op"))
        )
        assert difference == 3 * ROWS * S * H


@pytest.mark.parametrize("model", [GPT3, LLAMA_of_kept, halves_of(LLAMA_of_kept)], ids=["gpt", "whole", "halves"])
def test_keys_and_values_that_are_copied_stay_twice(model: Model) -> None:
    assert sum(elements(model, Kept(copied=True))) - sum(elements(model, AUTOGRAD)) == 3 * ROWS * S * 2 * H


def test_every_choice_is_tried() -> None:
    names = {"mask", "branch", "gathered", "activated", "again", "unread", "copied", "made_again"}
    assert {field.name for field in fields(Kept)} == names
