"""The prose of published runs, read by one table: `words.toml`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from shardlab.program.files import packaged


def read(what: str, text: str | None, facts: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The first entry of the table's list `what` whose words stand in `text`; empty where there is none.

    >>> read("gpu", "H100-SXM5-80GB (700 W)")["device"]
    'h100'

    Args:
        facts: what the run says in fields, for entries that count only `when` it does.
    """
    for entry in _table()[what]:
        met = all((facts or {}).get(name) == value for name, value in entry.get("when", {}).items())
        said = all(_stands(words, text or "") for words in entry["words"])
        if met and said and not any(_stands(words, text or "") for words in entry.get("unless", ())):
            return entry
    return {}


def _stands(words: str, text: str) -> bool:
    """Whether words stand in a text, none of them part of a longer one; a blank may be a hyphen or an underscore."""
    pattern = re.escape(words).replace(r"\ ", "[ _-]?")
    return re.search(rf"(?<![A-Za-z0-9]){pattern}(?![A-Za-z0-9])", text, re.IGNORECASE) is not None


@cache
def _table() -> dict[str, list[dict[str, Any]]]:
    return packaged("published/words.toml")
