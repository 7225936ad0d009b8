"""Sampling text."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

import pytest
import torch

from shardlab.errors import UserError
from shardlab.models import GPT, MLP
from shardlab.models.tensors import generate, initial_weights, views

GPT_SMALL = GPT(layers=2, hidden_size=16, heads=2, vocab_size=20, seq_len=8)
FLATS = [initial_weights(GPT_SMALL, layer, 0, torch.float32) for layer in range(2)]


def test_a_model_that_knows_each_tokens_successor_writes_it() -> None:
    model = MLP(layers=1, hidden_size=10, vocab_size=10, seq_len=4)
    flat = initial_weights(model, 0, 0, torch.float64)
    for parameter, view in zip(model.layout(0).parameters, views(model.layout(0), flat), strict=True):
        if parameter.name == "wte.weight":
            view.copy_(torch.eye(10))
        elif parameter.name == "lm_head.weight":
            view.copy_(100 * torch.eye(10).roll(1, 0))
        elif parameter.name.startswith("mlp"):
            view.zero_()
    assert generate(model, [flat], torch.tensor([7]), 6, seed=0).tolist() == [7, 8, 9, 0, 1, 2, 3]


def test_text_is_a_function_of_the_seed_and_begins_with_the_prompt() -> None:
    prompt = torch.tensor([3, 1, 4])
    texts = [generate(GPT_SMALL, FLATS, prompt, 20, seed) for seed in (0, 0, 1)]
    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0], texts[2])
    assert all(text.shape == (23,) and torch.equal(text[:3], prompt) for text in texts)
    assert not texts[0].requires_grad


def test_only_the_last_block_of_the_text_is_context() -> None:
    tail = torch.arange(8)
    long = torch.cat([torch.tensor([9, 9, 9]), tail])
    assert torch.equal(generate(GPT_SMALL, FLATS, long, 9, 0)[3:], generate(GPT_SMALL, FLATS, tail, 9, 0))


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(UserError, match="the prompt is empty"):
        generate(GPT_SMALL, FLATS, torch.empty(0, dtype=torch.int64), 5, 0)
