"""Numbers, bytes, sizes, shares and times as text, and parsers of such text.

First come functions from values to text, then sizes of messages (64KB) in both directions, then amounts that a user
writes with a unit (bytes, tokens), then lists and plurals, and last the breaking of lines.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise

from shardlab.common.errors import UserError

UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
"""Units of bytes and their sizes, largest first."""


def bytes_text(bytes: float, digits: int = 2) -> str:
    """Write bytes in the largest unit that they fill.

    >>> bytes_text(3 * 2**29), bytes_text(5_000_000), bytes_text(80 * 2**30, digits=0)
    ('1.50 GiB', '4.77 MiB', '80 GiB')
    """
    unit, size = byte_unit(bytes)
    return f"{bytes / size:,.{digits}f} {unit}"


def memory_text(bytes: float) -> str:
    """Return the memory of a device as text, without decimals if they are zero.

    >>> memory_text(80 * 2**30), memory_text(1.2 * 2**30)
    ('80 GiB', '1.20 GiB')
    """
    return bytes_text(bytes).replace(".00 ", " ")


def byte_unit(bytes: float) -> tuple[str, int]:
    """Return the largest unit that does not exceed a number of bytes, and the unit's size in bytes."""
    return next((unit for unit in UNITS if bytes >= unit[1]), UNITS[-1])


def percent_text(share: float) -> str:
    """Return a share in percent, with one decimal, or with two significant digits if it is small.

    >>> percent_text(0.421), percent_text(0.00012), percent_text(0)
    ('42.1%', '0.012%', '0.0%')
    """
    percent = 100 * share
    decimals = 1 if percent >= 1 or percent <= 0 else 1 - math.floor(math.log10(percent))
    return f"{percent:,.{decimals}f}%"


def seconds_text(seconds: float) -> str:
    """Return text such as `3.46 s`, `125.8 ms`, `93.1 us`."""
    if seconds >= 1:
        return f"{seconds:#,.3g} s" if seconds < 100 else f"{seconds:,.0f} s"
    return f"{seconds * 1e3:.4g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.4g} us"


def axis_time_text(moment: float, end: float, length: float) -> str:
    """Return the label of a time on an axis, with enough digits for an interval of `length` seconds.

    >>> axis_time_text(1.2345, 2.75, 0.005), axis_time_text(0.0125, 0.125, 0.125), axis_time_text(0, 1, 1)
    ('1.234500 s', '12.5 ms', '0')

    Args:
        moment: the time in seconds from the start of the step.
        end: end of the step in seconds, which decides the unit.
        length: length of the interval that the axis shows, in seconds.
    """
    if not moment:
        return "0"
    size, unit = (1.0, "s") if end >= 1 else (1e3, "ms") if end >= 1e-3 else (1e6, "us")
    digits = max(0, 3 - math.floor(math.log10(length * size)))
    return f"{moment * size:,.{digits}f} {unit}"


REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def printable(text: str) -> str:
    """Replace unprintable characters, which a terminal might execute. Line ends and tabs stay.

    >>> printable("a" + chr(27) + "[2J" + chr(9) + "b")
    'a\ufffd[2J\\tb'
    """
    return "".join(character if character.isprintable() or character in "\n\t" else REPLACEMENT for character in text)


POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
"""Power of 1024 of each unit. KB and KiB are both 1024 bytes, as in nccl-tests."""

_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([KMGT]?)(?:I?B)?\s*", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Return the bytes of a size.

    >>> parse_size("64MB"), parse_size("1.5 k"), parse_size("12")
    (67108864, 1536, 12)

    Raises:
        UserError: if the text is not a size.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise UserError(f"{text!r} is not a size; write a number and a unit, such as 1KB, 512 or 64MB")
    size = float(match[1]) * 1024 ** POWERS[match[2].upper()]
    if size != int(size):
        raise UserError(f"{text!r} is {size} bytes; give a whole number of bytes")
    return int(size)


def size_text(size: float) -> str:
    """Return a size in its largest fitting unit.

    >>> size_text(1536), size_text(64 * 1024 * 1024), size_text(7)
    ('1.5 KB', '64 MB', '7 B')
    """
    power = min(4, int(math.log(size, 1024) + 1e-9)) if size >= 1 else 0
    unit = ("B", "KB", "MB", "GB", "TB")[power]
    return f"{size / 1024**power:.4g} {unit}"


def sizes_between(smallest: int, largest: int, factor: int = 2) -> list[int]:
    """Return the sizes from the smallest to the largest, each `factor` times the size before.

    Raises:
        UserError: if no sizes, or endlessly many, lie in between.
    """
    if smallest < 4:
        raise UserError(f"the smallest size is {smallest} bytes; one float32 number has 4: give 4 or more")
    if largest < smallest:
        raise UserError(
            f"the largest size, {size_text(largest)}, is less than the smallest, {size_text(smallest)}; exchange them"
        )
    if factor < 2:
        raise UserError(f"each size is {factor} times the one before, so there is no end; give 2 or more")
    return [smallest * factor**step for step in range(int(math.log(largest / smallest, factor) + 1e-9) + 1)]


NUMBER = r"\d+(?:\.\d+)?(?:e\d+)?"

BYTES = {"b": 1} | {
    f"{letter}{end}": base**power for power, letter in enumerate("kmgt", 1) for end, base in (("ib", 1024), ("b", 1000))
}

TOKENS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}
"""Units of tokens. They are powers of 1,024, as is common for batches: 4M tokens are 512 sequences of 8,192."""


def parse_bytes(text: str, flag: str) -> float:
    """Return the bytes of text such as `72GiB`, `80GB` or `5e9B`. A unit is required, since a bare number may mean GiB.

    Raises:
        UserError: if it is not above 0, or has no unit.
    """
    if re.fullmatch(NUMBER, text.strip().lower()):
        raise UserError(f"{flag} {text} has no unit; write {text}GiB, {text}GB, or {text}B for bytes")
    return _amount(text, BYTES, f"{flag} {text}: give bytes above 0 with their unit, such as 72GiB or 80GB")


def parse_tokens(text: str, flag: str) -> int:
    """Return the tokens of text such as `4M`, `512k` or `4194304`.

    Raises:
        UserError: if it is no whole number above 0.
    """
    wrong = f"{flag} {text}: give a whole number of tokens, such as 4M (4 x 1024 x 1024) or 500000"
    amount = _amount(text, TOKENS, wrong)
    if amount != int(amount):
        raise UserError(wrong)
    return int(amount)


def listed(numbers: Iterable[int]) -> str:
    """Return numbers as ranges, such as `0-3, 7`."""
    runs: list[tuple[int, int]] = []
    for n in numbers:
        if runs and runs[-1][1] == n - 1:
            runs[-1] = (runs[-1][0], n)
        else:
            runs.append((n, n))
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) or "none"


def alternatives(words: Sequence[str]) -> str:
    """Return words with commas, and "or" before the last.

    >>> alternatives(["adamw", "lion", "muon"]), alternatives(["adamw"])
    ('adamw, lion or muon', 'adamw')
    """
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def number_text(number: int) -> str:
    """Return a whole number as text: its digits, or a power of two if there are more than 15 digits.

    >>> number_text(12_000), number_text(10**400)
    ('12,000', 'about 2^1328')
    """
    return f"{number:,}" if abs(number) < 10**15 else f"about {'-' * (number < 0)}2^{abs(number).bit_length() - 1}"


def plural(noun: str, count: int) -> str:
    """Return text such as `microbatch` or `microbatches`."""
    return noun if count == 1 else f"{noun}{'es' if noun.endswith('ch') else 's'}"


def counted(count: int, noun: str) -> str:
    """Return text such as `1 microbatch` or `2 microbatches`."""
    return f"{count:,} {plural(noun, count)}"


def line_breaks(line: str, width: int) -> list[int]:
    """Return the offsets of the words that begin a new line, so that no line is longer than `width` characters.

    Words are separated by blanks only: paths and options stay whole. A word longer than `width` has a line of its own.

    >>> line_breaks("resume with --resume runs/fsdp-1", 20)
    [21]
    """
    breaks, start = list[int](), 0
    for word in re.finditer(r"\S+", line):
        if word.end() - start > width and line[start : word.start()].strip():
            breaks.append(start := word.start())
    return breaks


def wrap_words(text: str, width: int) -> str:
    """Break the lines of a text between words (see `line_breaks`).

    >>> wrap_words("resume with --resume runs/fsdp-1", 20)
    'resume with --resume\\nruns/fsdp-1'
    """
    lines = list[str]()
    for line in text.split("\n"):
        breaks = line_breaks(line, width)
        pieces = [line[start:stop] for start, stop in pairwise([0, *breaks, len(line)])]
        lines += [*(piece.rstrip() for piece in pieces[:-1]), pieces[-1]]
    return "\n".join(lines)


def _amount(text: str, units: dict[str, int], wrong: str) -> float:
    match = re.fullmatch(rf"({NUMBER})\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in units or not float(match[1]):
        raise UserError(wrong)
    return float(match[1]) * units[match[2]]
