"""Half-blocks, sliced, with the collectives played by hand, equal the whole model in loss and gradients."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from shardlab.models import GPT, MLP, Blocks, CutModel, Llama, cut
from shardlab.models.tensors import (
    Dropout,
    Share,
    combined_loss,
    initial_weights,
    layers_of,
    loss_gradient,
    loss_stats,
    to_blocks,
    to_layers,
    views,
    with_borrowed,
)
from tests.models.conftest import piece_of
from tests.models.small import Dimensions
from tests.models.tensors.comparing import (
    error,
    fill_gradient,
    gradient_of,
    random_batch,
    random_flats,
    whole_step,
)

SMALL: Dimensions = {"layers": 2, "hidden_size": 16, "vocab_size": 40, "seq_len": 12}
MODELS: list[Blocks] = [
    GPT(heads=4, **SMALL),
    GPT(heads=8, kv_heads=4, dropout=0.3, **SMALL),
    replace(GPT(heads=4, bias=False, **SMALL), vocab_size=37),
    replace(GPT(heads=4, dropout=0.2, **SMALL), vocab_size=5),  # of four slices, the last is padding alone
    MLP(ffn_hidden_size=20, **SMALL),
    replace(MLP(dropout=0.1, **SMALL), layers=1, vocab_size=41),
    replace(GPT(heads=4, dropout=0.1, tied=True, **SMALL), vocab_size=41),
    replace(GPT(heads=4, tied=True, **SMALL), layers=1),
    Llama(heads=8, kv_heads=4, **SMALL),
    Llama(heads=4, dropout=0.2, ffn_hidden_size=20, **SMALL),
    GPT(heads=4, activation="squared_relu", norm="rms", **SMALL),
]
DROPPED = Dropout(0.3, seed=1, step=2, layer=99, microbatches=(3, 5))
"""As an executor gives it to any layer: which masks a layer's are is the layer's own business."""


def leaves_of(model: CutModel, flats: Sequence[Tensor], rank: int) -> list[list[Tensor]]:
    """A tensor-parallel rank's parameters: its slices of the bodies, and norms of its own."""
    leaves: list[list[Tensor]] = []
    for layer, flat in enumerate(flats):
        layout = model.layout(layer)
        run = flat.chunk(layout.slices)[rank % layout.slices]
        leaves.append([view.clone().requires_grad_() for view in views(layout, run)])
    return leaves


def played(
    model: CutModel, ranks: list[list[list[Tensor]]], x: Tensor, dropout: Dropout, cuts: list[range]
) -> list[Tensor]:
    """Every rank's slice of the logits; norms run on the ranks' `cuts` of the sequence."""
    ranks = [with_borrowed(model, leaves) for leaves in ranks]
    residuals: list[tuple[Tensor, ...]] = [()] * len(cuts)
    branches: list[Tensor] = []
    for number, (layer, run) in enumerate(zip(layers_of(model), model.runs, strict=True)):
        if run.cut:
            shares = [piece_of(model, number, rank) for rank in range(len(ranks))]
            branches = [layer.run(ranks[i][number], (x,), share, dropout)[0] for i, share in enumerate(shares)]
        else:
            branch = torch.stack(branches).sum(0)
            made = [
                layer.run(ranks[i][number], (branch[:, t.start : t.stop], *residuals[i]), Share(tokens=t), dropout)
                for i, t in enumerate(cuts)
            ]
            x, residuals = torch.cat([normalised for normalised, *_ in made], 1), [tuple(each[1:]) for each in made]
    return branches


def gradients_of(model: CutModel, ranks: list[list[list[Tensor]]]) -> list[Tensor]:
    """Flat gradients: the slices' one after the other, the norms' summed over ranks."""
    flats: list[Tensor] = []
    for layer, its in enumerate(model.runs):
        layout = model.layout(layer)
        runs = torch.zeros(len(ranks), layout.run_numel, dtype=torch.float64)
        for run, leaves in zip(runs, ranks, strict=True):
            fill_gradient(run, layout, leaves[layer])  # a rank without a cut of the sequence has no part in the norms
        flats.append(runs.flatten() if its.cut else runs.sum(0))
    return flats


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("slices", [1, 2, 4])
@pytest.mark.parametrize("whole", MODELS, ids=str)
def test_sliced_half_blocks_equal_the_whole_model_in_loss_and_gradients(
    whole: Blocks, slices: int, sequence_parallel: bool
) -> None:
    flats, (tokens, targets) = random_flats(whole), random_batch(whole, 4)
    targets[0, :5] = -1
    expected, theirs = whole_step(whole, flats, (tokens, targets))

    model = cut(whole, tp=slices)
    layers = to_layers(model, flats)
    ranks = [leaves_of(model, layers, rank) for rank in range(slices)]
    length = whole.seq_len // slices if sequence_parallel else whole.seq_len
    cuts = [range(start, start + length) for start in range(0, whole.seq_len, length)]
    logits = played(model, ranks, tokens, Dropout(whole.dropout, 1, 2, 99, (3, 5)), cuts)
    firsts = [model.first_token(rank) for rank in range(slices)]
    stats = torch.stack([loss_stats(its, targets, first) for its, first in zip(logits, firsts, strict=True)])
    torch.autograd.backward(
        logits, [loss_gradient(its, stats, targets, first) for its, first in zip(logits, firsts, strict=True)]
    )

    assert error(combined_loss(stats, targets), expected) <= 1e-12
    ours = to_blocks(model, gradients_of(model, ranks))
    assert all(error(a, b) <= 1e-12 for a, b in zip(ours, theirs, strict=True))


GPT_CUT = GPT(heads=4, **SMALL)


@pytest.mark.parametrize("dropout", [None, DROPPED])
@pytest.mark.parametrize("layer", range(0, cut(GPT_CUT).layers - 1, 2))
def test_a_bodys_result_is_the_sum_of_its_slices_results(layer: int, dropout: Dropout | None) -> None:
    flats, one, two = random_flats(GPT_CUT), cut(GPT_CUT), cut(GPT_CUT, tp=2)
    x = random_batch(GPT_CUT, 4)[0] if layer == 0 else torch.randn(4, 12, 16, dtype=torch.float64)
    (whole,) = layers_of(one)[layer].run(leaves_of(one, to_layers(one, flats), 0)[layer], (x,), Share(), dropout)
    layers = to_layers(two, flats)
    terms = [
        layers_of(two)[layer].run(leaves_of(two, layers, rank)[layer], (x,), piece_of(two, layer, rank), dropout)[0]
        for rank in range(2)
    ]
    assert error(torch.stack(terms).sum(0), whole) <= 1e-12
    assert all(error(term, whole) > 1e-3 for term in terms)


def test_the_heads_slices_are_slices_of_the_logits_and_padding_is_minus_infinity() -> None:
    whole = replace(GPT(heads=4, **SMALL), vocab_size=37)
    flats, one, four = random_flats(whole), cut(whole), cut(whole, tp=4)
    x, last = torch.randn(4, 12, 16, dtype=torch.float64), one.layers - 1
    logits = layers_of(one)[last](leaves_of(one, to_layers(one, flats), 0)[last], x)
    layers = to_layers(four, flats)
    slices = [
        layers_of(four)[last].run(leaves_of(four, layers, rank)[last], (x,), piece_of(four, last, rank))[0]
        for rank in range(4)
    ]
    together = torch.cat(slices, -1)
    assert together.shape == four.activation_shape(four.layers, 4)
    assert error(together[..., :37], logits) <= 1e-12
    assert together[..., 37:].isneginf().all()


@pytest.mark.parametrize("dropout", [None, DROPPED])
@pytest.mark.parametrize("layer", range(1, cut(GPT_CUT).layers, 2))
@pytest.mark.parametrize("ends", [(6,), (3, 6, 9), (1, 11)])
def test_a_norm_on_slices_of_the_sequence_concatenates_and_its_gradients_sum(
    layer: int, ends: tuple[int, ...], dropout: Dropout | None
) -> None:
    model = cut(GPT_CUT, tp=2)
    flats, compute = to_layers(model, random_flats(GPT_CUT)), layers_of(model)[layer]
    branch, residual, grad_residual, grad_normalised = torch.randn(4, 4, 12, 16, dtype=torch.float64)
    results, totals = list[Tensor](), list[Tensor]()
    for places in [(0, 12), (0, *ends, 12)]:
        cuts = [range(start, stop) for start, stop in pairwise(places)]
        outputs, total = list[Tensor](), torch.zeros((), dtype=torch.float64)
        for its in cuts:
            leaves = leaves_of(model, flats, 0)[layer]
            mine = slice(its.start, its.stop)
            given = (branch[:, mine],) if layer == 1 else (branch[:, mine], residual[:, mine])
            made = compute.run(leaves, given, Share(tokens=its), dropout)
            assert len(made) == (1 if layer == model.layers - 2 else 2), "the last norm hands nothing on"
            torch.autograd.backward(made, [grad_normalised[:, mine], grad_residual[:, mine]][: len(made)])
            outputs.append(torch.stack([y.detach() for y in made]))
            total = total + torch.cat([gradient_of(leaf).flatten() for leaf in leaves])
        results.append(torch.cat(outputs, 2))
        totals.append(total)
    assert error(results[1], results[0]) <= 1e-12
    assert error(totals[1], totals[0]) <= 1e-12


def test_a_body_never_adds_the_residual() -> None:
    """Were it added by every slice, their sum would count it more than once; with zero weights nothing may remain."""
    model = cut(GPT_CUT, tp=2)
    x = torch.randn(4, 12, 16, dtype=torch.float64)
    for layer in range(2, model.layers - 1, 2):
        zeros = [torch.zeros(p.shape, dtype=torch.float64) for p in model.layout(layer).parameters]
        (branch,) = layers_of(model)[layer].run(zeros, (x,), piece_of(model, layer, 1))
        assert not branch.any()


def test_the_residual_that_a_norm_hands_on_is_memory_of_its_own() -> None:
    model = cut(MLP(layers=1))  # neither positions nor dropout: the first residual is the branch itself
    branch = torch.randn(1, 64, 64)
    parameters = views(model.layout(1), initial_weights(model, 1, 0, torch.float32))
    _, residual = layers_of(model)[1].run(parameters, (branch,))
    assert torch.equal(residual, branch)
    assert residual.data_ptr() != branch.data_ptr()


@pytest.mark.parametrize("layer", range(cut(GPT_CUT).layers))
def test_half_blocks_begin_as_the_whole_model_does(layer: int) -> None:
    model = cut(GPT_CUT, tp=4)
    wholes = [initial_weights(GPT_CUT, block, 7, torch.float32) for block in range(2)]
    assert torch.equal(initial_weights(model, layer, 7, torch.float32), to_layers(model, wholes)[layer])
