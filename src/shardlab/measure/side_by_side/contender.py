"""The models' GPT as one would write it in PyTorch: an nn.Module, whose parameters have the names of our layouts."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._guards import active_fake_mode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardlab.execute.optimizers.settings import OptimizerConfig
from shardlab.execute.transport.neighbours import Neighbours
from shardlab.measure.side_by_side.results import OPTIMIZER
from shardlab.models import GPT
from shardlab.models.tensors import generator_of, initial_weights, named_views


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


# What takes turns: something that trains one step at a time, and its data.


DRAWN = 8
"""Steps whose tokens are drawn beforehand; then they come again."""


class Contender(Protocol):
    """One side of a pair, on one rank."""

    def step(self) -> Tensor:
        """Train one step.

        Returns:
            (2,) float64: the loss summed over the tokens that this rank reports, and their number, as
            `Executor.step` gives them.
        """
        ...


class DrawnBatches:
    """Microbatches of any tokens, drawn before anything is timed; the same on every rank and for both sides."""

    def __init__(self, micro_batch_size: int, microbatches: int, tokens: int, vocab_size: int) -> None:
        self.micro_batch_size = micro_batch_size
        self._tokens = tokens

        def draw(step: int, microbatch: int) -> tuple[Tensor, Tensor]:
            shape = (2, micro_batch_size, tokens)
            x, targets = torch.randint(vocab_size, shape, generator=generator_of("bench", step, microbatch))
            return x, targets

        self._drawn = [[draw(step, m) for m in range(microbatches)] for step in range(DRAWN)]

    def microbatch(self, step: int, microbatch: int, /) -> tuple[Tensor, Tensor]:
        """Tokens and targets, (micro_batch_size, tokens), int64."""
        return self._drawn[step % DRAWN][microbatch]

    def counted(self, step: int, microbatches: int, /) -> int:
        """Targets of a step."""
        return microbatches * self.micro_batch_size * self._tokens

    def whole(self, step: int) -> tuple[Tensor, Tensor]:
        """All microbatches of a step, one after the other."""
        tokens, targets = zip(*self._drawn[step % DRAWN], strict=True)
        return torch.cat(tokens), torch.cat(targets)


@dataclass
class Loop:
    """A PyTorch loop on one batch a step: forward, backward, optimizer.

    Attributes:
        module: wrapped as it may be.
        optimizer: of its parameters.
        batches, microbatch: what the rank trains on.
        device: where.
        reports: whether this rank's tokens are no other rank's.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer
    batches: DrawnBatches
    microbatch: int
    device: torch.device
    reports: bool = True
    at: int = 0

    def step(self) -> Tensor:
        x, targets = (each.to(self.device) for each in self.batches.microbatch(self.at, self.microbatch))
        loss = self.loss(x, targets)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.at += 1
        return reported(loss, targets.numel() if self.reports else 0)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """The loss, whose gradients the parameters then have."""
        loss = loss_of(self.module(x), targets)
        loss.backward()
        return loss


def reported(mean: Tensor, tokens: int) -> Tensor:
    """A mean loss over so many tokens, as a contender reports it."""
    total = mean.detach().double() * tokens
    return torch.stack([total, torch.full_like(total, tokens)])


# The floor: a rank's own share of a step in plain PyTorch, with all communication left out.


class Floor:
    """Forward and backward passes of some modules, then fused AdamW on a share of their parameters.

    What would come from another rank is drawn once: features, and their gradients. So its losses mean nothing.

    Args:
        modules: the rank's part of the model, perhaps one slice of it.
        rows: sequences of a microbatch.
        microbatches: how many the rank computes on.
        one_in: the optimizer steps one in so many elements of every parameter.

    Attributes:
        modules, optimizer: what a step calls.
    """

    def __init__(self, model: GPT, modules: list[GPTModule], rows: int, microbatches: int, one_in: int = 1) -> None:
        self.modules, self._microbatches = modules, microbatches
        parameters = [each for module in modules for each in module.parameters()]
        device = parameters[0].device
        shape = rows, model.seq_len, model.hidden_size
        self._tokens = torch.randint(model.vocab_size, shape[:2], device=device)
        self._features = torch.randn(shape, device=device).requires_grad_()
        self._gradient = torch.randn(shape, device=device)
        leaves = parameters
        if one_in > 1:
            leaves = [each.detach().flatten()[: -(-each.numel() // one_in)] for each in parameters]
            for leaf in leaves:
                leaf.grad = torch.zeros_like(leaf)
        self.optimizer = adamw(leaves, OPTIMIZER)

    def step(self) -> Tensor:
        for _ in range(self._microbatches):
            for module in self.modules:
                self._pass(module)
        self.optimizer.step()
        for module in self.modules:
            module.zero_grad()
        return torch.zeros(2, dtype=torch.float64, device=self._tokens.device)

    def _pass(self, module: GPTModule) -> None:
        made: Tensor = module(self._tokens if module.embeds else self._features)
        self._features.grad = None
        if module.scores:
            loss_of(made, self._tokens % made.shape[-1]).backward()
        else:
            made.backward(self._gradient)


# Peak memory of a contender: on a CPU all storages that torch makes for it, on a GPU what the allocator gives it.
#
# Both sides are measured so from when they are made, so that what the process had before does not count; neither do
# buffers of gloo's and NCCL's own.


Measured = tuple[Contender, list[Tensor], int]
"""A contender, what its first steps gave, and the most bytes during the last of them."""


class LiveStorages(TorchDispatchMode):
    """Counts the bytes of every storage that an op makes while this is entered, for as long as the storage lives.

    As torch's own MemTracker does, which a module that is called twice in a step, as a pipeline's is, makes fail.

    Memory that neighbours share is the messages', as buffers of gloo's are, and is not counted.

    Attributes:
        live: bytes now.
        peak: the most bytes since somebody set it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._sizes: dict[int, int] = {}
        self._shared = {_key(memory.untyped_storage()) for memory in Neighbours.memories()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:  # it calls ops on its local part, which come here
            return NotImplemented
        made = func(*args, **kwargs or {})
        if active_fake_mode() is None:
            for tensor in tree_leaves(made):
                if isinstance(tensor, Tensor):
                    self._see(tensor.untyped_storage())
        return made

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = _key(storage)
        if key in self._shared:
            return
        if key not in self._sizes:
            self._sizes[key] = 0
            weakref.finalize(storage, self._resized, key, None)
        self._resized(key, storage.nbytes())

    def _resized(self, key: int, size: int | None) -> None:
        self.live += (size or 0) - self._sizes.pop(key)
        if size is not None:
            self._sizes[key] = size
        self.peak = max(self.peak, self.live)

    @contextmanager
    def tracking(self) -> Generator[None]:
        """Within this, storages are tracked, also those whose size changes without an op."""
        resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> None:
            resize(storage, size)
            self._see(storage)

        with patch.object(torch.UntypedStorage, "resize_", resize_), self:
            yield


def _key(storage: torch.UntypedStorage) -> int:
    """The address of a storage in C++: equal for every Python object that stands for the same storage."""
    return storage._cdata  # pyright: ignore[reportPrivateUsage]


def made_and_measured(make: Callable[[], Contender], steps: int, device: torch.device) -> Measured:
    """Make a contender and have it train some steps, the last of which is measured."""
    return (_by_allocator if device.type == "cuda" else _by_storages)(make, steps)


def _by_storages(make: Callable[[], Contender], steps: int) -> Measured:
    storages = LiveStorages()
    with storages.tracking():
        contender = make()
        losses = [contender.step() for _ in range(steps - 1)]
        storages.peak = storages.live
        losses.append(contender.step())
    return contender, losses, storages.peak


def _by_allocator(make: Callable[[], Contender], steps: int) -> Measured:
    base = torch.cuda.memory_allocated()
    contender = make()
    losses = [contender.step() for _ in range(steps - 1)]
    torch.cuda.reset_peak_memory_stats()
    losses.append(contender.step())
    return contender, losses, torch.cuda.max_memory_allocated() - base
