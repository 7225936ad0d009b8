"""A program as text: for each rank the statements that it executes, with every value under a name of its own."""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from shardlab.language import Handle, Mesh, Rank, Strategy, UserError, Value

SOURCE = "<attack>"
"""File name of every script's code; frames that have it are the script's own."""

NAMES = re.compile(r"\b(k|pop)\.(\w+)")
"""A value's name: `k.x` reads it or writes it, `pop.x` reads it and takes the name away."""


@dataclass(frozen=True)
class Script:
    """A strategy as text.

    Attributes:
        mesh: the grid of its ranks.
        lines: the statements of each rank; `k.NAME` is a value or a handle.
    """

    mesh: Mesh
    lines: tuple[tuple[str, ...], ...]

    @property
    def text(self) -> str:
        """Python code of the strategy, an async function called `program`."""
        parts = ["async def program(rank):", "    k = Kept(rank)", "    pop = Popped(k)"]
        for index, lines in enumerate(self.lines):
            parts.append(f"    if rank.index == {index}:")
            parts += [f"        {line}" for line in lines or ("pass",)]
        return "\n".join(parts) + "\n"

    @property
    def strategy(self) -> Strategy:
        """The strategy that the text defines."""
        text = self.text
        space: dict[str, Any] = {"Kept": Kept, "Popped": Popped, "Fraction": Fraction}
        exec(compile(text, SOURCE, "exec"), space)
        linecache.cache[SOURCE] = len(text), None, text.splitlines(keepends=True), SOURCE
        return space["program"]


class Kept:
    """Values of one rank by name: a value is kept in the store of its kind, a handle as it is."""

    def __init__(self, rank: Rank) -> None:
        vars(self).update(_rank=rank, _handles={}, _kinds={})

    def __setattr__(self, name: str, what: object) -> None:
        self._handles.pop(name, None)
        if isinstance(what, Handle):
            self._handles[name] = what
        elif isinstance(what, Value):
            kind = what.spec.form.kind
            old = self._kinds.get(name)
            self._rank.store(kind)[name] = what
            if old not in (None, kind):
                del self._rank.store(old)[name]
            self._kinds[name] = kind

    def __getattr__(self, name: str) -> Any:
        if name in self._handles:
            return self._handles[name]
        if name not in self._kinds:
            raise UserError(f"nothing is called {name}")
        return self._rank.store(self._kinds[name])[name]

    def __delattr__(self, name: str) -> None:
        if name not in self._kinds:
            raise UserError(f"nothing is called {name}")
        del self._rank.store(self._kinds.pop(name))[name]


class Popped:
    """Values of one rank by name, each for its last use."""

    def __init__(self, kept: Kept) -> None:
        vars(self)["_kept"] = kept

    def __getattr__(self, name: str) -> Any:
        kept = self._kept
        if name in kept._handles:
            return kept._handles.pop(name)
        if name not in kept._kinds:
            raise UserError(f"nothing is called {name}")
        return kept._rank.store(kept._kinds.pop(name)).pop(name)


class Lines:
    """Statements of all ranks, in an order in which a single process could execute them, so that no rank waits for
    ever."""

    def __init__(self, ranks: int) -> None:
        self.of: list[list[str]] = [[] for _ in range(ranks)]
        self._count = 0

    def name(self, stem: str) -> str:
        """A name that no value has yet."""
        self._count += 1
        return f"{stem}_{self._count}"

    def put(self, rank: int, line: str) -> None:
        self.of[rank].append(line)

    def make(self, rank: int, stem: str, expression: str) -> str:
        """Append a statement that makes one value, and return the value's name."""
        name = self.name(stem)
        self.put(rank, f"k.{name} = {expression}")
        return name

    def together(self, stem: str, ranks: Iterable[int], expression: str, given: dict[int, str]) -> dict[int, str]:
        """Append a collective on every member; `{}` in the expression is the member's value."""
        return {rank: self.make(rank, stem, expression.format(f"k.{given[rank]}")) for rank in ranks}
