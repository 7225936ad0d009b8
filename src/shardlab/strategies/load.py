"""Finding a strategy by what a user calls it: a built-in name, or a function in a file."""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import sys
import traceback
from pathlib import Path
from types import ModuleType

from shardlab.program import UserError
from shardlab.strategies import STRATEGIES
from shardlab.strategies.entry import Entry


def load(name: str) -> Entry:
    """The strategy called `name`: a built-in name or `path/to/file.py:function`.

    Raises:
        UserError: when there is no such name, file or function, the file cannot be run, or the function is not async.
    """
    path, colon, function = name.rpartition(":")
    if colon and path.endswith(".py"):
        return _from_file(name, Path(path), function)
    if name in STRATEGIES:
        return STRATEGIES[name]
    near = difflib.get_close_matches(name, STRATEGIES, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]}?" if near else "give a built-in name or path/to/file.py:function."
    raise UserError(f"there is no strategy {name!r}; {hint} Built in: {', '.join(STRATEGIES)}")


def _from_file(name: str, path: Path, function: str) -> Entry:
    module = _module(path)
    program = getattr(module, function, None)
    if program is None:
        asynchronous = [key for key, value in vars(module).items() if inspect.iscoroutinefunction(value)]
        have = ", ".join(asynchronous) or "none"
        raise UserError(f"{path} has no function {function!r}; its async functions are: {have}")
    if not inspect.iscoroutinefunction(program):
        raise UserError(f"{function} in {path} is not a strategy; write it as `async def {function}(rank): ...`")
    return Entry(name, program, "as its program says", str(path))


def _module(path: Path) -> ModuleType:
    if not path.is_file():
        raise UserError(f"{path} is not a file; give path/to/file.py:function")
    spec = importlib.util.spec_from_file_location(f"shardlab_user_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        line = lines[-1] if lines else getattr(error, "lineno", None)
        place = f"{path}:{line}" if line else str(path)
        raise UserError(f"{place} cannot be run: {type(error).__name__}: {error}") from error
    return module
