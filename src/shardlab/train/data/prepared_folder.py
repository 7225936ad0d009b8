"""The format of a prepared folder: token files, the tokenizer, and a manifest that describes them.

`PreparedFolder` opens a folder and maps its tokens into memory; prepare.py writes one. Its manifest has the size and
the SHA-256 of every file, so that an incomplete copy is noticed.

The second half finds the tokenizer of a model, which a run keeps beside its weights: `find_tokenizer` and
`require_tokenizer`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shardlab.common.errors import UserError
from shardlab.common.fields import read_settings, read_table
from shardlab.common.files import read_file
from shardlab.train.data.documents import Text
from shardlab.train.data.stream import NO_STARTS, TokenRun
from shardlab.train.data.tokenizers import (
    GPT2_FILES,
    ByteTokenizer,
    Characters,
    Gpt2,
    HuggingFace,
    Tokenizer,
    export_tokenizer,
    read_tokenizer,
)

MANIFEST = "manifest.json"
FORMAT = "shardlab data 1"

PARTS = ("training", "validation")
"""Names of the parts of the data. A model is trained on the first and evaluated on the second."""


RECORD = "run.json"
"""File in which a run records its tokenizer. Folders in Hugging Face's format do not have it."""

FILES_BY_KIND: dict[str, tuple[str, ...]] = {
    Characters.kind: (Characters.FILE,),
    HuggingFace.kind: ("tokenizer.json",),
    Gpt2.kind: tuple(GPT2_FILES),
}
"""Files of each kind of tokenizer, by which the kind is recognized if there is no record."""


HASHED_PIECES = 64
"""Number of pieces of a large text that are hashed."""

MOST_RECORDED = 256 * 2**20
"""Largest number of bytes that one rank hashes for the record of a run. It takes a second or less."""

MOST_COMPARED = 4 * 2**20
"""Largest number of bytes that every rank hashes to compare its text with other ranks. It takes milliseconds."""


@dataclass(frozen=True)
class Manifest:
    """Description of a prepared folder.

    Attributes:
        sources: names of the inputs.
        tokenizer: kind of the tokenizer: chars, bytes, gpt2 or tokenizer.json.
        vocab_size: number of tokens in the tokenizer's vocabulary.
        end: token that ends a document (None: no token does).
        dtype: data type of a token in its file: uint8, uint16 or uint32, little-endian.
        training, validation: sizes of the parts.
        files: size and checksum of every other file of the folder, by name.
        largest: largest token that occurs (None: unknown).
        lost: the most frequent characters or words without a token, and how often they occur.
    """

    sources: tuple[str, ...]
    tokenizer: str
    vocab_size: int
    end: int | None
    dtype: str
    training: TokenCount
    validation: TokenCount
    files: Mapping[str, FileHash]
    largest: int | None = None
    lost: Mapping[str, int] = field(default_factory=dict[str, int])

    def write(self, folder: Path) -> None:
        """Write the manifest into its folder."""
        content = json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"
        (folder / MANIFEST).write_text(content, encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read the manifest of a folder.

        Raises:
            UserError: if there is no manifest, or it has another format.
        """
        path = folder / MANIFEST
        if not path.is_file():
            raise UserError(f"{folder} has no {MANIFEST}; name a folder that shardlab data prepare has made")
        table = read_table(read_file(path, "JSON"), str(path))
        if (format := table.pop("format", None)) != FORMAT:
            raise UserError(f"{path} has format {format!r}, not {FORMAT}; prepare the data again")
        return read_settings(cls, table, str(path))


@dataclass(frozen=True)
class PreparedFolder:
    """Opened prepared folder.

    Attributes:
        folder: path of the folder.
        manifest: its description.
        sha256: checksum of the manifest, which contains the checksums of all files.
    """

    folder: Path
    manifest: Manifest
    sha256: str

    @classmethod
    def open(cls, folder: Path) -> PreparedFolder:
        """Open a folder. The sizes of its files are compared with the manifest, but not their checksums.

        Raises:
            UserError: if there is no manifest, or a file is missing or has another size.
        """
        manifest = Manifest.read(folder)
        for name, expected in manifest.files.items():
            path = folder / name
            size = path.stat().st_size if path.is_file() else None
            if size != expected.bytes:
                problem = "is missing" if size is None else f"has {size:,} bytes, not {expected.bytes:,}"
                raise UserError(
                    f"{path} {problem}: the data are incomplete; prepare them again, or copy the whole folder"
                )
        return cls(folder, manifest, FileHash.of_file(folder / MANIFEST).sha256)

    @property
    def bytes(self) -> int:
        """Size of all files together."""
        return sum(file.bytes for file in self.manifest.files.values())

    def verify(self) -> None:
        """Read every file and compare its checksum.

        Raises:
            UserError: if a file differs. The message has the first one.
        """
        for name, expected in self.manifest.files.items():
            if FileHash.of_file(self.folder / name) != expected:
                raise UserError(
                    f"{self.folder / name} has another checksum than its manifest says: the data are damaged; prepare "
                    "them again, or copy the whole folder"
                )

    def run(self, part: str) -> TokenRun:
        """Map the tokens and documents of a part into memory."""
        tokens = np.memmap(self.folder / f"{part}.bin", np.dtype(self.manifest.dtype).newbyteorder("<"), "r")
        starts, sizes = (self.folder / f"{part}.{name}.bin" for name in ("documents", "sizes"))
        return TokenRun(
            tokens,
            np.memmap(starts, "<i8", "r") if starts.stat().st_size else NO_STARTS,
            np.memmap(sizes, "<i8", "r") if sizes.name in self.manifest.files else None,
            self.manifest.largest,
        )

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer in the folder."""
        names = [name for name in self.manifest.files if not name.endswith(".bin")]
        files = {name: (self.folder / name).read_bytes() for name in names}
        return restore(self.manifest.tokenizer, files, self.manifest.end)


@dataclass(frozen=True)
class TokenCount:
    """Size of a part.

    Attributes:
        tokens: number of tokens.
        documents: number of documents. A document that the split cuts counts in both parts.
    """

    tokens: int
    documents: int


@dataclass(frozen=True)
class FileHash:
    """Size of a file, and its SHA-256 in hexadecimal."""

    bytes: int
    sha256: str

    @classmethod
    def of_file(cls, path: Path) -> FileHash:
        """Read and hash a file."""
        with path.open("rb") as file:
            return cls(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())

    @classmethod
    def of_content(cls, content: bytes) -> FileHash:
        """Hash the content of a file."""
        return cls(len(content), hashlib.sha256(content).hexdigest())


def find_tokenizer(folder: Path) -> Tokenizer | None:
    """Find the tokenizer of the weights in a folder of a run or in Hugging Face's format; None if there is none.

    For a checkpoint or a file of weights of a run, it is the run's tokenizer.

    Raises:
        UserError: if its files are missing or have changed.
    """
    folder = run_folder(folder)
    record = read_table(read_file(path, "JSON"), str(path)) if (path := folder / RECORD).is_file() else {}
    if record.get("tokenizer") is not None:
        description = read_settings(TokenizerRecord, record["tokenizer"], str(path), "tokenizer", strict=False)
        contents = {name: _read_verified(folder / name, expected) for name, expected in description.files.items()}
        return restore(description.kind, contents, description.end)
    path, of_bytes = folder / "tokenizer.json", export_tokenizer(ByteTokenizer())["tokenizer.json"]
    if path.is_file() and path.read_bytes() == of_bytes:
        return ByteTokenizer()
    for kind, names in FILES_BY_KIND.items():
        if all((folder / name).is_file() for name in names):
            if kind == HuggingFace.kind:
                return read_tokenizer(path, record.get("huggingface"))
            return restore(kind, {name: (folder / name).read_bytes() for name in names})
    return None


def open_tokenizer(folder: Path) -> Tokenizer | None:
    """Open the tokenizer in a folder of prepared data, of a run, or in Hugging Face's format; None if there is none."""
    return PreparedFolder.open(folder).tokenizer() if (folder / MANIFEST).is_file() else find_tokenizer(folder)


def require_tokenizer(folder: Path, vocab_size: int) -> Tokenizer:
    """Return the tokenizer in a folder of weights. If a run has recorded none, its tokens are bytes.

    Args:
        folder: folder of a run or of a checkpoint, or in Hugging Face's format.
        vocab_size: size of the model's vocabulary.

    Raises:
        UserError: if a folder in Hugging Face's format has no tokenizer, and its vocabulary is not that of bytes.
    """
    tokenizer = find_tokenizer(folder)
    if tokenizer is None and not (run_folder(folder) / RECORD).is_file() and vocab_size != ByteTokenizer.vocab_size:
        raise UserError(
            f"{folder} has no tokenizer (such as a tokenizer.json), and a vocabulary of {vocab_size:,} tokens is not "
            "that of bytes; copy its tokenizer there, or name the prepared folder of its data with --data"
        )
    return tokenizer or ByteTokenizer()


def tokenizer_record(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the record of a run's tokenizer: its kind, vocabulary size and end token, and the hashes of its files."""
    sums = {name: asdict(FileHash.of_content(content)) for name, content in tokenizer.files().items()}
    return {"kind": tokenizer.kind, "vocab_size": tokenizer.vocab_size, "end": tokenizer.end, "files": sums}


@dataclass(frozen=True)
class TokenizerRecord:
    """Tokenizer in a run's record, as `tokenizer_record` writes it."""

    kind: str
    files: Mapping[str, FileHash]
    end: int | None = None


def restore(kind: str, files: dict[str, bytes], end: int | None = None) -> Tokenizer:
    """Create a tokenizer from its kind and its files.

    Args:
        kind: kind of the tokenizer, as in a manifest.
        files: content of the tokenizer's files by name.
        end: recorded token that ends a document (None: the files say it).
    """
    makers: dict[str, Callable[[dict[str, bytes]], Tokenizer]] = {
        ByteTokenizer.kind: lambda files: ByteTokenizer(),
        Characters.kind: Characters.read,
        Gpt2.kind: Gpt2,
        HuggingFace.kind: lambda files: HuggingFace(files["tokenizer.json"], companions=files, end=end),
    }
    return makers[kind](files)


def run_folder(folder: Path) -> Path:
    """Return the run's folder for one of its checkpoints or files of weights; any other folder as it is."""
    if folder.suffix == ".safetensors":
        return folder.parent
    return folder.parents[1] if folder.parent.name == "checkpoints" else folder


@dataclass(frozen=True)
class Checksum:
    """SHA-256 of a text.

    Attributes:
        bytes: length of the text.
        sha256: the checksum, in hexadecimal.
        of: description of the bytes that were hashed, so that anybody can compute the checksum again.
    """

    bytes: int
    sha256: str
    of: str


def checksum(text: Text, at_most: int) -> Checksum:
    """Hash a text; if it has more than `at_most` bytes, hash pieces that are spread evenly over it."""
    size = len(text)
    if size <= at_most:
        return Checksum(size, hashlib.sha256(text).hexdigest(), "the whole text")
    piece = at_most // HASHED_PIECES
    hashed = hashlib.sha256()
    for number in range(HASHED_PIECES):
        start = (size - piece) * number // (HASHED_PIECES - 1)
        hashed.update(text[start : start + piece])
    return Checksum(
        size,
        hashed.hexdigest(),
        f"{HASHED_PIECES} pieces of {piece} bytes, one after the other: piece i, from 0, starts at byte "
        f"(bytes - {piece}) * i // {HASHED_PIECES - 1}",
    )


def _read_verified(path: Path, expected: FileHash) -> bytes:
    content = path.read_bytes() if path.is_file() else None
    if content is None or FileHash.of_content(content) != expected:
        problem = "is missing" if content is None else "has another checksum than run.json says"
        raise UserError(f"{path} {problem}: the model was trained with another tokenizer; copy the run's folder whole")
    return content
