"""The GPT's layers against an independent GPT, written as nanoGPT writes it: modules, a mask and a plain softmax."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

import math
from itertools import chain

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardlab.models import GPT
from shardlab.models.tensors import layers_of, loss_of, views, with_borrowed
from tests.models.tensors.comparing import error, gradient_of


class CausalSelfAttention(nn.Module):
    def __init__(self, config: GPT) -> None:
        super().__init__()
        self.heads, hidden_size = config.heads, config.hidden_size
        self.kv_heads = config.kv_heads or config.heads
        self.kv_width = hidden_size // self.heads * self.kv_heads
        self.c_attn = nn.Linear(hidden_size, hidden_size + 2 * self.kv_width, bias=config.bias)
        self.c_proj = nn.Linear(hidden_size, hidden_size, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, hidden_size = x.size()
        q, k, v = (
            part.view(rows, tokens, -1, hidden_size // self.heads).transpose(1, 2)
            for part in self.c_attn(x).split([hidden_size, self.kv_width, self.kv_width], dim=2)
        )
        shared = [head * self.kv_heads // self.heads for head in range(self.heads)]  # whose keys each head uses
        k, v = k[:, shared], v[:, shared]
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        scores = scores.masked_fill(torch.tril(torch.ones(tokens, tokens)) == 0, float("-inf"))
        y = F.softmax(scores, dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(rows, tokens, hidden_size))


class MLP(nn.Module):
    def __init__(self, config: GPT) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.hidden_size, 4 * config.hidden_size, bias=config.bias)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(4 * config.hidden_size, config.hidden_size, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(self.gelu(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, config: GPT) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.hidden_size, bias=config.bias)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.hidden_size, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    def __init__(self, config: GPT) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.hidden_size)
        self.wpe = nn.Embedding(config.seq_len, config.hidden_size)
        self.h = nn.ModuleList([Block(config) for _ in range(config.layers)])
        self.ln_f = nn.LayerNorm(config.hidden_size, bias=config.bias)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tied:
            self.lm_head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.size(1)))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))

    def parameter(self, layer: int, name: str) -> nn.Parameter:
        """The parameter that Shardlab calls `name` in layer `layer`."""
        outside = name.startswith(("wte", "wpe", "ln_f", "lm_head"))
        return self.get_parameter(name if outside else f"h.{layer}.{name}")


@pytest.mark.parametrize(
    "model",
    [
        GPT(layers=3, hidden_size=24, heads=3, vocab_size=40, seq_len=10),
        GPT(layers=1, hidden_size=24, heads=1, vocab_size=40, seq_len=10),
        GPT(layers=2, hidden_size=16, heads=4, vocab_size=40, seq_len=10, bias=False),
        GPT(layers=1, hidden_size=16, heads=2, vocab_size=40, seq_len=10, tied=True),
        GPT(layers=3, hidden_size=16, heads=2, vocab_size=40, seq_len=10, tied=True),
        GPT(layers=2, hidden_size=24, heads=6, kv_heads=2, vocab_size=40, seq_len=10),
    ],
    ids=str,
)
def test_a_gpt_equals_nanogpt_in_logits_loss_and_gradients(model: GPT) -> None:
    torch.manual_seed(0)
    reference = NanoGPT(model).double()
    assert sum(p.numel() for p in reference.parameters()) == model.parameter_count
    layouts = [model.layout(layer) for layer in range(model.layers)]
    theirs = [[reference.parameter(i, p.name) for p in layout.parameters] for i, layout in enumerate(layouts)]
    ours = [views(layout, torch.zeros(layout.numel, dtype=torch.float64)) for layout in layouts]
    for view, parameter in zip(chain(*ours), chain(*theirs), strict=True):
        parameter.data.add_(torch.randn_like(parameter) / 10)  # biases and norms too, which begin as 0 and 1
        view.copy_(parameter.detach()).requires_grad_()

    tokens = torch.randint(model.vocab_size, (5, model.seq_len))
    targets = torch.randint(model.vocab_size, (5, model.seq_len))
    targets[:, :3] = -1
    expected = reference(tokens)
    expected_loss = F.cross_entropy(expected.view(-1, model.vocab_size), targets.view(-1), ignore_index=-1)
    expected_loss = expected_loss * (targets != -1).sum()
    expected_loss.backward()
    logits = tokens
    for layer, parameters in zip(layers_of(model), with_borrowed(model, ours), strict=True):
        logits = layer(parameters, logits)
    loss = loss_of(logits, targets)
    loss.backward()

    assert error(logits.detach(), expected.detach()) <= 1e-12
    assert error(loss.detach(), expected_loss.detach()) <= 1e-12
    for layer in range(model.layers):
        our_gradient, their_gradient = (
            torch.cat([gradient_of(p).flatten() for p in parameters]) for parameters in (ours[layer], theirs[layer])
        )
        assert error(our_gradient, their_gradient) <= 1e-12
