"""Regular files, atomic writing of files and folders, tables in TOML and JSON, and the cache folder.

In this order: checks of paths that users give, atomic writing, reading of TOML and JSON, writing of TOML, and the
processor's name with the folder for its measurements.
"""

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

from shardlab.common.errors import TooDeep, UserError, closest_name, why_unreadable


def require_regular_file(path: Path) -> None:
    """Refuse a path that is not a regular file, without opening it: opening a pipe without a writer would hang.

    Raises:
        UserError: if it is missing, a folder, a pipe or a device.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise missing_path(path, "name a text file") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); name a text file that can") from error
    if stat.S_ISDIR(mode):
        raise UserError(f"{path} is a folder; name a text file")
    if not stat.S_ISREG(mode):
        kind = "a pipe" if stat.S_ISFIFO(mode) else "a device" if stat.S_ISCHR(mode) else "no ordinary file"
        raise UserError(f"{path} is {kind}, but text is read from random places; write it to a file and name that")


def missing_path(path: Path, advice: str) -> UserError:
    """Return the error for a path that does not exist, with the nearest path that does, or with advice."""
    nearest = nearest_path(path)
    return UserError(f"{path} does not exist; {advice if nearest is None else f'did you mean {nearest}?'}")


def nearest_path(path: Path) -> Path | None:
    """Return the existing path that is most similar to `path`, part by part (None: a part has no similar name)."""
    nearest = Path(path.anchor)
    for part in path.relative_to(path.anchor).parts:
        if not os.path.exists(nearest / part):
            names = os.listdir(nearest) if os.access(nearest, os.R_OK) and nearest.is_dir() else []
            part = closest_name(part, names, cutoff=0.75)
            if part is None:
                return None
        nearest /= part
    return nearest


def path_from_here(name: str, folder: str | None) -> str:
    """Return a path for use in this working directory, given a path relative to the folder of another command.

    Args:
        name: `PATH`, `PATH:NAME` or `PATH:NUMBER`.
        folder: the working directory of the other command; None if it is unknown.

    Returns:
        The name with the path joined to the other command's folder. The name is returned unchanged if that folder is
        unknown or the same as this command's, or if the path exists only relative to this command's.
    """
    path = name if ":" not in name or Path(folder or "", name).exists() else name.rpartition(":")[0]
    if folder is None or Path(folder) == Path.cwd() or (Path(path).exists() and not Path(folder, path).exists()):
        return name
    return str(Path(folder, path)) + name[len(path) :]


PART_SUFFIX = ".shardlab.part"
"""Suffix of a file that is being written. A killed process leaves such a file behind."""


@contextmanager
def atomic_file(path: Path) -> Generator[Path, None, None]:
    """Write a file that replaces `path` when the block ends, and is removed if the block raises.

    The temporary file lies beside `path`. If `path` is a link, the link stays and its target is replaced. A device or a
    pipe, such as /dev/stdout, is written directly.

    Yields:
        The path to write to.

    Raises:
        OSError: when it cannot be written. The old file at `path` then stays.
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
    """Fill a folder that becomes `path` when the block ends, and is removed if the block raises.

    The temporary folder lies beside `path` and is locked. The operating system unlocks it when the process ends, so
    temporary folders of killed processes are recognized and removed first.

    Yields:
        The folder to write into.

    Raises:
        UserError: when there is something at `path`, or the folder cannot be made or written.
    """
    if os.path.lexists(path):
        raise UserError(f"{path} exists; name a new folder, so that nothing is overwritten")
    for old_part in path.parent.glob(f"{glob.escape(path.name)}.part-*"):
        with _try_lock(old_part) as is_locked:
            if is_locked:
                shutil.rmtree(old_part, ignore_errors=True)
    part = path.with_name(f"{path.name}.part-{secrets.token_hex(4)}")
    try:
        with _locked_new_folder(part):
            yield part
            part.rename(path)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror or error}); name another folder") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def write_atomically(path: Path, text: str) -> None:
    """Write a text file that appears whole or not at all."""
    with atomic_file(path) as part:
        part.write_text(text, encoding="utf-8", errors="surrogateescape")  # paths and prompts may hold any bytes


def load_table(name: str) -> dict[str, Any]:
    """Return a table that comes with Shardlab, by its path in the package, such as "simulate/hardware/devices.toml"."""
    return tomllib.loads((resources.files("shardlab") / name).read_text(encoding="utf-8"))


MOST_LEVELS = 50
"""Largest number of nested levels of tables and lists. No file that Shardlab reads needs ten."""


_LOADS: dict[str, Callable[[str], Any]] = {"TOML": tomllib.loads, "JSON": json.loads}


def read_file(path: Path, form: Literal["TOML", "JSON"]) -> Any:
    """Return the contents of a user's TOML or JSON file.

    Raises:
        UserError: if the file cannot be read, is no text, is nested too deep, or has a syntax error.
    """
    try:
        return parse_document(_LOADS[form], path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, TooDeep) as error:
        raise UserError(f"{path} cannot be read: {why_unreadable(error)}") from None
    except ValueError as error:
        raise UserError(f"{path} is not {form}: {error}") from None


def parse_document(loads: Callable[[str], Any], text: str) -> Any:
    """Parse a text, and refuse one that is nested too deep.

    Raises:
        TooDeep: if it has more than `MOST_LEVELS` nested levels, at which parsing and printing could overflow the
            stack.
        ValueError: raised by the parser itself.
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
        level = [inner for outer in level for inner in _children(outer)]
    return data


def as_toml(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Write tables as TOML, without the values that are None.

    >>> print(as_toml({"plan": {"mesh": {"pp": 2}, "schedule": "1f1b", "stages_per_rank": None}}), end="")
    [plan]
    mesh = { pp = 2 }
    schedule = "1f1b"
    """
    texts = [f"[{name}]\n{''.join(_lines(table))}" for name, table in tables.items()]
    return "\n".join(texts)


def toml_value(value: Any) -> str:
    """Return a value in TOML syntax.

    >>> toml_value(["a\\"b", 2e-3, True, float("inf")])
    '["a\\\\"b", 0.002, true, inf]'
    """
    if isinstance(value, Mapping):
        inner = [f"{_key(name)} = {toml_value(item)}" for name, item in cast(Mapping[str, Any], value).items()]
        return f"{{ {', '.join(inner)} }}" if inner else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, cast(list[Any], value)))}]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    assert isinstance(value, int | float), value
    return repr(value)


def processor_name() -> str:
    """Return the name of the CPU, from /proc/cpuinfo if it exists, and otherwise from Python's `platform`."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def cache_folder() -> Path:
    """Return the folder of measurements: `shardlab` in $XDG_CACHE_HOME or ~/.cache."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "shardlab"


@contextmanager
def _locked_new_folder(folder: Path) -> Generator[None, None, None]:
    """Make a folder and lock it during the block. Make it again if another process removed it before the lock."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        with _try_lock(folder) as is_locked:
            if is_locked and folder.exists():
                yield
                return


@contextmanager
def _try_lock(folder: Path) -> Generator[bool, None, None]:
    """Lock a folder during the block. Yield False if another process holds the lock."""
    try:
        place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:  # it was renamed or removed meanwhile, or is no folder
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


def _children(value: Any) -> list[Any]:
    """Return the tables and lists directly inside a value."""
    inner: list[Any] = []
    if isinstance(value, dict):
        inner = list(cast(dict[str, Any], value).values())
    elif isinstance(value, list):
        inner = cast(list[Any], value)
    return [child for child in inner if isinstance(child, dict | list)]


def _lines(table: Mapping[str, Any]) -> list[str]:
    return [f"{_key(name)} = {toml_value(value)}\n" for name, value in table.items() if value is not None]


def _key(name: str) -> str:
    return name if name.replace("_", "").replace("-", "").isalnum() and name.isascii() else toml_value(name)
