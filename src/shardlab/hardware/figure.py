"""Figures with where they are from: a source, the runs that they were fitted to, or that they are assumed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any, cast

from shardlab.program.files import packaged


@dataclass(frozen=True)
class Figure:
    """One figure of a recipe, a device or a link.

    Attributes:
        value: what it is.
        source: where it is described, or on what an assumption rests.
        fitted_to: the measurements that it was fitted to ("": it was not fitted).
        runs: ids of these measurements in a file of published runs; `*` stands for any characters.
        assumed: no source gives it, and no runs settle it.
    """

    value: Any
    source: str = ""
    fitted_to: str = ""
    runs: tuple[str, ...] = ()
    assumed: bool = False

    @property
    def count(self) -> int:
        """Numbers in it, each a degree of freedom of a fit."""
        value: Any = self.value
        return len(cast(list[float], value)) if isinstance(value, list | tuple | dict) else 1


def figures_of(row: Mapping[str, Any], base: Mapping[str, Figure]) -> dict[str, Figure]:
    """Figures of a table's row by name, as in "matmul.bfloat16", from its list `fit`.

    Each entry of `fit` names `figures` (`*` stands for any characters), and says source, fitted_to, runs or assumed.

    Args:
        row: the whole row, with what it has from its base.
        base: the figures of that; what the row does not name is as there.
    """
    values = _leaves(row)
    found = {name: figure for name, figure in base.items() if values[name] == figure.value}
    for entry in cast(list[dict[str, Any]], row.get("fit", [])):
        given: dict[str, Any] = entry | {"runs": tuple(entry.get("runs", ()))}
        patterns = given.pop("figures")
        for name, value in values.items():
            if any(fnmatch(name, pattern) for pattern in patterns):
                found[name] = Figure(value, **given)
    return found


def _leaves(row: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, Mapping) and name != "figures":
            found |= _leaves(cast(Mapping[str, Any], value), f"{prefix}{name}.")
        elif isinstance(value, int | float) or (prefix and isinstance(value, list)):
            found[prefix + name] = value
    return found


CONSTANTS = {
    name: Figure(**(row | {"runs": tuple(row.get("runs", ()))}))
    for name, row in packaged("hardware/constants.toml")["constant"].items()
}
"""What all devices and links share, from `constants.toml`."""
