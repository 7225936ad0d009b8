"""Python files that users name on the command line, as path/to/file.py:NAME."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable, Generator
from pathlib import Path
from types import ModuleType
from typing import Any

from shardlab.errors import UserError, closest


def file_and_name(name: str) -> tuple[Path | None, str]:
    """Split `path/to/file.py:NAME`; a built-in name has no file."""
    path, colon, member = name.rpartition(":")
    if colon:
        return Path(path), member
    return (Path(name), "") if name.endswith(".py") else (None, name)


def member(module: ModuleType, path: Path, name: str, what: tuple[str, str], is_one: Callable[[Any], bool]) -> Any:
    """Get what a file has under a name.

    Args:
        what: the kind of thing that is wanted, and all that a file has of it; `is_one` knows it.

    Raises:
        UserError: if there is no such name; the nearest one is suggested.
    """
    found = getattr(module, name, None) if name else None
    if found is None:
        have = [key for key, value in vars(module).items() if is_one(value)]
        one, several = what
        missing = f"{path} has no {one} {name!r}" if name else f"say which {one} of {path}: {path}:NAME"
        near = closest(name, have)
        hint = f"did you mean {near}?" if near else f"its {several} are: {', '.join(have) or 'none'}"
        raise UserError(f"{missing}; {hint}")
    return found


def module_of(path: Path) -> ModuleType:
    """Run a file as a module; nothing is written beside it, and places in it are named as the user named it.

    Raises:
        UserError: if there is no such file, or it cannot be run.
    """
    if not path.is_file():
        raise UserError(f"{path} is not a file; give path/to/file.py:NAME")
    module = ModuleType(f"shardlab_user_{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses look it up
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)  # the file may import its neighbours
    with running(path):
        exec(compile(path.read_bytes(), str(path), "exec"), vars(module))
    return module


@contextlib.contextmanager
def running(path: Path) -> Generator[None]:
    """While a file's code runs, what it prints goes to stderr: a command's stdout is its own.

    Raises:
        UserError: for whatever the code raises, with its line.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except (Exception, SystemExit) as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        line = lines[-1] if lines else getattr(error, "lineno", None)
        place = f"{path}:{line}" if line else str(path)
        if isinstance(error, UserError):
            raise UserError(f"{place}: {error}") from error
        raise UserError(f"{place} cannot be run: {type(error).__name__}: {error}") from error
