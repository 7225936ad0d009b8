"""Names of data on a command line or in a TOML file: paths, with weights if there are several."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardlab.data.manifest import Prepared
from shardlab.errors import UserError
from shardlab.program.files import want_file


@dataclass(frozen=True)
class DataSource:
    """A prepared folder or a text, and how often it is drawn from compared with others.

    Raises:
        UserError: neither is there, a file of the folder is missing or has another size, or the weight cannot be.
    """

    path: Path
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise UserError(f"{self.path}: a weight of {self.weight:g} cannot be; give a number greater than 0")
        if self.path.is_dir():
            Prepared.open(self.path)
        else:
            want_file(self.path)


def sources_of(words: Sequence[str] | Mapping[str, float]) -> tuple[DataSource, ...]:
    """The sources of `PATH`s or `PATH:WEIGHT`s, or of a table of paths and weights.

    A path that is there is taken as it is, also with a colon in it.

    Raises:
        UserError: for what is not there, and a weight that cannot be.
    """
    if isinstance(words, Mapping):
        return tuple(DataSource(Path(path), weight) for path, weight in words.items())
    return tuple(_source(word) for word in words)


def _source(word: str) -> DataSource:
    path, colon, weight = word.rpartition(":")
    if not colon or Path(word).exists():
        return DataSource(Path(word))
    try:
        return DataSource(Path(path), float(weight))
    except UserError:
        raise
    except ValueError:
        raise UserError(f"{word}: {weight!r} is no weight; give PATH:NUMBER, as in {path}:0.7") from None
