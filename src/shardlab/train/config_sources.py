"""Where a configuration comes from: presets, files and flags, of which later ones prevail."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple, cast

from shardlab.common.errors import UserError, find, nearest
from shardlab.common.fields import as_text, field_types, of_file
from shardlab.common.files import packaged, read_file
from shardlab.models import Blocks
from shardlab.models.model import count_parameters
from shardlab.models.named import find_model, sources, unsized, with_written
from shardlab.strategies.load import load
from shardlab.strategies.plan.plan import UNNAMED, Plan
from shardlab.strategies.registry import StrategyEntry
from shardlab.train.config import RAMP, SECTIONS, BatchRamp, StrategyConfig, TrainingConfig, by_rule
from shardlab.train.data import sources_of
from shardlab.train.data.prepared_folder import Prepared

Sections = Mapping[str, Mapping[str, Any]]

NAMING = {"model": {"model"}, "plan": {"strategy", "mesh", "plan"}}
"""Fields that name a whole model or plan: a source that has one takes nothing of its section from earlier sources."""


class ConfigSource(NamedTuple):
    """Some fields of the tree, by section, and what to call the place that they stand in."""

    name: str
    sections: Sections


def preset(name: str) -> ConfigSource:
    """A preset.

    Raises:
        UserError: there is none of this name; the nearest is suggested.
    """
    written = dict(find(packaged("train/presets.toml"), name, "preset"))
    written.pop("source")
    return ConfigSource(name, _checked(written))


def config_file(path: Path) -> ConfigSource:
    """A configuration in a TOML file.

    Raises:
        UserError: for a file that cannot be read, a section or field that there is not, or a value that does not fit.
    """
    try:
        return ConfigSource(str(path), _checked(read_file(path, "TOML")))
    except UserError as error:
        text = str(error)
        raise UserError(text if text.startswith(str(path)) else f"{path}: {text}") from None


def _checked(written: Mapping[str, Any]) -> Sections:
    """What a file says, as values of the fields."""
    known = ("model", "plan", *SECTIONS)
    found: dict[str, dict[str, Any]] = {}
    for section, table in written.items():
        if section not in known:
            raise UserError(f"a configuration has no section {section}; {nearest(section, known)}")
        if not isinstance(table, dict):
            raise UserError(f"{section} is {table!r}; write a table, [{section}], and its fields below it")
        values = cast(dict[str, Any], table)
        if section in SECTIONS:
            values = {name: _value(section, name, value) for name, value in values.items()}
        elif section == "plan":
            plan_fields = ["strategy", "ranks", "name", *(each.name for each in fields(Plan))]
            for name in values:
                _want_known(section, name, plan_fields)
        found[section] = values
    return found


def _value(section: str, name: str, value: Any) -> Any:
    types = field_types(SECTIONS[section])
    _want_known(section, name, types)
    read = of_file(types[name], value)
    if wanted := types[name].wanted(read):
        raise UserError(f"{name} is {as_text(read)}; give {wanted}")
    return read


def _want_known(section: str, name: str, known: Sequence[str] | Mapping[str, Any]) -> None:
    if name not in known:
        raise UserError(f"[{section}] has no {name}; {nearest(name, known)}")


def prevailing(sources: Sequence[ConfigSource], section: str) -> Sequence[ConfigSource]:
    """The sources of a section: those from the last one on that names a whole model or plan."""
    naming = NAMING.get(section, set())
    for number in reversed(range(len(sources))):
        if naming & set(sources[number].sections.get(section, {})):
            return sources[number:]
    return sources


def merged(sources: Sequence[ConfigSource], section: str) -> dict[str, Any]:
    """A section's fields, each from the last source that has it."""
    fields: dict[str, Any] = {}
    for source in prevailing(sources, section):
        fields |= _fields(source, section)
    return fields


def origin(sources: Sequence[ConfigSource], section: str, name: str) -> str | None:
    """Name the source that a field comes from; None: from none of them."""
    found = [source.name for source in prevailing(sources, section) if name in _fields(source, section)]
    return found[-1] if found else None


def _fields(source: ConfigSource, section: str) -> Mapping[str, Any]:
    """What a source says of a section: a batch ramp says how many microbatches as well, and such a number, no ramp."""
    given = source.sections.get(section, {})
    if (ramp := given.get("batch_ramp")) and not RAMP.wanted(ramp):
        return {"microbatches": BatchRamp.of(ramp).stages[-1][1], **given}
    return {"batch_ramp": None, **given} if "microbatches" in given else given


def model_of(sources: Sequence[ConfigSource], layers: int) -> Blocks:
    """The model that sources describe; with so many layers, if nobody says.

    Raises:
        UserError: when there is no such model, or it has not what a source says.
    """
    written, init = merged(sources, "model"), merged(sources, "train").get("init")
    name = written.pop("model")
    if init is not None and origin(sources, "model", "model") == "default":
        model = with_written(_model_in(init), written, str(init))
    else:
        model = find_model(name)
        model = with_written(model, ({"layers": layers} if "layers" in unsized(name, model) else {}) | written, name)
    if init is not None:
        from shardlab.train.huggingface.sources import want_same

        want_same(_model_in(init), model, init)
    return model


def of_data(sources: Sequence[ConfigSource]) -> ConfigSource | None:
    """The vocabulary of prepared data, for a model whose vocabulary nobody has chosen.

    It is taken as it is: where tensor parallelism cuts it unevenly, the last slice is filled up. (nanoGPT fills up
    GPT-2's 50,257 tokens to 50,304, a multiple of 64, for speed: `vocab_size: int = 50304` in its model.py.)

    Raises:
        UserError: when the data cannot be read.
    """
    written, init = merged(sources, "model"), merged(sources, "train").get("init")
    of_init = init is not None and origin(sources, "model", "model") == "default"
    if of_init or "vocab_size" in written or "vocab_size" not in unsized(name := written["model"], find_model(name)):
        return None
    folders = [source.path for source in sources_of(merged(sources, "data").get("data", ())) if source.path.is_dir()]
    sizes = [Prepared.open(folder).manifest.vocab_size for folder in folders]
    return ConfigSource("the data", {"model": {"vocab_size": max(sizes)}}) if sizes else None


def _model_in(folder: Path) -> Blocks:
    """The model whose weights are in a folder."""
    from shardlab.train.huggingface import open_source  # which needs torch

    return open_source(folder).model


def plan_below(sources: Sequence[ConfigSource]) -> tuple[str | None, int | None, Plan | None, str | None]:
    """What sources say of the plan: the strategy's name, how many ranks, the plan if there is one, or else the passes.

    Raises:
        UserError: when they say fields of a plan of a strategy that is a program of its own.
    """
    written = merged(sources, "plan")
    strategy, ranks, name = (written.pop(key, None) for key in ("strategy", "ranks", "name"))
    if not written:
        return strategy, ranks, None, None
    if strategy is not None:
        entry = load(strategy)
        if entry.plan is None:
            passes = written.pop("passes", None)
            if not written:
                return strategy, ranks, None, passes
            raise UserError(f"{strategy} is a program of its own, which fields of a plan do not change; leave them out")
        written = entry.plan(ranks or entry.ranks).as_dict() | written
    return name or strategy or UNNAMED, ranks, Plan.from_dict(written), None


def resolved(sources: Sequence[ConfigSource], entry: StrategyEntry, ranks: int) -> TrainingConfig:
    """The configuration that sources make together; the plan is chosen already.

    Raises:
        UserError: when values do not go together.
    """
    sections = {name: merged(sources, name) for name in SECTIONS}
    sections["optimizer"] = by_rule(sections["optimizer"], sections["train"]["steps"])
    return TrainingConfig(
        model=model_of(sources, entry.default_layers(ranks)),
        plan=StrategyConfig(entry.for_job(ranks), ranks, entry.name, entry.passes),
        **{name: kind(**sections[name]) for name, kind in SECTIONS.items()},
    )


# One dial, the depth of a model, from which sizes, batch, steps and learning rate follow by rule.


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
