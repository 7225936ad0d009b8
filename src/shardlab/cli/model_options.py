"""Options for the model, and for the settings of a training.

`ModelOptions` names a model and changes its fields, most of them by `SizeOptions`. `SettingOptions` has a flag for each
field of the sections of `shardlab.train.config`. The flags are generated from these fields, so a new setting gets its
flag automatically.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, make_dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import tyro

from shardlab.cli.options import Flag, Layers, OptionalCount, one_word_option, switch_flags, switch_value
from shardlab.common.fields import COUNT, field_helps, field_types
from shardlab.train.config import SECTIONS
from shardlab.train.config_sources import preset_source

if TYPE_CHECKING:
    from shardlab.models import Blocks


def _factor(word: str) -> float:
    if word.lower() == "none":
        return math.inf
    try:
        return float(word)
    except ValueError:
        raise ValueError(f"{word!r} is not a number; give one, or none.") from None


Factor = Annotated[float | None, one_word_option("{FLOAT|none}", _factor, float), tyro.conf.arg(help_behavior_hint="")]
"""Number or, for the word none, infinity. None if the option is left out."""

OptionalNumber = Annotated[float | None, tyro.conf.arg(metavar="FLOAT", help_behavior_hint="")]

Name = Annotated[str | None, tyro.conf.arg(metavar="NAME|FILE", help_behavior_hint="")]

OFF_FLAGS = ("no_bias", "untied")
"""Flags that turn a switch of the model off. They are not fields of a model."""


@dataclass(frozen=True)
class SizeOptions:
    """Flags that change the fields of a model."""

    hidden_size: OptionalCount = None
    """Features of a token."""

    heads: OptionalCount = None
    """Number of attention heads."""

    head_dim: OptionalCount = None
    """Features of an attention head. By default, the features of a token are shared among the heads."""

    kv_heads: OptionalCount = None
    """Number of heads of keys and values. Several query heads share each of them."""

    ffn_hidden_size: OptionalCount = None
    """Features inside each MLP or expert."""

    experts: OptionalCount = None
    """Number of experts in each layer (moe, mixtral)."""

    shared_experts: OptionalCount = None
    """Number of further experts in each layer that process every token (moe, mixtral)."""

    shared_ffn_hidden_size: OptionalCount = None
    """Features inside each shared expert. By default, as many as inside another expert (moe, mixtral)."""

    dense_layers: OptionalCount = None
    """Number of first layers that have an MLP in place of experts (moe, mixtral)."""

    dense_ffn_hidden_size: OptionalCount = None
    """Features inside the MLP of these layers. By default, as many as inside an expert (moe, mixtral)."""

    top_k: OptionalCount = None
    """Number of experts that process each token (moe, mixtral)."""

    capacity_factor: Factor = None
    """Capacity of an expert, as a multiple of its even share of the tokens; none drops no token (moe, mixtral)."""

    auxiliary: OptionalNumber = None
    """Weight of the load-balancing loss (moe, mixtral)."""

    vocab_size: OptionalCount = None
    """Number of different tokens, such as 256 for bytes."""

    dropout: OptionalNumber = None
    """Probability of dropout."""

    bias: Flag = False
    """Use biases in linear maps and norms, even if the preset or config file leaves them out."""

    no_bias: Flag = False
    """Leave out the biases of linear maps and norms."""

    tied: Flag = False
    """Use the token embedding as the matrix of the head. With more than one layer, this needs a plan."""

    untied: Flag = False
    """Give the head a matrix of its own, even if the published model uses the token embedding."""

    def flag_values(self) -> dict[str, Any]:
        """Return the values of the given flags, by field of a model.

        Raises:
            UserError: if flags contradict each other.
        """
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values |= {"bias": switch_value(self, "bias"), "tied": switch_value(self, "tied", "untied")}
        values = {field: value for field, value in values.items() if value is not None and field not in OFF_FLAGS}
        if values.get("capacity_factor") == math.inf:
            values["capacity_factor"] = None
        return values

    def words(self) -> list[str]:
        """Return the given flags as words of a command."""
        switches = {"bias": ("--bias", "--no-bias"), "tied": ("--tied", "--untied")}
        arguments: list[str] = []
        for field, value in self.flag_values().items():
            if field in switches:
                arguments.append(switches[field][not value])
            else:
                arguments += [f"--{field.replace('_', '-')}", "none" if value is None else str(value)]
        return arguments


NO_SIZES = SizeOptions()

SizeFlags = Annotated[SizeOptions, tyro.conf.OmitArgPrefixes, tyro.conf.arg(name="")]
"""Field type of a command that has these flags, without a prefix in their names."""


@dataclass(frozen=True)
class ModelOptions:
    """Name of a model, and flags that change its fields."""

    model: Name = None
    """gpt, llama3-8b, ... or a file, such as config.json."""

    layers: Layers = None
    """Number of layers. The embedding is part of the first layer, and the head is part of the last."""

    seq_len: OptionalCount = None
    """Tokens of a sequence."""

    sizes: SizeFlags = NO_SIZES

    def flag_values(self) -> dict[str, Any]:
        """Return the values of the given flags: the name of the model as `model`, and the fields that are changed.

        Raises:
            UserError: if flags contradict each other.
        """
        options = {name: getattr(self, name) for name in ("model", "layers", "seq_len")}
        return {name: value for name, value in options.items() if value is not None} | self.sizes.flag_values()

    def make(
        self, layers: int, otherwise: str = "gpt", *, file_fields: Mapping[str, Any] | None = None, **small: Any
    ) -> Blocks:
        """Return the model that the options describe.

        Args:
            layers: default number of layers of an architecture that is named without sizes.
            otherwise: model to use if neither the options nor `file_fields` name one.
            file_fields: fields of a job file, which are dropped if the options name a model.
            small: further default sizes of such an architecture. Sizes of fields that it lacks are ignored.

        Raises:
            UserError: if there is no such model, or it lacks a field that a flag sets.
        """
        from shardlab.models.named import unsized, with_written

        values = self.flag_values()
        values = values if "model" in values else {**(file_fields or {}), **values}
        name = values.pop("model", otherwise)
        model = noted_model(name)
        free = unsized(name, model)
        values = {field: value for field, value in ({"layers": layers} | small).items() if field in free} | values
        return with_written(model, values, name)

    def apply(self, model: Blocks, source: str) -> Blocks:
        """Return a model with the fields that the options set.

        If the options name a model, their fields are set on that model instead of `model`.

        Args:
            source: name of the model in error messages.

        Raises:
            UserError: if the model lacks a field that a flag sets.
        """
        from shardlab.models.named import with_fields

        values = self.flag_values()
        name = values.pop("model", None)
        return with_fields(noted_model(name) if name else model, values, name or source)


def noted_model(name: str) -> Blocks:
    """Find the model of a name, and print on stderr the fields of its config.json that are ignored.

    Raises:
        UserError: if there is no such model.
    """
    from shardlab.models.from_config import config_notes
    from shardlab.models.named import find_model, is_config_file

    model = find_model(name)
    if is_config_file(name):
        print_notes(tuple(config_notes(Path(name))))
    return model


@cache
def print_notes(notes: tuple[str, ...]) -> None:
    """Print notes on stderr, each group of notes once."""
    for note in notes:
        print(f"shardlab: {note}", file=sys.stderr)


DEFAULT_MODEL = ModelOptions()

ModelFlags = Annotated[ModelOptions, tyro.conf.OmitArgPrefixes, tyro.conf.arg(name="")]
"""Field type of a command that has these flags, without a prefix in their names."""


@dataclass(frozen=True)
class SettingOptions:
    """Settings of a training by flags. A field is None or False if its flag is not given."""

    def flag_values(self) -> dict[str, dict[str, Any]]:
        """Return the values of the given flags, by section and field.

        Raises:
            UserError: if flags contradict each other.
        """
        values: dict[str, dict[str, Any]] = {}
        for section, kind in SECTIONS.items():
            types = field_types(kind)
            words = {
                name: switch_value(self, name) if field_type.words is bool else getattr(self, name)
                for name, field_type in types.items()
            }
            values[section] = {name: types[name].of_words(value) for name, value in words.items() if value is not None}
        return values


Settings = Annotated[SettingOptions, tyro.conf.OmitArgPrefixes, tyro.conf.arg(name="")]
"""Field type of a command that has these flags, without a prefix in their names."""


def _flags() -> Iterator[tuple[str, Any, Any]]:
    """Yield the name of each flag, its type for tyro, and its default."""
    defaults = preset_source("default").sections
    for section, kind in SECTIONS.items():
        helps = field_helps(kind)
        for name, field_type in field_types(kind).items():
            default = defaults[section].get(name)
            default_text = " ".join(map(str, cast(tuple[Any, ...], default))) if isinstance(default, tuple) else default
            hint = "" if default_text is None else f"(default: {default_text})"
            about = tyro.conf.arg(metavar=field_type.metavar, help=helps[name], help_behavior_hint=hint)
            if field_type.words is bool:
                yield from switch_flags(name, helps[name])
            else:
                yield name, Annotated[OptionalCount if field_type is COUNT else field_type.words | None, about], None


setting_flags: Callable[..., SettingOptions] = make_dataclass(
    "SettingFlags", _flags(), bases=(SettingOptions,), frozen=True
)
"""Class of `SettingOptions` with a flag for each field of the sections."""

NO_SETTINGS = setting_flags()
