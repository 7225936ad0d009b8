"""Sources of a configuration: presets, files and flags. A later source overrides an earlier one.

A command makes a list of `ConfigSource` (the default preset, a chosen preset, a file, its flags). `merge_fields` merges
one section, and `resolve_config` merges all sections into a `TrainingConfig`. Two sources are computed from others:
`vocabulary_source` reads the vocabulary of prepared data, and `depth_source` derives sizes, batch, steps and learning
rate from `--depth`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from shardlab.common.errors import UserError, find_by_name, naming, suggest_name
from shardlab.common.fields import COUNT, field_types, read_fields, text
from shardlab.common.files import load_table, read_file
from shardlab.execute.optimizers.settings import OptimizerConfig
from shardlab.models import Blocks
from shardlab.models.model import count_parameters
from shardlab.models.named import find_model, sources, unsized, with_written
from shardlab.strategies.load import load
from shardlab.strategies.plan.plan import UNNAMED, Plan
from shardlab.strategies.registry import StrategyEntry
from shardlab.train.config import (
    DIVISION,
    JOB_SECTIONS,
    RAMP,
    SECTIONS,
    BatchConfig,
    BatchRamp,
    StrategyConfig,
    TrainingConfig,
    with_default_schedule,
)
from shardlab.train.data import parse_sources
from shardlab.train.data.prepared_folder import PreparedFolder

Sections = Mapping[str, Mapping[str, Any]]

NAMING = {"model": {"model"}, "plan": {"strategy", "mesh", "plan"}}
"""Fields that name a whole model or plan. If a source has one, the section's fields in earlier sources are ignored."""

_NAME = text("NAME", "a name in quotes")

_PLAN_FIELDS = dict.fromkeys((entry.name for entry in fields(Plan)), Any)

_TYPES: dict[str, Mapping[str, Any]] = {
    "model": {"model": _NAME},
    "plan": {"strategy": _NAME, "ranks": COUNT, "name": _NAME, **_PLAN_FIELDS},
    **{section: field_types(kind) for section, kind in JOB_SECTIONS.items()},
}
"""Types of the fields of each section of a file. The fields of a plan are read by `Plan.from_dict`."""


class ConfigSource(NamedTuple):
    """Some fields of a configuration, by section, and the name of the source for messages."""

    name: str
    sections: Sections


def preset_source(name: str) -> ConfigSource:
    """Return a built-in preset.

    Raises:
        UserError: if no preset has this name. The message suggests the nearest name.
    """
    tables = dict(find_by_name(load_table("train/presets.toml"), name, "preset"))
    tables.pop("source")
    return ConfigSource(name, _parse_sections(tables))


def file_source(path: Path) -> ConfigSource:
    """Read a configuration from a TOML file.

    Raises:
        UserError: if the file cannot be read, or has an unknown section or field, or a value of the wrong kind.
    """
    with naming(path):
        return ConfigSource(str(path), _parse_sections(read_file(path, "TOML")))


def batch_of(source: ConfigSource) -> BatchConfig:
    """Return the global batch that a source describes in `batch` or `train`."""
    batch, train = (source.sections.get(section, {}) for section in ("batch", "train"))
    return BatchConfig(**{name: train[name] for name in DIVISION if name in train} | dict(batch))


def with_divided_batch(source: ConfigSource, flags: ConfigSource) -> ConfigSource:
    """Divide the global batch of a source into microbatches, and return the source with `train` set accordingly.

    Values that flags set take precedence. A source without a global batch is returned unchanged.

    Raises:
        UserError: if the batch does not divide.
    """
    batch = batch_of(flags).fill(batch_of(source))
    if batch.global_batch is None:
        return source
    divided = dict(zip(DIVISION, batch.cut(1, None), strict=True))
    return ConfigSource(source.name, {**source.sections, "train": {**source.sections.get("train", {}), **divided}})


def _parse_sections(tables: Mapping[str, Any]) -> Sections:
    """Convert the tables of a file to values of the fields. Unknown sections and fields are refused."""
    sections: dict[str, dict[str, Any]] = {}
    for section, table in tables.items():
        if section in _PLAN_FIELDS:
            raise UserError(f"a configuration has no {section!r}; write it below [plan], or give the file as --plan")
        if section not in _TYPES:
            raise UserError(f"a configuration has no {section!r}; {suggest_name(section, _TYPES)}")
        values = read_fields(_TYPES[section], table, "", section, strict=section != "model")
        sections[section] = {**table, **values}  # the fields of a model depend on its name, and are read with it
    if "global_batch" not in (batch := sections.get("batch", {})):
        sections["train"] = sections.get("train", {}) | batch
    return sections


def effective_sources(sources: Sequence[ConfigSource], section: str) -> Sequence[ConfigSource]:
    """Return the sources of a section: the last one that names a whole model or plan, and those after it.

    If no source names one, all sources are returned.
    """
    naming = NAMING.get(section, set())
    for number in reversed(range(len(sources))):
        if naming & set(sources[number].sections.get(section, {})):
            return sources[number:]
    return sources


def merge_fields(sources: Sequence[ConfigSource], section: str) -> dict[str, Any]:
    """Return the fields of a section, each from the last source that has it."""
    fields: dict[str, Any] = {}
    for source in effective_sources(sources, section):
        fields |= _fields(source, section)
    return fields


def origin_of(sources: Sequence[ConfigSource], section: str, name: str) -> str | None:
    """Return the name of the source that a field comes from; None if no source has the field."""
    names = [source.name for source in effective_sources(sources, section) if name in _fields(source, section)]
    return names[-1] if names else None


def _fields(source: ConfigSource, section: str) -> Mapping[str, Any]:
    """Return the fields of a source in a section.

    A batch ramp also sets the microbatches, and a number of microbatches removes the ramp of earlier sources.
    """
    section_fields = source.sections.get(section, {})
    if (ramp := section_fields.get("batch_ramp")) and not RAMP.check(ramp):
        return {"microbatches": BatchRamp.parse(ramp).stages[-1][1], **section_fields}
    return {"batch_ramp": None, **section_fields} if "microbatches" in section_fields else section_fields


def model_of(sources: Sequence[ConfigSource], layers: int) -> Blocks:
    """Return the model that the sources describe.

    Args:
        sources: sources of the configuration.
        layers: number of layers, unless the model itself or a source sets it.

    Raises:
        UserError: if there is no such model, or it lacks a field that a source sets.
    """
    values, init = merge_fields(sources, "model"), merge_fields(sources, "train").get("init")
    name = values.pop("model")
    if init is not None and origin_of(sources, "model", "model") == "default":
        model = with_written(_model_in(init), values, str(init))
    else:
        model = find_model(name)
        model = with_written(model, ({"layers": layers} if "layers" in unsized(name, model) else {}) | values, name)
    if init is not None:
        from shardlab.train.huggingface.sources import require_same

        require_same(_model_in(init), model, init)
    return model


def vocabulary_source(sources: Sequence[ConfigSource]) -> ConfigSource | None:
    """Return a source with the vocabulary size of prepared data; None if the model's vocabulary is chosen already.

    The size is not padded here. If tensor parallelism splits it unevenly, the last slice is padded. (nanoGPT pads
    GPT-2's 50,257 tokens to 50,304, a multiple of 64, for speed: `vocab_size: int = 50304` in its model.py.)

    Raises:
        UserError: if the data cannot be read.
    """
    values, init = merge_fields(sources, "model"), merge_fields(sources, "train").get("init")
    of_init = init is not None and origin_of(sources, "model", "model") == "default"
    if of_init or "vocab_size" in values or "vocab_size" not in unsized(name := values["model"], find_model(name)):
        return None
    folders = [
        source.path for source in parse_sources(merge_fields(sources, "data").get("data", ())) if source.path.is_dir()
    ]
    sizes = [PreparedFolder.open(folder).manifest.vocab_size for folder in folders]
    return ConfigSource("the data", {"model": {"vocab_size": max(sizes)}}) if sizes else None


def _model_in(folder: Path) -> Blocks:
    """Return the model whose weights are in a folder."""
    from shardlab.train.huggingface.sources import open_source  # imports torch

    return open_source(folder).model


def plan_settings(sources: Sequence[ConfigSource]) -> tuple[str | None, int | None, Plan | None, str | None]:
    """Return the strategy, the ranks, the plan and the passes that the sources set.

    Returns:
        The strategy's name, the number of ranks, the plan, and the passes if the strategy has no plan. Each is None if
        no source sets it.

    Raises:
        UserError: if the sources set fields of a plan for a strategy that is a program of its own.
    """
    plan_fields = merge_fields(sources, "plan")
    strategy, ranks, name = (plan_fields.pop(key, None) for key in ("strategy", "ranks", "name"))
    if not plan_fields:
        return strategy, ranks, None, None
    if strategy is not None:
        entry = load(strategy)
        if entry.plan is None:
            passes = plan_fields.pop("passes", None)
            if not plan_fields:
                return strategy, ranks, None, passes
            raise UserError(f"{strategy} is a program of its own, which fields of a plan do not change; leave them out")
        plan_fields = entry.plan(ranks or entry.ranks).as_dict() | plan_fields
    return name or strategy or UNNAMED, ranks, Plan.from_dict(plan_fields), None


def resolve_config(sources: Sequence[ConfigSource], entry: StrategyEntry, ranks: int) -> TrainingConfig:
    """Merge the sources into one configuration.

    Args:
        sources: sources of the configuration; their plan is ignored.
        entry: strategy, which the caller has chosen.
        ranks: number of ranks.

    Raises:
        UserError: if values contradict each other.
    """
    sections = {name: merge_fields(sources, name) for name in SECTIONS}
    sections["optimizer"] = with_default_schedule(sections["optimizer"], sections["train"]["steps"])
    return TrainingConfig(
        model=model_of(sources, entry.default_layers(ranks)),
        plan=StrategyConfig(entry.for_job(ranks), ranks, entry.name, entry.passes),
        **{name: kind(**sections[name]) for name, kind in SECTIONS.items()},
    )


def saved_fields(config: ConfigSource, section: str) -> dict[str, Any]:
    """Return the fields of a section in the configuration of an earlier run. A field that it lacks has its default."""
    return merge_fields([preset_source("default"), config], section)


def saved_optimizer(config: ConfigSource) -> OptimizerConfig:
    """Return the settings of the optimizer in the configuration of an earlier run."""
    steps = saved_fields(config, "train")["steps"]
    return OptimizerConfig(**with_default_schedule(saved_fields(config, "optimizer"), steps))


WIDTH_PER_LAYER = 64
"""Width / depth of a model (nanochat's aspect ratio, scripts/base_train.py)."""

HEAD_WIDTH = 128
"""Preferred number of features of a head (nanochat's head dimension)."""

TOKENS_PER_PARAMETER = 20
"""Tokens of a run for each parameter (Chinchilla, Hoffmann et al. 2022, arXiv 2203.15556, section 3.4 and table 3)."""

BATCH, BATCH_TOKENS, BATCH_EXPONENT = 2**19, 1.32e9, 0.383
"""The best batch B in tokens grows with the tokens D of a run: B = 2**19 (D / 1.32e9) ** 0.383. The exponent is that of
Bergsma et al. 2025, "Power Lines", arXiv 2505.13738. The point is nanochat's measurement at depth 12, which has 12
tokens for each of 110 million parameters."""

RATE, RATE_WIDTH = 6e-4, 768
"""AdamW's learning rate falls with the root of the width: 6e-4 sqrt(768 / width). GPT-3 Small (Brown et al. 2020, arXiv
2005.14165, table 2.1) and nanoGPT's GPT-2 use 6e-4. The root is nanochat's rule for its AdamW parameters."""


def depth_source(depth: int, earlier: Sequence[ConfigSource], flags: Sections) -> ConfigSource:
    """Return the settings that follow from the depth of a model, without those that flags set.

    - width: 64 x depth; heads: the number whose width comes nearest to 128 (nanochat).
    - tokens of the run: 20 x parameters without position embeddings (Chinchilla).
    - batch: by the power law of Power Lines, rounded to a power of 2 as in nanochat. The number of microbatches is that
      of the sources, and their size follows (our own choice).
    - steps: tokens / batch, rounded up. The learning-rate schedule is as long, and its warm-up a twentieth of it (our
      own choice).
    - learning rate: 6e-4 at a width of 768, falling with the root of the width.

    Args:
        depth: number of layers.
        earlier: sources before this one.
        flags: settings of the command line.

    Raises:
        UserError: if a flag sets the layers as well, or the model is a published one, which has its own sizes.
    """
    if "layers" in flags.get("model", {}):
        raise UserError("--depth and --layers both say how many layers the model has; give one of them")
    name = merge_fields(earlier, "model")["model"]
    if name.lower() in sources():
        raise UserError(f"--depth sets sizes, but {name} has its own; leave out --depth, or give a --model such as gpt")
    width = WIDTH_PER_LAYER * depth
    sizes = {"layers": depth, "hidden_size": width}
    if any(entry.name == "heads" for entry in fields(find_model(name))):
        sizes["heads"] = heads_for_width(flags.get("model", {}).get("hidden_size", width))
    sections: dict[str, dict[str, Any]] = {"model": _omit(sizes, flags.get("model", {}))}
    title = f"--depth {depth}"
    model = model_of([*earlier, ConfigSource(title, sections)], depth)

    tokens = TOKENS_PER_PARAMETER * count_parameters(model).without_positions
    train, set_train = merge_fields(earlier, "train"), flags.get("train", {})
    batch = 2 ** round(math.log2(BATCH * (tokens / BATCH_TOKENS) ** BATCH_EXPONENT))
    train["micro_batch_size"] = set_train.get(
        "micro_batch_size", max(1, round(batch / (train["microbatches"] * model.seq_len)))
    )
    microbatches = math.ceil(tokens / (train["micro_batch_size"] * model.seq_len))
    ramp = BatchRamp.parse(train.get("batch_ramp") or f"0:{train['microbatches']}")
    steps = set_train.get("steps", ramp.steps(microbatches))
    rate = float(f"{RATE * math.sqrt(RATE_WIDTH / model.hidden_size):.3g}")
    optimizer = {"learning_rate": rate, "schedule_steps": steps, "warmup_steps": -(-steps // 20)}
    sections["train"] = _omit({"steps": steps, "micro_batch_size": train["micro_batch_size"]}, set_train)
    sections["optimizer"] = _omit(optimizer, flags.get("optimizer", {}))
    return ConfigSource(title, sections)


def heads_for_width(width: int) -> int:
    """Return the number of heads whose width is even and comes nearest to 128 features.

    >>> [heads_for_width(64 * depth) for depth in (1, 2, 3, 5, 12)]
    [1, 1, 2, 2, 6]
    """
    even = [heads for heads in range(1, width + 1) if width % (2 * heads) == 0] or [1]
    return min(even, key=lambda heads: abs(width / heads - HEAD_WIDTH))


def _omit(values: dict[str, Any], names: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}
