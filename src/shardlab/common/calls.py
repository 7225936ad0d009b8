"""Calls of Shardlab's functions from a script or a notebook.

`public` decorates these functions. `require_arguments` refuses arguments that a function does not take.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, NoReturn, ParamSpec, TypeVar, cast

from shardlab.common.errors import AsSentence, UserError, unknown_name
from shardlab.common.user_code import in_notebook_cell

P = ParamSpec("P")
R = TypeVar("R")


class Interrupted(AsSentence, KeyboardInterrupt):
    """Interrupt of a function. The message says which function was interrupted."""


def public(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function of the Python API, so that a mistake or an interrupt ends in one sentence.

    Wrong arguments raise a `UserError`. Messages name the options of commands as arguments. Scalars of NumPy and torch
    become numbers of Python. In a notebook, messages are printed on stdout, since Jupyter shows stderr as an error.
    """
    name, signature = function.__name__, inspect.signature(function)

    @wraps(function)
    def call(*arguments: P.args, **settings: P.kwargs) -> R:
        try:
            require_arguments(name, signature, arguments, settings)
            plain = {each: _plain(value) for each, value in settings.items()}
            with contextlib.redirect_stderr(sys.stdout) if in_notebook_cell() else contextlib.nullcontext():
                return cast(Any, function)(*map(_plain, arguments), **plain)
        except UserError as error:
            error.args = (options_as_arguments(str(error), name), *error.args[1:])
            raise
        except KeyboardInterrupt as interrupt:
            raise Interrupted(f"{name} was interrupted" + f" ({interrupt})" * bool(str(interrupt))) from None

    return call


def _plain(value: Any) -> Any:
    """Return a scalar of NumPy or torch as a number of Python, and any other value unchanged."""
    return value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value


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
        names = [each.name for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
        if len(names) == len(signature.parameters):
            for setting in settings.keys() - names:
                raise unknown_name("argument", setting, names) from None
        raise UserError(f"{name}: {error}; it takes {', '.join(names)}") from None


def refuse_argument(name: str, value: object, accepted: str) -> NoReturn:
    """Refuse the value of an argument.

    Raises:
        UserError: with the accepted values.
    """
    given = f"the class {value.__name__}" if isinstance(value, type) else f"{value!r:.100}"
    raise UserError(f"{name} is {given}; give {accepted}")


_OPTION = re.compile(r"(shardlab (?:\w+ )+--\S+)|(?<![\w-])--(no-)?([a-z][a-z-]*)(?:[ =](?=[\d'\"A-Z]))?")
"""Option in a message. A whole command comes first. The last group is followed by the value, if there is one."""


def options_as_arguments(text: str, command: str) -> str:
    """Return a message of a command with its options as arguments of the function of the same name.

    >>> options_as_arguments("give --global-batch 96 or 128, or leave --no-compile out", "plan")
    'give global_batch=96 or 128, or leave compile=False out'
    >>> options_as_arguments("there is no option --x=3; --help lists them", "plan")
    'there is no option x=3; shardlab plan --help lists them'
    """

    def argument(found: re.Match[str]) -> str:
        whole, off, option = found.groups()
        if whole:
            return whole
        if option == "help":
            return f"shardlab {command} --help"
        return option.replace("-", "_") + ("=False" if off else "=" if found[0][-1] in " =" else "")

    return _OPTION.sub(argument, text)
