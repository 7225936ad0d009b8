"""Python files that users name on the command line, as path/to/file.py:function."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from shardlab.errors import closest
from shardlab.program import UserError


def file_and_function(name: str) -> tuple[Path | None, str]:
    """Split `path/to/file.py:function`; a built-in name has no file."""
    path, colon, function = name.rpartition(":")
    if colon:
        return Path(path), function
    return (Path(name), "") if name.endswith(".py") else (None, name)


def member(module: ModuleType, path: Path, function: str, what: str, is_one: Callable[[Any], bool]) -> Any:
    """Get what a file has under a name.

    Args:
        what: the kind of thing that is wanted, in the plural; `is_one` knows it.

    Raises:
        UserError: if there is no such name; the nearest one is suggested.
    """
    found = getattr(module, function, None) if function else None
    if found is None:
        have = [key for key, value in vars(module).items() if is_one(value)]
        missing = f"{path} has no function {function!r}" if function else f"say which function of {path}: {path}:NAME"
        near = closest(function, have)
        hint = f"did you mean {near}?" if near else f"its {what} are: {', '.join(have) or 'none'}"
        raise UserError(f"{missing}; {hint}")
    return found


def module_of(path: Path) -> ModuleType:
    """Run a file as a module; nothing is written beside it, and places in it are named as the user named it."""
    if not path.is_file():
        raise UserError(f"{path} is not a file; give path/to/file.py:function")
    module = ModuleType(f"shardlab_user_{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses look it up
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)  # the file may import its neighbours
    try:
        with contextlib.redirect_stdout(sys.stderr):  # a command's stdout is its own, whatever the file prints
            exec(compile(path.read_bytes(), str(path), "exec"), vars(module))
    except (Exception, SystemExit) as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        line = lines[-1] if lines else getattr(error, "lineno", None)
        place = f"{path}:{line}" if line else str(path)
        raise UserError(f"{place} cannot be run: {type(error).__name__}: {error}") from error
    return module
