"""The layers' arithmetic: what each token sees, and dropout."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardlab.models import GPT, MLP, Blocks, CutModel, Llama, Model, cut
from shardlab.models.attention import Attend
from shardlab.models.tensors import (
    Dropout,
    Share,
    add_borrowed,
    combine_loss,
    cross_entropy,
    initial_weights,
    loss_gradient,
    loss_stats,
    make_layers,
    parameter_views,
    to_blocks,
    to_layers,
)
from shardlab.models.tensors.attention import attend, attend_backward, consecutive_runs, merge, select_rows
from tests.models.conftest import piece_of
from tests.models.small import Dimensions, WithHeads
from tests.models.tensors.comparing import error, fill_gradient, gradient_of, random_batch, random_flats, whole_step
from tests.support.thorough import examples, sampled

SMALL: WithHeads = {"layers": 2, "hidden_size": 24, "heads": 3, "vocab_size": 40, "seq_len": 10}


def parameters_of(model: Model, dtype: torch.dtype = torch.float64) -> list[list[Tensor]]:
    """Random ones, also where first weights would be 0 or 1."""
    flats = [initial_weights(model, layer, 0, dtype) for layer in range(model.layers)]
    parameters = [parameter_views(model.layout(layer), flat) for layer, flat in enumerate(flats)]
    generator = torch.Generator().manual_seed(1)
    return [[p.add_(torch.randn(p.shape, dtype=dtype, generator=generator) / 5) for p in layer] for layer in parameters]


def run(model: Model, parameters: Sequence[Sequence[Tensor]], x: Tensor, dropouts: Sequence[Dropout | None]) -> Tensor:
    for layer, weights, dropout in zip(make_layers(model), parameters, dropouts, strict=True):
        x = layer(weights, x, dropout)
    return x


def test_an_mlp_sees_one_token_only() -> None:
    model = MLP(layers=2, hidden_size=16, vocab_size=20, seq_len=8)
    parameters, tokens = parameters_of(model), torch.randint(20, (3, 8))
    whole = run(model, parameters, tokens, [None] * 2)
    one = run(model, parameters, tokens[:, 4:5], [None] * 2)
    assert error(one, whole[:, 4:5]) <= 1e-12


def test_a_gpt_sees_no_later_token() -> None:
    model = GPT(**SMALL)
    parameters, tokens = parameters_of(model), torch.randint(40, (3, 10))
    for dropout in (None, Dropout(1e-15, 0, 0, 0, (0,))):
        whole = run(model, parameters, tokens, [dropout] * 2)
        start = run(model, parameters, tokens[:, :6], [dropout] * 2)
        assert error(start, whole[:, :6]) <= 1e-12


def test_attention_step_by_step_equals_the_fused_one() -> None:
    model = GPT(**SMALL)
    parameters, tokens = parameters_of(model), torch.randint(40, (3, 10))
    hardly = [Dropout(1e-15, 0, 0, layer, (0,)) for layer in range(2)]
    assert error(run(model, parameters, tokens, hardly), run(model, parameters, tokens, [None] * 2)) <= 1e-12


@pytest.mark.parametrize("model", [GPT(**SMALL), MLP(layers=2, hidden_size=24, vocab_size=40, seq_len=10)], ids=str)
def test_microbatches_together_equal_microbatches_apart(model: Model) -> None:
    parameters, tokens = parameters_of(model), torch.randint(40, (4, 10))
    together, first, second = (
        run(model, parameters, rows, [Dropout(0.3, 0, 5, layer, microbatches) for layer in range(2)])
        for rows, microbatches in [(tokens, (3, 6)), (tokens[:2], (3,)), (tokens[2:], (6,))]
    )
    assert error(together, torch.cat([first, second])) <= 1e-12
    assert error(together, run(model, parameters, tokens, [None] * 2)) > 0.01


def test_dropout_of_probability_zero_is_none() -> None:
    model = replace(GPT(**SMALL), layers=1)
    parameters, tokens = parameters_of(model), torch.randint(40, (4, 10))
    zero = run(model, parameters, tokens, [Dropout(0.0, 0, 0, 0, (0,))])
    assert torch.equal(zero, run(model, parameters, tokens, [None]))


def test_a_loss_in_half_precision_is_summed_in_single() -> None:
    logits, targets = torch.zeros(4, 1000, 2, dtype=torch.bfloat16), torch.zeros(4, 1000, dtype=torch.int64)
    loss = cross_entropy(logits, targets)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, 4000 * torch.tensor(2.0).log())


# Half-blocks, sliced, with the collectives played by hand, equal the whole model in loss and gradients.


HALVES_SMALL: Dimensions = {"layers": 2, "hidden_size": 16, "vocab_size": 40, "seq_len": 12}
MODELS: list[Blocks] = [
    GPT(heads=4, **HALVES_SMALL),
    GPT(heads=8, kv_heads=4, dropout=0.3, **HALVES_SMALL),
    replace(GPT(heads=4, bias=False, **HALVES_SMALL), vocab_size=37),
    replace(GPT(heads=4, dropout=0.2, **HALVES_SMALL), vocab_size=5),  # of four slices, the last is padding alone
    MLP(ffn_hidden_size=20, **HALVES_SMALL),
    replace(MLP(dropout=0.1, **HALVES_SMALL), layers=1, vocab_size=41),
    replace(GPT(heads=4, dropout=0.1, tied=True, **HALVES_SMALL), vocab_size=41),
    replace(GPT(heads=4, tied=True, **HALVES_SMALL), layers=1),
    Llama(heads=8, kv_heads=4, **HALVES_SMALL),
    Llama(heads=4, kv_heads=4, head_dim=6, dropout=0.1, **HALVES_SMALL),
    Llama(heads=4, head_dim=3, kv_rank=6, q_rank=5, rope_dim=4, dropout=0.1, **HALVES_SMALL),
    Llama(heads=4, head_dim=3, kv_rank=6, rope_dim=4, **HALVES_SMALL),
    Llama(heads=4, dropout=0.2, ffn_hidden_size=20, **HALVES_SMALL),
    GPT(heads=4, activation="squared_relu", norm="rms", **HALVES_SMALL),
]
DROPPED = Dropout(0.3, seed=1, step=2, layer=99, microbatches=(3, 5))
"""As an executor gives it to any layer: which masks a layer's are is the layer's own business."""


def leaves_of(model: CutModel, flats: Sequence[Tensor], rank: int) -> list[list[Tensor]]:
    """A tensor-parallel rank's parameters: its slices of the bodies, and norms of its own."""
    leaves: list[list[Tensor]] = []
    for layer, flat in enumerate(flats):
        layout = model.layout(layer)
        run = flat.chunk(layout.slices)[rank % layout.slices]
        leaves.append([view.clone().requires_grad_() for view in parameter_views(layout, run)])
    return leaves


def played(
    model: CutModel, ranks: list[list[list[Tensor]]], x: Tensor, dropout: Dropout, cuts: list[range]
) -> list[Tensor]:
    """Every rank's slice of the logits; norms run on the ranks' `cuts` of the sequence."""
    ranks = [add_borrowed(model, leaves) for leaves in ranks]
    residuals: list[tuple[Tensor, ...]] = [()] * len(cuts)
    branches: list[Tensor] = []
    for number, (layer, run) in enumerate(zip(make_layers(model), model.runs, strict=True)):
        if run.cut:
            shares = [piece_of(model, number, rank) for rank in range(len(ranks))]
            branches = [layer.run(ranks[i][number], (x,), share, dropout)[0] for i, share in enumerate(shares)]
        else:
            branch = torch.stack(branches).sum(0)
            outputs = [
                layer.run(ranks[i][number], (branch[:, t.start : t.stop], *residuals[i]), Share(tokens=t), dropout)
                for i, t in enumerate(cuts)
            ]
            x, residuals = (
                torch.cat([normalised for normalised, *_ in outputs], 1),
                [tuple(values[1:]) for values in outputs],
            )
    return branches


def gradients_of(model: CutModel, ranks: list[list[list[Tensor]]]) -> list[Tensor]:
    """Flat gradients: the slices' one after the other, the norms' summed over ranks."""
    flats: list[Tensor] = []
    for layer, layer_run in enumerate(model.runs):
        layout = model.layout(layer)
        runs = torch.zeros(len(ranks), layout.run_numel, dtype=torch.float64)
        for run, leaves in zip(runs, ranks, strict=True):
            fill_gradient(run, layout, leaves[layer])  # a rank without a cut of the sequence has no part in the norms
        flats.append(runs.flatten() if layer_run.cut else runs.sum(0))
    return flats


@pytest.mark.parametrize(
    ("slices", "sequence_parallel"),
    sampled(product((1, 2, 4), (False, True)), [(1, False), (2, False), (4, True)].__contains__),
)
@pytest.mark.parametrize("whole", MODELS, ids=str)
def test_sliced_half_blocks_equal_the_whole_model_in_loss_and_gradients(
    whole: Blocks, slices: int, sequence_parallel: bool
) -> None:
    require_equal_slices(whole, slices, sequence_parallel)


@settings(max_examples=examples(12), deadline=None)
@given(st.data())
def test_slices_equal_the_whole_model_however_wide_its_heads_are(data: st.DataObject) -> None:
    slices, grouped, head_dim = (data.draw(st.integers(*ends)) for ends in ((1, 3), (1, 3), (1, 9)))
    kv_heads = slices * data.draw(st.integers(1, 2))
    rotary = head_dim % 2 == 0 and data.draw(st.booleans())
    whole = GPT(
        heads=kv_heads * grouped, kv_heads=kv_heads, head_dim=head_dim, rope_theta=1e3 if rotary else None,
        ffn_hidden_size=24, dropout=data.draw(st.sampled_from((0.0, 0.3))), bias=data.draw(st.booleans()),
        qk_norm=data.draw(st.booleans()), qkv_bias=data.draw(st.booleans()),
        **HALVES_SMALL,
    )  # fmt: skip
    require_equal_slices(whole, slices, sequence_parallel=data.draw(st.booleans()))


def require_equal_slices(whole: Blocks, slices: int, sequence_parallel: bool) -> None:
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
    stats = torch.stack([loss_stats(part, targets, first) for part, first in zip(logits, firsts, strict=True)])
    torch.autograd.backward(
        logits, [loss_gradient(part, stats, targets, first) for part, first in zip(logits, firsts, strict=True)]
    )

    assert error(combine_loss(stats, targets), expected) <= 1e-12
    ours = to_blocks(model, gradients_of(model, ranks))
    assert all(error(a, b) <= 1e-12 for a, b in zip(ours, theirs, strict=True))


GPT_CUT = GPT(heads=4, **HALVES_SMALL)


@pytest.mark.parametrize("dropout", [None, DROPPED])
@pytest.mark.parametrize("layer", range(0, cut(GPT_CUT).layers - 1, 2))
def test_a_bodys_result_is_the_sum_of_its_slices_results(layer: int, dropout: Dropout | None) -> None:
    flats, one, two = random_flats(GPT_CUT), cut(GPT_CUT), cut(GPT_CUT, tp=2)
    x = random_batch(GPT_CUT, 4)[0] if layer == 0 else torch.randn(4, 12, 16, dtype=torch.float64)
    (whole,) = make_layers(one)[layer].run(leaves_of(one, to_layers(one, flats), 0)[layer], (x,), Share(), dropout)
    layers = to_layers(two, flats)
    terms = [
        make_layers(two)[layer].run(leaves_of(two, layers, rank)[layer], (x,), piece_of(two, layer, rank), dropout)[0]
        for rank in range(2)
    ]
    assert error(torch.stack(terms).sum(0), whole) <= 1e-12
    assert all(error(term, whole) > 1e-3 for term in terms)


def test_the_heads_slices_are_slices_of_the_logits_and_padding_is_minus_infinity() -> None:
    whole = replace(GPT(heads=4, **HALVES_SMALL), vocab_size=37)
    flats, one, four = random_flats(whole), cut(whole), cut(whole, tp=4)
    x, last = torch.randn(4, 12, 16, dtype=torch.float64), one.layers - 1
    logits = make_layers(one)[last](leaves_of(one, to_layers(one, flats), 0)[last], x)
    layers = to_layers(four, flats)
    slices = [
        make_layers(four)[last].run(leaves_of(four, layers, rank)[last], (x,), piece_of(four, last, rank))[0]
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
    flats, compute = to_layers(model, random_flats(GPT_CUT)), make_layers(model)[layer]
    branch, residual, grad_residual, grad_normalised = torch.randn(4, 4, 12, 16, dtype=torch.float64)
    results, totals = list[Tensor](), list[Tensor]()
    for places in [(0, 12), (0, *ends, 12)]:
        cuts = [range(start, stop) for start, stop in pairwise(places)]
        outputs, total = list[Tensor](), torch.zeros((), dtype=torch.float64)
        for tokens in cuts:
            leaves = leaves_of(model, flats, 0)[layer]
            mine = slice(tokens.start, tokens.stop)
            inputs = (branch[:, mine],) if layer == 1 else (branch[:, mine], residual[:, mine])
            normed = compute.run(leaves, inputs, Share(tokens=tokens), dropout)
            assert len(normed) == (1 if layer == model.layers - 2 else 2), "the last norm hands nothing on"
            torch.autograd.backward(normed, [grad_normalised[:, mine], grad_residual[:, mine]][: len(normed)])
            outputs.append(torch.stack([y.detach() for y in normed]))
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
        (branch,) = make_layers(model)[layer].run(zeros, (x,), piece_of(model, layer, 1))
        assert not branch.any()


def test_the_residual_that_a_norm_hands_on_is_memory_of_its_own() -> None:
    model = cut(MLP(layers=1))  # neither positions nor dropout: the first residual is the branch itself
    branch = torch.randn(1, 64, 64)
    parameters = parameter_views(model.layout(1), initial_weights(model, 1, 0, torch.float32))
    _, residual = make_layers(model)[1].run(parameters, (branch,))
    assert torch.equal(residual, branch)
    assert residual.data_ptr() != branch.data_ptr()


@pytest.mark.parametrize("layer", range(cut(GPT_CUT).layers))
def test_half_blocks_begin_as_the_whole_model_does(layer: int) -> None:
    model = cut(GPT_CUT, tp=4)
    wholes = [initial_weights(GPT_CUT, block, 7, torch.float32) for block in range(2)]
    assert torch.equal(initial_weights(model, layer, 7, torch.float32), to_layers(model, wholes)[layer])


# A model cut for context parallelism, with attention between its layers, equals the whole in loss and gradients.


CONTEXT_SMALL: Dimensions = {"layers": 2, "hidden_size": 16, "vocab_size": 40, "seq_len": 12}
CONTEXT_MODELS: list[Blocks] = [
    GPT(heads=4, **CONTEXT_SMALL),
    GPT(heads=8, kv_heads=4, bias=False, **CONTEXT_SMALL),
    MLP(ffn_hidden_size=20, dropout=0.3, **CONTEXT_SMALL),
    Llama(heads=4, kv_heads=2, **CONTEXT_SMALL),
    Llama(heads=4, kv_heads=2, head_dim=6, qk_norm=True, qkv_bias=True, **CONTEXT_SMALL),
    Llama(heads=4, head_dim=3, kv_rank=6, rope_dim=4, **CONTEXT_SMALL),
    GPT(heads=4, rope_theta=1e3, activation="squared_relu", **CONTEXT_SMALL),
]
TOKENS = [[0, 1, 2, 9, 10, 11], [3, 4, 5, 6, 7, 8]]
"""Of each of two ranks, in the balanced order."""


class Attended(torch.autograd.Function):
    """All ranks' queries that meet all ranks' keys and values, block by block."""

    @staticmethod
    def forward(ctx: Any, part: Attend, *inputs: Tensor) -> tuple[Tensor, ...]:
        queries, blocks = inputs[:2], inputs[2:]
        outputs = [
            merge(part, *(attend(part, q, kv, mine, theirs) for kv, theirs in zip(blocks, TOKENS, strict=True)))
            for q, mine in zip(queries, TOKENS, strict=True)
        ]
        ctx.part = part
        ctx.save_for_backward(*inputs, *outputs)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        tensors: tuple[Tensor, ...] = ctx.saved_tensors
        queries, blocks, outputs = (tensors[i : i + 2] for i in (0, 2, 4))
        totals = [torch.zeros_like(x) for x in (*queries, *blocks)]
        for i, mine in enumerate(TOKENS):
            for j, theirs in enumerate(TOKENS):
                terms = attend_backward(ctx.part, queries[i], blocks[j], outputs[i], gradients[i], mine, theirs)
                totals[i] += terms[0]
                totals[2 + j] += terms[1]
        return None, *totals


@pytest.mark.parametrize("whole", CONTEXT_MODELS, ids=str)
def test_the_cut_model_equals_the_whole_in_loss_and_gradients(whole: Blocks) -> None:
    flats, (tokens, targets) = random_flats(whole), random_batch(whole, 4)
    dropout = Dropout(whole.dropout, 1, 2, 99, (3, 5))
    expected, theirs = whole_step(whole, flats, (tokens, targets))

    model = cut(whole, attention_apart=True)
    leaves = [
        [v.requires_grad_() for v in parameter_views(model.layout(layer), flat)]
        for layer, flat in enumerate(to_layers(model, flats))
    ]
    values = [select_rows(tokens.T, mine).T for mine in TOKENS]
    residuals: list[tuple[Tensor, ...]] = [(), ()]
    for number, (layer, signature) in enumerate(zip(make_layers(model), model.signatures, strict=True)):
        outputs = [
            layer.run(leaves[number], (x, *(r if signature.carries else ())), Share(tokens=mine), dropout)
            for x, r, mine in zip(values, residuals, TOKENS, strict=True)
        ]
        if signature.projects:
            inputs = *(q for q, _ in outputs), *(kv for _, kv in outputs)
            values = list(cast("tuple[Tensor, ...]", Attended.apply(model.attention_after(number), *inputs)))
        else:
            values = [x for x, *_ in outputs]
        if signature.carries:
            residuals = [carried[1:] for carried in outputs]
    losses = [cross_entropy(x, select_rows(targets.T, mine).T) for x, mine in zip(values, TOKENS, strict=True)]
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
    assert select_rows(matrix, range(2, 5)).data_ptr() == matrix[2].data_ptr()
    assert torch.equal(select_rows(matrix, [0, 1, 4]), matrix[[0, 1, 4]])
    assert consecutive_runs([3]) == [(0, 1)]
