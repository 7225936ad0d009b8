"""Generator of the gallery page: `python docs/gallery.py` writes docs/gallery.md from the modules of its bugs.

Each bug is an exercise of `shardlab.learn.course.gallery`. The page has its statement, what Shardlab says about the
program with the bug, and the repair. A test keeps the page up to date.
"""

from __future__ import annotations

import difflib
import re
import tempfile
import textwrap
from pathlib import Path

from shardlab.common.user_code import load_module
from shardlab.learn.course.catalogue import CourseEntry, gallery
from shardlab.learn.course.grading import grade

PAGE = Path(__file__).parent / "gallery.md"
WIDTH = 120
"""Columns at which prose is wrapped."""

HEAD = """\
# Gallery of bugs

The page shows twenty publicly reported bugs of Megatron-LM, DeepSpeed and torch as small programs. Most of them raised
no error: the loss decreased, but more slowly or towards another value. Each section describes where a bug was reported
and its effect. Then come Shardlab's message about a program with the same bug, and the repair.

A program shows the kind of a bug, and leaves out everything else; it is not the code in which the bug occurred. Some
kinds of bugs cannot be expressed in Shardlab's language: a buffer that is reused while a collective still reads it, a
stream that is not waited for, a number that overflows. Programs handle values, not buffers, and a value stays until the
communication that reads it is over.

Each bug is also an exercise of [the course](course.md): in a course folder, open `gallery/crossing_sends.py`, and
`shardlab learn watch crossing_sends` grades your repair. [gallery.py](gallery.py) generates the page from the
[modules](../src/shardlab/learn/course/gallery): run `python docs/gallery.py` after a change.
"""

FOLDERS = {
    "gradients": "Contributions that are missing, or counted twice",
    "scaling": "Gradients divided by a wrong number",
    "norms": "The norm that clips",
    "communication": "Who communicates, when, and how often",
    "weights": "Weights of the step before",
}
"""Title of each folder of the gallery."""


def page() -> str:
    """Return the text of the page."""
    entries = gallery()
    groups = [
        "\n".join([f"## {title}\n", *(section(entry) for entry in entries if folder_of(entry) == folder)])
        for folder, title in FOLDERS.items()
    ]
    return "\n".join([HEAD, contents(entries), *groups])


def contents(entries: tuple[CourseEntry, ...]) -> str:
    """Return a table of all bugs."""
    rows = [
        f"| {entry.exercise.number} | [{entry.exercise.title}](#{anchor(heading(entry))}) | {seen_in(entry)} |"
        for entry in entries
    ]
    return "\n".join(["| number | bug | seen in |", "| --- | --- | --- |", *rows, ""])


def section(entry: CourseEntry) -> str:
    """Return the section of a bug."""
    folder = f"../src/shardlab/learn/course/gallery/{folder_of(entry)}"
    start, solution = entry.start_text.splitlines(), entry.solution_text.splitlines()
    changes = [line for line in difflib.unified_diff(start, solution, lineterm="", n=2) if line[:2] not in ("--", "++")]
    hunks = "\n".join("..." if line.startswith("@@") else line for line in changes).removeprefix("...\n")
    return "\n".join(
        [
            f"### {heading(entry)}\n",
            f"Seen in {seen_in(entry)}. Its program is\n[{entry.name}.py]({folder}/{entry.name}.py).\n",
            *(block(text) for text in entry.statement.split("\n\n")[1:]),
            "Shardlab says:\n",
            f"```text\n{textwrap.fill(finding(entry), WIDTH, break_on_hyphens=False, break_long_words=False)}\n```\n",
            "The repair:\n",
            f"```diff\n{hunks}\n```\n",
        ]
    )


def finding(entry: CourseEntry) -> str:
    """Return what Shardlab says about the program with the bug."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{entry.name}.py"
        file.write_text(entry.start_text, encoding="utf-8")
        result = grade(entry.exercise, getattr(load_module(file), entry.name))
    text = " ".join(result.finding.replace(f"{folder}/", "").split())
    return text if result.stage == "refused" else f"The program is right, but {text}"


def block(text: str) -> str:
    """Return a paragraph of a statement, or its figure."""
    if text.startswith("    "):
        return f"```text\n{textwrap.dedent(text)}\n```\n"
    text = " ".join(text.split()).removesuffix("Find the bug and mend it.").strip()
    return textwrap.fill(text, WIDTH, break_on_hyphens=False, break_long_words=False) + "\n"


def heading(entry: CourseEntry) -> str:
    """Return the heading of a bug's section."""
    return f"{entry.exercise.number}. {entry.exercise.title}"


def anchor(title: str) -> str:
    """Return the anchor that GitHub gives to a heading."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def seen_in(entry: CourseEntry) -> str:
    """Return a link to the thread in which a bug was reported."""
    repository, _, number = entry.exercise.seen_in.partition("#")
    return f"[{entry.exercise.seen_in}](https://github.com/{repository}/issues/{number})"


def folder_of(entry: CourseEntry) -> str:
    """Return the folder of a bug's module."""
    return entry.module.__name__.split(".")[-2]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
