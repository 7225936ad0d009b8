"""Text that a terminal and a file can show, whatever a model made up."""

from __future__ import annotations

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def printable(text: str) -> str:
    """Replace each character that cannot be seen, but line ends and tabs; a terminal might obey it.

    >>> printable("a" + chr(27) + "[2J" + chr(9) + "b")
    'a\ufffd[2J\\tb'
    """
    return "".join(each if each.isprintable() or each in "\n\t" else REPLACEMENT for each in text)
