"""Tables of devices, nodes and links: the TOML files beside this one, in which each row says where it was looked up."""

from __future__ import annotations

from typing import Any

from shardlab.program.files import packaged


def rows(file: str, table: str) -> dict[str, dict[str, Any]]:
    """Rows of a table by name, whole: what one leaves out is as in its base, and the pages of its source are named."""
    pages = packaged("hardware/pages.toml")
    found: dict[str, dict[str, Any]] = {}
    for name, row in packaged(f"hardware/{file}.toml")[table].items():
        found[name] = found.get(row.pop("base", ""), {}) | row
    return {name: row | {"source": row["source"].format(**pages)} for name, row in found.items()}
