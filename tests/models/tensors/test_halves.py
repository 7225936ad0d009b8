"""Half-blocks, sliced, with the collectives played by hand, equal the whole model in loss and gradients."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from shardlab.models import GPT, MLP, Blocks, Halves, Llama
from shardlab.models.tensors import (
    Dropout,
    Share,
    combined_loss,
    initial_weights,
    layers_of,
    loss_gradient,
    loss_of,
    loss_stats,
    to_blocks,
    to_halves,
    views,
    with_borrowed,
)
from shardlab.program.sizes import LayerKind

SMALL = {"layers": 2, "width": 16, "vocabulary": 40, "block": 12}
MODELS = [
    GPT(heads=4, **SMALL),
    GPT(heads=8, kv_heads=4, dropout=0.3, **SMALL),
    GPT(heads=4, bias=False, **SMALL | {"vocabulary": 37}),
    GPT(heads=4, dropout=0.2, **SMALL | {"vocabulary": 5}),  # of four slices, the last is padding alone
    MLP(ffn_hidden=20, **SMALL),
    MLP(dropout=0.1, **SMALL | {"layers": 1, "vocabulary": 41}),
    GPT(heads=4, dropout=0.1, tied=True, **SMALL | {"vocabulary": 41}),
    GPT(heads=4, tied=True, **SMALL | {"layers": 1}),
    Llama(heads=8, kv_heads=4, **SMALL),
    Llama(heads=4, dropout=0.2, ffn_hidden=20, **SMALL),
    GPT(heads=4, activation="squared_relu", norm="rms", **SMALL),
]
DROPPED = Dropout(0.3, seed=1, step=2, layer=99, microbatches=(3, 5))
"""As an executor gives it to any layer: which masks a layer's are is the layer's own business."""


def error(a: Tensor, b: Tensor) -> float:
    return ((a - b).abs().max() / b.abs().max()).item()


def random_flats(model: Blocks) -> list[Tensor]:
    """Weights without an accidental 0 or 1."""
    flats = [initial_weights(model, block, 0, torch.float64) for block in range(model.layers)]
    generator = torch.Generator().manual_seed(1)
    for block, flat in enumerate(flats):
        for view in views(model.layout(block), flat):
            view.add_(torch.randn(view.shape, dtype=flat.dtype, generator=generator) / 5)
    return flats


def leaves_of(model: Halves, flats: Sequence[Tensor], rank: int) -> list[list[Tensor]]:
    """A tensor-parallel rank's parameters: its slices of the bodies, and norms of its own."""
    leaves: list[list[Tensor]] = []
    for layer, flat in enumerate(flats):
        layout = model.layout(layer)
        run = flat.chunk(layout.slices)[rank % layout.slices]
        leaves.append([view.clone().requires_grad_() for view in views(layout, run)])
    return leaves


def played(
    model: Halves, ranks: list[list[list[Tensor]]], x: Tensor, dropout: Dropout, cuts: list[range]
) -> list[Tensor]:
    """Every rank's slice of the logits; norms run on the ranks' `cuts` of the sequence."""
    ranks = [with_borrowed(model, leaves) for leaves in ranks]
    residuals: list[Tensor | None] = [None] * len(cuts)
    for number, (layer, kind) in enumerate(zip(layers_of(model), model.kinds, strict=True)):
        if kind is LayerKind.SLICED:
            shares = [Share(rank, model.slices) for rank in range(model.slices)]
            branches = [layer.run(ranks[s.slice][number], (x,), s, dropout)[0] for s in shares]
        else:
            branch = sum(branches)
            pairs = [
                layer.run(ranks[i][number], (residuals[i], branch[:, cut.start : cut.stop]), Share(tokens=cut), dropout)
                for i, cut in enumerate(cuts)
            ]
            residuals, normalised = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
            x = torch.cat(normalised, 1)
    return branches


def gradients_of(model: Halves, ranks: list[list[list[Tensor]]]) -> list[Tensor]:
    """Flat gradients: the slices' one after the other, the norms' summed over ranks."""
    flats: list[Tensor] = []
    for layer, kind in enumerate(model.kinds):
        layout = model.layout(layer)
        runs = torch.zeros(len(ranks), layout.run_numel, dtype=torch.float64)
        for run, leaves in zip(runs, ranks, strict=True):
            for view, leaf in zip(views(layout, run), leaves[layer], strict=True):
                if leaf.grad is not None:  # a rank without a cut of the sequence has no part in the norms
                    view.copy_(leaf.grad)
        flats.append(runs.flatten() if kind is LayerKind.SLICED else runs.sum(0))
    return flats


def batch(model: Blocks) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    tokens, targets = torch.randint(model.vocabulary, (2, 4, model.block), generator=generator)
    targets[0, :5] = -1
    return tokens, targets


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("slices", [1, 2, 4])
@pytest.mark.parametrize("whole", MODELS, ids=str)
def test_sliced_half_blocks_equal_the_whole_model_in_loss_and_gradients(
    whole: Blocks, slices: int, sequence_parallel: bool
) -> None:
    flats, (tokens, targets) = random_flats(whole), batch(whole)
    parameters = [[v.requires_grad_() for v in views(whole.layout(i), flat.clone())] for i, flat in enumerate(flats)]
    x = tokens
    for block, layer in enumerate(layers_of(whole)):
        x = layer(with_borrowed(whole, parameters)[block], x, Dropout(whole.dropout, 1, 2, block, (3, 5)))
    expected = loss_of(x, targets)
    expected.backward()

    model = Halves(whole, slices)
    halves = to_halves(model, flats)
    ranks = [leaves_of(model, halves, rank) for rank in range(slices)]
    length = whole.block // slices if sequence_parallel else whole.block
    cuts = [range(start, start + length) for start in range(0, whole.block, length)]
    logits = played(model, ranks, tokens, Dropout(whole.dropout, 1, 2, 99, (3, 5)), cuts)
    firsts = [model.first_token(rank) for rank in range(slices)]
    stats = torch.stack([loss_stats(its, targets, first) for its, first in zip(logits, firsts, strict=True)])
    torch.autograd.backward(
        logits, [loss_gradient(its, stats, targets, first) for its, first in zip(logits, firsts, strict=True)]
    )

    assert error(combined_loss(stats, targets), expected.detach()) <= 1e-12
    ours = to_blocks(model, gradients_of(model, ranks))
    for block, gradient in enumerate(ours):
        theirs = torch.zeros_like(gradient)
        for view, parameter in zip(views(whole.layout(block), theirs), parameters[block], strict=True):
            view.copy_(parameter.grad)
        assert error(gradient, theirs) <= 1e-12, f"block {block}"


GPT_CUT = GPT(heads=4, **SMALL)


@pytest.mark.parametrize("dropout", [None, DROPPED])
@pytest.mark.parametrize("layer", range(0, Halves(GPT_CUT).layers - 1, 2))
def test_a_bodys_result_is_the_sum_of_its_slices_results(layer: int, dropout: Dropout | None) -> None:
    flats, one, two = random_flats(GPT_CUT), Halves(GPT_CUT), Halves(GPT_CUT, 2)
    x = batch(GPT_CUT)[0] if layer == 0 else torch.randn(4, 12, 16, dtype=torch.float64)
    (whole,) = layers_of(one)[layer].run(leaves_of(one, to_halves(one, flats), 0)[layer], (x,), Share(), dropout)
    halves = to_halves(two, flats)
    terms = [
        layers_of(two)[layer].run(leaves_of(two, halves, rank)[layer], (x,), Share(rank, 2), dropout)[0]
        for rank in range(2)
    ]
    assert error(sum(terms), whole) <= 1e-12
    assert all(error(term, whole) > 1e-3 for term in terms)


def test_the_heads_slices_are_slices_of_the_logits_and_padding_is_minus_infinity() -> None:
    whole = GPT(heads=4, **SMALL | {"vocabulary": 37})
    flats, one, four = random_flats(whole), Halves(whole), Halves(whole, 4)
    x, last = torch.randn(4, 12, 16, dtype=torch.float64), one.layers - 1
    logits = layers_of(one)[last](leaves_of(one, to_halves(one, flats), 0)[last], x)
    halves = to_halves(four, flats)
    slices = [
        layers_of(four)[last].run(leaves_of(four, halves, rank)[last], (x,), Share(rank, 4))[0] for rank in range(4)
    ]
    together = torch.cat(slices, -1)
    assert together.shape[1:] == four.activation_shape(four.layers)
    assert error(together[..., :37], logits) <= 1e-12
    assert together[..., 37:].isneginf().all()


@pytest.mark.parametrize("dropout", [None, DROPPED])
@pytest.mark.parametrize("layer", range(1, Halves(GPT_CUT).layers, 2))
@pytest.mark.parametrize("ends", [(6,), (3, 6, 9), (1, 11)])
def test_a_norm_on_slices_of_the_sequence_concatenates_and_its_gradients_sum(
    layer: int, ends: tuple[int, ...], dropout: Dropout | None
) -> None:
    model = Halves(GPT_CUT, 2)
    flats, compute = to_halves(model, random_flats(GPT_CUT)), layers_of(model)[layer]
    branch, residual, grad_residual, grad_normalised = torch.randn(4, 4, 12, 16, dtype=torch.float64)
    results, totals = [], []
    for places in [(0, 12), (0, *ends, 12)]:
        cuts = [range(start, stop) for start, stop in pairwise(places)]
        outputs, total = [], 0
        for cut in cuts:
            leaves = leaves_of(model, flats, 0)[layer]
            mine = slice(cut.start, cut.stop)
            given = None if layer == 1 else residual[:, mine]
            handed_on, normalised = compute.run(leaves, (given, branch[:, mine]), Share(tokens=cut), dropout)
            assert (handed_on is None) == (layer == model.layers - 2)
            pairs = [(handed_on, grad_residual[:, mine]), (normalised, grad_normalised[:, mine])]
            pairs = [(y, grad) for y, grad in pairs if y is not None]
            torch.autograd.backward([y for y, _ in pairs], [grad for _, grad in pairs])
            outputs.append(torch.stack([y.detach() for y, _ in pairs]))
            full = [leaf.grad.flatten() for leaf in leaves]
            total = total + torch.cat(full)
        results.append(torch.cat(outputs, 2))
        totals.append(total)
    assert error(results[1], results[0]) <= 1e-12
    assert error(totals[1], totals[0]) <= 1e-12


def test_a_body_never_adds_the_residual() -> None:
    """Were it added by every slice, their sum would count it more than once; with zero weights nothing may remain."""
    model = Halves(GPT_CUT, 2)
    x = torch.randn(4, 12, 16, dtype=torch.float64)
    for layer in range(2, model.layers - 1, 2):
        zeros = [torch.zeros(p.shape, dtype=torch.float64) for p in model.layout(layer).parameters]
        (branch,) = layers_of(model)[layer].run(zeros, (x,), Share(1, 2))
        assert not branch.any()


def test_the_residual_that_a_norm_hands_on_is_memory_of_its_own() -> None:
    model = Halves(MLP(layers=1))  # neither positions nor dropout: the first residual is the branch itself
    branch = torch.randn(1, 64, 64)
    parameters = views(model.layout(1), initial_weights(model, 1, 0, torch.float32))
    residual, _ = layers_of(model)[1].run(parameters, (None, branch))
    assert torch.equal(residual, branch)
    assert residual.data_ptr() != branch.data_ptr()


@pytest.mark.parametrize("layer", range(Halves(GPT_CUT).layers))
def test_half_blocks_begin_as_the_whole_model_does(layer: int) -> None:
    model = Halves(GPT_CUT, 4)
    wholes = [initial_weights(GPT_CUT, block, 7, torch.float32) for block in range(2)]
    assert torch.equal(initial_weights(model, layer, 7, torch.float32), to_halves(model, wholes)[layer])
