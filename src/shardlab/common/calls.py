"""Calls of Shardlab's functions from a script or a notebook.

`public` decorates these functions, and `public_class` the classes whose objects they take. `require_arguments` refuses
arguments that a function does not take.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, TypeVar, cast

from shardlab.common.errors import AsSentence, UserError, refuse_long_names, unknown_name
from shardlab.common.fields import plain
from shardlab.common.user_code import in_notebook_cell

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class Interrupted(AsSentence, KeyboardInterrupt):
    """Interrupt of a function. The message says which function was interrupted."""


def public(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function of the Python API, so that a mistake or an interrupt ends in one sentence.

    Wrong arguments raise a `UserError`. Messages name the options of commands as arguments. Scalars of NumPy and torch
    become numbers of Python, and paths become text. In a notebook, messages are printed on stdout, since Jupyter shows
    stderr as an error.
    """
    name, signature = function.__name__, inspect.signature(function)

    @wraps(function)
    def call(*arguments: P.args, **settings: P.kwargs) -> R:
        try:
            require_arguments(name, signature, arguments, settings)
            plain_settings = {setting: _plain(value) for setting, value in settings.items()}
            output = contextlib.redirect_stderr(sys.stdout) if in_notebook_cell() else contextlib.nullcontext()
            with output, refuse_long_names():
                return cast(Any, function)(*map(_plain, arguments), **plain_settings)
        except UserError as error:
            error.args = (options_as_arguments(str(error), name), *error.args[1:])
            raise
        except KeyboardInterrupt as interrupt:
            raise Interrupted(f"{name} was interrupted" + f" ({interrupt})" * bool(str(interrupt))) from None

    return call


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else plain(value)


def public_class(kind: type[T]) -> type[T]:
    """Decorate a dataclass of the Python API, so that a mistake in its arguments is one sentence.

    Wrong arguments raise a `UserError`. Scalars of NumPy and torch become numbers of Python.
    """
    create, signature = kind.__init__, inspect.signature(kind)

    @wraps(create)
    def init(self: T, *arguments: Any, **settings: Any) -> None:
        try:
            create(self, *map(plain, arguments), **{name: plain(value) for name, value in settings.items()})
        except TypeError:
            for field in fields(cast(Any, kind)):  # such as Plan.mesh, for which a Mesh is made
                part = field.default_factory
                if misplaced := settings.keys() & getattr(part, "__dataclass_fields__", {}):
                    name = min(misplaced)
                    call = f"{cast(Any, part).__name__}({name}={settings[name]!r:.100})"
                    raise UserError(f"{kind.__name__} has no argument {name}; give {field.name}={call}") from None
            require_arguments(kind.__name__, signature, arguments, settings)
            raise

    kind.__init__ = init
    return kind


def require_arguments(
    name: str, signature: inspect.Signature, arguments: Sequence[Any], settings: Mapping[str, Any]
) -> None:
    """Refuse arguments that a function does not take.

    Args:
        name: name of the function.
        signature: signature of the function.
        arguments, settings: arguments by position and by name.

    Raises:
        UserError: with the arguments that it takes.
    """
    try:
        signature.bind(*arguments, **settings)
    except TypeError as error:
        names = [
            parameter.name for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD
        ]
        if len(names) == len(signature.parameters):
            for setting in settings.keys() - names:
                raise unknown_name("argument", setting, names) from None
        raise UserError(f"{name}: {error}; it takes {', '.join(names)}") from None


def refuse_argument(name: str, value: object, accepted: str) -> NoReturn:
    """Refuse the value of an argument.

    Raises:
        UserError: with the accepted values.
    """
    value_text = f"the class {value.__name__}" if isinstance(value, type) else f"{value!r:.100}"
    raise UserError(f"{name} is {value_text}; give {accepted}")


_OPTION = re.compile(r"(shardlab (?:\w+ )+--\S+)|(?<![\w-])--(no-)?([a-z][a-z-]*)(?:[ =](?=[\d'\"A-Z]))?")
"""Option in a message. A whole command comes first. The last group is followed by the value, if there is one."""


def options_as_arguments(text: str, command: str) -> str:
    """Return a message of a command with its options as arguments of the function of the same name.

    >>> options_as_arguments("give --global-batch 96 or 128, or leave --no-compile out", "plan")
    'give global_batch=96 or 128, or leave compile=False out'
    >>> options_as_arguments("there is no option --x=3; --help lists them", "plan")
    'there is no option x=3; shardlab plan --help lists them'
    """

    def argument(match: re.Match[str]) -> str:
        full_command, negation, option = match.groups()
        if full_command:
            return full_command
        if option == "help":
            return f"shardlab {command} --help"
        return option.replace("-", "_") + ("=False" if negation else "=" if match[0][-1] in " =" else "")

    return _OPTION.sub(argument, text)
