"""Files that are read from random places, files that appear whole or not at all, and tables of Shardlab's own."""

from __future__ import annotations

import fcntl
import glob
import json
import os
import platform
import secrets
import shutil
import stat
import tomllib
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any, Literal, cast

from shardlab.common.errors import TooDeep, UserError, why_unreadable


def require_regular_file(path: Path) -> None:
    """Refuse what is no ordinary file, without opening it: a pipe without a writer would hang.

    Raises:
        UserError: saying what it is instead.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; name a text file") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); name a text file that can") from error
    if stat.S_ISDIR(mode):
        raise UserError(f"{path} is a folder; name a text file")
    if not stat.S_ISREG(mode):
        kind = "a pipe" if stat.S_ISFIFO(mode) else "a device" if stat.S_ISCHR(mode) else "no ordinary file"
        raise UserError(f"{path} is {kind}, but text is read from random places; write it to a file and name that")


def path_from_here(name: str, folder: str | None) -> str:
    """Return a path as it is found from here that a file names relative to the folder of another command.

    Args:
        name: `PATH`, `PATH:NAME` or `PATH:NUMBER`.
        folder: in which the other command ran; None if that is not known.

    Returns:
        The name with an absolute path, unless both commands run in the same folder, or the path is there only from
        here: then the name as it is.
    """
    path = name if ":" not in name or Path(folder or "", name).exists() else name.rpartition(":")[0]
    if folder is None or Path(folder) == Path.cwd() or (Path(path).exists() and not Path(folder, path).exists()):
        return name
    return str(Path(folder, path)) + name[len(path) :]


PART_SUFFIX = ".shardlab.part"
"""End of the name of a file that is being written: what has it was left by a process that was killed."""


@contextmanager
def atomic_file(path: Path) -> Generator[Path, None, None]:
    """Write a file beside `path`: it takes the place of `path` when the block ends, and goes if the block raises.

    A link stays, and the file that it names is replaced. A device or a pipe, such as /dev/stdout, is written into.

    Yields:
        where to write.

    Raises:
        OSError: when it cannot be written; what was at `path` before is still there.
    """
    if path.exists() and not path.is_file():
        yield path
        return
    path = path.resolve()
    part = path.with_name(path.name + PART_SUFFIX)
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: Path) -> Generator[Path, None, None]:
    """Fill a folder beside `path`: it becomes `path` when the block ends, and goes if the block raises.

    What processes that were killed have left of such folders goes first. One that is being filled is locked, and a
    process that ends unlocks what it holds, however it ends.

    Yields:
        the folder to write into.

    Raises:
        UserError: when there is something at `path`, or the folder cannot be made or written.
    """
    if os.path.lexists(path):
        raise UserError(f"{path} exists; name a new folder, so that nothing is overwritten")
    for left in path.parent.glob(f"{glob.escape(path.name)}.part-*"):
        with _locked(left) as mine:
            if mine:
                shutil.rmtree(left, ignore_errors=True)
    part = path.with_name(f"{path.name}.part-{secrets.token_hex(4)}")
    try:
        with _made(part):
            yield part
            part.rename(path)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror or error}); name another folder") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


@contextmanager
def _made(folder: Path) -> Generator[None, None, None]:
    """Make a folder, and lock it for as long as the block takes; again, if it was swept away before it was locked."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder) as mine:
            if mine and folder.exists():
                yield
                return


@contextmanager
def _locked(folder: Path) -> Generator[bool, None, None]:
    """Lock a folder for as long as the block takes; whether nobody else had locked it."""
    try:
        place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:  # renamed or removed meanwhile, or no folder
        yield False
        return
    try:
        fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
        free = True
    except OSError:
        free = False
    try:
        yield free
    finally:
        os.close(place)


def write_atomically(path: Path, text: str) -> None:
    """Write a text file that appears whole or not at all."""
    with atomic_file(path) as part:
        part.write_text(text, encoding="utf-8", errors="surrogateescape")  # paths and prompts may hold any bytes


def load_table(name: str) -> dict[str, Any]:
    """Return one of the tables that come with Shardlab, by its path in the package, as in
    "simulate/hardware/devices.toml".
    """
    return tomllib.loads((resources.files("shardlab") / name).read_text(encoding="utf-8"))


# Reading what users write as TOML or JSON: a file that cannot be read, or is nested too deep, ends in a sentence.


MOST_LEVELS = 50
"""Levels of tables and lists; no file that is read needs ten."""


_LOADS: dict[str, Callable[[str], Any]] = {"TOML": tomllib.loads, "JSON": json.loads}


def read_file(path: Path, form: Literal["TOML", "JSON"]) -> Any:
    """What a user's file says.

    Raises:
        UserError: the file cannot be read, is no text, is nested too deep, or is not of that form.
    """
    try:
        return parse_document(_LOADS[form], path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, TooDeep) as error:
        raise UserError(f"{path} cannot be read: {why_unreadable(error)}") from None
    except ValueError as error:
        raise UserError(f"{path} is not {form}: {error}") from None


def parse_document(loads: Callable[[str], Any], text: str) -> Any:
    """What a parser makes of a text.

    Raises:
        TooDeep: if it is nested deeper than `MOST_NESTED` levels, on which parsers and printing would end in an error.
        ValueError: what the parser itself raises.
    """
    try:
        data = loads(text)
    except RecursionError:
        raise TooDeep(MOST_LEVELS) from None
    level, depth = [data], 0
    while level:
        depth += 1
        if depth > MOST_LEVELS:
            raise TooDeep(MOST_LEVELS)
        level = [inner for outer in level for inner in _inside(outer)]
    return data


def _inside(value: Any) -> list[Any]:
    """Return the tables and lists right inside a value."""
    inner: list[Any] = []
    if isinstance(value, dict):
        inner = list(cast(dict[str, Any], value).values())
    elif isinstance(value, list):
        inner = cast(list[Any], value)
    return [each for each in inner if isinstance(each, dict | list)]


# Writing TOML: tables of words, numbers, truth values and lists of these.


def as_toml(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Write tables as TOML; a value that is None is left out.

    >>> print(as_toml({"plan": {"mesh": {"pp": 2}, "schedule": "1f1b", "stages_per_rank": None}}), end="")
    [plan]
    mesh = { pp = 2 }
    schedule = "1f1b"
    """
    texts = [f"[{name}]\n{''.join(_lines(table))}" for name, table in tables.items()]
    return "\n".join(texts)


def _lines(table: Mapping[str, Any]) -> list[str]:
    return [f"{_key(name)} = {toml_value(value)}\n" for name, value in table.items() if value is not None]


def toml_value(value: Any) -> str:
    """Return a value as TOML has it.

    >>> toml_value(["a\\"b", 2e-3, True, float("inf")])
    '["a\\\\"b", 0.002, true, inf]'
    """
    if isinstance(value, Mapping):
        inner = [f"{_key(name)} = {toml_value(each)}" for name, each in cast(Mapping[str, Any], value).items()]
        return f"{{ {', '.join(inner)} }}" if inner else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, cast(list[Any], value)))}]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    assert isinstance(value, int | float), value
    return repr(value)


def _key(name: str) -> str:
    return name if name.replace("_", "").replace("-", "").isalnum() and name.isascii() else toml_value(name)


# What tells this machine from others, and where measurements of it lie.


def processor_name() -> str:
    """Return the CPU's name, as Linux knows it; elsewhere as Python does."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def cache_folder() -> Path:
    """Return the folder of measurements: $XDG_CACHE_HOME or ~/.cache, then shardlab."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "shardlab"
