"""The two base exceptions: `Refused` for a wrong program, `UserError` for a wrong request.

The error for an unknown name suggests the nearest known name.
"""

from __future__ import annotations

import errno
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Literal, NamedTuple, Self, TypeVar

T = TypeVar("T")


Rule = Literal[
    "a term", "another rank's value", "the layer's own", "awaited something else", "batch of collectives",
    "batch of messages", "can hang", "counted twice", "cut matrices", "cut sequences", "deadlock", "does not divide",
    "elsewhere", "endless", "freed", "frozen", "frozen and not kept", "frozen in the norm", "in flight", "left over",
    "loaded twice", "made up", "malformed tape", "masked keys", "merged terms", "missing microbatches",
    "missing pieces", "missing slices", "missing terms", "moved twice", "never updated", "no forward", "no operator",
    "no reduction", "no sum of squares", "no term", "no value", "norm for some", "norm on some ranks", "not awaited",
    "not exchanged", "not gathered", "not kept", "not loaded", "not received", "not runnable", "nothing to wait for",
    "number in use", "other dtypes", "other factors", "other forward", "other indices", "other message", "other order",
    "other pieces", "other slices", "other sums", "other tokens", "other values", "part of a slice", "partial",
    "partial norm", "partial weight", "pieces overlap", "replaced", "replicas differ", "room taken", "scaled gradient",
    "stale weight", "stalled", "stepped again", "the program raised", "tied weight", "unknown axis", "unknown group",
    "unknown key", "unknown layer", "unknown microbatch", "unknown rank", "unknown slice", "unknown verb",
    "unused result", "written over", "wrong expectation", "wrong factor", "wrong kind", "wrong layer", "wrong number",
    "wrong offset", "wrong root", "wrong step", "wrong store",
]  # fmt: skip
"""Short names of the rules that a program may break."""


class About(NamedTuple):
    """Text of the refused op, such as `update(layer 1)`, and the op's layer (-1: it has none)."""

    text: str
    layer: int = -1


def about_layer(verb: str, layer: int) -> About:
    """Return the `About` of an op with this name on a layer."""
    return About(f"{verb}(layer {layer})", layer)


class Refused(Exception):
    """Error of a wrong program: it would hang, or compute something else than the gradient.

    The message is one or two sentences: rank and op, the value given, the value expected, and the remedy.

    Args:
        about: the op and its layer, or only the op's text if it has no layer.

    Attributes:
        rule: name of the broken rule.
        rank, op: position of the op on the tapes, set by `at` (None: the program as a whole is refused).
        layer: the op's layer (None: it has none).
        given: the value found, and after a semicolon the value expected.
        remedy: what to do.
        missing: numbers of the missing microbatches, slices of a layer, or terms of a sum. If sequences are cut,
            microbatches are counted in cells: slice s of microbatch m is m * slices + s.
        doubled: numbers of the microbatches, slices or terms that would be counted twice.
        line: the line at fault in a user's file, as `file:line` ("": unknown).
        source: text of that line ("": unknown).
        trail: further lines, appended to the message.
    """

    def __init__(
        self,
        rule: Rule,
        about: About | str,
        fault: str,
        remedy: str,
        *,
        missing: Iterable[int] = (),
        doubled: Iterable[int] = (),
    ) -> None:
        super().__init__(rule, about, fault, remedy)  # arguments with which unpickling calls this constructor
        about, layer = (about, -1) if isinstance(about, str) else about
        self.rule, self.about, self.given, self.remedy = rule, about, fault, remedy
        self.layer = layer if layer >= 0 else None
        self.missing, self.doubled = tuple(missing), tuple(doubled)
        self.rank: int | None = None
        self.op: int | None = None
        self.line = self.source = self.trail = ""

    def at(self, rank: int, op: int) -> Self:
        """Set rank and op, unless an inner call has set them."""
        if self.rank is None:
            self.rank, self.op = rank, op
        return self

    def __str__(self) -> str:
        place = "" if self.rank is None else f"rank {self.rank}, op {self.op} "
        remedy = f". {self.remedy[0].upper()}{self.remedy[1:]}" if ";" in self.given else f"; {self.remedy}"
        parts = self.line, (place + self.about).rstrip(), self.given + remedy
        return f"{': '.join(filter(None, parts))}.{self.trail}"

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython prints in place of a traceback: the sentence, and the user's line at fault."""
        from shardlab.common.user_code import source_line  # which imports this module

        return [f"{type(self).__name__}: {self}", *source_line(self)]

    def fields(self) -> dict[str, object]:
        """Return all fields, for JSON."""
        names = ("rule", "line", "rank", "op", "layer", "about", "given", "remedy", "missing", "doubled")
        return {"text": str(self), **{name: getattr(self, name) for name in names}}


class Deadlock(Refused):
    """Refusal of a program whose ranks wait for one another for ever. The message names the whole cycle."""


class AsSentence(BaseException):
    """Exception that IPython shows as its message, without a traceback."""

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython prints in place of a traceback."""
        return [f"{type(self).__name__}: {self}"]


class UserError(AsSentence, ValueError):
    """Error in a user's request. The message is one sentence that says what to change."""


@contextmanager
def naming(path: Path) -> Generator[None, None, None]:
    """Prefix the message of every `UserError` raised in the block with the path of a file."""
    try:
        yield
    except UserError as error:
        text = str(error)
        raise UserError(text if text.startswith(str(path)) else f"{path}: {text}") from None


@contextmanager
def refuse_long_names() -> Generator[None, None, None]:
    """Raise a `UserError` for a text that is too long for the name of a file, such as the data in place of its path."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        name = str(error.filename)
        raise UserError(f"{name[:40]!r}... is too long for the name of a file; give the path of a file") from None


class TooDeep(ValueError):
    """Error of a file whose tables and lists are nested too deeply."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"it is nested more than {limit} levels deep")


def why_unreadable(error: OSError | UnicodeDecodeError | TooDeep) -> str:
    """Return why a file could not be read, as part of a sentence."""
    if isinstance(error, TooDeep):
        return str(error)
    return "it is not text" if isinstance(error, UnicodeDecodeError) else error.strerror or str(error)


def error_text(error: BaseException, message: str = "") -> str:
    """Return the type and the message of an error of a user's program, as part of a sentence.

    >>> error_text(KeyError("x")), error_text(AssertionError())
    ("KeyError: 'x'", 'AssertionError')

    Args:
        message: text in place of the error's message.
    """
    memory = "this machine has less memory left than this needs" if isinstance(error, MemoryError) else ""
    return ": ".join(filter(None, (type(error).__name__, message or str(error) or memory)))


def closest_name(name: str, names: Iterable[str], cutoff: float = 0.5) -> str | None:
    """Return the known name nearest to `name`, ignoring case; None if no name is similar (see `get_close_matches`).

    The shortest name that begins with `name` comes first.

    >>> closest_name("dp", ["pp", "dp_replicate", "dp_shard"])
    'dp_shard'
    """
    spellings = {known_name.lower(): known_name for known_name in names}
    longer = sorted((lower for lower in spellings if len(name) > 1 and lower.startswith(name.lower())), key=len)
    close = longer or get_close_matches(name.lower(), spellings, n=1, cutoff=cutoff)
    return spellings[close[0]] if close else None


def suggest_name(name: str, names: Iterable[str], others: str = "") -> str:
    """Return the second half of a sentence about an unknown name: the nearest name, or else all names.

    >>> suggest_name("fsdq", ["ddp", "fsdp"])
    'did you mean fsdp?'
    >>> suggest_name("tree", ["ddp", "fsdp"], " and files that end in .py")
    'there are ddp, fsdp and files that end in .py'

    Args:
        others: other accepted values, appended to the list of names.
    """
    known_names = list(names)
    close = closest_name(name, known_names)
    return f"did you mean {close}?" if close else f"there are {', '.join(known_names)}{others}"


def unknown_name(noun: str, name: str | int, names: Iterable[str], others: str = "") -> UserError:
    """Return the error for a name that is not in `names`. `noun` names its kind; `others` is as in `suggest_name`."""
    return UserError(f"there is no {noun} {name!r}; {suggest_name(str(name), names, others)}")


def find_by_name(table: Mapping[str, T], name: str, noun: str) -> T:
    """Return the table's entry of that name, ignoring case.

    Raises:
        UserError: if there is none; the message suggests the nearest name.
    """
    entry = table.get(name.strip().lower())
    if entry is None:
        raise unknown_name(noun, name, table)
    return entry
