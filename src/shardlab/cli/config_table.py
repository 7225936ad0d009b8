"""A configuration as a table, and what a model counts, for `shardlab train`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from rich.console import Console
from rich.text import Text

from shardlab.cli.console import print_figures, print_whole, table_of
from shardlab.models.counts import ParameterCounts
from shardlab.strategies.plan import UNNAMED
from shardlab.train.config import TrainingConfig
from shardlab.train.config_sources import ConfigSource, origin

BY_NAME = {"model": "the model", "plan": "the plan"}
"""What gives a field of these sections that no source has; other fields follow by a rule."""


def print_config(console: Console, config: TrainingConfig, sources: Sequence[ConfigSource], *, all: bool) -> None:
    """Print a row for each field, with the source that it comes from; without `all`, but for those of the first source
    and those that follow from others.
    """
    table = table_of("section", "field", "value", "from", words=4)
    for section, fields in config.as_dict().items():
        shown = section
        for name, value in fields.items():
            source = origin(sources, section, name)
            if value is None or (not all and source in (None, sources[0].name)) or (name, value) == ("name", UNNAMED):
                continue
            found = source or ("rule" if name == "passes" else BY_NAME.get(section, "rule"))
            table.add_row(shown, name, Text(as_words(value), "bold"), Text(found, "dim"))
            shown = ""
    if table.row_count:
        print_whole(console, table, folded=2)


def as_words(value: Any) -> str:
    """A value as it is read in a table."""
    if isinstance(value, dict):
        sizes = cast(dict[str, Any], value)
        return " ".join(f"{axis} {size}" for axis, size in sizes.items()) or "one rank"
    if isinstance(value, list):
        return ", ".join(map(str, cast(list[Any], value))) or "none"
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def print_counts(console: Console, counts: ParameterCounts) -> None:
    """Print a model's parameter counts."""
    rows = [
        ("parameters", f"{counts.parameters:,}", "all"),
        ("decayed", f"{counts.decayed:,}", f"in {counts.decayed_tensors} tensors"),
        ("not decayed", f"{counts.not_decayed:,}", f"in {counts.not_decayed_tensors} tensors"),
        ("nanoGPT's count", f"{counts.without_positions:,}", "without position embeddings"),
    ]
    print_figures(console, rows)
