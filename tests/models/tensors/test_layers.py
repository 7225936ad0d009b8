"""The layers' arithmetic: what each token sees, and dropout."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from shardlab.models import GPT, MLP, Model
from shardlab.models.tensors import Dropout, initial_weights, layers_of, loss_of, views
from tests.models.small import WithHeads
from tests.models.tensors.comparing import error

SMALL: WithHeads = {"layers": 2, "hidden_size": 24, "heads": 3, "vocab_size": 40, "seq_len": 10}


def parameters_of(model: Model, dtype: torch.dtype = torch.float64) -> list[list[Tensor]]:
    """Random ones, also where first weights would be 0 or 1."""
    flats = [initial_weights(model, layer, 0, dtype) for layer in range(model.layers)]
    parameters = [views(model.layout(layer), flat) for layer, flat in enumerate(flats)]
    generator = torch.Generator().manual_seed(1)
    return [[p.add_(torch.randn(p.shape, dtype=dtype, generator=generator) / 5) for p in layer] for layer in parameters]


def run(model: Model, parameters: Sequence[Sequence[Tensor]], x: Tensor, dropouts: Sequence[Dropout | None]) -> Tensor:
    for layer, weights, dropout in zip(layers_of(model), parameters, dropouts, strict=True):
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
    loss = loss_of(logits, targets)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, 4000 * torch.tensor(2.0).log())
