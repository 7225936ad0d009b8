"""Output of the commands: JSON, tables, facts with labels, help, and error messages.

1. `stdout_console`, `print_json`, `table_of` and the other `print_...` functions write results.
2. `print_help` prints the help of a command. tyro names a group of options after the field of a nested dataclass. So
   for its help, a command is described to tyro a second time, with the same options nested by group (`help_view`): the
   most used options first, the rest in groups. Command lines are never parsed with this description.
3. `mistakes_as_sentences` turns tyro's box about a wrong command line into one sentence, and `meant_by` suggests the
   option of Shardlab for an option of another framework (`PEERS`).
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
import sysconfig
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, make_dataclass
from io import StringIO
from itertools import takewhile
from pathlib import Path
from typing import IO, Annotated, Any, Union, cast, get_args, get_type_hints

import tyro
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from shardlab.cli.model_options import ModelOptions
from shardlab.cli.options import Pictures
from shardlab.cli.plan_options import PlanOptions
from shardlab.common.errors import UserError, closest_name, suggest_name
from shardlab.common.fields import field_helps, field_types
from shardlab.train.config import SECTIONS

INDENT = 16
"""Width of a fact's label in characters."""

MOST_WIDTH = 100_000
"""Width in characters into which every table fits."""

NARROWEST_FOLDED = 12
"""Least width of folded cells in characters."""

NARROWEST = 30
"""Least width of a fact's text in characters, however narrow the terminal is."""

NAMED, EXPLAINED = 5, 9
"""Least indentation of the names of options in tyro's box, and of their explanations."""

COLOR = re.compile(r"\x1b\[[0-9;]*m")
"""Escape sequence of a color on a terminal."""

PEERS = {
    "--learning-rate": "lr max-lr",
    "--min-learning-rate-ratio": "min-lr min-lr-ratio",
    "--learning-rate-schedule": "lr-scheduler lr-scheduler-type lr-decay-style lr-schedule decay-lr",
    "--warmup-steps": "warmup warmup-iters lr-warmup-iters lr-warmup-steps num-warmup-steps",
    "--decay-steps": "lr-decay-iters lr-decay-steps",
    "--clip": "grad-clip clip-grad max-grad-norm max-norm gradient-clip-val gradient-clipping",
    "--optimizer": "optim",
    "--steps": "max-steps max-iters train-iters num-steps iterations iters num-train-steps training-steps",
    "--microbatches": "gradient-accumulation-steps grad-accum accumulate-grad-batches gradient-accumulation",
    "--micro-batch-size": "per-device-train-batch-size local-batch-size device-batch-size",
    "--global-batch": "global-batch-size gbs train-batch-size",
    "a step has --microbatches of --micro-batch-size sequences": "batch-size global-batch global-batch-size gbs "
    "train-batch-size",
    "a run's length is in --steps": "epochs num-epochs num-train-epochs max-epochs",
    "--precision": "dtype torch-dtype bf16 fp16 mixed-precision param-dtype",
    "the tokenizer comes from the folder in --data, which shardlab data prepare makes, or from --init":
    "tokenizer tokenizer-name tokenizer-type tokenizer-path",
    "each of --ranks uses a GPU if the host has one for each, otherwise CPUs (CUDA_VISIBLE_DEVICES= "
"hides GPUs)": "device accelerator no-cuda use-cpu cpu gpu",
    "--ranks": "gpus num-gpus nproc-per-node nproc devices world-size num-processes",
    "--out": "output-dir output out-dir save-dir checkpoint-dir save-folder",
    "--save-every": "save-interval save-steps checkpoint-interval checkpoint-every checkpointing-steps",
    "--keep": "save-total-limit",
    "--resume": "resume-from-checkpoint load ckpt-path resume-from restore init-from",
    "--init": "model-name-or-path pretrained finetune-from",
    "--model": "model-name model-type arch",
    "--log-every": "log-interval logging-steps log-freq",
    "--validate-every": "eval-interval eval-steps eval-every val-check-interval validation-interval",
    "--wandb": "wandb-log wandb-project use-wandb report-to",
    "--compile": "torch-compile",
    "--seq-len": "block-size context-length seq-length max-seq-length max-seq-len max-length sequence-length ctx-len",
    "--layers": "n-layer n-layers num-layers num-hidden-layers depth",
    "--hidden-size": "n-embd d-model dim embed-dim n-embed",
    "--heads": "n-head n-heads num-heads num-attention-heads",
    "--kv-heads": "n-kv-head n-kv-heads num-kv-heads num-key-value-heads num-query-groups",
    "--ffn-hidden-size": "intermediate-size d-ff n-inner mlp-hidden-size",
    "--experts": "num-experts n-experts num-local-experts",
    "--tp": "tensor-parallel-size tensor-model-parallel-size tensor-parallel tensor-parallel-degree",
    "--pp": "pipeline-parallel-size pipeline-model-parallel-size pipeline-parallel pipeline-parallel-degree",
    "--cp": "context-parallel-size context-parallel context-parallel-degree",
    "--ep": "expert-parallel-size expert-model-parallel-size expert-parallel expert-parallel-degree",
    "--dp-replicate": "data-parallel-replicate-degree data-parallel-size dp ddp",
    "--dp-shard": "data-parallel-shard-degree fsdp",
    "--recompute": "gradient-checkpointing activation-checkpointing recompute-activations",
    "--data": "dataset data-path dataset-name train-data train-file data-dir",
    "--tokens": "max-new-tokens max-tokens num-tokens",
    "--time": "walltime time-limit",
    "--ranks-per-node": "ntasks-per-node tasks-per-node nproc-per-node",
    "--gpus-per-node": "gres gpus gpus-per-task",
    "--cpus-per-rank": "cpus-per-task",
    "--name": "job-name",
}  # fmt: skip
"""Names that nanoGPT, Hugging Face's trainer, torchtitan, Megatron-LM and schedulers have for an option, by the option
or by a sentence with options. If a command lacks one of these options, the next entry with the name counts."""

ONE_LIST = 12
"""Largest number of options that the help shows as one list."""

MOST_USED = {
    "simulate": "ranks model cluster global_batch pp tp dp_shard schedule passes svg",
    "train": "preset data model strategy ranks steps learning_rate precision out resume",
    "verify": "ranks model layers pp tp dp_shard schedule shard_optimizer precision all",
    "eval": "data batches seq_len strategy ranks micro_batch_size pp tp dp_shard json",
    "convert": "to shard_mb model seq_len json",
    "plan": "model cluster sequence global_batch tokens_per_step precision recompute memory explain out",
    "collectives": "ranks kinds min max factor overlap plot profile verbose json",
}
"""Options of each long command that the help shows first, ten at most."""

GROUPS = {
    "model": "model layers sequence seq_len",
    "plan": "strategy ranks all max_tp max_pp max_cp max_ep max_dp_shard",
    "data": "data format field batches global_batch micro_batch_size max_micro_batch_size microbatches batch_ramp "
    "tokens_per_step",
    "optimizer": "optimizer ema clip",
    "run": "preset config depth bind resume from_step steps compile recipe cluster other_machine memory costs max_ops "
    "max_seconds_per_op seconds forecasts measured grade measure",
    "logging": "",
    "output": "out print_config path each_pass force top explain save verbose json",
}
"""Groups in the order of the help, with their options. `CLASS_GROUPS` and the sections of a training add more."""

CLASS_GROUPS: dict[type[Any], str] = {ModelOptions: "model", PlanOptions: "plan", Pictures: "output"}
"""Group of all options of a class."""

SECTION_GROUPS = {"train": "run", "precision": "run", "saving": "output"}
"""Groups of those sections of a training's configuration that are not groups of their own."""


def stdout_console() -> Console:
    """Return the console for the results of a command."""
    file = sys.stdout if sys.stdout.isatty() else cast(IO[str], Trimmed(sys.stdout))
    return Console(file=file, highlight=False)


def print_json(data: object) -> None:
    """Print data for --json."""
    print(json.dumps(data, indent=2))


def table_of(*headings: str, words: int = 1, gap: int = 2) -> Table:
    """Return a table without lines.

    Args:
        headings: headings of the columns.
        words: number of columns with words, which come first and are aligned left. The others are aligned right.
        gap: blanks between columns.
    """
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="dim")
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number < words else "right", no_wrap=True)
    return table


def print_fact(
    console: Console, label: str, text: str, style: str = "", figure: str = "", *, indent: int = INDENT
) -> None:
    """Print a label, perhaps a figure, and a text, which is wrapped below itself at the width of the terminal."""
    head = Text.assemble((label.ljust(indent), "dim"), (figure, "bold"), "  " if figure else "")
    style = style or ("dim" if figure else "")
    for line in Text(text, style).wrap(console, max(NARROWEST, console.width - len(head))) or [Text()]:
        console.print(head + line, soft_wrap=True)
        head = Text(" " * len(head))


def print_figures(console: Console, figures: Sequence[tuple[str, str, str]]) -> None:
    """Print facts with aligned figures: the label, the figure and the text of each."""
    width = max(len(figure) for _, figure, _ in figures)
    for label, figure, text in figures:
        print_fact(console, label, text, figure=figure.rjust(width))


def print_path(console: Console, label: str, path: Path) -> None:
    """Print the path of a file that was written, in one line however long it is."""
    console.print(Text.assemble((label.ljust(INDENT), "dim"), (str(path), "bold")), soft_wrap=True)


def print_whole(console: Console, table: Table, folded: int) -> None:
    """Print a table without cutting a cell, however narrow the terminal is.

    Args:
        folded: index of the column of words that is folded if the terminal is too narrow. In a pipe, none is folded.
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
    """Return the width in characters of a table of which no cell is cut."""
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
    """Print the help for a command line with -h or --help. If another word of the line is wrong, return.

    Args:
        words: words of the command line.
        commands: all commands, by name.
        description: description of the program.

    Raises:
        SystemExit: after the help was printed.
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
        with contextlib.redirect_stderr(io.StringIO()):
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
    if "what" in (hints := get_type_hints(kind, include_extras=True)):  # a command of several commands
        union, *about = get_args(hints["what"])
        views = tuple(
            Annotated[help_view(subcommand.name, command), subcommand]
            for command, subcommand in map(get_args, get_args(union))
        )
        return _dataclass_like(kind, [("what", Annotated[(Union[views], *about)], field())])  # noqa: UP007
    options = list(_options(kind))
    positional = [option for option in options if option.is_positional]
    named = {option.name: option for option in options if not option.is_positional}
    if len(named) <= ONE_LIST:
        return _dataclass_like(kind, [_field(option) for option in options])
    first = [named.pop(each) for each in MOST_USED[name].split()]
    ungrouped = [option for option in named.values() if option.group is None]
    shown = [_field(option) for option in [*positional, *first, *ungrouped]]
    for group in GROUPS:
        members = [_field(option) for option in named.values() if option.group == group]
        if members:
            nested = make_dataclass(group, members, kw_only=True)
            shown.append((f"{group}_group", Annotated[nested, tyro.conf.arg(name=group, help="")], field()))
    return _dataclass_like(kind, shown)


@contextlib.contextmanager
def mistakes_as_sentences() -> Generator[None, None, None]:
    """Turn the box that tyro prints about a wrong command line, in this context, into a sentence.

    Raises:
        UserError: with this sentence.
    """
    written = io.StringIO()
    try:
        with contextlib.redirect_stderr(written):
            yield
    except SystemExit as end:
        if end.code:
            raise UserError(sentence_of(written.getvalue())) from None
        raise
    sys.stderr.write(written.getvalue())


def sentence_of(box: str) -> str:
    r"""Return the text of a box between its title and its first rule, without the explanations of options.

    >>> sentence_of("Required options\n ---\n  Missing from shardlab convert:\n      TO\n          A folder.\n  ---")
    'missing from shardlab convert: TO; --help tells more'
    """
    plain = COLOR.sub("", box)  # in a terminal
    _, *lines = re.sub("[│╭╮╰╯├┤]", " ", plain.replace("─", "-")).splitlines()
    body = [line for line in lines if line.strip()]
    while body and not body[0].strip(" -"):
        body.pop(0)
    body = list(takewhile(lambda line: line.strip(" -"), body))
    indented = [(len(line) - len(line.lstrip()), line.strip()) for line in body]
    text = " ".join(line for indent, line in indented if indent < NAMED).rstrip(".")
    if choice := re.fullmatch(r"invalid choice '(.*)' for argument '(.*)'\. Expected one of \((.*)\)", text):
        given, flag, listed = choice.groups()
        names = sorted(set(re.findall("'([^']*)'", listed)) - {"None"})
        return f"{flag} is {given!r}; {suggest_name(given, names)}"
    if unfit := re.match(r"Error parsing (\S+): no type matching .* could be instantiated from \[(.*?)\]\.", text):
        usage = next((line.strip() for line in lines if line.split()[:1] == [unfit[1]]), unfit[1])
        return f"{unfit[1]}: {unfit[2]} does not fit; give {usage}"
    text = text.removeprefix("Error parsing ").replace("Missing", "missing")
    named = ", ".join(line for indent, line in indented if NAMED <= indent < EXPLAINED)
    return f"{text} {named}".strip() + "; --help tells more" * ("; give" not in text)


def meant_by(word: str, flags: Collection[str]) -> str:
    """Return the second half of a sentence about an option that a command does not have.

    >>> meant_by("--lr", ["--layers", "--learning-rate"])
    'did you mean --learning-rate?'

    Args:
        word: option as it was given, with or without a value after =.
        flags: options of the command.
    """
    given = word.partition("=")[0].lower().replace("_", "-")
    for meaning, peers in PEERS.items():
        if given.removeprefix("--") in peers.split() and set(re.findall(r"--[a-z-]+", meaning)) <= set(flags):
            return f"did you mean {meaning}?" if meaning in flags else meaning
    close = closest_name(given, flags)
    return f"did you mean {close}?" if close else "--help lists them"


def unreadable_python(error: BaseException) -> str | None:
    """Return the path of a file of this Python that this user may not read, if it may be the reason of an error.

    That happens if Python is installed in the home folder of another user, which is closed to others.
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
        group: group in which it is shown (None: the option has none).
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
    """Table in a given width, whatever the width of the console."""

    table: Table
    width: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from console.render(self.table, options.update(width=self.width))


def _is_denied(path: Path) -> bool:
    try:
        os.scandir(path).close() if os.path.isdir(path) else path.open("rb").close()
    except PermissionError:
        return True
    except OSError:
        return False
    return False


def _options(kind: type[Any]) -> Iterator[Option]:
    """List the options of a command; the help of `--x` mentions `--no-x`, which has no help of its own."""
    hints, helps = get_type_hints(kind, include_extras=True), dict[str, str]()
    for each in kind.__mro__:
        if each.__module__.startswith("shardlab."):
            helps = field_helps(each) | helps
    names = [each.name for each in fields(kind)]
    opposites = {f"no_{name}" for name in names}
    for each in fields(kind):
        hint = hints[each.name]
        about = get_args(hint)[1:]
        if is_dataclass(each.default):
            yield from _options(type(each.default))
        elif tyro.conf.Suppress not in about and each.name not in opposites:
            extra = dict[str, Any]()
            if each.name in helps:
                extra["help"] = helps[each.name]
            if tyro.conf.FlagCreatePairsOff in about:
                off = f"no_{each.name}"
                extra["help_behavior_hint"] = f"(--{off.replace('_', '-')} turns it off)" if off in names else ""
            shown = Annotated[(hint, tyro.conf.arg(prefix_name=False, **extra))]
            yield Option(each.name, shown, each.default, _group(kind, each.name))


def _group(kind: type[Any], name: str) -> str | None:
    for options, group in CLASS_GROUPS.items():
        if issubclass(kind, options):
            return group
    if group := next((group for group, names in GROUPS.items() if name in names.split()), None):
        return group
    section = next((section for section, config in SECTIONS.items() if name in field_types(config)), None)
    return None if section is None else SECTION_GROUPS.get(section, section)


def _field(option: Option) -> tuple[str, Any, Any]:
    return option.name, option.kind, field() if option.default is MISSING else field(default=option.default)


def _dataclass_like(kind: type[Any], shown: list[tuple[str, Any, Any]]) -> type[Any]:
    """Make a dataclass with these fields and the name and docstring of another one."""
    return make_dataclass(kind.__name__, shown, kw_only=True, namespace={"__doc__": kind.__doc__})


def _first_paragraph(kind: type[Any]) -> str:
    return " ".join((kind.__doc__ or "").partition("\n\n")[0].split())
