"""Sampling text."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch leaves some of its annotations out.

import pytest
import torch
from torch import Tensor

from shardlab.common.errors import UserError
from shardlab.models import GPT, MLP, Blocks, Llama, Mixtral, MoE
from shardlab.models.tensors import TextGenerator, TokenSampling, initial_weights, parameter_views
from shardlab.models.tensors.attention import can_cache

GPT_SMALL = GPT(layers=2, hidden_size=16, heads=2, vocab_size=20, seq_len=8)
CACHED = {
    "gpt": GPT(layers=3, hidden_size=16, heads=4, vocab_size=20, seq_len=24),
    "grouped": GPT(layers=2, hidden_size=16, heads=4, kv_heads=2, vocab_size=20, seq_len=24, tied=True),
    "wide heads": GPT(layers=2, hidden_size=16, heads=2, head_dim=12, qk_norm=True, vocab_size=20, seq_len=24),
    "latents": Llama(layers=2, hidden_size=16, heads=4, head_dim=4, kv_rank=8, rope_dim=4, vocab_size=20, seq_len=24),
    "llama": Llama(layers=2, hidden_size=16, heads=4, kv_heads=2, vocab_size=20, seq_len=24),
    "moe": MoE(layers=2, hidden_size=16, heads=2, vocab_size=20, seq_len=24, capacity_factor=None),
    "mixtral": Mixtral(layers=2, hidden_size=16, heads=4, kv_heads=2, vocab_size=20, seq_len=24, capacity_factor=None),
}
GREEDY = TokenSampling(temperature=0)


def weights_of(model: Blocks, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Larger than first weights are, so that scores differ."""
    return [8 * initial_weights(model, layer, 0, dtype) for layer in range(model.layers)]


def text_of(model: Blocks, prompt: list[int], count: int, choice: TokenSampling, *, cached: bool = True) -> list[int]:
    return list(TextGenerator(model, weights_of(model), choice, cached=cached).generate(prompt, count))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", CACHED)
@pytest.mark.parametrize("lengths", [[1] * 24, [7, 1, 5, 1, 1, 9]], ids=["one by one", "several at once"])
def test_scores_with_kept_keys_and_values_are_those_without_at_every_place(
    name: str, lengths: list[int], dtype: torch.dtype
) -> None:
    """They differ by rounding alone: 115 units at most on the CPUs that were tried, whose kernels round differently."""
    model = CACHED[name]
    flats = weights_of(model, dtype)
    tokens = torch.randint(20, (24,), generator=torch.Generator().manual_seed(1)).tolist()
    whole = TextGenerator(model, flats, GREEDY, cached=False).read(tokens)
    writer = TextGenerator(model, flats, GREEDY)
    parts = [writer.read(part.tolist()) for part in torch.tensor(tokens).split(lengths)]
    assert can_cache(model)
    tolerance = 512 * torch.finfo(dtype).eps * float(whole.abs().max())
    torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", CACHED)
def test_the_likeliest_text_is_the_same_with_and_without_also_past_the_last_position(name: str) -> None:
    texts = [text_of(CACHED[name], [3, 1, 4], 30, GREEDY, cached=cached) for cached in (True, False)]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 1


def test_a_text_goes_on_where_it_was_left() -> None:
    once = text_of(GPT_SMALL, [3], 6, TokenSampling())
    writer = TextGenerator(GPT_SMALL, weights_of(GPT_SMALL), TokenSampling())
    assert [*writer.generate([3], 2), *writer.generate([], 4)] == once


def test_experts_that_may_drop_tokens_are_computed_anew() -> None:
    model = MoE(layers=1, hidden_size=16, heads=2, vocab_size=20, seq_len=8)
    assert not can_cache(model)
    assert len(text_of(model, [1, 2], 4, GREEDY)) == 4


def test_a_model_that_knows_each_tokens_successor_writes_it() -> None:
    model = MLP(layers=1, hidden_size=10, vocab_size=10, seq_len=4)
    flat = initial_weights(model, 0, 0, torch.float64)
    for parameter, view in zip(model.layout(0).parameters, parameter_views(model.layout(0), flat), strict=True):
        if parameter.name == "wte.weight":
            view.copy_(torch.eye(10))
        elif parameter.name == "lm_head.weight":
            view.copy_(100 * torch.eye(10).roll(1, 0))
        elif parameter.name.startswith("mlp"):
            view.zero_()
    assert list(TextGenerator(model, [flat], TokenSampling()).generate([7], 6)) == [8, 9, 0, 1, 2, 3]


def test_text_is_a_function_of_the_seed() -> None:
    texts = [text_of(GPT_SMALL, [3, 1, 4], 20, TokenSampling(seed=seed)) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]


def test_only_the_last_tokens_that_a_model_has_places_for_are_context() -> None:
    tail = list(range(8))
    assert text_of(GPT_SMALL, [9, 9, 9, *tail], 9, TokenSampling()) == text_of(GPT_SMALL, tail, 9, TokenSampling())


LOGITS = torch.tensor([0.5, 0.2, 0.2, 0.1]).log()


def token_frequencies(choice: TokenSampling) -> list[float]:
    """How often each of the four tokens is drawn."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.tensor([choice.draw(LOGITS, generator) for _ in range(1500)])
    return (torch.bincount(tokens, minlength=4) / len(tokens)).tolist()


@pytest.mark.parametrize(
    ("choice", "probabilities"),
    [
        (TokenSampling(), [0.5, 0.2, 0.2, 0.1]),
        (TokenSampling(temperature=0), [1, 0, 0, 0]),
        (TokenSampling(temperature=0.5), [25 / 34, 4 / 34, 4 / 34, 1 / 34]),
        (TokenSampling(top_k=2), [5 / 7, 2 / 7, 0, 0]),
        (TokenSampling(top_k=9), [0.5, 0.2, 0.2, 0.1]),
        (TokenSampling(top_p=0.6), [5 / 7, 2 / 7, 0, 0]),
        (TokenSampling(top_p=0.01), [1, 0, 0, 0]),
        (TokenSampling(top_k=3, top_p=0.9), [5 / 9, 2 / 9, 2 / 9, 0]),
    ],
    ids=str,
)
def test_tokens_are_drawn_with_the_probabilities_that_are_asked_for(
    choice: TokenSampling, probabilities: list[float]
) -> None:
    assert token_frequencies(choice) == pytest.approx(probabilities, abs=0.03)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -1.0}, "temperature is -1; give 0 or more"),
        ({"temperature": float("nan")}, "temperature is nan; give 0 or more"),
        ({"top_k": 0}, "top-k is 0, which leaves no token"),
        ({"top_p": 0.0}, "top-p is 0; give a probability"),
        ({"top_p": 1.5}, "top-p is 1.5; give a probability"),
    ],
)
def test_a_choice_that_means_nothing_is_refused(fields: dict[str, float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        TokenSampling(**fields)  # pyright: ignore[reportArgumentType]


def test_a_prompt_that_is_empty_or_of_other_tokens_is_refused() -> None:
    with pytest.raises(UserError, match="the prompt is empty"):
        text_of(GPT_SMALL, [], 5, TokenSampling())
    with pytest.raises(UserError, match="token 20 of the text is outside the model's vocabulary of 20"):
        text_of(GPT_SMALL, [1, 20], 5, TokenSampling())


def test_weights_that_are_nan_are_reported() -> None:
    with pytest.raises(UserError, match="its weights have diverged"):
        TokenSampling().draw(torch.tensor([1.0, float("nan")]), torch.Generator())
