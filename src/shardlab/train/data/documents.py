"""Documents of text, JSONL, Parquet and token files, or of a Python iterable, read piece by piece."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import sysconfig
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from shardlab.common.errors import UserError, nearest
from shardlab.common.files import want_file

PIECE = 1 << 20
"""Bytes of a long text that are tokenized at once, up to the end of a line."""

Format = Literal["text", "jsonl", "parquet", "tokens"]

SUFFIXES: dict[str, Format] = {
    ".txt": "text", ".text": "text", ".md": "text", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet",
    ".bin": "tokens",
}  # fmt: skip
"""Files are told apart by their names."""

CONTAINERS = {
    b"\x1f\x8b": "compressed by gzip", b"\x28\xb5\x2f\xfd": "compressed by zstd", b"BZh": "compressed by bzip2",
    b"\xfd7zXZ": "compressed by xz", b"PK\x03\x04": "a zip archive", b"ARROW1": "an Arrow file",
    b"PAR1": "a Parquet file", b"\x93NUMPY": "an array of NumPy", b"\x80\x04": "a pickle", b"\x80\x02": "a pickle",
}  # fmt: skip
"""How files begin that nobody means as text."""

MARKS = {
    b"\xff\xfe\x00\x00": "UTF-32", b"\x00\x00\xfe\xff": "UTF-32", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16",
}  # fmt: skip
"""Byte order marks of texts that are not UTF-8."""

TOKEN = np.dtype("<u2")
"""A token in a file of tokens, as nanoGPT writes them."""


class Piece(NamedTuple):
    """A document, or a piece of one.

    Attributes:
        text: in UTF-8, if the file is.
        begins, ends: whether the document begins and ends with it.
        done: bytes of the input, all files together, that have been read by now.
        tokens: in place of a text.
    """

    text: bytes
    begins: bool
    ends: bool
    done: int
    tokens: NDArray[np.integer] | None = None


class DocumentSource(Protocol):
    """Documents in order, as often as they are asked for."""

    @property
    def name(self) -> str:
        """What an error and a record call it."""
        ...

    @property
    def size(self) -> int:
        """In bytes; 0: nobody knows."""
        ...

    @property
    def ends(self) -> bool:
        """Whether the token that ends a document stands after each."""
        ...

    def pieces(self) -> Iterator[Piece]:
        """All documents; `done` counts this source's bytes alone.

        Raises:
            UserError: for what cannot be read, with its place.
        """
        ...


Document = str | bytes | Iterable[int]
"""A text, or tokens."""


@dataclass
class Documents:
    """Documents of a Python iterable: texts, bytes, or arrays of tokens.

    Tokens are taken as they are; after each that ends a document, another begins.

    Attributes:
        documents: an iterable, or a function that returns one; an iterator can be gone through once, which is not
            enough for a tokenizer that is made from the text.
        name: what an error and a record call them.

    >>> [piece.text for piece in Documents(["one", b"two"]).pieces()]
    [b'one', b'two']
    """

    documents: Iterable[Document] | Callable[[], Iterable[Document]]
    name: str = "the documents"
    _gone: bool = field(default=False, init=False, repr=False)

    @property
    def size(self) -> int:
        return 0

    @property
    def ends(self) -> bool:
        return True

    def pieces(self) -> Iterator[Piece]:
        done, documents = 0, self.documents() if callable(self.documents) else self.documents
        if not callable(self.documents) and isinstance(documents, Iterator):
            if self._gone:
                raise UserError(
                    f"{self.name} can be gone through once; give a list, or a function that returns an iterable"
                )
            self._gone = True
        for number, each in enumerate(documents, 1):
            where = f"{self.name}, document {number}"
            if isinstance(each, str | bytes):
                text, tokens = utf8(each, where) if isinstance(each, str) else each, None
            else:
                text, tokens = b"", _tokens_in(each, where)
            done += len(text)
            yield Piece(text, True, True, done, tokens)


def _tokens_in(document: object, where: str) -> NDArray[np.integer]:
    """A document's tokens, if it is made of them."""
    try:
        found: NDArray[Any] = np.asarray(document)
    except ValueError:
        found = np.empty((0, 0))
    if found.ndim != 1 or (found.size and not np.issubdtype(found.dtype, np.integer)):
        raise UserError(f"{where} is {_kind(document)}; give a text, bytes, or one row of tokens")
    return found.astype(np.int64)


@dataclass(frozen=True)
class Input:
    """A file of documents.

    Attributes:
        path: the file.
        format: what it is; a text is one document, a line of JSONL and a row of Parquet one each; of tokens, each
            that ends a document does.
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

    @classmethod
    def guess(cls, path: Path, field: str = "text") -> Input:
        """The file as what its name tells, or else as a text.

        Raises:
            UserError: for what is no file, and for one that begins as no text does.
        """
        want_file(path)
        found = SUFFIXES.get(path.suffix.lower())
        if found is None:
            with path.open("rb") as file:
                first = file.read(8)
            for mark, what in CONTAINERS.items():
                if first.startswith(mark):
                    raise UserError(f"{path} is {what}, not a text; give the text in it, or a file whose name tells")
        return cls(path, found or "text", field)

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def size(self) -> int:
        return self.path.stat().st_size

    @property
    def ends(self) -> bool:
        return self.format != "text"

    def pieces(self) -> Iterator[Piece]:
        readers: dict[Format, Callable[[], Iterator[Piece]]] = {
            "text": self._text, "jsonl": self._jsonl, "parquet": self._parquet, "tokens": self._tokens,
        }  # fmt: skip
        try:
            yield from readers[self.format]()
        except OSError as error:
            raise UserError(f"{self.path} cannot be read ({error.strerror or error}); name a file that can") from error

    def _text(self) -> Iterator[Piece]:
        with self.path.open("rb") as file:
            done, piece, begins = 0, _lines(file), True
            while piece:
                done += len(piece)
                following = _lines(file)
                yield Piece(piece.removeprefix(UTF8_MARK) if begins else piece, begins, not following, done)
                piece, begins = following, False

    def _tokens(self) -> Iterator[Piece]:
        if self.size % TOKEN.itemsize:
            raise UserError(f"{self.path} has {self.size:,} bytes, but each token has {TOKEN.itemsize}; copy it whole")
        done = 0
        with self.path.open("rb") as file:
            while piece := file.read(PIECE):
                begins, done = done == 0, done + len(piece)
                yield Piece(b"", begins, done == self.size, done, np.frombuffer(piece, TOKEN))

    def _jsonl(self) -> Iterator[Piece]:
        done = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if number == 1 and (other := _other_encoding(line)):
                    raise UserError(f"{self.path} is {other}; {CONVERT}")
                done += len(line)
                if line.strip():
                    yield Piece(self._document(line, f"{self.path}, line {number}"), True, True, done)

    def _document(self, line: bytes, where: str) -> bytes:
        try:
            record = _parsed(line.rstrip())
        except (ValueError, RecursionError) as error:
            reason = "it is nested too deep" if isinstance(error, RecursionError) else str(error)
            if isinstance(error, UnicodeDecodeError):
                reason = f"it is not UTF-8: {_place(line, error)}"
            if isinstance(error, json.JSONDecodeError):
                reason = f"{error.msg}, column {error.colno}"
            raise UserError(f"{where} is not JSON ({reason}); write one object in each line") from None
        if not isinstance(record, dict):
            raise UserError(f"{where} is {_kind(record)}, but an object with a text in {self.field!r} was expected")
        return self._as_text(self._value(record, where), where)  # pyright: ignore[reportUnknownArgumentType]

    def _value(self, record: dict[str, Any], where: str) -> object:
        if self.field not in record:
            there = nearest(self.field, record) if record else "it is empty"
            raise UserError(f"{where} has no field {self.field!r}; {OTHER_FIELD}: {there}")
        return record[self.field]

    def _as_text(self, value: object, where: str) -> bytes:
        if not isinstance(value, str | bytes):
            raise UserError(f"{where}: {self.field!r} is {_kind(value)}, but text was expected")
        return utf8(value, f"{where}: {self.field!r}")

    def _parquet(self) -> Iterator[Piece]:
        parquet, arrow = library("pyarrow.parquet", "a Parquet file"), library("pyarrow", "a Parquet file")
        try:
            with parquet.ParquetFile(self.path) as file:
                names: list[str] = file.schema_arrow.names
                if self.field not in names:
                    raise UserError(
                        f"{self.path} has no column {self.field!r}; {OTHER_FIELD}: {nearest(self.field, names)}"
                    )
                rows, row = max(1, file.metadata.num_rows), 0
                for batch in file.iter_batches(batch_size=1024, columns=[self.field]):
                    column = batch.column(0)
                    if any(is_text(column.type) for is_text in (arrow.types.is_string, arrow.types.is_large_string)):
                        column = column.cast(arrow.large_binary())  # texts are not always UTF-8
                    for value in column.to_pylist():
                        row += 1
                        text = self._as_text(value, f"{self.path}, row {row}")
                        yield Piece(text, True, True, self.size * row // rows)
        except arrow.ArrowException as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"{self.path} cannot be read as Parquet ({reason}); name a whole Parquet file") from None


OTHER_FIELD = "--field (of data prepare and eval) names the one with the text"

CONVERT = "convert it, as by: iconv -f UTF-16 -t UTF-8"
"""What to do with a text of another encoding."""


def decoded(text: bytes) -> str:
    """The text as characters.

    Raises:
        UserError: it is not UTF-8.
    """
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        if other := _other_encoding(text):
            raise UserError(f"the text is {other}; {CONVERT}") from None
        raise UserError(f"the text is not UTF-8 ({_place(text, error)}); convert it, or take bytes as tokens") from None


def utf8(text: str | bytes, where: str) -> bytes:
    """A text in UTF-8.

    Raises:
        UserError: there is none; it says where.
    """
    try:
        if isinstance(text, str):
            return text.encode()
        text.decode()
    except UnicodeEncodeError:
        raise UserError(f"{where} has half of a surrogate pair, which is no text") from None
    except UnicodeDecodeError as error:
        assert isinstance(text, bytes)
        raise UserError(f"{where} is not UTF-8 ({_place(text, error)}); convert it") from None
    return text


def _place(text: bytes, error: UnicodeDecodeError) -> str:
    return f"byte 0x{text[error.start]:02x} after {text[: error.start][-20:]!r}"


def _other_encoding(text: bytes) -> str | None:
    """The encoding of a text that is not UTF-8, as its first bytes tell it: a mark, or a letter beside a zero."""
    found = next((name for mark, name in MARKS.items() if text.startswith(mark)), None)
    return found or ("UTF-16" if len(text) > 1 and 0 in text[:2] and text[:2] != bytes(2) else None)


def _parsed(line: bytes) -> Any:
    """A line of JSON; numbers of any length are read, since none of them is text."""
    try:
        return json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except ValueError:  # an integer of thousands of digits, which Python does not convert
        return json.loads(line, parse_int=lambda _: 0)


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
        dict: "an object", str: "a text", bytes: "bytes",
    }  # fmt: skip
    return next((name for kind, name in kinds.items() if isinstance(value, kind)), f"a {type(value).__name__}")


# Text as bytes: a user's file, or one that every machine has.


UTF8_MARK = b"\xef\xbb\xbf"
"""Editors of Windows write it at the beginning of UTF-8; it is no text."""

DEFAULT_BYTES = 4_000_000
"""The default text ends here at the latest: enough for minutes of training, and read at once."""

Text = bytes | mmap.mmap | memoryview
"""Bytes; those of a user's file stay in it, mapped into memory, so that no rank reads more than it trains on."""


def default_text() -> bytes:
    """A text that every machine has: the source of Python's standard library, module after module by name."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for file in sorted(folder.glob("*.py"), key=lambda file: file.name):
        text += file.read_bytes()
        if len(text) >= DEFAULT_BYTES:
            break
    if not text:
        raise UserError(f"the source of Python's standard library is not in {folder}; name a text of your own instead")
    return bytes(text[:DEFAULT_BYTES])


def map_text(path: Path) -> Text:
    """Map a user's text into memory, without the mark that some editors write at the beginning of UTF-8.

    Raises:
        UserError: when it is no file, or cannot be read or mapped.
    """
    want_file(path)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if not size:
                return b""
            text = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
            return memoryview(text)[len(UTF8_MARK) :] if text[: len(UTF8_MARK)] == UTF8_MARK else text
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); name a text file that can") from error


# Tiny Shakespeare: a million characters from his plays, on which small language models are tried out.


URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
"""Checksum of the 1,115,394 bytes at that address."""

PATIENCE = 30
"""Seconds for which a download may stand still."""


@contextmanager
def shakespeare(file: Path | None) -> Generator[Path, None, None]:
    """The text as a file: the user's, or one that is downloaded and goes when the block ends.

    Raises:
        UserError: it cannot be had, or is another text.
    """
    if file is not None:
        want_file(file)
        _want_text(file.read_bytes(), str(file))
        yield file
        return
    import urllib.request  # which imports much else

    try:
        with urllib.request.urlopen(URL, timeout=PATIENCE) as answer:
            text = answer.read()
    except OSError as error:
        reason = getattr(error, "reason", None) or error
        raise UserError(
            f"{URL} cannot be downloaded ({reason}); fetch it by other means, and name it with --file"
        ) from None
    _want_text(text, URL)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "input.txt")
        path.write_bytes(text)
        yield path


def _want_text(text: bytes, name: str) -> None:
    found = hashlib.sha256(text).hexdigest()
    if found != SHA256:
        raise UserError(
            f"{name} is not tiny Shakespeare ({len(text):,} bytes with the SHA-256 {found[:8]}..., not 1,115,394 with "
            f"{SHA256[:8]}...); fetch {URL} again"
        )


# Libraries that only some inputs and tokenizers need: the extra `data`.


def library(name: str, purpose: str) -> Any:
    """A module of the extra `data`, imported when it is first needed.

    Args:
        purpose: what it is needed for, as in "a Parquet file".

    Raises:
        UserError: it is not installed.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError:
        package = name.partition(".")[0]
        raise UserError(
            f"{purpose} needs the Python package {package}, which is not installed; pip install 'shardlab[data]'"
        ) from None
