"""A GPT in plain PyTorch, and two contenders of a comparison: its training loop, and a lower bound of a step.

`GPTModule` is an nn.Module whose parameters have the names of our layouts. `Loop` trains it. `LowerBound` computes a
rank's share of a step without communication. `measure_memory` runs the first steps of a contender and measures its peak
memory.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
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

from shardlab.execute.transport.neighbours import Neighbours
from shardlab.measure.side_by_side.results import OPTIMIZER
from shardlab.models import GPT
from shardlab.models.tensors import initial_weights, make_generator, named_views


class CausalAttention(nn.Module):
    """Causal self-attention with several heads."""

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
    """Consecutive blocks of a GPT. The first block includes the embedding, and the last block the head.

    Args:
        model: the whole model.
        layers: indices of the blocks.
        slices: number of slices into which the attention heads, the hidden features of MLPs and the vocabulary of the
            output layer are split. The module has one slice of each.
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
        """Map tokens (rows, T), or features (rows, T, C) of an earlier block, to features or to logits."""
        if self.embeds:
            x = self.wte(x) + self.wpe.weight
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.ln_f(x)) if self.scores else x


def gpt_module(model: GPT, layers: range, seed: int, device: torch.device) -> GPTModule:
    """Return blocks of a GPT with the initial weights of our layers."""
    module = GPTModule(model, layers)
    parameters = dict(module.named_parameters())
    with torch.no_grad():
        for position, layer in enumerate(layers):
            first = initial_weights(model, layer, seed, torch.float32)
            for name, weights in named_views(model.layout(layer), first).items():
                parameters.get(name, parameters.get(f"blocks.{position}.{name}", weights)).copy_(weights)
    return module.to(device)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of logits (rows, T, vocabulary) for targets (rows, T)."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


ADAMW: dict[str, Any] = {"lr": OPTIMIZER.learning_rate, "betas": OPTIMIZER.betas, "eps": OPTIMIZER.eps, "fused": True}
"""Arguments of PyTorch's AdamW: the settings of our optimizer."""


def groups_of(parameters: Sequence[Tensor]) -> list[dict[str, Any]]:
    """Return the parameter groups of an optimizer: matrices decay, biases and norms do not."""
    matrices = [parameter for parameter in parameters if parameter.dim() > 1]
    others = [parameter for parameter in parameters if parameter.dim() < 2]
    return [{"params": matrices, "weight_decay": OPTIMIZER.weight_decay}, {"params": others, "weight_decay": 0.0}]


def adamw(*parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
    """Return fused AdamW of one or more sequences of parameters. Each sequence has separate groups."""
    return torch.optim.AdamW([group for sequence in parameters for group in groups_of(sequence)], **ADAMW)


DISTINCT_STEPS = 8
"""Number of steps whose tokens are drawn in advance. Later steps repeat them."""


class Contender(Protocol):
    """One side of a pair, on one rank."""

    def step(self) -> Tensor:
        """Train one step.

        Returns:
            (2,) float64: the sum of the losses of the tokens that this rank reports, and the number of these tokens,
            as in `Executor.step`.
        """
        ...


class DrawnBatches:
    """Microbatches of random tokens, which are drawn before the timing and equal on all ranks and for both sides."""

    def __init__(self, micro_batch_size: int, microbatches: int, tokens: int, vocab_size: int) -> None:
        self.micro_batch_size = micro_batch_size
        self._tokens = tokens

        def draw(step: int, microbatch: int) -> tuple[Tensor, Tensor]:
            shape = (2, micro_batch_size, tokens)
            x, targets = torch.randint(vocab_size, shape, generator=make_generator("bench", step, microbatch))
            return x, targets

        self._microbatches_by_step = [[draw(step, m) for m in range(microbatches)] for step in range(DISTINCT_STEPS)]

    def microbatch(self, step: int, microbatch: int, /) -> tuple[Tensor, Tensor]:
        """Return tokens and targets, (micro_batch_size, tokens), int64."""
        return self._microbatches_by_step[step % DISTINCT_STEPS][microbatch]

    def counted(self, step: int, microbatches: int, /) -> int:
        """Return the number of targets of a step."""
        return microbatches * self.micro_batch_size * self._tokens

    def whole(self, step: int) -> tuple[Tensor, Tensor]:
        """Return all microbatches of a step, concatenated."""
        tokens, targets = zip(*self._microbatches_by_step[step % DISTINCT_STEPS], strict=True)
        return torch.cat(tokens), torch.cat(targets)


@dataclass
class Loop:
    """Training loop of PyTorch with one batch in each step: forward, backward, optimizer.

    Attributes:
        module: the model, which may be wrapped.
        optimizer: optimizer of its parameters.
        batches: microbatches of all ranks.
        microbatch: number of the microbatch on which this rank trains.
        device: device of the rank.
        reports: whether this rank reports the loss. One of the ranks that train on the same microbatch does.
        at: number of the next step.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer
    batches: DrawnBatches
    microbatch: int
    device: torch.device
    reports: bool = True
    at: int = 0

    def step(self) -> Tensor:
        x, targets = (tensor.to(self.device) for tensor in self.batches.microbatch(self.at, self.microbatch))
        loss = self.loss(x, targets)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.at += 1
        return report_loss(loss, targets.numel() if self.reports else 0)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Return the loss, after its backward pass."""
        loss = loss_of(self.module(x), targets)
        loss.backward()
        return loss


def report_loss(mean: Tensor, tokens: int) -> Tensor:
    """Return a mean loss and its number of tokens in the form in which `Contender.step` returns them."""
    total = mean.detach().double() * tokens
    return torch.stack([total, torch.full_like(total, tokens)])


class LowerBound:
    """Lower bound of a step's time: a rank's share of the step in plain PyTorch, without communication.

    Features and gradients that another rank would send are random numbers, drawn once, so the losses have no meaning.

    Args:
        model: the whole model.
        modules: the rank's stages of the model, or its slice.
        rows: sequences of a microbatch.
        microbatches: number of microbatches of the rank.
        one_in: number of shards of the optimizer state. The optimizer updates one shard of every parameter.

    Attributes:
        modules: the argument `modules`.
        optimizer: optimizer of the modules' parameters, or of one shard of each.
    """

    def __init__(self, model: GPT, modules: list[GPTModule], rows: int, microbatches: int, one_in: int = 1) -> None:
        self.modules, self._microbatches = modules, microbatches
        parameters = [parameter for module in modules for parameter in module.parameters()]
        device = parameters[0].device
        shape = rows, model.seq_len, model.hidden_size
        self._tokens = torch.randint(model.vocab_size, shape[:2], device=device)
        self._features = torch.randn(shape, device=device).requires_grad_()
        self._gradient = torch.randn(shape, device=device)
        leaves = parameters
        if one_in > 1:
            leaves = [parameter.detach().flatten()[: -(-parameter.numel() // one_in)] for parameter in parameters]
            for leaf in leaves:
                leaf.grad = torch.zeros_like(leaf)
        self.optimizer = adamw(leaves)

    def step(self) -> Tensor:
        for _ in range(self._microbatches):
            for module in self.modules:
                self._pass(module)
        self.optimizer.step()
        for module in self.modules:
            module.zero_grad()
        return torch.zeros(2, dtype=torch.float64, device=self._tokens.device)

    def _pass(self, module: GPTModule) -> None:
        output: Tensor = module(self._tokens if module.embeds else self._features)
        self._features.grad = None
        if module.scores:
            loss_of(output, self._tokens % output.shape[-1]).backward()
        else:
            output.backward(self._gradient)


MemoryRun = tuple[Contender, list[Tensor], int]
"""Contender, losses of its first steps, and the peak in bytes during the last of them."""


class LiveStorages(TorchDispatchMode):
    """Counter of the live bytes of all storages that ops create inside of the context.

    This is like torch's own MemTracker, which fails for a module that is called twice in a step, as in a pipeline.
    Shared memory of neighbours contains messages, like gloo's buffers, and is not counted.

    Attributes:
        live: current number of bytes.
        peak: largest number of bytes since the peak was last reset.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._sizes: dict[int, int] = {}
        self._shared = {_address(memory.untyped_storage()) for memory in Neighbours.memories()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:  # its ops on local tensors are dispatched here too
            return NotImplemented
        output = func(*args, **kwargs or {})
        if active_fake_mode() is None:
            for tensor in tree_leaves(output):
                if isinstance(tensor, Tensor):
                    self._see(tensor.untyped_storage())
        return output

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = _address(storage)
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
        """Track storages inside of the context, including storages that are resized without an op."""
        resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> None:
            resize(storage, size)
            self._see(storage)

        with patch.object(torch.UntypedStorage, "resize_", resize_), self:
            yield


def _address(storage: torch.UntypedStorage) -> int:
    """Return the C++ address of a storage, which is equal for all Python objects of the storage."""
    return storage._cdata  # pyright: ignore[reportPrivateUsage]


def measure_memory(make: Callable[[], Contender], steps: int, device: torch.device) -> MemoryRun:
    """Create a contender, train some steps, and measure the peak memory of the last one.

    On a CPU, all storages that torch creates are counted; on a GPU, the memory of the allocator. Counting starts with
    the creation of the contender, and excludes buffers of gloo and NCCL.
    """
    storages, on_gpu = LiveStorages(), device.type == "cuda"
    base = torch.cuda.memory_allocated() if on_gpu else 0
    with nullcontext() if on_gpu else storages.tracking():
        contender = make()
        losses = [contender.step() for _ in range(steps - 1)]
        storages.peak = storages.live
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        losses.append(contender.step())
    return contender, losses, torch.cuda.max_memory_allocated() - base if on_gpu else storages.peak
