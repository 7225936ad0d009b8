"""What kernels on a GPU keep: each choice alone, against what it stands for."""

from __future__ import annotations

from dataclasses import fields

import pytest

from shardlab.models import GPT, CutModel, Llama, Model, cut_for
from shardlab.models.kept import AUTOGRAD, EXECUTOR, kept_activations, kept_elements
from shardlab.models.kept import SavedActivations as Kept
from shardlab.models.primitives import Norm
from shardlab.models.run import Run
from shardlab.program import Mesh

S, H, HEADS, ROWS = 256, 256, 4, 3
"""Tokens, features, attention heads, and sequences of a microbatch."""

GPT3 = GPT(layers=3, hidden_size=H, heads=HEADS, seq_len=S, dropout=0.1)
LLAMA = Llama(layers=3, hidden_size=H, heads=HEADS, seq_len=S, ffn_hidden_size=4 * H)


def halves_of(model: GPT | Llama) -> CutModel:
    cut = cut_for(model, Mesh(tp=2), planned=True)
    assert isinstance(cut, CutModel)
    return cut


def is_norm(run: Run) -> bool:
    return isinstance(run.steps[-1].primitive, Norm)


def saved(model: Model, kept: Kept, element: int = 2) -> list[int]:
    return [kept_elements(model, layer, ROWS, kept, element) for layer in range(model.layers)]


@pytest.mark.parametrize(
    "model", [GPT3, LLAMA, halves_of(GPT3), halves_of(LLAMA)], ids=lambda model: type(model).__name__
)
def test_without_a_choice_all_is_kept_that_autograd_keeps_and_by_our_executor_less(model: Model) -> None:
    assert saved(model, EXECUTOR) == [model.microbatch_saved(layer, ROWS) for layer in range(model.layers)]
    assert saved(model, AUTOGRAD) == [model.run(layer).saved(ROWS, made_again=False) for layer in range(model.layers)]
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
        less = kept_elements(GPT3, 1, ROWS, AUTOGRAD, element) - kept_elements(GPT3, 1, ROWS, Kept(mask=1.0), element)
        assert less == ROWS * masks * (1 - 1 / element)
    assert sum(saved(halves_of(GPT3), AUTOGRAD)) - sum(saved(halves_of(GPT3), Kept(mask=1.0))) == 3 * ROWS * masks / 2
    assert saved(LLAMA, Kept(mask=1.0)) == saved(LLAMA, AUTOGRAD), "nothing drops out"


def test_a_branch_that_is_not_kept_leaves_the_residual_alone() -> None:
    model = halves_of(GPT3)
    stay = kept_activations(model, ROWS, Kept(branch=False), 2)
    for layer, run in enumerate(model.runs):
        entering = model.microbatch_elements(layer, ROWS)
        assert stay[layer] == (0 if is_norm(run) else entering)
    assert saved(model, Kept(branch=False)) == saved(model, AUTOGRAD)


@pytest.mark.parametrize("slices", [1, 2, 8])
def test_what_sequence_parallelism_gathered_stays_as_a_slice(slices: int) -> None:
    model = halves_of(GPT3)
    stay = kept_activations(model, ROWS, Kept(gathered=False), slices)
    for layer, run in enumerate(model.runs):
        entering = model.microbatch_elements(layer, ROWS)
        sliced = not is_norm(run) and layer > 0
        assert stay[layer] == (entering // slices if sliced else entering)


@pytest.mark.parametrize("model", [LLAMA, halves_of(LLAMA)], ids=["whole", "halves"])
def test_swiglu_in_two_kernels_keeps_what_is_between_them(model: Model) -> None:
    assert sum(saved(model, Kept(activated=True))) - sum(saved(model, AUTOGRAD)) == 3 * ROWS * S * 4 * H
    assert saved(GPT3, Kept(activated=True)) == saved(GPT3, AUTOGRAD), "GELU is one kernel"


def test_of_every_second_product_a_block_keeps_attention_and_the_odd_products() -> None:
    """Of queries, keys, values, output, gate, up and down: keys, output and up, and attention's result."""
    products = S * H + S * H + S * 4 * H  # keys and output, up
    result = S * H
    middle = kept_elements(LLAMA, 1, ROWS, Kept(per_op=True), 2)
    assert middle <= ROWS * (products + result + S * H)
    assert middle < kept_elements(LLAMA, 1, ROWS, AUTOGRAD, 2) / 2
    stay = kept_activations(halves_of(LLAMA), ROWS, Kept(per_op=True), 1)
    inner = list(zip(halves_of(LLAMA).runs, stay[:-1], strict=True))[1:-1]
    assert all(not size for run, size in inner if not is_norm(run))


@pytest.mark.parametrize("model", [GPT3, LLAMA, halves_of(GPT3), halves_of(LLAMA)], ids=str)
def test_what_an_activation_function_made_is_made_again(model: Model) -> None:
    less = sum(saved(model, AUTOGRAD)) - sum(saved(model, EXECUTOR))
    assert less == 3 * ROWS * S * 4 * H


def test_a_product_that_nobody_reads_is_the_feed_forwards_last() -> None:
    for model in (LLAMA, halves_of(LLAMA)):
        more = sum(saved(model, Kept(per_op=True, unread=True))) - sum(saved(model, Kept(per_op=True)))
        assert more == 3 * ROWS * S * H


@pytest.mark.parametrize("model", [GPT3, LLAMA, halves_of(LLAMA)], ids=["gpt", "whole", "halves"])
def test_keys_and_values_that_are_copied_stay_twice(model: Model) -> None:
    assert sum(saved(model, Kept(copied=True))) - sum(saved(model, AUTOGRAD)) == 3 * ROWS * S * 2 * H


def test_every_choice_is_tried() -> None:
    tried = {"mask", "branch", "gathered", "activated", "per_op", "unread", "copied", "made_again"}
    assert {field.name for field in fields(Kept)} == tried
