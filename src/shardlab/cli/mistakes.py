"""Mistakes in a command line, as one sentence each."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Generator
from itertools import takewhile

from shardlab.errors import UserError, nearest

NAMED, EXPLAINED = 5, 9
"""In a box that lists options, their names are indented so far at least, and their explanations."""


@contextlib.contextmanager
def mistakes_as_sentences() -> Generator[None, None, None]:
    """Make a sentence of the box in which tyro says what is wrong with a command line.

    Raises:
        UserError: with that sentence.
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
    r"""What a box says between its title and its first rule, without explanations of options.

    >>> sentence_of("Required options\n ---\n  Missing from shardlab convert:\n      TO\n          A folder.\n  ---")
    'missing from shardlab convert: TO; --help tells more'
    """
    _, *lines = re.sub("[│╭╮╰╯├┤]", " ", box.replace("─", "-")).splitlines()
    body = [line for line in lines if line.strip()]
    while body and not body[0].strip(" -"):
        body.pop(0)
    body = list(takewhile(lambda line: line.strip(" -"), body))
    indented = [(len(line) - len(line.lstrip()), line.strip()) for line in body]
    text = " ".join(line for indent, line in indented if indent < NAMED).rstrip(".")
    if choice := re.fullmatch(r"invalid choice '(.*)' for argument '(.*)'\. Expected one of \((.*)\)", text):
        given, flag, listed = choice.groups()
        names = sorted(set(re.findall("'([^']*)'", listed)) - {"None"})
        return f"{flag} is {given!r}; {nearest(given, names)}"
    text = text.removeprefix("Error parsing ").replace("Missing", "missing")
    named = ", ".join(line for indent, line in indented if NAMED <= indent < EXPLAINED)
    return f"{text} {named}".strip() + "; --help tells more" * ("; give" not in text)
