"""Finding a strategy by what a user calls it: a built-in name, or a function in a file."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import sys
import traceback
from pathlib import Path
from types import ModuleType

from shardlab.program import UserError
from shardlab.strategies import find
from shardlab.strategies.entry import Entry, data_parallel_mesh


def load(name: str) -> Entry:
    """The strategy called `name`: a built-in name or `path/to/file.py:function`.

    A file whose strategy needs another grid than one axis of data-parallel ranks says so with a second function,
    `<strategy>_mesh(ranks) -> Mesh`.

    Raises:
        UserError: when there is no such name, file or function, the file cannot be run, or the function is not async.
    """
    path, function = file_and_function(name)
    if path is not None:
        return _from_file(name, path, function)
    return find(name)


def file_and_function(name: str) -> tuple[Path | None, str]:
    """What `path/to/file.py:function` is made of; no file for a built-in name."""
    path, colon, function = name.rpartition(":")
    if colon:
        return Path(path), function
    return (Path(name), "") if name.endswith(".py") else (None, name)


def _from_file(name: str, path: Path, function: str) -> Entry:
    module = _module(path)
    program = getattr(module, function, None) if function else None
    if program is None:
        have = [key for key, value in vars(module).items() if inspect.iscoroutinefunction(value)]
        near = difflib.get_close_matches(function, have, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"its async functions are: {', '.join(have) or 'none'}"
        what = f"{path} has no function {function!r}" if function else f"say which function of {path}: {path}:NAME"
        raise UserError(f"{what}; {hint}")
    if not inspect.iscoroutinefunction(program):
        raise UserError(f"{function} in {path} is not a strategy; write it as `async def {function}(rank): ...`")
    mesh = getattr(module, f"{function}_mesh", data_parallel_mesh)
    return Entry(name, program, "as its program says", str(path), mesh)


def _module(path: Path) -> ModuleType:
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
