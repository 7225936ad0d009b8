"""Command lines parsed with what tyro has found out about options before.

Importing this module has that effect in a process and its forks. Options are those of classes, which live on, so that
what tyro has found stays true. Otherwise, tyro clears most of it for each line, derives all options of a command again
(60 ms of CPU time), and in a process with pytest computes a tenth of its cached results a second time.
"""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any, get_args

caches: Any = import_module("tyro._unsafe_cache")
caches.clear_cache = lambda: None
caches.sys = SimpleNamespace(modules={})

_Parser: Any = import_module("tyro._parsers").ParserSpecification
_Subcommand: Any = import_module("tyro.conf._confstruct")._SubcommandConfig
_derive = _Parser.from_callable_or_type
_derived: dict[tuple[Any, ...], Any] = {}


def _derive_once(f: Any, **options: Any) -> Any:
    """Derive the options of a union of commands at its first use, and those of one command when a line names it."""
    commands: list[Any] = [getattr(command, "__metadata__", (None,))[0] for command in get_args(f)]
    if options["parent_classes"] or not commands or not all(isinstance(command, _Subcommand) for command in commands):
        return _derive(f, **options)
    key = (
        options["description"],
        *((command.name, command.constructor_factory(), command.description) for command in commands),
    )
    if key not in _derived:
        _derived[key] = _derive(f, **options)
    return _derived[key]


_Parser.from_callable_or_type = staticmethod(_derive_once)
