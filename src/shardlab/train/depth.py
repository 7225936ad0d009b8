"""One dial, the depth of a model, from which sizes, batch, steps and learning rate follow by rule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from shardlab.errors import UserError
from shardlab.models.counts import count_parameters
from shardlab.models.named import find_model, sources
from shardlab.train.config_sources import ConfigSource, Sections, merged, model_of
from shardlab.train.ramp import BatchRamp

WIDTH_OF_A_LAYER = 64
"""Width / depth (nanochat's aspect ratio, scripts/base_train.py)."""

HEAD = 128
"""Features of a head to come close to (nanochat's head dimension)."""

TOKENS_OF_A_PARAMETER = 20
"""Tokens for each parameter (Chinchilla, Hoffmann et al. 2022, arXiv 2203.15556, section 3.4 and table 3)."""

BATCH, BATCH_TOKENS, BATCH_EXPONENT = 2**19, 1.32e9, 0.383
"""The best batch grows with the tokens of a run, B = 2**19 (D / 1.32e9) ** 0.383 (exponent: Bergsma et al. 2025, "Power
Lines", arXiv 2505.13738; point: measured for nanochat's depth 12, 12 tokens for each of 110 million parameters)."""

RATE, RATE_WIDTH = 6e-4, 768
"""AdamW's learning rate falls with the root of the width, 6e-4 sqrt(768 / width): 6e-4 is GPT-3 Small's (Brown et al.
2020, arXiv 2005.14165, table 2.1) and nanoGPT's for GPT-2; the root is nanochat's rule for its AdamW parameters."""


def of_depth(depth: int, given: Sequence[ConfigSource], flags: Sections) -> ConfigSource:
    """What the dial sets, but for what flags set themselves.

    - width: 64 x depth; heads: as many as make a head's width come nearest to 128 (nanochat);
    - tokens of the run: 20 x parameters, position embeddings not counted (Chinchilla);
    - batch: by the power law of Power Lines, rounded to a power of 2 as nanochat does; its microbatches are those of
      the sources, and their size follows (our own choice);
    - steps: tokens / batch, upwards; the learning rate's schedule is as long, and its warm-up a twentieth (our own);
    - learning rate: 6e-4 at a width of 768, falling with the width's root.

    Raises:
        UserError: when a flag sets the layers as well, or the model is a published one, which has its own sizes.
    """
    if "layers" in flags.get("model", {}):
        raise UserError("--depth and --layers both say how many layers the model has; give one of them")
    name = merged(given, "model")["model"]
    if name.lower() in sources():
        raise UserError(f"--depth sets sizes, but {name} has its own; leave out --depth, or give a --model such as gpt")
    width = WIDTH_OF_A_LAYER * depth
    sizes = {"layers": depth, "hidden_size": width}
    if any(each.name == "heads" for each in fields(find_model(name))):
        sizes["heads"] = heads_of(flags.get("model", {}).get("hidden_size", width))
    found: dict[str, dict[str, Any]] = {"model": _unset(sizes, flags.get("model", {}))}
    title = f"--depth {depth}"
    model = model_of([*given, ConfigSource(title, found)], depth)

    tokens = TOKENS_OF_A_PARAMETER * count_parameters(model).without_positions
    train, set_train = merged(given, "train"), flags.get("train", {})
    batch = 2 ** round(math.log2(BATCH * (tokens / BATCH_TOKENS) ** BATCH_EXPONENT))
    train["micro_batch_size"] = set_train.get(
        "micro_batch_size", max(1, round(batch / (train["microbatches"] * model.seq_len)))
    )
    microbatches = math.ceil(tokens / (train["micro_batch_size"] * model.seq_len))
    ramp = BatchRamp.of(train.get("batch_ramp") or f"0:{train['microbatches']}")
    steps = set_train.get("steps", ramp.steps(microbatches))
    rate = float(f"{RATE * math.sqrt(RATE_WIDTH / model.hidden_size):.3g}")
    optimizer = {"learning_rate": rate, "schedule_steps": steps, "warmup_steps": -(-steps // 20)}
    found["train"] = _unset({"steps": steps, "micro_batch_size": train["micro_batch_size"]}, set_train)
    found["optimizer"] = _unset(optimizer, flags.get("optimizer", {}))
    return ConfigSource(title, found)


def heads_of(width: int) -> int:
    """How many heads of an even width come nearest to 128 features each.

    >>> [heads_of(64 * depth) for depth in (1, 2, 3, 5, 12)]
    [1, 1, 2, 2, 6]
    """
    even = [heads for heads in range(1, width + 1) if width % (2 * heads) == 0] or [1]
    return min(even, key=lambda heads: abs(width / heads - HEAD))


def _unset(values: dict[str, Any], given: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in given}
