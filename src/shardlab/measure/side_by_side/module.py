"""The models' GPT as one would write it in PyTorch: an nn.Module, whose parameters have the names of our layouts."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardlab.models import GPT
from shardlab.models.tensors import initial_weights, named_views
from shardlab.optimizers import OptimizerConfig


class CausalAttention(nn.Module):
    """Causal attention of so many heads, from `width` features and back."""

    def __init__(self, width: int, heads: int, slices: int) -> None:
        super().__init__()
        self.heads = heads // slices
        self.c_attn = nn.Linear(width, 3 * width // slices)
        self.c_proj = nn.Linear(width // slices, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, _ = x.shape
        parts = self.c_attn(x).chunk(3, -1)
        q, k, v = (part.view(rows, tokens, self.heads, -1).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """Two linear maps with a GELU between them."""

    def __init__(self, width: int, slices: int) -> None:
        super().__init__()
        self.c_fc = nn.Linear(width, 4 * width // slices)
        self.c_proj = nn.Linear(4 * width // slices, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x)))


class Block(nn.Module):
    """A pre-norm block of a transformer."""

    def __init__(self, width: int, heads: int, slices: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = CausalAttention(width, heads, slices)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = FeedForward(width, slices)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPTModule(nn.Module):
    """Some of a GPT's blocks, one after the other; the embedding comes with the first, the head with the last.

    Args:
        model: the whole.
        layers: which of its blocks.
        slices: that heads, features inside MLPs and the vocabulary of the head are cut into; one of them is made.
    """

    def __init__(self, model: GPT, layers: range, slices: int = 1) -> None:
        super().__init__()
        width = model.hidden_size
        self.embeds, self.scores = 0 in layers, model.layers - 1 in layers
        if self.embeds:
            self.wte = nn.Embedding(model.vocab_size, width)
            self.wpe = nn.Embedding(model.seq_len, width)
        self.blocks = nn.ModuleList(Block(width, model.heads, slices) for _ in layers)
        if self.scores:
            self.ln_f = nn.LayerNorm(width)
            self.lm_head = nn.Linear(width, model.vocab_size // slices, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (rows, T), or features (rows, T, C) of an earlier block, to features, or to logits."""
        if self.embeds:
            x = self.wte(x) + self.wpe.weight
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.ln_f(x)) if self.scores else x


def gpt_module(model: GPT, layers: range, seed: int, device: torch.device) -> GPTModule:
    """Blocks of a GPT with the first weights that our layers have."""
    module = GPTModule(model, layers)
    parameters = dict(module.named_parameters())
    with torch.no_grad():
        for place, layer in enumerate(layers):
            first = initial_weights(model, layer, seed, torch.float32)
            for name, weights in named_views(model.layout(layer), first).items():
                parameters.get(name, parameters.get(f"blocks.{place}.{name}", weights)).copy_(weights)
    return module.to(device)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy, the mean over tokens; logits (rows, T, vocabulary), targets (rows, T)."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def groups_of(parameters: Sequence[Tensor], config: OptimizerConfig) -> list[dict[str, object]]:
    """Groups of parameters for an optimizer: matrices decay, biases and norms do not."""
    matrices = [each for each in parameters if each.dim() > 1]
    others = [each for each in parameters if each.dim() < 2]
    return [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]


def adamw(parameters: Sequence[Tensor], config: OptimizerConfig) -> torch.optim.Optimizer:
    """Fused AdamW, set as our optimizer is."""
    return torch.optim.AdamW(
        groups_of(parameters, config), lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=True
    )
