"""Output of the commands: JSON, tables, facts with labels, help, and error messages.

1. `Report` collects the facts and tables of a result and prints them on the console or as JSON. It uses the functions
   `table_of` and `print_...`.
2. `print_help` prints a command's help. tyro names a group of options after the field of a nested dataclass. For the
   help, each command therefore has a second dataclass, in which the same options are nested by group (`help_view`): the
   most used options first, the rest in groups. Command lines are never parsed with this dataclass.
3. `mistakes_as_sentences` turns tyro's error for a wrong command line into one sentence, and `suggest_option` suggests
   the option of Shardlab for an option of another framework.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, make_dataclass
from functools import cache, partial
from io import StringIO
from itertools import groupby, pairwise
from pathlib import Path
from typing import IO, Annotated, Any, Union, cast, get_args, get_type_hints

import tyro
import tyro._errors as parse_errors  # pyright: ignore[reportPrivateUsage]
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from shardlab.cli.model_options import ModelOptions, SizeOptions
from shardlab.cli.options import Pictures
from shardlab.cli.plan_options import PlanOptions
from shardlab.common.errors import UserError, closest_name, suggest_name
from shardlab.common.fields import field_helps, field_types
from shardlab.common.files import load_table
from shardlab.common.text import line_breaks
from shardlab.train.config import SECTIONS
from shardlab.train.launch.interrupt import ignore_errors

INDENT = 16
"""Width of a fact's label in characters."""

MOST_WIDTH = 100_000
"""Width of a console in characters that no table exceeds."""

NARROWEST_FOLDED = 12
"""Smallest width of folded cells in characters."""

NARROWEST = 30
"""Smallest width of a fact's text in characters, even if the terminal is narrower."""

ONE_LIST = 12
"""Largest number of options that the help shows as one list."""

CLASS_GROUPS: dict[type[Any], str] = {
    ModelOptions: "model",
    SizeOptions: "model",
    PlanOptions: "plan",
    Pictures: "output",
}
"""Name of the group in the help that has all options of a dataclass."""


@cache
def help_tables() -> dict[str, dict[str, str]]:
    """Return the tables of help.toml about options, which the help and the error messages use."""
    return load_table("cli/help.toml")


def stdout_console() -> Console:
    """Return the console for the results of a command."""
    file = sys.stdout if sys.stdout.isatty() else cast(IO[str], Trimmed(sys.stdout))
    return Console(file=file, highlight=False)


def print_json(data: object) -> None:
    """Print data for --json."""
    print(json.dumps(data, indent=2))


def table_of(*headings: str, words: int = 1, gap: int = 2) -> Table:
    """Return a table without borders.

    Args:
        headings: headings of the columns.
        words: number of columns with text. They come first and are aligned left; the others are aligned right.
        gap: spaces between columns.
    """
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="dim")
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number < words else "right", no_wrap=True)
    return table


def print_line(console: Console, text: Text, style: str = "") -> None:
    """Print a line. In a terminal, it is broken between words, and words such as paths stay whole."""
    for line in _wrap(text, console.width) if console.is_terminal else [text]:
        console.print(line, style=style, soft_wrap=True)


def print_fact(
    console: Console, label: str, text: str, style: str = "", figure: str = "", *, indent: int = INDENT
) -> None:
    """Print a label, an optional figure, and a text that is wrapped, with a hanging indent, at the terminal's width."""
    head = Text.assemble((label.ljust(indent), "dim"), (figure, "bold"), "  " if figure else "")
    style, indent = style or ("dim" if figure else ""), len(head)
    width = max(NARROWEST, console.width - indent)
    for line in _wrap(Text(text, style), width):
        if len(line) > width:  # a long word, such as a path
            if head.plain.strip():
                console.print(head, soft_wrap=True)
            head = Text(" " * max(0, min(indent, console.width - len(line))))
        console.print(head + line, soft_wrap=True)
        head = Text(" " * indent)


def print_figures(console: Console, figures: Sequence[tuple[str, str, str]]) -> None:
    """Print facts, each a label, a figure and a text, with the figures aligned."""
    width = max(len(figure) for _, figure, _ in figures)
    for label, figure, text in figures:
        print_fact(console, label, text, figure=figure.rjust(width))


class Report:
    """Facts and tables of a result, each with its text for the console and its fields for --json.

    `show` renders them in the order in which they were added. The figures of consecutive facts are aligned.

    Args:
        rows: rows for --json, if the JSON is a list instead of an object with fields.

    Attributes:
        data: fields for --json. Fields that the console does not show are added here.
    """

    def __init__(self, rows: Sequence[Any] | None = None, /, **data: Any) -> None:
        self.data: Any = data if rows is None else rows
        self._parts: list[Fact | Callable[[Console], object]] = []

    def fact(
        self, label: str, text: str = "", figure: str | None = None, style: str = "", indent: int = INDENT, **data: Any
    ) -> None:
        """Add a fact.

        Args:
            label, figure, text: what the console shows (see `print_fact`).
            style: style of the text.
            indent: width of the label in characters.
            data: fields with the same content for --json.
        """
        self._parts.append(Fact(label, text, figure, style, indent))
        self.data |= data

    def facts(self, label: str, texts: Iterable[str]) -> None:
        """Add a fact for each text, with the label on the first one only. Empty texts are left out."""
        for number, text in enumerate(filter(None, texts)):
            self.fact("" if number else label, text)

    def line(self, text: RenderableType = "", style: str = "", *, wrap: bool = True) -> None:
        """Add a line or a table for the console, wrapped at the width of the terminal.

        Args:
            text: the line. Its markup is interpreted only if `wrap` is true.
            style: style of the line.
            wrap: whether a line is also wrapped in a pipe.
        """
        if wrap:
            self.draw(lambda console: console.print(text, style=style))
        else:
            self.draw(partial(print_line, text=text if isinstance(text, Text) else Text(str(text)), style=style))

    def draw(self, draw: Callable[[Console], object]) -> None:
        """Add a function that prints something on the console."""
        self._parts.append(draw)

    def table(
        self,
        columns: Mapping[str, Callable[[Any], str | Text]],
        rows: Sequence[Any],
        key: str = "",
        *,
        words: int = 1,
        gap: int = 2,
        folded: int | None = None,
        wrapped: int | None = None,
        fields: Callable[[Any], Any] = lambda row: row,
        style: Callable[[Any], str] = lambda row: "",
    ) -> None:
        """Add a table.

        Args:
            columns: function from a row to its cell, by heading. The first `words` columns and the folded column
                contain text.
            rows: rows of the table. For --json they become the field `key`, unless it is "".
            gap: spaces between columns.
            wrapped: index of a column that is wrapped between words if the table exceeds the terminal's width, or 80
                characters in a pipe.
            fields: function from a row to its fields for --json.
            style: function from a row to its style.
            folded: index of a column that is folded if the terminal is too narrow. No cell is then truncated (None:
                cells are truncated).
        """
        table = table_of(*columns, words=words, gap=gap)
        if wrapped is not None:
            table.columns[wrapped].no_wrap = False
        if folded is not None and words:
            table.columns[folded].justify = "left"
        for row in rows:
            table.add_row(*(cell(row) for cell in columns.values()), style=style(row))
        self.draw(lambda console: console.print(table) if folded is None else print_whole(console, table, folded))
        if key:
            self.data[key] = [fields(row) for row in rows]

    def show(self, *, json: bool) -> None:
        """Print the report, or only its data as JSON."""
        print_json(self.data) if json else self.print(stdout_console())

    def print(self, console: Console) -> None:
        """Print the report on a console."""
        for is_aligned, parts in groupby(self._parts, lambda part: isinstance(part, Fact) and part.figure is not None):
            if is_aligned:
                print_figures(
                    console, [(part.label, part.figure or "", part.text) for part in parts if isinstance(part, Fact)]
                )
                continue
            for part in parts:
                if isinstance(part, Fact):
                    print_fact(console, part.label, part.text, part.style, indent=part.indent)
                else:
                    part(console)


@dataclass(frozen=True)
class Fact:
    """Line of a report; see `Report.fact`."""

    label: str
    text: str
    figure: str | None
    style: str
    indent: int


def print_path(console: Console, label: str, path: Path) -> None:
    """Print the path of a file that was written. A long path is not wrapped."""
    print_line(console, Text.assemble((label.ljust(INDENT), "dim"), (str(path), "bold")))


def print_whole(console: Console, table: Table, folded: int) -> None:
    """Print a table without truncating a cell, even in a narrow terminal.

    Args:
        folded: index of the text column that is folded if the terminal is too narrow. In a pipe, no column is folded.
    """
    width, column = whole_width(table), table.columns[folded]
    if console.is_terminal and width > console.width:
        cells = max(
            Text.from_markup(cell).cell_len if isinstance(cell, str) else len(str(cell)) for cell in column.cells
        )
        column.width = min(cells, max(NARROWEST_FOLDED, cells - (width - console.width)))
        column.no_wrap, column.overflow = False, "fold"
        width -= cells - column.width
    console.print(_Wide(table, max(width, console.width)), soft_wrap=width > console.width)


def whole_width(table: Table) -> int:
    """Return the width in characters that a table needs to show every cell whole."""
    return Console(width=MOST_WIDTH, file=StringIO()).measure(table).maximum


class Trimmed:
    """Text file that drops blanks at the ends of lines, which a table's last column would leave in a pipe."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def write(self, text: str) -> int:
        return self._file.write(re.sub(r" +$", "", text, flags=re.MULTILINE))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def print_help(words: list[str], commands: Mapping[str, type[Any]], description: str) -> None:
    """Print the help for a command line with -h or --help. If the line has another mistake, print nothing.

    Args:
        words: words of the command line.
        commands: all commands, by name.
        description: description of the program.

    Raises:
        SystemExit: after the help is printed.
    """
    if words[0] in commands:
        kinds, about = {**commands, words[0]: help_view(words[0], commands[words[0]])}, dict[str, str]()
    else:
        kinds, about = commands, {name: _first_paragraph(kind) for name, kind in commands.items()}
    choices = tuple(
        Annotated[Any, tyro.conf.subcommand(name=name, description=about.get(name), constructor=kind)]
        for name, kind in kinds.items()
    )
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(ignore_errors(sys.stdout)):
            tyro.cli(
                cast(Any, Union[choices]),  # noqa: UP007
                prog="shardlab",
                description=description,
                args=words,
                return_unknown_args=True,
            )
    except SystemExit as end:
        if not end.code:
            raise


def help_view(name: str, kind: type[Any]) -> type[Any]:
    """Return a dataclass with the options of a command nested by group, for its help.

    Args:
        name: name of the command, without the command that contains it.
        kind: class of the command.
    """
    if "what" in (hints := get_type_hints(kind, include_extras=True)):  # a command with subcommands
        union, *about = get_args(hints["what"])
        commands = dict(map(get_args, get_args(union)))
        views = {command: help_view(subcommand.name, command) for command, subcommand in commands.items()}
        choices = tuple(Annotated[views[command], subcommand] for command, subcommand in commands.items())
        (member,) = [option for option in fields(kind) if option.name == "what"]
        default = field() if member.default_factory is MISSING else field(default_factory=views[member.default_factory])
        return _dataclass_like(kind, [("what", Annotated[(Union[choices], *about)], default)])  # noqa: UP007
    options = list(_options(kind))
    positional = [option for option in options if option.is_positional]
    by_name = {option.name: option for option in options if not option.is_positional}
    if len(by_name) <= ONE_LIST:
        return _dataclass_like(kind, [_field(option) for option in options])
    most_used = [by_name.pop(word) for word in help_tables()["most_used"][name].split()]
    ungrouped = [option for option in by_name.values() if option.group is None]
    entries = [_field(option) for option in [*positional, *most_used, *ungrouped]]
    for group in help_tables()["groups"]:
        members = [_field(option) for option in by_name.values() if option.group == group]
        if members:
            nested = make_dataclass(group, members, kw_only=True)
            entries.append((f"{group}_group", Annotated[nested, tyro.conf.arg(name=group, help="")], field()))
    return _dataclass_like(kind, entries)


@contextlib.contextmanager
def mistakes_as_sentences() -> Generator[None, None, None]:
    """Raise tyro's errors about a command line as one sentence, in place of the box that tyro prints.

    Raises:
        UserError: with the sentence.
    """

    def refuse(event: parse_errors.ParseErrorEvent) -> None:
        raise UserError(sentence_of(event))

    with parse_errors.on_parse_error(refuse):
        yield


UNFIT_WORD = r"(?:no type matching .* from \[|could not convert string to float: |invalid literal for int.*: )(.*'.*?')"
"""Pattern of messages of tyro and Python about a word of another type than the option's."""


def sentence_of(event: parse_errors.ParseErrorEvent) -> str:
    """Return a sentence about an error that tyro found in a command line."""
    match event:
        case parse_errors.InvalidChoice(argument=option, value=word, choices=choices):
            return f"{option.display_name()} is {word!r}; {suggest_name(word, sorted({*choices} - {'None'}))}"
        case parse_errors.InstantiationFailure(argument=option, message=message) if option is not None:
            name = option.display_name()
            if word_match := re.match(UNFIT_WORD, message):
                return f"{name}: {word_match[1]} does not fit; give {name} {option.lowered.metavar}"
            text = f"{name}: {message.rstrip('.')}"
        case parse_errors.MissingArgs(missing_arguments=missing):
            names = [
                f"{'' if argument.arg.is_positional() else argument.arg.display_name()} {argument.arg.lowered.metavar}"
                for argument in missing
            ]
            text = (
                f"missing from {event.prog} {missing[0].source_parser.prog_suffix}: {', '.join(map(str.strip, names))}"
            )
        case parse_errors.BadValue(argument=option):
            name, value = option.display_name(), option.lowered.metavar
            text = f"{value} is missing" if option.is_positional() else f"{name} has no value; give {name} {value}"
        case parse_errors.MissingSubcommand(subcommand_spec=commands):
            text = f"expected one of the commands {', '.join(commands.parser_from_name)}"
        case _:
            text = f"{event.prog} does not accept these options together"
    return text if "; give" in text else f"{text}; --help tells more"


def suggest_option(word: str, flags: Collection[str]) -> str:
    """Return a suggestion for an option that a command does not have, as the second half of a sentence.

    >>> suggest_option("--lr", ["--layers", "--learning-rate"])
    'did you mean --learning-rate?'

    Args:
        word: option as the user wrote it, with or without a value after =.
        flags: options of the command.
    """
    option = word.partition("=")[0].lower().replace("_", "-")
    option = f"--{option.removeprefix('--').rpartition('.')[2]}"  # torchtitan's options begin with their section
    for meaning, peers in help_tables()["peers"].items():
        if option.removeprefix("--") in peers.split() and set(re.findall(r"--[a-z-]+", meaning)) <= set(flags):
            return f"did you mean {meaning}?" if meaning in flags else meaning
    guess = closest_name(option.removeprefix("--"), [flag.removeprefix("--") for flag in flags])
    return f"did you mean --{guess}?" if guess else "--help lists them"


def unknown_command(word: str, commands: Collection[str], program: str) -> UserError:
    """Return the error for a command that does not exist.

    >>> str(unknown_command("finetune", ["train", "eval"], "shardlab"))
    "there is no command 'finetune'; did you mean train --init? (shardlab --help lists all commands)"

    Args:
        word: word that the user wrote.
        commands: commands that exist.
        program: `shardlab`, or the command of which these are the subcommands.
    """
    peers = help_tables().get(f"peer commands of {program}", {})
    meaning = next((key for key, names in peers.items() if word.lower().replace("_", "-") in names.split()), None)
    guess = meaning or closest_name(word, commands)
    lists = f"{program} --help lists all commands"
    return UserError(f"there is no command {word!r}; " + (f"did you mean {guess}? ({lists})" if guess else lists))


def subcommand_names(kind: type[Any]) -> list[str]:
    """List the names of a command's subcommands."""
    hint = get_type_hints(kind, include_extras=True).get("what")
    return [] if hint is None else [get_args(subcommand)[1].name for subcommand in get_args(get_args(hint)[0])]


def unreadable_python(error: BaseException) -> str | None:
    """Return the path of a file of this Python that the user may not read, if that can explain an error (else None).

    This happens if Python is installed in another user's private home folder.
    """
    packages = Path(sysconfig.get_path("purelib"))
    paths = [Path(sysconfig.get_path("stdlib")), Path(sys.executable), packages]
    if isinstance(error, ImportError) and error.name:
        paths.append(packages / error.name.partition(".")[0])
    if isinstance(error, OSError) and isinstance(error.filename, str):
        paths += [path for path in [Path(error.filename)] if path.is_relative_to(packages)]
    return next((str(path) for path in paths if _is_denied(path)), None)


@dataclass(frozen=True)
class Option:
    """Option of a command, as tyro reads it from a field.

    Attributes:
        name: name of the field.
        kind: annotation of the field, with its help.
        default: value without the option (MISSING: the option is required).
        group: group of the option in the help (None: it is in no group).
    """

    name: str
    kind: Any
    default: Any
    group: str | None

    @property
    def is_positional(self) -> bool:
        """Whether the option is given without its name."""
        return tyro.conf.Positional in get_args(self.kind)


@dataclass(frozen=True)
class _Wide:
    """Table with a fixed width, independent of the console's width."""

    table: Table
    width: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from console.render(self.table, options.update(width=self.width))


def _wrap(text: Text, width: int) -> list[Text]:
    """Break a text into lines between words (see `line_breaks`)."""
    lines = list[Text]()
    for line in text.split():
        breaks = line_breaks(line.plain, width)
        lines += [line[start:stop] for start, stop in pairwise([0, *breaks, len(line)])]
    for line in lines:
        line.rstrip()
    return lines or [Text()]


def _is_denied(path: Path) -> bool:
    try:
        os.scandir(path).close() if os.path.isdir(path) else path.open("rb").close()
    except PermissionError:
        return True
    except OSError:
        return False
    return False


def _options(kind: type[Any]) -> Iterator[Option]:
    """List the options of a command, without `--no-x`, which the help of `--x` mentions."""
    hints, helps = get_type_hints(kind, include_extras=True), dict[str, str]()
    for base in kind.__mro__:
        if base.__module__.startswith("shardlab."):
            helps = field_helps(base) | helps
    names = [option.name for option in fields(kind)]
    opposites = {f"no_{name}" for name in names}
    for option in fields(kind):
        hint = hints[option.name]
        about = get_args(hint)[1:]
        if is_dataclass(option.default):
            yield from _options(type(option.default))
        elif tyro.conf.Suppress not in about and option.name not in opposites:
            extra = dict[str, Any]()
            if option.name in helps:
                extra["help"] = helps[option.name]
            if tyro.conf.FlagCreatePairsOff in about:
                switch = f"no_{option.name}"
                extra["help_behavior_hint"] = f"(--{switch.replace('_', '-')} turns it off)" if switch in names else ""
            annotation = Annotated[(hint, tyro.conf.arg(prefix_name=False, **extra))]
            yield Option(option.name, annotation, option.default, _group(kind, option.name))


def _group(kind: type[Any], name: str) -> str | None:
    for options, group in CLASS_GROUPS.items():
        if issubclass(kind, options):
            return group
    tables = help_tables()
    if group := next((group for group, names in tables["groups"].items() if name in names.split()), None):
        return group
    section = next((section for section, config in SECTIONS.items() if name in field_types(config)), None)
    return None if section is None else tables["section_groups"].get(section, section)


def _field(option: Option) -> tuple[str, Any, Any]:
    return option.name, option.kind, field() if option.default is MISSING else field(default=option.default)


def _dataclass_like(kind: type[Any], members: list[tuple[str, Any, Any]]) -> type[Any]:
    """Make a dataclass with the fields `members`, and with the name and the docstring of `kind`."""
    return make_dataclass(kind.__name__, members, kw_only=True, namespace={"__doc__": kind.__doc__})


def _first_paragraph(kind: type[Any]) -> str:
    return " ".join((kind.__doc__ or "").partition("\n\n")[0].split())
