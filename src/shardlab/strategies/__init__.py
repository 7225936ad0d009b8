"""Built-in strategies: the short files are to be read, in the order of `shardlab strategies`; the rest are plans.

A strategy is declared by its own module, with `built_in` or `preset`; every module of this folder is imported.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from shardlab.errors import unknown
from shardlab.strategies.entry import DECLARED, StrategyEntry
from shardlab.strategies.plan import Plan


def find(name: str) -> StrategyEntry:
    """The built-in strategy of this name; `_` is as good as `-`.

    Raises:
        UserError: if there is none; the nearest name is suggested.
    """
    if (spelled := name.replace("_", "-")) in STRATEGIES:
        return STRATEGIES[spelled]
    raise unknown("strategy", name, STRATEGIES, " and path/to/file.py:function")


for module in iter_modules(__path__):
    import_module(f"{__name__}.{module.name}")

STRATEGIES = {entry.name: entry for entry in sorted(DECLARED, key=lambda entry: entry.order)}
"""Every built-in strategy by name."""

__all__ = ["STRATEGIES", "Plan", "StrategyEntry", "find"]
