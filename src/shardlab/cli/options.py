"""Kinds of option that several commands share."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_type_hints

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from shardlab.common.text import read_tokens
from shardlab.common.user_code import MAX_FOLDED, MAX_OPS, MAX_SECONDS
from shardlab.language import UserError
from shardlab.language.ops import ColorBy
from shardlab.language.rules.kinds import counted
from shardlab.simulate.timeline import Costs, Timeline
from shardlab.simulate.timeline.run import Counter

if TYPE_CHECKING:
    from shardlab.draw.trace_events import Shown


def _count(word: str) -> int:
    try:
        return int(word)
    except ValueError:
        raise ValueError(f"{word!r} is not a whole number; give 1 or more.") from None


def check_counts(command: object) -> None:
    """Refuse a count of less than 1 among a command's options: tyro would take eight lines to say so.

    Raises:
        UserError: with the option.
    """
    hints = get_type_hints(type(command), include_extras=True)
    for field in fields(cast(Any, command)):
        value = getattr(command, field.name)
        if is_dataclass(value):
            check_counts(value)
            continue
        is_count = any(each is _COUNT for each in getattr(hints[field.name], "__metadata__", ()))
        if is_count and value is not None and value < 1:
            raise UserError(f"--{field.name.replace('_', '-')}: {value} is too few; give 1 or more")


def option_names(command: object) -> list[str]:
    """Names of a command's fields, each of which is an option; those of a group of options stand alone."""
    names: list[str] = []
    for field in fields(cast(Any, command)):
        value = getattr(command, field.name)
        names += option_names(value) if is_dataclass(value) else [field.name]
    return names


def one_word(metavar: str, read: Callable[[str], Any], kind: type) -> PrimitiveConstructorSpec[Any]:
    """An option of one word, which `read` makes a value of such a kind; what its ValueError says is printed."""
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda words: read(words[0]),
        is_instance=lambda value: value is None or isinstance(value, kind),
        str_from_instance=lambda value: [str(value)],
    )


_COUNT = one_word("N", _count, int)

Count = Annotated[int, _COUNT]
"""1 or more."""

OptionalCount = Annotated[int | None, _COUNT, tyro.conf.arg(help_behavior_hint="")]
"""1 or more, or not given."""

Ranks = Annotated[int | None, _COUNT, tyro.conf.arg(help_behavior_hint="(default: the plan's, or 4, or 1)")]
"""1 or more; without it as many as the plan has, or 4, or 1 for a strategy of one device."""

Layers = Annotated[int | None, _COUNT, tyro.conf.arg(help_behavior_hint="(default: 4, or one for each stage)")]
"""1 or more; without it 4, or one for each stage if a pipeline has more stages."""

MaxOps = Annotated[
    int | None,
    _COUNT,
    tyro.conf.arg(help_behavior_hint=f"(default: {MAX_OPS:,}; {MAX_FOLDED:,} if identical ranks are folded)"),
]
"""The most ops that are traced; a module's `main` sees to it (see `shardlab.common.user_code`)."""

MaxSeconds = Annotated[float | None, tyro.conf.arg(metavar="SECONDS", help_behavior_hint=f"(default: {MAX_SECONDS:g})")]
"""The most CPU time until a user's next op; a module's `main` sees to it (see `shardlab.common.user_code`)."""

Norm = Annotated[float | None, tyro.conf.arg(metavar="NORM", help_behavior_hint="")]
"""The largest norm of a gradient, or none."""

Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]
"""`--flag`, without a `--no-flag`."""


def switch_flags(name: str, about: str) -> Iterator[tuple[str, Any, bool]]:
    """The two flags of a switch, `--name` and `--no-name`: the name of each, its type for tyro, and False."""
    yield name, Annotated[Flag, tyro.conf.arg(help=about)], False
    off = f"Turn --{name.replace('_', '-')} off, even if the preset or config file turns it on."
    yield f"no_{name}", Annotated[Flag, tyro.conf.arg(help=off)], False


def switched(options: object, name: str, opposite: str | None = None) -> bool | None:
    """What the two flags of a switch say; None: neither is given.

    Args:
        opposite: the name of the one that turns it off (None: `no_` and its name).

    Raises:
        UserError: both are given.
    """
    opposite = opposite or f"no_{name}"
    on, off = getattr(options, name), getattr(options, opposite)
    if on and off:
        flags = " and ".join(f"--{each.replace('_', '-')}" for each in (name, opposite))
        raise UserError(f"both {flags} were given; give one of them")
    return on if on or off else None


NewFile = Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")]
"""A file to be written."""

Name = Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")]
"""A name, or none."""

StrategyName = Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="STRATEGY", help_behavior_hint="")]
"""A built-in name or `path/to/file.py:function`; none for a plan by flags."""


# Option `--costs NAME=TIME,...`: what ops take, in any unit.


CostsText = Annotated[str | None, tyro.conf.arg(metavar="NAME=TIME,...", help_behavior_hint="")]
"""The option; it is read by `costs_of`."""

NAMES = [field.name for field in fields(Costs) if field.name != "link_latency"]


def costs_of(text: str) -> Costs:
    """The costs in `forward=18.5,backward_input=18.1,backward_weight=9.3,send=0.6`; those left out are 0.

    A send's time is spent on a link that carries any number of messages at once.

    Raises:
        UserError: for what is no cost, or none that there is, or one given twice.
    """
    given = dict.fromkeys(NAMES, 0.0)
    seen: set[str] = set()
    for part in text.split(","):
        name, equals, time = (word.strip() for word in part.partition("="))
        if not equals:
            raise UserError(f"--costs: {part.strip()!r} is not a cost; give NAME=TIME,... such as forward=1,send=0.2")
        if name == "backward":
            raise UserError("--costs: give backward_input and backward_weight; an unsplit backward costs their sum")
        if name not in given:
            raise UserError(f"--costs: there is no cost {name!r}; give some of {', '.join(NAMES)}")
        if name in seen:
            raise UserError(f"--costs: {name} is given twice; give it once")
        seen.add(name)
        given[name] = _time(name, time)
    return Costs(**given, link_latency=True)


def _time(name: str, text: str) -> float:
    try:
        time = float(text)
    except ValueError:
        time = math.nan
    if not 0 <= time < math.inf:
        raise UserError(f"--costs: {name}={text} is not a time; give a number, 0 or more")
    return time


# Files to be written: refused before any work is done if they cannot be, and then written whole or not at all.


OWN_MARKS = (
    b"<dc:title>shardlab</dc:title>",  # SVG
    b'"otherData": {"generator": "shardlab"}',  # a trace
    b"Creator\0shardlab",  # PNG
    b"/Creator (shardlab)",  # PDF
    b"# written by shardlab plan: ",  # TOML
)
"""Marks of the files that Shardlab writes; one stands near the beginning or the end of each."""

NEAR = 4096
"""Bytes."""


def check_new_file(
    option: str, path: Path | None, example: str, *, force: bool = False, content: bytes | None = None
) -> None:
    """Refuse a file that has no folder to go to, or that is there already and is not Shardlab's own.

    Args:
        option: the option that names it.
        path: the file; None if none is wanted.
        example: a name that it could have.
        force: replace whatever file is there.
        content: what will be in it, if that bears no mark of Shardlab's; the same file may be there already.

    Raises:
        UserError: if the folder is missing, the file is one, or it is another program's or a user's.
    """
    if path is None:
        return
    if path.is_dir():
        raise UserError(f"{option} {path}: this is a folder; give a file in it, such as {path / example}")
    if not path.parent.is_dir():
        raise UserError(f"{option} {path}: the folder {path.parent} does not exist; make it first")
    if path.is_file() and not force and not _may_go(path, content):
        whose = "not what Shardlab would write" if content is not None else "not one of Shardlab's"
        raise UserError(
            f"{option} {path}: this file exists and is {whose}; give another name, or --force to replace it"
        )


def _may_go(path: Path, content: bytes | None) -> bool:
    """Whether a file can be replaced without loss: it is empty, or Shardlab has written it."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            if content is not None:
                return size in (0, len(content)) and file.read() in (b"", content)
            ends = file.read(NEAR)
            file.seek(max(0, size - NEAR))
            ends += file.read()
    except OSError:
        return False
    return not size or any(mark in ends for mark in OWN_MARKS)


@contextmanager
def writing(option: str, path: Path) -> Generator[None]:
    """Within this, that a file cannot be written is the user's mistake.

    Raises:
        UserError: with the option, the file and the reason.
    """
    try:
        yield
    except OSError as error:
        raise UserError(f"{option} {path}: it cannot be written: {error.strerror}") from None


# Tokens of a step that is planned, in sequences.


MOST_TOKENS = 16 * 2**20
"""Tokens of a step, if nobody says how many: no more than these, and no more than 16 sequences for each device."""


def sequences_of_step(tokens_per_step: str | None, global_batch: int | None, length: int, devices: int) -> int:
    """Sequences of a step's global batch.

    Args:
        tokens_per_step, global_batch: as the command line gives them (None: it leaves them out).
        length: tokens of a sequence.
        devices: of the cluster.

    Raises:
        UserError: when both are given, or the tokens are no whole sequences.
    """
    if global_batch is not None:
        if tokens_per_step is not None:
            raise UserError("both --tokens-per-step and --global-batch were given; give one of them")
        return global_batch
    if tokens_per_step is None:
        most = MOST_TOKENS // length // devices * devices or 1 << ((MOST_TOKENS // length) | 1).bit_length() - 1
        return min(16 * devices, most)
    tokens = read_tokens(tokens_per_step, "--tokens-per-step")
    sequences, rest = divmod(tokens, length)
    if rest or not sequences:
        near = f"{sequences} or {sequences + 1}" if sequences else "1"
        raise UserError(
            f"{tokens:,} tokens are not a whole number of sequences of {length:,} tokens; give --global-batch "
            f"{near} ({max(sequences, 1) * length:,} tokens)"
        )
    return sequences


# Global batch of a priced step and its microbatches: equal for every plan, unless options say more.


@dataclass(frozen=True)
class BatchRequest:
    """Options about the global batch; None for those that the command line leaves out.

    Attributes:
        sequences: of the global batch.
        microbatches: of the global batch.
        micro_batch_size: sequences of a microbatch.
    """

    sequences: int | None = None
    microbatches: int | None = None
    micro_batch_size: int | None = None

    def cut(self, devices: int, data_ranks: int | None) -> tuple[int, int]:
        """Microbatches of the global batch, and the sequences of each.

        By default there is a microbatch of one sequence for each device of the cluster, whatever the plan: so commands
        for one cluster are steps of as many tokens.

        Args:
            devices: of the cluster, whether they are used or not.
            data_ranks: among how many ranks a plan deals the microbatches (None: no plan, the program says).

        Raises:
            UserError: when the options contradict each other, or the batch does not divide.
        """
        micro_batch_size, microbatches = self.micro_batch_size or 1, self.microbatches or devices
        if self.sequences is not None:
            if self.micro_batch_size is None and self.microbatches is not None:
                micro_batch_size = max(1, self.sequences // self.microbatches)
            microbatches = self.microbatches or self.sequences // micro_batch_size
            if microbatches * micro_batch_size != self.sequences:
                what = counted(self.microbatches, "microbatch") if self.microbatches else "microbatches"
                each = f" of {counted(self.micro_batch_size, 'sequence')}" if self.micro_batch_size else ""
                unit = (self.microbatches or 1) * (self.micro_batch_size or 1)
                remedy = (
                    "leave out one of the three"
                    if self.microbatches and self.micro_batch_size
                    else f"give a multiple of {unit}"
                )
                raise UserError(
                    f"a global batch of {counted(self.sequences, 'sequence')} cannot be cut into {what}{each}; {remedy}"
                )
        if self.microbatches is None and data_ranks is not None and microbatches % data_ranks:
            raise UserError(self._undivided(microbatches, micro_batch_size, data_ranks, devices))
        return microbatches, micro_batch_size

    def _undivided(self, microbatches: int, micro_batch_size: int, data_ranks: int, devices: int) -> str:
        why = f" (a microbatch for each of the cluster's {devices:,} devices)" if self.sequences is None else ""
        each = f", in microbatches of {micro_batch_size}," if micro_batch_size > 1 else ""
        down, unit = microbatches - microbatches % data_ranks, micro_batch_size * data_ranks
        sizes = f"{down * micro_batch_size} or {down * micro_batch_size + unit}" if down else f"{unit}"
        batch = counted(microbatches * micro_batch_size, "sequence")
        return (
            f"the global batch of {batch}{why}{each} does not divide among "
            f"{data_ranks} data-parallel ranks; give --global-batch {sizes}"
        )


AS_USUAL = BatchRequest()
"""Default batch: a microbatch of one sequence for each device."""


# Files that show a step: a drawing of its timeline, and a trace for viewers.


MOST_DRAWN = 500_000
"""Events in a picture: a matter of seconds."""


@dataclass(frozen=True)
class Pictures:
    """Options of the files that show a step."""

    svg: NewFile = None
    """Draw the timeline of the step into this file; for a comparison, both timelines; with --passes, the timelines
    before the first pass and after each pass."""

    color_by: Annotated[ColorBy, tyro.conf.arg(metavar="{pass,layer}")] = "pass"
    """Meaning of the colours: the pass (forward, backward, input gradient, weight gradient), or the layer."""

    trace: NewFile = None
    """Write the timelines into this file, for Perfetto (ui.perfetto.dev) and Chrome."""

    force: Flag = False
    """Replace files that Shardlab did not write."""

    @property
    def files(self) -> list[Path]:
        """The files that are wanted."""
        return [path for path in (self.svg, self.trace) if path is not None]

    def check(self, example: str) -> None:
        """Refuse files that cannot be written, that are one, or that would replace a user's.

        Raises:
            UserError: if so, or if there is none that could be replaced.
        """
        if self.force and not self.files:
            raise UserError("--force replaces files, but no file is written; give --svg or --trace, or leave it out")
        check_new_file("--svg", self.svg, example, force=self.force)
        check_new_file("--trace", self.trace, "trace.json", force=self.force)
        if self.svg is not None and self.trace is not None and self.svg.resolve() == self.trace.resolve():
            raise UserError(f"--svg and --trace are both {self.svg}; give them different files")

    def save(self, timeline: Timeline, name: str, counters: Sequence[Counter] | None = None) -> None:
        """Write a timeline of what has such a name into the files that are wanted."""
        if self.svg is not None:
            self._draw(timeline, self.svg, f"{name}: one optimizer step")
        self.save_trace({"": (timeline, counters)})

    def save_each(self, timelines: Mapping[str, Timeline], name: str) -> None:
        """Write timelines of what has such a name, each under its own, into the files that are wanted."""
        if self.svg is not None:
            from shardlab.draw import save_comparison
            from shardlab.draw.timeline import MILLISECONDS, UNIT_TIME

            _want_few(sum(len(events) for timeline in timelines.values() for events in timeline.events), self.svg)
            in_seconds = any(timeline.in_seconds for timeline in timelines.values())
            with writing("--svg", self.svg):
                unit = MILLISECONDS if in_seconds else UNIT_TIME
                save_comparison(timelines, self.svg, f"{name}: one optimizer step", self.color_by, unit)
        self.save_trace({each: (timeline, None) for each, timeline in timelines.items()})

    def _draw(self, timeline: Timeline, path: Path, title: str) -> None:
        from shardlab.draw import save_timeline  # matplotlib takes longer to import than most simulations take
        from shardlab.draw.timeline import UNIT_TIME

        _want_few(sum(map(len, timeline.events)), path)
        with writing("--svg", path):
            unit = "time (seconds)" if timeline.in_seconds else UNIT_TIME
            save_timeline(timeline, path, title, unit, self.color_by)

    def save_trace(self, shown: Mapping[str, Shown]) -> None:
        """Write timelines for trace viewers, each under its name, if that is wanted."""
        if self.trace is None:
            return
        from shardlab.draw.trace_events import save_trace_events

        with writing("--trace", self.trace):
            save_trace_events(shown, self.trace)


def _want_few(count: int, path: Path) -> None:
    if count > MOST_DRAWN:
        raise UserError(
            f"--svg {path}: {count:,} events are too many for a picture of at most {MOST_DRAWN:,}; "
            "write --trace, or take fewer microbatches"
        )


NO_PICTURES = Pictures()

PictureFlags = Annotated[Pictures, tyro.conf.OmitArgPrefixes, tyro.conf.arg(name="")]
"""The options, as a command's field; their names stand alone."""
