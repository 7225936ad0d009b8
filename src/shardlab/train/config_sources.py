"""Where a configuration comes from: presets, files and flags, of which later ones prevail."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple, cast

from shardlab.data import sources_of
from shardlab.data.manifest import Prepared
from shardlab.errors import UserError, find, nearest
from shardlab.models import Blocks
from shardlab.models.named import find_model, unsized, with_written
from shardlab.program.field_types import as_text, field_types, of_file
from shardlab.program.files import packaged
from shardlab.program.nesting import read_file
from shardlab.strategies.entry import StrategyEntry
from shardlab.strategies.load import load
from shardlab.strategies.plan import UNNAMED, Plan
from shardlab.train.config import SECTIONS, StrategyConfig, TrainingConfig, by_rule
from shardlab.train.ramp import RAMP, BatchRamp

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
        from shardlab.exchange.initial import want_same

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
    from shardlab.exchange import open_source  # which needs torch

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
