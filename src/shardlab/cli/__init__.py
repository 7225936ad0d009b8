"""Command line of Shardlab: parse a command, run it, and report errors as one sentence.

Each subcommand is a frozen dataclass in a module of its name (`COMMANDS`). Its fields are the options, from which tyro
makes the parser and the help, and its `run` does the work. To find a command, open the module or folder of its name.
Shared by several commands: `options.py`, `model_options.py` and `plan_options.py` (options), `console.py` (output, help
and error messages). Modules that need torch are imported inside `run`, so that other commands start without it.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import gc
import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from typing import Annotated, Any, Protocol, Union, cast

import tyro

from shardlab.cli.bench.command import Bench
from shardlab.cli.checkpoint import CheckpointCommand
from shardlab.cli.collectives import Collectives
from shardlab.cli.compare import Compare
from shardlab.cli.console import (
    mistakes_as_sentences,
    print_json,
    subcommand_names,
    suggest_option,
    unknown_command,
    unreadable_python,
)
from shardlab.cli.convert import Convert
from shardlab.cli.data import DataCommand
from shardlab.cli.doctor import Doctor, SmokeTest
from shardlab.cli.evaluate import Eval
from shardlab.cli.explain.command import Explain
from shardlab.cli.history import History, Show
from shardlab.cli.launch import Launch, Submit
from shardlab.cli.learn.command import Learn
from shardlab.cli.listings import Clusters, Recipes, ScheduleCommand, Strategies
from shardlab.cli.options import option_values
from shardlab.cli.passes import PassesCommand
from shardlab.cli.plan.command import PlanCommand
from shardlab.cli.sample import Sample
from shardlab.cli.schedule.search import ScheduleSearch
from shardlab.cli.simulate.command import Simulate
from shardlab.cli.train.command import Train
from shardlab.cli.validate import Validate
from shardlab.cli.verify import Verify
from shardlab.cli.view.command import View
from shardlab.common.errors import refuse_long_names
from shardlab.common.user_code import trace_limits
from shardlab.language import Refused, UserError
from shardlab.starting import INTERRUPTED, exit_on_interrupt, finish_loading
from shardlab.strategies import STRATEGIES
from shardlab.train.launch.interrupt import ignore_errors


class Command(Protocol):
    """Subcommand with its parsed options."""

    def run(self) -> int:
        """Run the command, and return its exit status.

        Raises:
            UserError: for a request that cannot be met. The exit status is 2.
            Refused: for a wrong program. The exit status is 1.
        """
        ...


COMMANDS: dict[str, type[Command]] = {
    "strategies": Strategies,
    "simulate": Simulate,
    "view": View,
    "schedule": ScheduleCommand,
    "schedule search": ScheduleSearch,
    "passes": PassesCommand,
    "collectives": Collectives,
    "data": DataCommand,
    "train": Train,
    "verify": Verify,
    "history": History,
    "show": Show,
    "launch": Launch,
    "submit": Submit,
    "doctor": Doctor,
    "test": SmokeTest,
    "sample": Sample,
    "eval": Eval,
    "convert": Convert,
    "checkpoint": CheckpointCommand,
    "recipes": Recipes,
    "clusters": Clusters,
    "validate": Validate,
    "plan": PlanCommand,
    "explain": Explain,
    "bench": Bench,
    "compare": Compare,
    "learn": Learn,
}
"""All subcommands, in the order of the help."""


atexit.register(gc.freeze)  # otherwise, the last garbage collection visits all of torch, for most of a second


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, and return the exit status.

    Args:
        argv: arguments of the command line (None: those of this process).
    """
    if list(sys.argv[1:] if argv is None else argv) == ["--version"]:
        print(f"shardlab {_version()}")
        return 0
    status = INTERRUPTED
    try:
        with contextlib.redirect_stderr(ignore_errors(sys.stderr)):
            status = _run(argv)
    finally:
        exit_on_interrupt(status)
    return status


def _run(argv: Sequence[str] | None) -> int:
    command: Command | None = None
    try:
        finish_loading()
        try:
            command = command_of(list(sys.argv[1:] if argv is None else argv))
        except SystemExit:  # tyro has printed its help
            return 0
        limits = trace_limits(getattr(command, "max_ops", None), getattr(command, "max_seconds_per_op", None))
        with limits, refuse_long_names():
            status = command.run()
        sys.stdout.flush()
        return status
    except (UserError, Refused) as error:
        print(f"shardlab: {error}", file=sys.stderr)
        if isinstance(error, Refused) and getattr(command, "json", False):
            print_json({"refused": error.fields()})
        return 2 if isinstance(error, UserError) else 1
    except KeyboardInterrupt as interrupt:  # an interrupt of ranks names its reason
        exit_on_interrupt(INTERRUPTED)  # a second Ctrl-C
        print(f"shardlab: interrupted{f' ({interrupt})' if str(interrupt) else ''}", file=sys.stderr)
        return INTERRUPTED
    except (ImportError, OSError, EOFError) as error:
        if (path := unreadable_python(error)) is not None:
            print(
                f"shardlab: this user has no permission to read {path}, which this Python needs ({error}); make "
                "it readable for all users, or use a Python that is installed for all users",
                file=sys.stderr,
            )
            return 2
        if not isinstance(error, OSError) or error.errno not in (errno.EPIPE, errno.EIO):
            raise
        # The reader of a pipe ended, or the terminal was closed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def command_of(words: list[str]) -> Command:
    """Parse a command line into a command.

    Raises:
        UserError: if there is no such command or option, or a value does not fit.
        SystemExit: if the line asks for help, which is printed.
    """
    with mistakes_as_sentences():
        command, extra_words = cast(tuple[Command, list[str]], _parse(words))
    if extra_words:
        raise _unknown_word(extra_words[0], command)
    return command


def _parse(words: list[str]) -> Any:
    """Parse a command line with tyro. Return the command, and the words that it does not recognize."""
    if not words:
        raise UserError(f"no command is given; there are {', '.join(COMMANDS)}")
    ours = words[: words.index("--")] if "--" in words else words  # those after -- are another program's
    for option, value in [*pairwise(ours), *(word.split("=", 1) for word in ours if "=" in word)]:
        if option.startswith("--") and not value:
            raise UserError(f"{option} is empty; give a value, or leave it out")
    if (pair := " ".join(words[:2])) in COMMANDS:
        words = [pair, *words[2:]]
    if words[0].startswith("-") and words[0] not in ("-h", "--help"):
        raise UserError(f"{words[0]} comes before the command; shardlab --help lists all commands")
    if not words[0].startswith("-") and words[0] not in COMMANDS:
        raise unknown_command(words[0], COMMANDS, "shardlab")
    names = subcommand_names(COMMANDS[words[0]]) if words[0] in COMMANDS and words[1:] else []
    all_names = {*names, *(Learn().elsewhere if words[0] == "learn" else ())}  # exercises have their own error message
    if names and words[1] not in all_names and not words[1].startswith("-"):
        raise unknown_command(words[1], names, f"shardlab {words[0]}")
    if {"-h", "--help"} & set(words):
        from shardlab.cli.console import print_help

        print_help(words, COMMANDS, DESCRIPTION)
    types = tuple(Annotated[Any, tyro.conf.subcommand(name=name, constructor=kind)] for name, kind in COMMANDS.items())
    return tyro.cli(
        cast(Any, Union[types]),  # noqa: UP007
        prog="shardlab",
        description=DESCRIPTION,
        args=words,
        return_unknown_args=True,
    )


def _unknown_word(word: str, command: object) -> UserError:
    """Return the error for a word of the command line that is not an option of the command."""
    if sentence := getattr(command, "elsewhere", {}).get(word.partition("=")[0]):
        return UserError(sentence)
    if word in STRATEGIES and getattr(command, "strategy", word) is None:
        return UserError(f"unexpected argument {word!r}; did you mean --strategy {word}?")
    if not word.startswith("-"):
        return UserError(f"unexpected argument {word!r}; options begin with --, and --help lists them")
    flags = sorted(f"--{name.replace('_', '-')}" for name in option_values(command))
    if (name := word.partition("=")[0]) in flags:  # a positional argument
        return UserError(f"there is no option {name}; give its value alone")
    return UserError(f"there is no option {word}; {suggest_option(word, flags)}")


def _version() -> str:
    try:
        return version("shardlab")
    except PackageNotFoundError:  # run from its folder
        return "that is not installed"


DESCRIPTION = (
    "Write a parallel training strategy once; check, draw and simulate it, and train a real "
    "transformer with it. --version prints the version."
)
