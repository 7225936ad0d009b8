"""Tiny models of every family, and how a mesh cuts them."""

from __future__ import annotations

from functools import cache, partial

from shardlab.language import Mesh, Sizes
from shardlab.language.precision import FP64
from shardlab.models import GPT, MLP, Blocks, Llama, Mixtral, MoE
from shardlab.models.cutting import cut_for

_small = partial(GPT, hidden_size=8, heads=4, seq_len=8, vocab_size=16)
_llama = partial(Llama, hidden_size=8, heads=4, kv_heads=2, seq_len=8, vocab_size=16)
_moe = partial(MoE, hidden_size=8, heads=4, seq_len=8, vocab_size=16)
_mixtral = partial(Mixtral, hidden_size=8, heads=4, kv_heads=2, seq_len=8, vocab_size=16)

MODELS: dict[str, Blocks] = {
    "gpt": _small(layers=2),
    "gpt3": _small(layers=3, dropout=0.1),
    "mlp": MLP(layers=2, hidden_size=8, seq_len=8, vocab_size=16),
    "llama": _llama(layers=2),
    "moe": _moe(layers=2, auxiliary=0.1),
    "mixture": _moe(layers=2, auxiliary=0.0, capacity_factor=None),
    "mixtral": _mixtral(layers=1, auxiliary=0.1),
    "tied": _small(layers=2, tied=True),
    "tied llama": _llama(layers=2, tied=True),
    "tied moe": _moe(layers=2, auxiliary=0.1, tied=True),
}
"""By name; "moe" and "mixtral" have an auxiliary loss, whose gradient does not depend on the gradient that comes in."""

TIED = tuple(name for name, model in MODELS.items() if model.has_tied_head)
"""Models whose head computes with the embedding's weight."""

ROWS = 1
"""Sequences of a microbatch."""


@cache
def sizes_of(model: str, mesh: Mesh) -> Sizes:
    """Sizes of a model's values in float64, as a program of its own sees them."""
    elements = cut_for(MODELS[model], mesh).sizes(ROWS, 8)
    return FP64.sizes(elements, "adamw", ema=False)
