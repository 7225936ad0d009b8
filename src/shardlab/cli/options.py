"""Option types and option groups that several commands share.

A command is a frozen dataclass, and tyro makes an option of each field. This file has, in this order:

1. types of single options, such as `Count` or `NewFile`, as annotations that tell tyro how to parse and explain them;
2. `Pictures`, the options for files that show a step, which a command takes as one field;
3. functions that read or refuse the values of options: `--x`/`--no-x` pairs, `--costs`, files to write, and the size of
   the global batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from shardlab.common.text import parse_tokens
from shardlab.common.user_code import MAX_FOLDED_OPS, MAX_OPS, MAX_SECONDS
from shardlab.language import UserError
from shardlab.language.ops import ColorBy
from shardlab.simulate.timeline import PUZZLE_COSTS, TEACHING_COSTS, Costs, Timeline
from shardlab.simulate.timeline.prices import Prices
from shardlab.simulate.timeline.run import Counter

if TYPE_CHECKING:
    from shardlab.draw.trace_events import TimelineWithMemory


MaxSeconds = Annotated[float | None, tyro.conf.arg(metavar="SECONDS", help_behavior_hint=f"(default: {MAX_SECONDS:g})")]
"""Largest CPU time in seconds between two ops of a user's program. `shardlab.cli.main` enforces it."""

Norm = Annotated[float | None, tyro.conf.arg(metavar="NORM", help_behavior_hint="")]
"""Largest norm of a gradient, or None."""

Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]
"""Switch with `--flag` but without `--no-flag`."""

NewFile = Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")]
"""Path of a file to write, or None."""

Name = Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")]
"""Name, or None."""

StrategyName = Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="STRATEGY", help_behavior_hint="")]
"""Built-in name or `path/to/file.py:function`; None for a plan by flags."""

CostsText = Annotated[str | None, tyro.conf.arg(metavar="NAME=TIME,...", help_behavior_hint="(default: teaching)")]
"""Text of the option `--costs`, which `costs_of` parses."""

COST_NAMES = [field.name for field in fields(Costs) if field.name != "link_latency"]

OWN_MARKS = (
    b"<dc:title>shardlab</dc:title>",  # SVG
    b'"otherData": {"generator": "shardlab"}',  # a trace
    b"Creator\0shardlab",  # PNG
    b"/Creator (shardlab)",  # PDF
    b"# written by shardlab plan: ",  # TOML
    b'<meta name="generator" content="shardlab">',  # HTML
)
"""Marks by which Shardlab recognizes its own files. Each file has one near its beginning or its end."""

MARK_RANGE = 4096
"""Number of bytes at either end of a file in which a mark is looked for."""

MOST_TOKENS = 16 * 2**20
"""Largest default number of tokens in a step. The default is also at most 16 sequences for each device."""

MOST_DRAWN = 500_000
"""Largest number of events in a picture. Drawing so many takes some seconds."""


def one_word_option(metavar: str, parse: Callable[[str], Any], kind: type) -> PrimitiveConstructorSpec[Any]:
    """Return the tyro constructor of an option that takes one word.

    Args:
        metavar: placeholder of the value in the help.
        parse: parser of the word. tyro prints the message of its ValueError.
        kind: type of the parsed value.
    """
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda words: parse(words[0]),
        is_instance=lambda value: value is None or isinstance(value, kind),
        str_from_instance=lambda value: [str(value)],
    )


def _parse_count(word: str) -> int:
    try:
        count = int(word)
    except ValueError:
        raise ValueError(f"{word!r} is not a whole number; give 1 or more.") from None
    if count < 1:
        raise ValueError(f"{count} is too few; give 1 or more.")
    return count


_COUNT = one_word_option("N", _parse_count, int)

Count = Annotated[int, _COUNT]
"""Integer of 1 or more."""

OptionalCount = Annotated[int | None, _COUNT, tyro.conf.arg(help_behavior_hint="")]
"""Integer of 1 or more, or None if the option is left out."""

Ranks = Annotated[int | None, _COUNT, tyro.conf.arg(help_behavior_hint="(default: the plan's, or 4, or 1)")]
"""Number of ranks. Default: the plan's, or 4, or 1 for a strategy of one device."""

Layers = Annotated[int | None, _COUNT, tyro.conf.arg(help_behavior_hint="(default: 4, or one for each stage)")]
"""Number of layers. Default: 4, or one for each stage if a pipeline has more stages."""

MaxOps = Annotated[
    int | None,
    _COUNT,
    tyro.conf.arg(help_behavior_hint=f"(default: {MAX_OPS:,}; {MAX_FOLDED_OPS:,} if identical ranks are folded)"),
]
"""Largest number of ops that are traced. `shardlab.cli.main` enforces it with `user_code.trace_limits`."""


@dataclass(frozen=True)
class Pictures:
    """Options for files that show a step: a drawing of its timeline, and a trace for viewers."""

    svg: NewFile = None
    """Draw the timeline of the step into this file. For a comparison, draw both timelines; with --passes, the timelines
    before the first pass and after each pass."""

    color_by: Annotated[ColorBy, tyro.conf.arg(metavar="{pass,layer}")] = "pass"
    """Colour the boxes by pass (forward, backward, input gradient, weight gradient) or by layer."""

    trace: NewFile = None
    """Write the timelines into this file, for Perfetto (ui.perfetto.dev) and Chrome."""

    force: Flag = False
    """Replace files that Shardlab did not write."""

    @property
    def files(self) -> list[Path]:
        """Paths of the files to write."""
        return [path for path in (self.svg, self.trace) if path is not None]

    def check(self, example: str) -> None:
        """Refuse a file that cannot be written, the same file for both options, and a user's file without --force.

        Raises:
            UserError: in these cases, or if --force is given without a file.
        """
        if self.force and not self.files:
            raise UserError("--force replaces files, but no file is written; give --svg or --trace, or leave it out")
        if self.color_by == "layer" and self.svg is None:
            raise UserError("--color-by is for a drawing; give --svg FILE, or leave it out")
        if self.svg is not None and self.svg.suffix in (".png", ".pdf", ".jpg"):
            raise UserError(f"--svg {self.svg}: a drawing is an SVG file; give {self.svg.with_suffix('.svg')}")
        check_new_file("--svg", self.svg, example, force=self.force)
        check_new_file("--trace", self.trace, "trace.json", force=self.force)
        if self.svg is not None and self.trace is not None and self.svg.resolve() == self.trace.resolve():
            raise UserError(f"--svg and --trace are both {self.svg}; give them different files")

    def save(self, timeline: Timeline, name: str, counters: Sequence[Counter] | None = None) -> None:
        """Write one timeline into the requested files.

        Args:
            name: title of the strategy.
            counters: memory of each rank by category, for the trace (None: the trace shows only the total).
        """
        if self.svg is not None:
            self._draw(timeline, self.svg, f"{name}: one optimizer step")
        self.save_trace({"": (timeline, counters)})

    def save_each(self, timelines: Mapping[str, Timeline], name: str) -> None:
        """Write several timelines of one strategy into the requested files.

        Args:
            timelines: timelines by the name under which they are shown.
            name: title of the strategy.
        """
        if self.svg is not None:
            from shardlab.draw import save_comparison
            from shardlab.draw.timeline import MILLISECONDS, UNIT_TIME

            _require_few_events(
                sum(len(events) for timeline in timelines.values() for events in timeline.events), self.svg
            )
            in_seconds = any(timeline.in_seconds for timeline in timelines.values())
            with writing("--svg", self.svg):
                unit = MILLISECONDS if in_seconds else UNIT_TIME
                save_comparison(timelines, self.svg, f"{name}: one optimizer step", self.color_by, unit)
        self.save_trace({label: (timeline, None) for label, timeline in timelines.items()})

    def _draw(self, timeline: Timeline, path: Path, title: str) -> None:
        from shardlab.draw import save_timeline  # matplotlib takes longer to import than most simulations take
        from shardlab.draw.timeline import UNIT_TIME

        _require_few_events(sum(map(len, timeline.events)), path)
        with writing("--svg", path):
            unit = "time (seconds)" if timeline.in_seconds else UNIT_TIME
            save_timeline(timeline, path, title, unit, self.color_by)

    def save_trace(self, timelines: Mapping[str, TimelineWithMemory]) -> None:
        """Write timelines, by the names under which they are shown, for trace viewers, if --trace is given."""
        if self.trace is None:
            return
        from shardlab.draw.trace_events import save_trace_events

        with writing("--trace", self.trace):
            save_trace_events(timelines, self.trace)


def option_values(command: object) -> dict[str, Any]:
    """Return the values of a command's options by name, including those of its option groups."""
    values: dict[str, Any] = {}
    for field in fields(cast(Any, command)):
        value = getattr(command, field.name)
        values |= option_values(value) if is_dataclass(value) else {field.name: value}
    return values


def switch_flags(name: str, about: str) -> Iterator[tuple[str, Any, bool]]:
    """Yield the fields of the two flags `--name` and `--no-name`: name, type for tyro, and default."""
    yield name, Annotated[Flag, tyro.conf.arg(help=about)], False
    help_text = f"Turn --{name.replace('_', '-')} off, even if the preset or config file turns it on."
    yield f"no_{name}", Annotated[Flag, tyro.conf.arg(help=help_text)], False


def switch_value(options: object, name: str, opposite: str | None = None) -> bool | None:
    """Return the value that the two flags of a switch give, or None if neither is given.

    Args:
        opposite: name of the flag that turns the switch off (None: `no_` and the name).

    Raises:
        UserError: if both flags are given.
    """
    opposite = opposite or f"no_{name}"
    on, off = getattr(options, name), getattr(options, opposite)
    if on and off:
        flags = " and ".join(f"--{flag.replace('_', '-')}" for flag in (name, opposite))
        raise UserError(f"both {flags} were given; give one of them")
    return on if on or off else None


NAMED_COSTS: dict[str, Prices] = {"teaching": TEACHING_COSTS, "puzzle": PUZZLE_COSTS}


def costs_of(text: str) -> Prices:
    """Parse --costs: the name `teaching` or `puzzle`, or a list of times.

    A text such as `forward=18.5,backward_input=18.1,backward_weight=9.3,send=0.6` gives the time of some ops, in any
    unit. Other costs are 0. A send's time is only latency: a link carries any number of messages at once.

    Raises:
        UserError: for a word that is not NAME=TIME, an unknown name, or a name that is given twice.
    """
    if text.strip() in NAMED_COSTS:
        return NAMED_COSTS[text.strip()]
    costs = dict.fromkeys(COST_NAMES, 0.0)
    used_names: set[str] = set()
    for part in text.split(","):
        name, equals, time = (word.strip() for word in part.partition("="))
        if not equals:
            raise UserError(
                f"--costs: {part.strip()!r} is not a cost; give teaching, puzzle, or NAME=TIME,... such as "
                "forward=1,send=0.2"
            )
        if name == "backward":
            raise UserError("--costs: give backward_input and backward_weight; an unsplit backward costs their sum")
        if name not in costs:
            raise UserError(f"--costs: there is no cost {name!r}; give some of {', '.join(COST_NAMES)}")
        if name in used_names:
            raise UserError(f"--costs: {name} is given twice; give it once")
        used_names.add(name)
        costs[name] = _parse_time(name, time)
    return Costs(**costs, link_latency=True)


def check_new_file(
    option: str, path: Path | None, example: str, *, force: bool = False, content: bytes | None = None
) -> None:
    """Refuse to write a file whose folder is missing, or that exists and was not written by Shardlab.

    Commands call this first, so that a wrong path is reported before minutes of work.

    Args:
        option: option that names the file.
        path: path of the file (None: no file is requested).
        example: name of a file for the error message.
        force: replace any existing file.
        content: bytes to write, if they contain none of `OWN_MARKS`. An existing file with the same bytes is accepted.

    Raises:
        UserError: if the folder is missing, the path is a folder, or the file belongs to a user or another program.
    """
    if path is None:
        return
    if path.is_dir():
        raise UserError(f"{option} {path}: this is a folder; give a file in it, such as {path / example}")
    if not path.parent.is_dir():
        raise UserError(f"{option} {path}: the folder {path.parent} does not exist; make it first")
    if path.is_file() and not force and not _is_replaceable(path, content):
        origin = "not what Shardlab would write" if content is not None else "not one of Shardlab's"
        raise UserError(
            f"{option} {path}: this file exists and is {origin}; give another name, or --force to replace it"
        )


@contextmanager
def writing(option: str, path: Path) -> Generator[None]:
    """Turn errors of the operating system in this context into a `UserError`.

    Raises:
        UserError: with the option, the file and the reason.
    """
    try:
        yield
    except OSError as error:
        raise UserError(f"{option} {path}: it cannot be written: {error.strerror}") from None


def sequences_of_step(tokens_per_step: str | None, global_batch: int | None, length: int, devices: int) -> int:
    """Return the number of sequences in the global batch of a step to plan.

    Args:
        tokens_per_step, global_batch: values of these options (None: left out).
        length: tokens of a sequence.
        devices: number of devices of the cluster.

    Raises:
        UserError: when both options are given, or the tokens are not a whole number of sequences.
    """
    if global_batch is not None:
        if tokens_per_step is not None:
            raise UserError("both --tokens-per-step and --global-batch were given; give one of them")
        return global_batch
    if tokens_per_step is None:
        limit = MOST_TOKENS // length // devices * devices or 1 << ((MOST_TOKENS // length) | 1).bit_length() - 1
        return min(16 * devices, limit)
    tokens = parse_tokens(tokens_per_step, "--tokens-per-step")
    sequences, rest = divmod(tokens, length)
    if rest or not sequences:
        choices = f"{sequences} or {sequences + 1}" if sequences else "1"
        raise UserError(
            f"{tokens:,} tokens are not a whole number of sequences of {length:,} tokens; give --global-batch "
            f"{choices} ({max(sequences, 1) * length:,} tokens)"
        )
    return sequences


NO_PICTURES = Pictures()

PictureFlags = Annotated[Pictures, tyro.conf.OmitArgPrefixes, tyro.conf.arg(name="")]
"""Field type of a command that has these options, without a prefix in their names."""


def _parse_time(name: str, text: str) -> float:
    try:
        time = float(text)
    except ValueError:
        time = math.nan
    if not 0 <= time < math.inf:
        raise UserError(f"--costs: {name}={text} is not a time; give a number, 0 or more")
    return time


def _is_replaceable(path: Path, content: bytes | None) -> bool:
    """Return whether a file can be replaced without loss: it is empty, or Shardlab wrote it."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            if content is not None:
                return size in (0, len(content)) and file.read() in (b"", content)
            ends = file.read(MARK_RANGE)
            file.seek(max(0, size - MARK_RANGE))
            ends += file.read()
    except OSError:
        return False
    return not size or any(mark in ends for mark in OWN_MARKS)


def _require_few_events(count: int, path: Path) -> None:
    if count > MOST_DRAWN:
        raise UserError(
            f"--svg {path}: {count:,} events are too many for a picture of at most {MOST_DRAWN:,}; "
            "write --trace, or take fewer microbatches"
        )
