"""Documents from text, JSONL, Parquet and token files, or from a Python iterable, read piece by piece.

A `DocumentSource` yields `Piece`s: whole documents, or parts of a long text. `Input` reads a file and `Documents` an
iterable. An error names the place in the input, such as a line or a row. Two texts need no input: `default_text`, which
every machine has, and `tiny_shakespeare`, which is downloaded.
"""

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
from typing import Any, BinaryIO, Literal, NamedTuple, cast, get_args

import numpy as np
from numpy.typing import NDArray

from shardlab.common.errors import UserError, suggest_name
from shardlab.common.files import require_regular_file

PIECE_BYTES = 1 << 20
"""Approximate bytes of a long text that are tokenized at once. Pieces end at the end of a line."""

Format = Literal["text", "jsonl", "parquet", "tokens"]

SUFFIXES: dict[str, Format] = {
    ".txt": "text", ".text": "text", ".md": "text", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet",
    ".bin": "tokens",
}  # fmt: skip
"""Formats by the suffix of a file's name."""

NOT_TEXT = {
    b"\x1f\x8b": "compressed by gzip", b"\x28\xb5\x2f\xfd": "compressed by zstd", b"BZh": "compressed by bzip2",
    b"\xfd7zXZ": "compressed by xz", b"PK\x03\x04": "a zip archive", b"ARROW1": "an Arrow file",
    b"PAR1": "a Parquet file", b"\x93NUMPY": "an array of NumPy", b"\x80\x04": "a pickle", b"\x80\x02": "a pickle",
}  # fmt: skip
"""First bytes of files that are not text, with the kind of file."""

BYTE_ORDER_MARKS = {
    b"\xff\xfe\x00\x00": "UTF-32", b"\x00\x00\xfe\xff": "UTF-32", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16",
}  # fmt: skip
"""Byte order marks of texts that are not UTF-8."""

TOKEN = np.dtype("<u2")
"""Data type of a token in a file of tokens, as nanoGPT writes it."""


UTF8_MARK = b"\xef\xbb\xbf"
"""Byte order mark of UTF-8, which some editors on Windows write. It is not part of the text."""

DEFAULT_BYTES = 4_000_000
"""Largest size in bytes of the default text: enough for minutes of training, and quick to read."""

Text = bytes | mmap.mmap | memoryview
"""Text as bytes. A user's file is mapped into memory, so that no rank reads more than it trains on."""


class Piece(NamedTuple):
    """A document, or a part of one.

    Attributes:
        text: the text, in UTF-8 if the file is.
        begins, ends: whether the document begins and ends with this piece.
        bytes_read: bytes of the source that have been read up to the end of this piece; an estimate for Parquet.
        tokens: the tokens, if the document consists of tokens instead of text.
    """

    text: bytes
    begins: bool
    ends: bool
    bytes_read: int
    tokens: NDArray[np.integer] | None = None


Document = str | bytes | Iterable[int]
"""A text, or tokens."""


@dataclass
class Documents:
    """Documents of a Python iterable: texts, bytes, or arrays of tokens.

    Arrays of tokens are not encoded again. In an array, a new document begins after each end token of the tokenizer.

    Attributes:
        documents: an iterable, or a function that returns one. An iterator can be read only once, which is not enough
            for a tokenizer that is trained on the text.
        name: name of the documents in errors and records.

    >>> [piece.text for piece in Documents(["one", b"two"]).pieces()]
    [b'one', b'two']
    """

    documents: Iterable[Document] | Callable[[], Iterable[Document]]
    name: str = "the documents"
    _is_exhausted: bool = field(default=False, init=False, repr=False)

    size = 0
    """Size in bytes; 0 if it is unknown."""

    ends = True
    """Whether the tokenizer's end token is added after each document."""

    def pieces(self) -> Iterator[Piece]:
        """Yield all documents.

        Raises:
            UserError: if the source cannot be read. The message says where.
        """
        bytes_read, documents = 0, self.documents() if callable(self.documents) else self.documents
        if not callable(self.documents) and isinstance(documents, Iterator):
            if self._is_exhausted:
                raise UserError(
                    f"{self.name} can be read only once; give a list, or a function that returns an iterable"
                )
            self._is_exhausted = True
        for number, document in enumerate(documents, 1):
            location = f"{self.name}, document {number}"
            if isinstance(document, str | bytes):
                text, tokens = encode_utf8(document, location) if isinstance(document, str) else document, None
            else:
                text, tokens = b"", _token_array(document, location)
            bytes_read += len(text)
            yield Piece(text, True, True, bytes_read, tokens)


@dataclass(frozen=True)
class Input:
    """File of documents.

    Attributes:
        path: the file.
        format: "text" (one document), "jsonl" (a document in each line), "parquet" (in each row) or "tokens" (documents
            end with the tokenizer's end token).
        field: field of a JSON line, or column of a Parquet file, that has the text.
    """

    path: Path
    format: Format
    field: str = "text"

    @classmethod
    def from_path(cls, path: Path, format: str | None, field: str) -> Input:
        """Return the file with a given format, or with the format of its suffix.

        Raises:
            UserError: if there is no such file or format.
        """
        require_regular_file(path)
        formats = ", ".join(get_args(Format))
        known_format = SUFFIXES.get(path.suffix.lower()) if format is None else cast(Format, format)
        if known_format is None or known_format not in get_args(Format):
            description = f"file type {path.suffix!r}" if format is None else f"format {format!r}"
            raise UserError(
                f"{path}: unknown {description}; known are {', '.join(SUFFIXES)}, and --format ({formats}) says what a "
                "file of another name is"
            )
        return cls(path, known_format, field)

    @classmethod
    def guess(cls, path: Path, field: str = "text") -> Input:
        """Return the file with the format of its suffix. A file with another suffix is a text.

        Raises:
            UserError: if there is no such file, or its first bytes are those of another format.
        """
        require_regular_file(path)
        format = SUFFIXES.get(path.suffix.lower())
        if format is None:
            with path.open("rb") as file:
                first = file.read(8)
            for mark, description in NOT_TEXT.items():
                if first.startswith(mark):
                    raise UserError(f"{path} is {description}, not a text; give the text in it, or rename the file")
        return cls(path, format or "text", field)

    @property
    def name(self) -> str:
        """Name of the file in errors and records."""
        return str(self.path)

    @property
    def size(self) -> int:
        """Size in bytes."""
        return self.path.stat().st_size

    @property
    def ends(self) -> bool:
        """Whether the tokenizer's end token is added after each document."""
        return self.format != "text"

    def pieces(self) -> Iterator[Piece]:
        """Yield all documents.

        Raises:
            UserError: if the file cannot be read. The message says where.
        """
        readers: dict[Format, Callable[[], Iterator[Piece]]] = {
            "text": self._text, "jsonl": self._jsonl, "parquet": self._parquet, "tokens": self._tokens,
        }  # fmt: skip
        try:
            yield from readers[self.format]()
        except OSError as error:
            raise UserError(f"{self.path} cannot be read ({error.strerror or error}); name a file that can") from error

    def _text(self) -> Iterator[Piece]:
        with self.path.open("rb") as file:
            bytes_read, piece, begins = 0, _read_lines(file), True
            while piece:
                bytes_read += len(piece)
                following = _read_lines(file)
                yield Piece(piece.removeprefix(UTF8_MARK) if begins else piece, begins, not following, bytes_read)
                piece, begins = following, False

    def _tokens(self) -> Iterator[Piece]:
        if self.size % TOKEN.itemsize:
            raise UserError(f"{self.path} has {self.size:,} bytes, but each token has {TOKEN.itemsize}; copy it whole")
        bytes_read = 0
        with self.path.open("rb") as file:
            while piece := file.read(PIECE_BYTES):
                begins, bytes_read = bytes_read == 0, bytes_read + len(piece)
                yield Piece(b"", begins, bytes_read == self.size, bytes_read, np.frombuffer(piece, TOKEN))

    def _jsonl(self) -> Iterator[Piece]:
        bytes_read = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if number == 1 and (other := _detect_encoding(line)):
                    raise UserError(f"{self.path} is {other}; {CONVERT}")
                bytes_read += len(line)
                if line.strip():
                    yield Piece(self._document(line, f"{self.path}, line {number}"), True, True, bytes_read)

    def _document(self, line: bytes, location: str) -> bytes:
        try:
            record = _parse_json(line.rstrip())
        except (ValueError, RecursionError) as error:
            reason = "it is nested too deep" if isinstance(error, RecursionError) else str(error)
            if isinstance(error, UnicodeDecodeError):
                reason = f"it is not UTF-8: {_place(line, error)}"
            if isinstance(error, json.JSONDecodeError):
                reason = f"{error.msg}, column {error.colno}"
            raise UserError(f"{location} is not JSON ({reason}); write one object in each line") from None
        if not isinstance(record, dict):
            raise UserError(f"{location} is {_kind(record)}, but an object with a text in {self.field!r} was expected")
        fields = cast(dict[str, Any], record)
        if self.field not in fields:
            suggestion = suggest_name(self.field, fields) if fields else "it is empty"
            raise UserError(f"{location} has no field {self.field!r}; {OTHER_FIELD}: {suggestion}")
        return self._as_text(fields[self.field], location)

    def _as_text(self, value: object, location: str) -> bytes:
        if not isinstance(value, str | bytes):
            raise UserError(f"{location}: {self.field!r} is {_kind(value)}, but text was expected")
        return encode_utf8(value, f"{location}: {self.field!r}")

    def _parquet(self) -> Iterator[Piece]:
        parquet, arrow = import_extra("pyarrow.parquet", "a Parquet file"), import_extra("pyarrow", "a Parquet file")
        try:
            with parquet.ParquetFile(self.path) as file:
                names: list[str] = file.schema_arrow.names
                if self.field not in names:
                    raise UserError(
                        f"{self.path} has no column {self.field!r}; {OTHER_FIELD}: {suggest_name(self.field, names)}"
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


DocumentSource = Documents | Input
"""Source of documents."""


def default_text() -> bytes:
    """Return a text that every machine has: the source of Python's standard library, modules in alphabetical order."""
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
    """Map a user's text into memory, without a UTF-8 mark at its beginning.

    Raises:
        UserError: if it is not a file, or cannot be read or mapped.
    """
    require_regular_file(path)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if not size:
                return b""
            text = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
            return memoryview(text)[len(UTF8_MARK) :] if text[: len(UTF8_MARK)] == UTF8_MARK else text
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); name a text file that can") from error


SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"


SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
"""SHA-256 of the 1,115,394 bytes at SHAKESPEARE_URL."""

DOWNLOAD_TIMEOUT = 30
"""Seconds without data after which a download fails."""


@contextmanager
def tiny_shakespeare(file: Path | None) -> Generator[Path, None, None]:
    """Yield the path of tiny Shakespeare, a million characters from Shakespeare's plays.

    Args:
        file: the user's copy (None: download one, and remove it at the end of the block).

    Raises:
        UserError: if it cannot be downloaded, or is another text.
    """
    if file is not None:
        require_regular_file(file)
        _require_shakespeare(file.read_bytes(), str(file))
        yield file
        return
    import urllib.request  # this import is slow

    try:
        with urllib.request.urlopen(SHAKESPEARE_URL, timeout=DOWNLOAD_TIMEOUT) as answer:
            text = answer.read()
    except OSError as error:
        reason = getattr(error, "reason", None) or error
        raise UserError(
            f"{SHAKESPEARE_URL} cannot be downloaded ({reason}); fetch it by other means, and name it with --file"
        ) from None
    _require_shakespeare(text, SHAKESPEARE_URL)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "input.txt")
        path.write_bytes(text)
        yield path


def import_extra(name: str, purpose: str) -> Any:
    """Import a module that the extra `data` installs.

    Args:
        name: the module.
        purpose: the input that needs it, such as "a Parquet file", for the error message.

    Raises:
        UserError: if it is not installed.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError:
        package = name.partition(".")[0]
        raise UserError(
            f"{purpose} needs the Python package {package}, which is not installed; pip install 'shardlab[data]'"
        ) from None


def decode_utf8(text: bytes) -> str:
    """Decode a text.

    Raises:
        UserError: if it is not UTF-8.
    """
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        if other := _detect_encoding(text):
            raise UserError(f"the text is {other}; {CONVERT}") from None
        raise UserError(f"the text is not UTF-8 ({_place(text, error)}); convert it, or take bytes as tokens") from None


def encode_utf8(text: str | bytes, location: str) -> bytes:
    """Return a text in UTF-8.

    Args:
        text: string, or bytes, which are checked.
        location: where the text is, for the error message.

    Raises:
        UserError: if the text cannot be encoded, or the bytes are not UTF-8.
    """
    try:
        if isinstance(text, str):
            return text.encode()
        text.decode()
    except UnicodeEncodeError:
        raise UserError(f"{location} has half of a surrogate pair, which is no text") from None
    except UnicodeDecodeError as error:
        assert isinstance(text, bytes)
        raise UserError(f"{location} is not UTF-8 ({_place(text, error)}); convert it") from None
    return text


OTHER_FIELD = "--field (of data prepare and eval) names the one with the text"

CONVERT = "convert it, as by: iconv -f UTF-16 -t UTF-8"
"""Remedy for a text in another encoding."""


def _token_array(document: object, location: str) -> NDArray[np.integer]:
    """Return the tokens of a document.

    Raises:
        UserError: if the document does not consist of tokens.
    """
    try:
        array: NDArray[Any] = np.asarray(document)
    except ValueError:
        array = np.empty((0, 0))
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise UserError(f"{location} is {_kind(document)}; give a text, bytes, or one row of tokens")
    return array.astype(np.int64)


def _place(text: bytes, error: UnicodeDecodeError) -> str:
    return f"byte 0x{text[error.start]:02x} after {text[: error.start][-20:]!r}"


def _detect_encoding(text: bytes) -> str | None:
    """Guess the encoding of a text that is not UTF-8 from its first bytes: a byte order mark, or a zero byte
    beside a letter.
    """
    encoding = next((name for mark, name in BYTE_ORDER_MARKS.items() if text.startswith(mark)), None)
    return encoding or ("UTF-16" if len(text) > 1 and 0 in text[:2] and text[:2] != bytes(2) else None)


def _parse_json(line: bytes) -> Any:
    """Parse a line of JSON. Numbers may have any length, since they are not used."""
    try:
        return json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except ValueError:  # Python does not convert an integer of thousands of digits
        return json.loads(line, parse_int=lambda _: 0)


def _read_lines(file: BinaryIO) -> bytes:
    """Read the next piece of a text, up to the end of a line, or of a character if the line is very long."""
    piece = file.read(PIECE_BYTES)
    if len(piece) < PIECE_BYTES:
        return piece
    piece += file.readline(PIECE_BYTES)
    if not piece.endswith(b"\n"):
        excess = next((back for back in (1, 2, 3) if piece[-back] >= 0xC0), 0)  # the cut may be inside a character
        file.seek(-excess, 1)
        return piece[: len(piece) - excess]
    return piece


def _kind(value: object) -> str:
    kinds: dict[type, str] = {
        type(None): "null", bool: "true or false", int: "a number", float: "a number", list: "a list",
        dict: "an object", str: "a text", bytes: "bytes",
    }  # fmt: skip
    return next((name for kind, name in kinds.items() if isinstance(value, kind)), f"a {type(value).__name__}")


def _require_shakespeare(text: bytes, name: str) -> None:
    digest = hashlib.sha256(text).hexdigest()
    if digest != SHAKESPEARE_SHA256:
        raise UserError(
            f"{name} is not tiny Shakespeare ({len(text):,} bytes with the SHA-256 {digest[:8]}..., not 1,115,394 with "
            f"{SHAKESPEARE_SHA256[:8]}...); fetch {SHAKESPEARE_URL} again"
        )
