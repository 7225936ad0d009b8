"""Documents of text, JSONL and Parquet files, read piece by piece."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, get_args

from shardlab.data.extra import library
from shardlab.errors import UserError, nearest
from shardlab.program.files import want_file

PIECE = 1 << 20
"""Bytes of a long text that are tokenized at once, up to the end of a line."""

Format = Literal["text", "jsonl", "parquet"]

SUFFIXES: dict[str, Format] = {
    ".txt": "text", ".text": "text", ".md": "text", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet",
}  # fmt: skip
"""Files are told apart by their names."""


class Piece(NamedTuple):
    """A document, or a piece of one.

    Attributes:
        text: in UTF-8, if the file is.
        ends: whether the document ends with it.
        done: bytes of the input, all files together, that have been read by now.
    """

    text: bytes
    ends: bool
    done: int


@dataclass(frozen=True)
class Input:
    """A file of documents.

    Attributes:
        path: the file.
        format: what it is; a text is one document, a line of JSONL and a row of Parquet one each.
        field: of a line, or column, that has the text.
    """

    path: Path
    format: Format
    field: str = "text"

    @classmethod
    def of(cls, path: Path, format: str | None, field: str) -> Input:
        """The file, of a format that its name tells unless it is given.

        Raises:
            UserError: for what is no file, and for an unknown format.
        """
        want_file(path)
        formats = ", ".join(get_args(Format))
        found = (
            SUFFIXES.get(path.suffix.lower())
            if format is None
            else next((each for each in get_args(Format) if each == format), None)
        )
        if found is None:
            what = f"file type {path.suffix!r}" if format is None else f"format {format!r}"
            raise UserError(
                f"{path}: unknown {what}; known are {', '.join(SUFFIXES)}, and --format ({formats}) says what a file "
                "of another name is"
            )
        return cls(path, found, field)

    @property
    def size(self) -> int:
        """In bytes."""
        return self.path.stat().st_size

    def pieces(self) -> Iterator[Piece]:
        """All documents in order; `done` counts this file's bytes alone.

        Raises:
            UserError: for what cannot be read, with the line or row.
        """
        readers: dict[Format, Callable[[], Iterator[Piece]]] = {
            "text": self._text, "jsonl": self._jsonl, "parquet": self._parquet,
        }  # fmt: skip
        try:
            yield from readers[self.format]()
        except OSError as error:
            raise UserError(f"{self.path} cannot be read ({error.strerror or error}); name a file that can") from error

    def _text(self) -> Iterator[Piece]:
        with self.path.open("rb") as file:
            done, piece = 0, _lines(file)
            while piece:
                done += len(piece)
                following = _lines(file)
                yield Piece(piece, not following, done)
                piece = following

    def _jsonl(self) -> Iterator[Piece]:
        done = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                done += len(line)
                if line.strip():
                    yield Piece(self._document(line, f"{self.path}, line {number}"), True, done)

    def _document(self, line: bytes, where: str) -> bytes:
        try:
            record: Any = json.loads(line.rstrip())
        except (ValueError, RecursionError) as error:
            reason = "it is nested too deep" if isinstance(error, RecursionError) else "it is not UTF-8"
            if isinstance(error, json.JSONDecodeError):
                reason = f"{error.msg}, column {error.colno}"
            raise UserError(f"{where} is not JSON ({reason}); write one object in each line") from None
        if not isinstance(record, dict):
            raise UserError(f"{where} is {_kind(record)}, but an object with a text in {self.field!r} was expected")
        return self._utf8(self._value(record, where), where)  # pyright: ignore[reportUnknownArgumentType]

    def _value(self, record: dict[str, Any], where: str) -> object:
        if self.field not in record:
            there = nearest(self.field, record) if record else "it is empty"
            raise UserError(f"{where} has no field {self.field!r}; --field names the one with the text: {there}")
        return record[self.field]

    def _utf8(self, value: object, where: str) -> bytes:
        if not isinstance(value, str):
            raise UserError(f"{where}: {self.field!r} is {_kind(value)}, but text was expected")
        try:
            return value.encode()
        except UnicodeEncodeError:
            raise UserError(f"{where}: {self.field!r} has half of a surrogate pair, which is no text") from None

    def _parquet(self) -> Iterator[Piece]:
        parquet, arrow = library("pyarrow.parquet", "a Parquet file"), library("pyarrow", "a Parquet file")
        try:
            with parquet.ParquetFile(self.path) as file:
                names: list[str] = file.schema_arrow.names
                if self.field not in names:
                    raise UserError(
                        f"{self.path} has no column {self.field!r}; --field names the one with the text: "
                        f"{nearest(self.field, names)}"
                    )
                rows, row = max(1, file.metadata.num_rows), 0
                for batch in file.iter_batches(batch_size=1024, columns=[self.field]):
                    for value in batch.column(0).to_pylist():
                        row += 1
                        yield Piece(self._utf8(value, f"{self.path}, row {row}"), True, self.size * row // rows)
        except arrow.ArrowException as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"{self.path} cannot be read as Parquet ({reason}); name a whole Parquet file") from None


def decoded(text: bytes) -> str:
    """The text as characters.

    Raises:
        UserError: it is not UTF-8.
    """
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"the text is not UTF-8 (byte 0x{text[error.start]:02x} after {text[: error.start][-20:]!r}); convert it, "
            "or give --tokenizer bytes"
        ) from None


def _lines(file: BinaryIO) -> bytes:
    """The next piece of a text, to the end of a line; of a very long line, to the end of a character."""
    piece = file.read(PIECE)
    if len(piece) < PIECE:
        return piece
    piece += file.readline(PIECE)
    if not piece.endswith(b"\n"):
        over = next((back for back in (1, 2, 3) if piece[-back] >= 0xC0), 0)  # where a character may have been cut
        file.seek(-over, 1)
        return piece[: len(piece) - over]
    return piece


def _kind(value: object) -> str:
    kinds: dict[type, str] = {
        type(None): "null", bool: "true or false", int: "a number", float: "a number", list: "a list",
        dict: "an object", str: "a text",
    }  # fmt: skip
    return next((name for kind, name in kinds.items() if isinstance(value, kind)), f"a {type(value).__name__}")
