"""Tables of devices, nodes and links: the TOML files beside this one, in which each row says where it was looked up."""

from __future__ import annotations

from typing import Any

from shardlab.hardware.figure import figures_of
from shardlab.program.files import packaged


def rows(file: str, table: str) -> dict[str, dict[str, Any]]:
    """Rows of a table by name, whole: what one leaves out is as in its base, and the pages of its source are named.

    Of a row with a list `fit`, `figures` says where each figure is from (see `figures_of`).
    """
    pages = packaged("hardware/pages.toml")
    found: dict[str, dict[str, Any]] = {}
    for name, row in packaged(f"hardware/{file}.toml")[table].items():
        base = found.get(row.pop("base", ""), {})
        found[name] = base | row
        if "fit" in row:
            found[name]["figures"] = figures_of(base | row, base.get("figures", {}))
            del found[name]["fit"]
    return {name: row | {"source": row["source"].format(**pages)} for name, row in found.items()}
