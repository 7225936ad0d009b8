"""The GPT's layers against an independent GPT, written as nanoGPT writes it: modules, a mask and a plain softmax."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardlab.models import GPT, Llama, Mixtral
from shardlab.models.tensors import Share, add_borrowed, cross_entropy, make_layers, parameter_views
from shardlab.models.tensors.attention import rotate, rotations
from shardlab.models.tensors.compute import rms_norm
from tests.models.small import Dimensions
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
        is_outside = name.startswith(("wte", "wpe", "ln_f", "lm_head"))
        return self.get_parameter(name if is_outside else f"h.{layer}.{name}")


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
    ours = [parameter_views(layout, torch.zeros(layout.numel, dtype=torch.float64)) for layout in layouts]
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
    for layer, parameters in zip(make_layers(model), add_borrowed(model, ours), strict=True):
        logits = layer(parameters, logits)
    loss = cross_entropy(logits, targets)
    loss.backward()

    assert error(logits.detach(), expected.detach()) <= 1e-12
    assert error(loss.detach(), expected_loss.detach()) <= 1e-12
    for layer in range(model.layers):
        our_gradient, their_gradient = (
            torch.cat([gradient_of(p).flatten() for p in parameters]) for parameters in (ours[layer], theirs[layer])
        )
        assert error(our_gradient, their_gradient) <= 1e-12


# Llama and Mixtral against independent ones, written as their papers and Llama's own code write them.


SMALL: Dimensions = {"layers": 2, "hidden_size": 24, "vocab_size": 40, "seq_len": 10}


class RMSNorm(nn.Module):
    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


def turn(x: Tensor, theta: float) -> Tensor:
    """x (rows, heads, T, size): each pair of neighbouring features by its angle, with sines and cosines."""
    tokens, size = x.shape[-2:]
    turned = torch.empty_like(x)
    for i in range(0, size, 2):
        angle = torch.arange(tokens, dtype=x.dtype) * theta ** (-i / size)
        a, b = x[..., i], x[..., i + 1]
        turned[..., i] = a * angle.cos() - b * angle.sin()
        turned[..., i + 1] = a * angle.sin() + b * angle.cos()
    return turned


class Attention(nn.Module):
    def __init__(self, config: GPT) -> None:
        super().__init__()
        self.config, size = config, config.hidden_size // config.heads
        assert config.rope_theta is not None
        self.rope_theta = config.rope_theta
        self.kv_heads = config.kv_heads or config.heads
        self.sections = [config.hidden_size, self.kv_heads * size, self.kv_heads * size]
        self.c_attn = nn.Linear(config.hidden_size, sum(self.sections), bias=False)
        self.c_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        config, (rows, tokens, hidden_size) = self.config, x.shape
        q, k, v = (
            part.view(rows, tokens, -1, hidden_size // config.heads).transpose(1, 2)
            for part in self.c_attn(x).split(self.sections, -1)
        )
        q, k = turn(q, self.rope_theta), turn(k, self.rope_theta)
        k, v = (heads.repeat_interleave(config.heads // self.kv_heads, 1) for heads in (k, v))
        scores = q @ k.mT / (hidden_size // config.heads) ** 0.5
        future = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(future, float("-inf")).softmax(-1) @ v
        return self.c_proj(mixed.transpose(1, 2).reshape(rows, tokens, hidden_size))


class SwiGLU(nn.Module):
    def __init__(self, config: GPT) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.hidden_size, 2 * config.hidden, bias=False)
        self.c_proj = nn.Linear(config.hidden, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.c_fc(x).chunk(2, -1)
        return self.c_proj(F.silu(gate) * up)


class Experts(nn.Module):
    """Each token through its `top_k` experts, their probabilities renormalised (arXiv 2401.04088, section 2.1).

    All are sent to the shared ones, if there are any (arXiv 2401.06066, eq. 9).
    """

    def __init__(self, config: Mixtral) -> None:
        super().__init__()
        self.top_k, e = config.top_k, config.experts
        wide = replace(config, ffn_hidden_size=config.shared_experts * config.hidden) if config.shared_experts else None
        self.shared = wide and SwiGLU(wide)
        self.router = nn.Linear(config.hidden_size, e, bias=False)
        self.experts = nn.ParameterDict(
            {
                "c_fc": nn.Parameter(torch.randn(e, 2 * config.hidden, config.hidden_size)),
                "c_proj": nn.Parameter(torch.randn(e, config.hidden_size, config.hidden)),
            }
        )

    def forward(self, x: Tensor) -> Tensor:
        best, choices = self.router(x).topk(self.top_k, -1)
        total = self.shared(x) if self.shared else torch.zeros_like(x)
        for weight, expert in zip(best.softmax(-1).unbind(-1), choices.unbind(-1), strict=True):
            gate, up = torch.einsum("rtc,rthc->rth", x, self.experts["c_fc"][expert]).chunk(2, -1)
            output = torch.einsum("rth,rtch->rtc", F.silu(gate) * up, self.experts["c_proj"][expert])
            total = total + weight[..., None] * output
        return total


class Block_of_llama(nn.Module):
    def __init__(self, config: GPT) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = RMSNorm(config.hidden_size), RMSNorm(config.hidden_size)
        self.attn = Attention(config)
        self.mlp = Experts(config) if isinstance(config, Mixtral) else SwiGLU(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Transformer(nn.Module):
    def __init__(self, config: GPT) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.hidden_size)
        self.h = nn.ModuleList([Block_of_llama(config) for _ in range(config.layers)])
        self.ln_f = RMSNorm(config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens)
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))

    def parameter(self, layer: int, name: str) -> nn.Parameter:
        """The parameter that Shardlab calls `name` in layer `layer`."""
        if name.startswith("mlp.experts"):
            name = f"mlp.experts.{name.split('.')[2]}"
        is_outside = name.startswith(("wte", "ln_f", "lm_head"))
        return self.get_parameter(name if is_outside else f"h.{layer}.{name}")


@pytest.mark.parametrize(
    "model",
    [
        Llama(heads=4, **SMALL),
        Llama(heads=6, kv_heads=2, ffn_hidden_size=20, rope_theta=100.0, **SMALL),
        replace(Llama(heads=4, kv_heads=1, **SMALL), layers=1),
        Mixtral(heads=4, kv_heads=2, experts=4, capacity_factor=None, auxiliary=0.0, **SMALL),
        Mixtral(heads=4, experts=4, shared_experts=2, capacity_factor=None, auxiliary=0.0, **SMALL),
    ],
    ids=str,
)
def test_logits_loss_and_gradients_are_an_independent_models(model: GPT) -> None:
    torch.manual_seed(0)
    reference = Transformer(model).double()
    assert sum(p.numel() for p in reference.parameters()) == model.parameter_count
    layouts = [model.layout(layer) for layer in range(model.layers)]
    theirs = [[reference.parameter(i, p.name) for p in layout.parameters] for i, layout in enumerate(layouts)]
    ours = [parameter_views(layout, torch.zeros(layout.numel, dtype=torch.float64)) for layout in layouts]
    for view, parameter in zip(chain(*ours), chain(*theirs), strict=True):
        parameter.data.add_(torch.randn_like(parameter) / 10)
        view.copy_(parameter.detach()).requires_grad_()

    tokens, targets = torch.randint(model.vocab_size, (2, 5, model.seq_len))
    expected = reference(tokens)
    expected_loss = F.cross_entropy(expected.flatten(0, 1), targets.flatten(), reduction="sum")
    expected_loss.backward()
    logits = tokens
    for layer, parameters in zip(make_layers(model), ours, strict=True):
        logits = layer(parameters, logits, None, Share())
    loss = cross_entropy(logits, targets)
    loss.backward()

    assert error(logits.detach(), expected.detach()) <= 1e-12
    assert error(loss.detach(), expected_loss.detach()) <= 1e-12
    for mine, other in zip(ours, theirs, strict=True):
        gradients = (torch.cat([gradient_of(p).flatten() for p in parameters]) for parameters in (mine, other))
        assert error(*gradients) <= 1e-12


def angles(tokens: Sequence[int], size: int, theta: float, dtype: torch.dtype = torch.float64) -> Tensor:
    return rotations(theta, None, size, tuple(tokens), dtype, torch.device("cpu"))


def test_turns_in_real_numbers_are_those_in_complex_numbers() -> None:
    x = torch.randn(2, 3, 12, dtype=torch.float64, requires_grad=True)
    whole = angles([0, 5, 6], 4, 100.0)
    rotated = [rotate(x, turns, 2) for turns in (whole, torch.view_as_real(whole))]
    torch.testing.assert_close(*rotated, rtol=1e-14, atol=1e-14)
    back = [torch.autograd.grad(tensor.square().sum(), x)[0] for tensor in rotated]
    torch.testing.assert_close(*back, rtol=1e-14, atol=1e-14)


def test_autograd_goes_through_norms_and_turns() -> None:
    def by_angles(y: Tensor) -> Tensor:
        return rotate(y, angles([0, 5, 6], 4, 100.0), 2)

    x = torch.randn(2, 3, 12, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(12, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(rms_norm, (x, weight))
    assert torch.autograd.gradcheck(by_angles, (x,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_half_precision_is_normalised_and_turned_in_single(dtype: torch.dtype) -> None:
    x, weight = torch.randn(2, 8, 12, dtype=dtype), torch.ones(12, dtype=dtype)
    assert rms_norm(100 * x, weight).dtype == dtype
    rotated = rotate(x, angles(range(8), 4, 100.0, torch.float32), 2)
    torch.testing.assert_close(rotated, rotate(x.double(), angles(range(8), 4, 100.0), 2).to(dtype))
    assert torch.equal(rotated[..., 8:], x[..., 8:])  # values stay


def test_products_of_turned_queries_and_keys_depend_on_their_distance_alone() -> None:
    q, k = torch.randn(2, 1, 1, 8, dtype=torch.float64)
    products = [
        (rotate(q, angles([place + 3], 8, 1e4), 1) * rotate(k, angles([place], 8, 1e4), 1)).sum()
        for place in (0, 1, 50, 700)
    ]
    torch.testing.assert_close(torch.stack(products), products[0].expand(4), rtol=1e-12, atol=1e-12)
