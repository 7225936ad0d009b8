"""Fields of a dataclass of settings, in four forms: Python, flags, TOML and JSON.

Every table of a file is read by `read_settings` or `read_fields`, which follow the annotations of a dataclass. An
annotation may name a `FieldType`, which limits the values and describes the flag of the field; the docstring of a field
is the help of its flag. First come the functions on all fields of a class, then the functions that build a `FieldType`
(`integer`, `choice`, ...), then the common types (`COUNT`, `DURATION`, `INTERVAL`, ...). In the functions that build a
type, the argument `expected` describes the accepted values in messages, and `fits` tells whether a number is accepted.
"""

from __future__ import annotations

import ast
import inspect
import math
import operator
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from shardlab.common.errors import UserError, suggest_name

T = TypeVar("T")

SHORTEST_SECONDS = 1e-9
"""Lower limit of any measured time in seconds. A coarse clock, or the clock of a virtual machine during a migration,
can report 0."""

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}

TIME_FORMATS = "a time, such as 90s, 10m, 2h, 1d, 1:30:00 or 1-12:00:00"
"""Formats that `parse_seconds` accepts, for messages."""


def parse_seconds(words: str) -> float | None:
    """Return the seconds of a number with a unit, or of [DAYS-]HOURS:MINUTES:SECONDS; None for other text.

    After DAYS-, minutes and seconds may be left out, as in the time limits of Slurm.

    >>> parse_seconds("90s"), parse_seconds("1.5h"), parse_seconds("1:30:00"), parse_seconds("90")
    (90.0, 5400.0, 5400.0, None)
    """
    if clock := re.fullmatch(r"([0-9]{1,9}):([0-5][0-9]):([0-5][0-9])", words):
        hours, minutes, seconds = map(float, clock.groups())
        return 3600 * hours + 60 * minutes + seconds
    if days_clock := re.fullmatch(r"([0-9]{1,6})-((?:[01]?[0-9]|2[0-3])(?::[0-5][0-9]){0,2})", words):
        hours, minutes, seconds = map(float, [*days_clock[2].split(":"), 0, 0][:3])
        return 86400 * float(days_clock[1]) + 3600 * hours + 60 * minutes + seconds
    try:
        duration = float(words[:-1]) * UNITS[words[-1:]]
    except (ValueError, KeyError):
        return None
    return duration if 0 <= duration < math.inf else None


@dataclass(frozen=True)
class FieldType:
    """Type of a field: its accepted values, and their form on a command line.

    Attributes:
        words: type of the flag's arguments (bool: it has none).
        metavar: placeholder for the arguments in the help.
        check: function from a value to a description of accepted values; "" if the value is accepted.
        of_words: function from the flag's arguments to the value. If the flag takes one argument, it also converts
            texts in files.
        of_file: function from a value in a file to the field's value (None: a list becomes a tuple, and a text
            is converted by `of_words`).
    """

    words: Any
    metavar: str
    check: Callable[[Any], str]
    of_words: Callable[[Any], Any] = lambda words: words
    of_file: Callable[[Any], Any] | None = None


@cache
def field_hints(kind: type) -> dict[str, Any]:
    """Return the annotations of the fields of a dataclass."""
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in fields(kind)}


@cache
def field_types(kind: type) -> dict[str, FieldType]:
    """Return the types of the fields whose annotations name one."""
    hints = field_hints(kind).items()
    return {name: hint.__metadata__[0] for name, hint in hints if hasattr(hint, "__metadata__")}


def read_settings(
    kind: type[T], data: Any, source: str, key: str = "", base: T | None = None, *, strict: bool = True
) -> T:
    """Return the dataclass that a table of a TOML or JSON file describes.

    Args:
        kind: the dataclass.
        data: the table.
        source: name of the file for messages ("": the caller adds it).
        key: key of the table in the file ("": the table is the whole file).
        base: object that supplies the values of fields which the table leaves out (None: the defaults apply).
        strict: whether a key that is not a field is refused.

    Raises:
        UserError: if a key is unknown or missing, or a value is of another type. The message names the key, the value,
            the accepted values, and the nearest known key.
    """
    values = read_fields(field_hints(kind), data, source, key, base, strict=strict)
    if base is not None:
        return replace(cast(Any, base), **values)
    required = (
        field for field in fields(cast(Any, kind)) if field.default is MISSING and field.default_factory is MISSING
    )
    if missing := [field.name for field in required if field.name not in values]:
        raise UserError(f"{_place(source, key)} does not say {', '.join(missing)}".lstrip())
    return kind(**values)


def read_fields(
    types: Mapping[str, Any], data: Any, source: str, key: str = "", base: object = None, *, strict: bool = True
) -> dict[str, Any]:
    """Return the values of the fields that a table of a file has.

    Args:
        types: annotation or `FieldType` of each known field.
        data, source, key, base, strict: as in `read_settings`.
    """
    table = read_table(data, source, key)
    if strict and (unknown := next((name for name in table if name not in types), None)) is not None:
        raise UserError(f"{_place(source, key)} has no {unknown!r}; {suggest_name(unknown, types)}")
    return {
        name: read_value(types[name], value, source, f"{key}.{name}".lstrip("."), getattr(base, name, None))
        for name, value in table.items()
        if name in types
    }


def read_table(data: Any, source: str, key: str = "") -> dict[str, Any]:
    """Return a value of a file if it is a table, and refuse any other value."""
    if not isinstance(data, dict):
        raise UserError(f"{_place(source, key)} is {data!r}; give a table")
    return cast(dict[str, Any], data)


def read_value(hint: Any, data: Any, source: str, key: str, base: Any = None) -> Any:
    """Convert a value of a file to the type that its annotation or `FieldType` names.

    Args:
        hint: the annotation.
        data: the value in the file.
        source, key: place in the file, as in `read_settings`.
        base: object or table that supplies the values which a table in the file leaves out.
    """
    origin: Any = get_origin(hint)
    inner = get_args(hint)
    if data is None and NoneType in get_args(inner[0] if origin is Annotated else hint):
        return None
    if origin in (Union, UnionType):
        kinds = [member for member in inner if member is not NoneType]
        fitting = [member for member in kinds if _is_table(member) == isinstance(data, dict)]
        return read_value((fitting or kinds)[0], data, source, key, base)
    if _is_record(hint):
        return data if isinstance(data, hint) else read_settings(hint, data, source, key, base)
    if origin is Mapping:
        table = read_table(data, source, key)
        return cast(dict[str, Any], base or {}) | read_fields(dict.fromkeys(table, inner[1]), table, source, key)
    if origin in (tuple, Sequence):
        if not isinstance(data, list | tuple):
            raise UserError(f"{_place(source, key)} is {data!r}; give a list")
        values = cast(Sequence[Any], data)
        return tuple(read_value(inner[0], value, source, f"{key}[{number}]") for number, value in enumerate(values))
    plain: FieldType | None = hint if isinstance(hint, FieldType) else PLAIN.get(hint)
    kind: FieldType | None = inner[1] if origin is Annotated else choice(hint) if origin is Literal else plain
    if kind is None:
        return data
    value = value_from_file(kind, data)
    if expected := kind.check(value):
        raise UserError(f"{_place(source, key)} is {data!r}; give {expected}")
    return value


def _place(source: str, key: str) -> str:
    return ": ".join(filter(None, (source, key)))


def _is_record(hint: Any) -> bool:
    return isinstance(hint, type) and is_dataclass(hint)


def _is_table(hint: Any) -> bool:
    return _is_record(hint) or get_origin(hint) is Mapping


def field_helps(kind: type) -> dict[str, str]:
    """Return the docstrings of the fields of a dataclass."""
    module = ast.parse(inspect.getsource(sys.modules[kind.__module__]))  # getsource(class) is slow
    tree = next(node for node in module.body if isinstance(node, ast.ClassDef) and node.name == kind.__name__)
    helps: dict[str, str] = {}
    for statement, next_statement in pairwise(tree.body):
        match statement, next_statement:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                helps[name] = " ".join(text.split())
            case _:
                pass
    return helps


def check_field(name: str, value: Any, field_type: FieldType, default: Any) -> None:
    """Refuse a value that its field does not accept.

    Raises:
        UserError: with what to give instead.
    """
    unset = value is None and default is None
    if not unset and (expected := field_type.check(value)):
        raise UserError(f"{name} is {as_text(value)}; give {expected}")


def check_fields(instance: object) -> None:
    """Refuse an object with a field that does not accept its value.

    A list becomes a tuple, as in `read_settings`.

    Raises:
        UserError: with what to give instead.
    """
    kind = type(instance)
    for name, field_type in field_types(kind).items():
        value = getattr(instance, name)
        if isinstance(value, list):  # as in a file
            value = tuple(cast(list[Any], value))
            object.__setattr__(instance, name, value)
        check_field(name, value, field_type, getattr(kind, name, None))


def plain(value: Any) -> Any:
    """Return a number of NumPy, torch or another package as a number of Python, and any other value unchanged.

    The numbers in a list or tuple are converted as well, and a range becomes a list.
    """
    kind = cast(Any, type(value))
    if kind in PLAIN or (kind is tuple and not value):  # quickly, since the planner makes many plans
        return value
    if kind in (list, tuple, range):
        numbers = [plain(number) for number in value]
        return tuple(numbers) if kind is tuple else numbers
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return value.item()
    counts = hasattr(kind, "__index__") and not hasattr(value, "shape")
    return operator.index(value) if counts else value


def value_from_file(field_type: FieldType, value: Any) -> Any:
    """Convert the value of a field in a file, without checking that the field accepts it."""
    if field_type.of_file is not None:
        return field_type.of_file(value)
    if isinstance(value, list):
        return tuple(cast(list[Any], value))
    return field_type.of_words(value) if field_type.words is str and isinstance(value, str) else value


def as_text(value: Any) -> str:
    """Return the value of a field as text for a message."""
    return ", ".join(map(str, cast(tuple[Any, ...], value))) or "nothing" if isinstance(value, tuple) else repr(value)


def as_flags(values: Mapping[str, Any]) -> str:
    """Return the flags that set these fields, or these axes of a mesh.

    >>> as_flags({"sequence_parallel": False})
    '--no-sequence-parallel'
    >>> as_flags({"dp_shard": 2, "sequence_parallel": True, "shard_optimizer": ("dp_shard", "cp")})
    '--dp-shard 2 --sequence-parallel --shard-optimizer dp_shard cp'
    """
    flags: list[str] = []
    for name, value in values.items():
        words = cast(tuple[Any, ...], value) if isinstance(value, tuple) else (value,)
        flag = f"--{'no-' * (value is False)}{name.replace('_', '-')}"
        flags.append(" ".join([flag, *([] if isinstance(value, bool) else map(str, words))]))
    return " ".join(flags)


def _numbers(value: Any) -> bool:
    return isinstance(value, tuple) and all(type(number) is int for number in cast(tuple[Any, ...], value))


def _texts(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(item, str) for item in cast(tuple[Any, ...], value))


def integer(expected: str, minimum: float) -> FieldType:
    """Return the type of a whole number of `minimum` or more."""
    return FieldType(
        int,
        "N",
        lambda value: "a whole number" if type(value) is not int else "" if value >= minimum else expected,
    )


def number(expected: str, fits: Callable[[float], bool]) -> FieldType:
    """Return the type of a number that `fits` accepts."""
    return FieldType(float, "FLOAT", lambda value: "" if _is_number(value) and fits(value) else expected)


def number_or_none(expected: str, fits: Callable[[float], bool], metavar: str) -> FieldType:
    """Return the type of a number that `fits` accepts, or of the word `none` for None."""

    def of_words(words: str) -> float | str | None:
        try:
            return None if words.lower() == "none" else float(words)
        except ValueError:
            return words

    return FieldType(
        str,
        f"{metavar}|none",
        lambda value: "" if value is None or (_is_number(value) and fits(value)) else expected,
        of_words,
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def pair(expected: str, fits: Callable[[float], bool]) -> FieldType:
    """Return the type of two numbers that `fits` accepts."""

    def check(value: Any) -> str:
        numbers = cast(tuple[Any, ...], value) if isinstance(value, tuple) else ()
        return "" if len(numbers) == 2 and all(_is_number(number) and fits(number) for number in numbers) else expected

    return FieldType(tuple[float, float], "FLOAT FLOAT", check)


def text(metavar: str, expected: str) -> FieldType:
    """Return the type of a text that is not empty."""
    return FieldType(str, metavar, lambda value: "" if isinstance(value, str) and value else expected)


INTEGER = integer("a whole number", -math.inf)
NUMBER = number("a number", lambda _: True)
NATURAL = integer("0 or more", 0)
PATH = FieldType(str, "FILE", lambda value: "" if isinstance(value, Path) else "a path in quotes", Path)
FOLDER = replace(PATH, metavar="FOLDER")
COUNT = integer("1 or more", 1)
NUMBERS = FieldType(tuple[int, ...], "N ...", lambda value: "" if _numbers(value) else "a list of whole numbers")
TEXTS = FieldType(tuple[str, ...], "DATA[:WEIGHT] ...", lambda value: "" if _texts(value) else "a list of texts")
SWITCH = FieldType(bool, "", lambda value: "" if type(value) is bool else "true or false")
WORD = FieldType(str, "NAME", lambda value: "" if isinstance(value, str) else "a word in quotes")

PLAIN = {int: INTEGER, float: NUMBER, bool: SWITCH, str: WORD}
"""Types of fields whose annotation names none."""


AMOUNT = number("a number, 0 or more", lambda value: 0 <= value < math.inf)
POSITIVE = number("a number above 0", lambda value: 0 < value < math.inf)
Amount = Annotated[float, AMOUNT]
Natural = Annotated[int, NATURAL]
Positive = Annotated[float, POSITIVE]


def _span(value: Any) -> str:
    numbers = cast(tuple[Any, ...], value) if _numbers(value) else ()
    return "" if len(numbers) == 2 and 0 <= numbers[0] < numbers[1] else "two step numbers, the second larger: 10:13"


def _span_of(words: str) -> tuple[int, ...] | str:
    numbers = words.split(":")
    return tuple(map(int, numbers)) if all(number.isdecimal() for number in numbers) else words


SPAN = FieldType(str, "FIRST:END", _span, _span_of)


def _seconds(words: str) -> float | str:
    try:
        return float(words)
    except ValueError:
        seconds = parse_seconds(words)
        return words if seconds is None else seconds


DURATION = FieldType(
    str,
    "TIME",
    lambda value: "" if _is_number(value) and 0 < value < math.inf else f"seconds, above 0, or {TIME_FORMATS}",
    _seconds,
)


def split_interval(value: int | str | None) -> tuple[int | None, float | None]:
    """Return the steps and the seconds of an interval. At least one of the two is None.

    >>> split_interval(100), split_interval("10m"), split_interval(None)
    ((100, None), (None, 600.0), (None, None))
    """
    return (None, parse_seconds(value)) if isinstance(value, str) else (value, None)


def _is_interval(value: Any) -> bool:
    return bool(parse_seconds(value)) if isinstance(value, str) else not COUNT.check(value)


INTERVAL = FieldType(
    str,
    "N|TIME",
    lambda value: "" if _is_interval(value) else f"a number of steps, such as 100, or {TIME_FORMATS}",
    lambda words: int(words) if words.isdecimal() else words,
)


def name_or(*objects: type) -> FieldType:
    """Return the type of a field that takes a name or, in Python, an object of one of the types `objects`."""
    expected = " or a ".join(("a word in quotes", *(kind.__name__ for kind in objects)))
    return FieldType(str, "NAME", lambda value: "" if isinstance(value, (str, *objects)) else expected)


def axes(*names: str) -> FieldType:
    """Return the type of a list of axes of the mesh, in any order."""

    def check(value: Any) -> str:
        if not isinstance(value, tuple):
            return "a list of axes, such as ['dp_shard']"
        axis_names = cast(tuple[Any, ...], value)
        fits = set(axis_names) <= set(names) and len(set(axis_names)) == len(axis_names)
        return "" if fits else f"some of {', '.join(names)}, each once"

    return FieldType(tuple[str, ...], "AXIS ...", check)


def choice(literal: Any) -> FieldType:
    """Return the type of a field that takes one of the words of a `Literal`."""
    words = get_args(literal)
    expected = f"one of {', '.join(words)}"
    return FieldType(literal, f"{{{','.join(words)}}}", lambda value: "" if value in words else expected)


def choice_or_ints(
    literal: Any,
    noun: str,
    counted: Sequence[str],
    others: Callable[[str], bool],
    about_others: str,
) -> FieldType:
    """Return the type of a field that takes one of the words of a `Literal`, or a list of numbers.

    Args:
        literal: the words.
        noun: what the numbers count.
        counted: words that take a number of 1 or more as a suffix, such as every-2.
        others: function that tells whether another word is accepted.
        about_others: description of those words for messages.
    """
    words, forms = get_args(literal), [f"{word}-N" for word in counted]
    expected = f"one of {', '.join((*words, *forms, about_others))}, or the numbers of {noun}s, such as 0 1"
    pattern = re.compile(rf"({'|'.join(counted)})-[1-9][0-9]*")

    def accepts(value: Any) -> bool:
        is_word = isinstance(value, str) and (pattern.fullmatch(value) is not None or others(value))
        return value in words or _numbers(value) or is_word

    def of_words(arguments: tuple[str, ...]) -> str | tuple[int, ...]:
        if arguments and all(word.isdecimal() for word in arguments):
            return tuple(map(int, arguments))
        return " ".join(arguments)

    return FieldType(
        tuple[str, ...],
        f"{{{','.join((*words, *forms))},{noun.upper()} ...}}",
        lambda value: "" if accepts(value) else expected,
        of_words,
    )
