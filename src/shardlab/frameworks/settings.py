"""Settings of a configuration: keys with their values and lines, and what each key means.

A *meaning* is Shardlab's name of a setting, such as "tp" or "micro_batch_size". Frameworks that have the same setting
share its meaning. A `KeyTable` has the keys of one framework, from a TOML file beside this module. It maps meanings to
the framework's own keys and back. It also lists, each with a reason, keys that do not change the time or the memory of
a step, and keys that do but that predictions do not follow. Any other key is reported as not understood. A `Config`
holds the settings of one file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache, cached_property
from typing import Any, NamedTuple, cast

from shardlab.common.errors import UserError
from shardlab.common.files import load_table

UNSET = "${"
"""Beginning of the text that stands for a variable without a value, such as `${NODES}`."""


OFF = (False, None, "", 0, "0", "false", "False", "none", "null")
"""Values of keys that turn something off."""


class Setting(NamedTuple):
    """Key of a configuration with its value.

    Attributes:
        key: the framework's own name, such as "--tensor-model-parallel-size" or "parallelism.tensor_parallel_degree".
        value: the value. True stands for a flag without a value.
        line: line of the file, from 1 (0: it was given on the command line).
    """

    key: str
    value: Any
    line: int = 0

    @property
    def place(self) -> str:
        """The line, as text for messages."""
        return f"line {self.line}" if self.line else "command line"

    @property
    def text(self) -> str:
        """The setting as it is written for the framework."""
        key, value = self.key, self.value
        if key.startswith("--"):
            values = " ".join(map(str, cast(list[Any], value))) if isinstance(value, list) else value
            return key if value is True else f"{key} {values}"
        text = str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else str(value)
        return f"{key} = {text}"

    @property
    def removed(self) -> bool:
        """Whether this setting, used as a change of a file, removes the key."""
        return self.value is None or (self.value is False and self.key.startswith("--"))


def change_text(settings: Sequence[Setting]) -> str:
    """Describe a change in one line: its new settings, the keys that it removes, and the lines of the file."""
    added = [setting.text for setting in settings if not setting.removed]
    removed = [setting.key for setting in settings if setting.removed]
    lines = sorted({setting.line for setting in settings if setting.line})
    joined = " ".join(added) if all(text.startswith("--") for text in added) else " and ".join(added)
    parts = [*([joined] if added else []), *([f"without {', '.join(removed)}"] if removed else [])]
    return " ".join([*parts, *([f"(line {', '.join(map(str, lines))})"] if lines else [])])


COUNTS = {
    *("tp", "pp", "cp", "ep", "dp", "dp_replicate", "micro_batch_size", "local_batch", "accumulation"),
    *("layers", "hidden_size", "heads", "seq_len", "vocab_size", "experts", "top_k", "vocab_multiple"),
    *("layers_per_stage", "microbatch_tokens"),
}
"""Meanings whose values are at least 1."""


@dataclass(frozen=True)
class Key:
    """Key of a framework that changes the time or the memory of a step.

    Attributes:
        meaning: Shardlab's name of the setting.
        name: name of the key today; empty if the framework has no such key.
        also: names of the key in other versions.
        default: value if the key is absent, from the framework's source.
        off: whether the key is a flag that turns the setting off.
        kind: type of the value if there is no default: "int" or "float" ("": any).
    """

    meaning: str
    name: str
    also: Sequence[str] = ()
    default: Any = None
    off: bool = False
    kind: str = ""

    def read(self, setting: Setting) -> Any:
        """Return the value of a setting, converted to the type of the key's values.

        Raises:
            UserError: if the value cannot be converted.
        """
        value = setting.value
        if self.off:
            return value is False or str(value).lower() == "false"
        kind = self.kind if self.default is None else type(self.default).__name__
        if not kind or value is None:
            return value
        convert, expected = _KINDS[kind]
        try:
            return convert(value)
        except (ValueError, TypeError, KeyError, OverflowError):
            raise UserError(f"{setting.place}: {setting.key} is {value!r}; give {expected}") from None


def _as_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[str(value).lower()]


def _as_int(value: Any) -> int:
    if isinstance(value, bool) or float(value) != int(float(value)):
        raise ValueError(value)
    return int(float(value))


def _as_list(value: Any) -> list[Any]:
    if isinstance(value, list):
        return cast(list[Any], value)
    return [part.strip() for part in str(value).strip("[]").replace(",", " ").split()] if value else []


_KINDS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "int": (_as_int, "a whole number"),
    "float": (float, "a number"),
    "bool": (_as_bool, "true or false"),
    "list": (_as_list, "a list"),
    "str": (str, "text"),
}
"""By name of a type: the function that converts a value in a file to the type, and a description for messages."""


class Reason(NamedTuple):
    """Setting that does not change a prediction, and why it does not matter, or what the prediction lacks."""

    setting: Setting
    reason: str


@dataclass(frozen=True)
class KeyTable:
    """Configuration keys of a framework.

    Attributes:
        framework: its name.
        source: repository, files and commits from which the keys and their defaults are taken.
        keys: from Shardlab's name of a setting (its meaning) to the framework's key.
        ignored: from a pattern of keys to the reason why they do not matter.
        unpredicted: from a pattern of keys to what a prediction lacks if they are set.
        versions: from a version to patterns of keys that only this version has.
        data: further tables of the file.
    """

    framework: str
    source: str
    keys: Mapping[str, Key]
    ignored: Mapping[str, str]
    unpredicted: Mapping[str, str]
    versions: Mapping[str, tuple[str, ...]]
    data: Mapping[str, Any] = field(default_factory=dict[str, Any], repr=False)

    @cached_property
    def by_name(self) -> Mapping[str, Key]:
        """Keys by all their names."""
        return {name: key for key in self.keys.values() for name in (*key.also, key.name) if name}

    def find(self, name: str) -> Key | None:
        """Return the key of this name if it changes a step (None: it does not, or is not known)."""
        return self.by_name.get(name)

    def reason_to_ignore(self, name: str) -> str | None:
        """Return why a key does not matter (None: the table does not say that)."""
        return next((reason for pattern, reason in self.ignored.items() if fnmatchcase(name, pattern)), None)

    def reason_unpredicted(self, name: str) -> str | None:
        """Return what a prediction lacks if a key is set (None: nothing)."""
        return next((reason for pattern, reason in self.unpredicted.items() if fnmatchcase(name, pattern)), None)

    def write(self, meaning: str, value: Any) -> Setting:
        """Return the setting that gives a meaning a value, under the key's present name."""
        key = self.keys[meaning]
        return Setting(key.name, not value if key.off else value)


@cache
def key_table(framework: str) -> KeyTable:
    """Return the table of a framework."""
    table = load_table(f"frameworks/{framework}.toml")
    keys = {meaning: Key(meaning, **row) for meaning, row in table.pop("keys").items()}
    ignored = {pattern: reason for reason, patterns in table.pop("ignored").items() for pattern in patterns}
    if base := table.pop("base", None):  # the keys of that framework have a default here, but no name
        keys = {meaning: replace(key, name="", also=()) for meaning, key in key_table(base).keys.items()} | keys
    versions = {version: tuple(patterns) for version, patterns in table.pop("versions", {}).items()}
    return KeyTable(
        framework, table.pop("source"), keys, ignored, table.pop("unpredicted", {}), versions, cast(Any, table)
    )


@dataclass(frozen=True)
class Config:
    """Settings of one configuration. Its properties divide them by what is known of their keys.

    Attributes:
        table: keys of the framework.
        file: name of the file, for messages.
        settings: all settings in order. A later one replaces an earlier one with the same meaning.
        facts: settings that say on how many devices the file runs, by "nodes", "per_node" (devices of a node) and
            "devices".
        notes: remarks on how the file was read.
        model: name of a model that replaces the one in the configuration ("": none).
    """

    table: KeyTable
    file: str
    settings: tuple[Setting, ...]
    facts: Mapping[str, Setting] = field(default_factory=dict[str, Setting])
    notes: tuple[str, ...] = ()
    model: str = ""

    @cached_property
    def by_meaning(self) -> dict[str, Setting]:
        """The last setting of each meaning that the file has."""
        settings: dict[str, Setting] = {}
        for setting in self.settings:
            if (key := self.table.find(setting.key)) is not None:
                settings[key.meaning] = setting
        return settings

    @cached_property
    def values(self) -> dict[str, Any]:
        """The value of each meaning: the file's, or else the framework's default.

        Raises:
            UserError: if a value has the wrong type, is below 1 although it counts something, or is a variable without
                a value.
        """
        values: dict[str, Any] = {}
        unset: dict[str, Setting] = {}
        for meaning, key in self.table.keys.items():
            setting = self.by_meaning.get(meaning)
            if setting is None or (key.default == "" and UNSET in str(setting.value)):
                values[meaning] = key.default
            elif UNSET in str(setting.value):
                unset[setting.key] = setting
            else:
                values[meaning] = key.read(setting)
                if meaning in COUNTS and values[meaning] is not None and values[meaning] < 1:
                    raise UserError(f"{setting.place}: {setting.key} is {setting.value}; give 1 or more")
        if unset:
            names = ", ".join(f"{key} ({setting.place}: {setting.value})" for key, setting in unset.items())
            first = next(iter(unset.values()))
            raise UserError(
                f"{self.file} does not set the variables of {names}; give them after --, as in -- {first.key} VALUE"
            )
        return values

    @cached_property
    def understood(self) -> list[Setting]:
        """Settings that have a meaning, and that no later setting replaces."""
        return [setting for setting in self.settings if setting in self.by_meaning.values()]

    @cached_property
    def ignored(self) -> list[Reason]:
        """Settings that do not change the time or the memory of a step."""
        pairs = [(setting, self.table.reason_to_ignore(setting.key)) for setting in self._others]
        return [Reason(setting, reason) for setting, reason in pairs if reason is not None]

    @cached_property
    def unpredicted(self) -> list[Reason]:
        """Settings that matter, but that the prediction does not follow."""
        pairs = [(setting, self.table.reason_unpredicted(setting.key)) for setting in self._last]
        return [Reason(setting, reason) for setting, reason in pairs if reason is not None and setting.value not in OFF]

    @cached_property
    def unknown(self) -> list[Setting]:
        """Settings whose keys are not known."""
        reasons = self.table.reason_unpredicted, self.table.reason_to_ignore
        others = [setting for setting in self._others if setting.value not in (None, {}, [])]
        return [setting for setting in others if not any(reason(setting.key) for reason in reasons)]

    @property
    def version(self) -> str:
        """Version of the framework that alone has a key of the file, with this key, as text ("": there is none)."""
        for version, patterns in self.table.versions.items():
            for setting in self.settings:
                if any(fnmatchcase(setting.key, pattern) for pattern in patterns):
                    return f"{version} ({setting.key})"
        return ""

    @property
    def _last(self) -> list[Setting]:
        """The last setting of each key."""
        return list({setting.key: setting for setting in self.settings}.values())

    @property
    def _others(self) -> list[Setting]:
        """The last setting of each key that has no meaning."""
        return [setting for setting in self._last if self.table.find(setting.key) is None]

    def with_meanings(self, changes: Mapping[str, Any]) -> Config:
        """Return this configuration with other values of some meanings.

        A meaning that the file has keeps the file's key; others get the framework's key of today. A value None removes
        the key.
        """
        changed = [key for meaning, key in self.table.keys.items() if meaning in changes]
        unchanged = [setting for setting in self.settings if self.table.find(setting.key) not in changed]
        added = [self.edit(meaning, value) for meaning, value in changes.items() if value is not None]
        return replace(self, settings=(*unchanged, *added))

    def edit(self, meaning: str, value: Any) -> Setting:
        """Return the setting that gives a meaning a value, with the key and line of this file if it has the meaning."""
        old = self.by_meaning.get(meaning)
        new = self.table.write(meaning, value)
        return new if old is None else Setting(old.key, new.value, old.line)

    def fact(self, name: str) -> int | None:
        """Return a number of `facts` (None: the file does not give it, or gives a variable without a value)."""
        setting = self.facts.get(name)
        text = "" if setting is None else str(setting.value)
        return int(text) if text.isdecimal() and int(text) > 0 else None

    @property
    def devices(self) -> int | None:
        """Number of devices on which the file starts a training (None: it does not say)."""
        if (devices := self.fact("devices")) is not None:
            return devices
        per_node, nodes = self.fact("per_node"), self.fact("nodes")
        if per_node is None or (nodes is None and "nodes" in self.facts):
            return None
        return per_node * (nodes or 1)
