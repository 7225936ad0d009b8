"""Generator of the reference page of verbs: `python docs/verbs.py` writes docs/verbs.md from their docstrings.

Every public method of `Rank` is in one of `GROUPS`, or in `MACHINERY` if programs do not call it. A test keeps the page
complete and up to date.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from shardlab.language import Rank, rank

PAGE = Path(__file__).parent / "verbs.md"
WIDTH = 120
"""Columns at which prose is wrapped."""

HEAD = """\
# Verbs of a rank

A [strategy](strategies.md) calls these methods of `Rank`. The page is generated from their docstrings by
[verbs.py](verbs.py): run `python docs/verbs.py` after a change.

A verb that computes is a plain call. A verb that communicates or copies starts the operation and returns a *handle* at
once; `await` waits for its result. `await rank.all_gather(w)` therefore blocks, while `handle = rank.all_gather(w)`,
other work and `w = await handle` overlap. There are two exceptions: `batch_p2p` is a context manager, and
`update_shard` a coroutine, which you await at once.

If a verb is used wrongly, an error names the line of the program, the rank and the op. All verbs reject values that
were freed, that belong to another rank or that are still handles, and layers or axes that do not exist. The other
errors are described with each verb. The [glossary](glossary.md) explains the terms.
"""

TYPES = {
    "Value": "A value of this rank. During tracing it has a description but no data.",
    "Values": "A tuple of values.",
    "Handle": "A communication or a copy in flight. `await` returns its result, whose type is in brackets.",
    "Factor": "A rational number times token counts, which become known when a step runs.",
    "Fraction": "Python's `fractions.Fraction`.",
    "Part": "A tuple (index, number of parts) that selects one of several equal parts, counted from 0.",
    "Expected": "A tuple (store's name, layer, microbatch or microbatches) that describes the expected message.",
    "By": "How a reduction combines values: `sum`, `mean`, `min` or `max`. Gradients and terms need `sum`. The others "
    "are for scalars, and for weights or gradients that are equal on all members.",
    "Group": "The ranks of a collective, in order: `group.ranks` has their numbers.",
    "Kind": "The kind of a value. Its text is the name of the store that keeps it.",
    "Store": "A dictionary of values of one kind. A value may have several keys, and is freed when the last one goes.",
    "Iterable": "Anything that can be iterated.",
    "Sequence": "A list, a tuple or a range.",
}
"""Explanations of the types in signatures."""

GROUPS = {
    "Places": "group coordinate share stage_layers weight_of store",
    "Loading": "load_weights load_weight load_opt_state load_batch zero_gradient",
    "Passes of layers": "forward loss loss_stats backward backward_input backward_weight attend attend_backward",
    "Sums and updates": "add accumulate wants_norm norm wants_direction direction update update_shard",
    "Slices and numbers": "slice concatenate scale tokens cast",
    "Collectives": "all_reduce all_gather reduce_scatter all_to_all broadcast scatter gather reduce barrier",
    "Messages": "send recv exchange batch_p2p",
    "Other memory": "offload reload",
}
"""Verbs of each section of the page, by heading."""

TRACING = frozenset({"sizes", "ops", "handles"})
"""Public attributes that tracing reads, and programs do not."""

MACHINERY = rank.MACHINERY - TRACING
"""Public methods that tracing calls, and programs do not."""


class Text(NamedTuple):
    """Parts of a docstring.

    Attributes:
        paragraphs: what comes before its sections; the first one is the summary.
        sections: (name, text) of each entry of a section, by the section's title. The name of a result is empty.
    """

    paragraphs: list[str]
    sections: dict[str, list[tuple[str, str]]]


def verbs() -> dict[str, Callable[..., Any]]:
    """Find all public methods of a rank."""
    return {name: method for name, method in inspect.getmembers(Rank, callable) if not name.startswith("_")}


def parsed(docstring: str) -> Text:
    """Take a docstring of Google's style apart."""
    before, *rest = re.split(r"^(Args|Attributes|Returns|Raises):\n", docstring + "\n", flags=re.MULTILINE)
    paragraphs = [" ".join(paragraph.split()) for paragraph in before.strip().split("\n\n")]
    sections: dict[str, list[tuple[str, str]]] = {}
    for title, text in zip(rest[::2], rest[1::2], strict=True):
        entries = re.split(r"\n(?=\S)", textwrap.dedent(text).strip())
        pairs = [entry.partition(": ") for entry in entries]
        sections[title] = [
            ("", " ".join(entry.split())) if title == "Returns" else (" ".join(name.split()), " ".join(words.split()))
            for entry, (name, _, words) in zip(entries, pairs, strict=True)
        ]
    return Text(paragraphs, sections)


def wrapped(text: str, lead: str = "") -> str:
    """Wrap prose; what stands between backticks stays in one line."""
    whole = re.sub(r"`[^`]*`", lambda code: code[0].replace(" ", "\0"), text)
    lines = textwrap.wrap(whole, WIDTH, initial_indent=lead, subsequent_indent=" " * len(lead), break_on_hyphens=False)
    return "\n".join(lines).replace("\0", " ") + "\n"


def signature(name: str, method: Callable[..., Any]) -> str:
    """How a verb is called: in a line, or with a line for each parameter."""
    found = inspect.signature(method)
    parameters: list[str] = []
    for parameter in list(found.parameters.values())[1:]:
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in parameters:
            parameters.append("*")
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}".replace("'", '"')
        parameters.append(f"{parameter.name}: {parameter.annotation}{default}")
    if is_context(method):
        return f"with rank.{name}({', '.join(parameters)}):"
    line = f"rank.{name}({', '.join(parameters)}) -> {found.return_annotation}"
    if len(line) <= WIDTH:
        return line
    return "\n    ".join([f"rank.{name}(", *[f"{parameter}," for parameter in parameters]]) + (
        f"\n) -> {found.return_annotation}"
    )


def is_context(method: Callable[..., Any]) -> bool:
    return inspect.isgeneratorfunction(inspect.unwrap(method))


def kind(method: Callable[..., Any]) -> str:
    """What a call returns."""
    if is_context(method):
        return "context manager"
    if inspect.iscoroutinefunction(method):
        return "`await` it at once"
    return "call with a handle" if "Handle" in str(inspect.signature(method).return_annotation) else "plain call"


def section(name: str, method: Callable[..., Any]) -> Iterator[str]:
    """Yield the paragraphs of a verb."""
    text = parsed(inspect.getdoc(method) or "")
    yield f"### {name}\n"
    yield f"```text\n{signature(name, method)}\n```\n"
    for paragraph in text.paragraphs:
        yield wrapped(paragraph)
    if entries := text.sections.get("Args"):
        yield "".join(wrapped(f"{quoted(names)}: {words}", "- ") for names, words in entries)
    for _, words in text.sections.get("Returns", ()):
        yield wrapped(f"Returns: {words[0].lower()}{words[1:]}")
    for error, words in text.sections.get("Raises", ()):
        yield wrapped(f"Raises `{error}` {words}")


def quoted(names: str) -> str:
    return ", ".join(f"`{name}`" for name in names.split(", "))


def attributes() -> Iterator[str]:
    """Yield what a rank has beside its methods, from the docstrings of its classes."""
    for base in reversed(Rank.__mro__):
        for names, words in parsed(inspect.cleandoc(base.__doc__ or "")).sections.get("Attributes", ()):
            if names not in TRACING:
                yield wrapped(f"{quoted(names)}: {words}", "- ")


def page() -> str:
    """Write the page."""
    known = verbs()
    parts = [HEAD, "| verb | is a | what it does |\n| --- | --- | --- |\n"]
    for names in GROUPS.values():
        for name in names.split():
            summary = parsed(inspect.getdoc(known[name]) or "").paragraphs[0]
            parts[-1] += f"| [{name}](#{name}) | {kind(known[name])} | {summary} |\n"
    parts += ["## Types\n", "| type | what it is |\n| --- | --- |\n"]
    parts[-1] += "".join(f"| `{name}` | {words} |\n" for name, words in TYPES.items())
    parts += ["## Attributes\n", "".join(attributes())]
    for heading, names in GROUPS.items():
        parts.append(f"## {heading}\n")
        for name in names.split():
            parts += section(name, known[name])
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
