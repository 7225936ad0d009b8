"""A disk in memory that crashes: of what was not synced, any part may be lost."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from shardlab.train.checkpoint.write import Disk


class Crash(Exception):
    """The machine has stopped."""


class Node:
    """A file or a folder.

    Attributes:
        content: of a file; now, and as it is surely on the disk.
        names: of a folder, each with its node; likewise.
        pending: changes of the names since, in order, of which the first so many may have reached the disk.
    """

    def __init__(self) -> None:
        self.content = self.safe_content = b""
        self.names: dict[str, Node] = {}
        self.safe_names: dict[str, Node] = {}
        self.pending: list[Callable[[dict[str, Node]], object]] = []

    def change(self, change: Callable[[dict[str, Node]], object]) -> None:
        change(self.names)
        self.pending.append(change)


class CrashingDisk(Disk):
    """Stops the machine before operation `last`; operations are counted from 0."""

    def __init__(self, last: int | None = None) -> None:
        self.root = Node()
        self.done = 0
        self.last = last

    def make_folder(self, path: Path) -> None:
        self._count()
        at = self.root
        for name in path.parts[1:]:
            if name not in at.names:
                node = Node()
                at.change(lambda names, name=name, node=node: names.__setitem__(name, node))
            at = at.names[name]

    def write(self, path: Path, chunks: Iterable[bytes | memoryview]) -> None:
        node, folder = Node(), self._at(path.parent)
        self._count()
        folder.change(lambda names: names.__setitem__(path.name, node))
        for chunk in chunks:
            self._count()
            node.content += bytes(chunk)

    def read(self, path: Path) -> bytes:
        return self._at(path).content

    def names(self, path: Path) -> list[str]:
        try:
            return sorted(self._at(path).names)
        except KeyError:
            return []

    def sync(self, path: Path) -> None:
        self._count()
        self._at(path).safe_content = self._at(path).content

    def sync_folder(self, path: Path) -> None:
        self._count()
        self._at(path).safe_names = dict(self._at(path).names)
        self._at(path).pending = []

    def rename(self, old: Path, new: Path) -> None:
        self._count()
        assert old.parent == new.parent
        node = self._at(old)
        assert new.name not in self._at(new.parent).names

        def change(names: dict[str, Node]) -> None:
            names.pop(old.name, None)
            names[new.name] = node

        self._at(old.parent).change(change)

    def remove(self, path: Path) -> None:
        node = self._at(path)
        for name in list(node.names):
            self.remove(path / name)
        self._count()
        self._at(path.parent).change(lambda names: names.pop(path.name, None))

    def left(self, folder: Path, draw: Callable[[int], int]) -> None:
        """Write what a crash leaves into a real folder.

        Args:
            draw: a number from 0 to the one that it is given, for each thing that may be lost.
        """
        self._left(self.root, folder, draw)

    def _left(self, node: Node, path: Path, draw: Callable[[int], int]) -> None:
        path.mkdir()
        names = dict(node.safe_names)
        for change in node.pending[: draw(len(node.pending))]:
            change(names)
        for name, inner in sorted(names.items()):
            if inner.names or inner.safe_names or inner.pending:
                self._left(inner, path / name, draw)
            else:
                lost = len(inner.content) - len(inner.safe_content)
                (path / name).write_bytes(inner.content[: len(inner.content) - (draw(lost) if lost else 0)])

    def _at(self, path: Path) -> Node:
        node = self.root
        for name in path.parts[1:]:
            node = node.names[name]
        return node

    def _count(self) -> None:
        if self.done == self.last:
            raise Crash
        self.done += 1
