"""A prepared folder: token files, tokenizer, and a manifest that says what they are."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from shardlab.common.errors import UserError
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
    exported,
    read_tokenizer,
)

MANIFEST = "manifest.json"
FORMAT = "shardlab data 1"

PARTS = ("training", "validation")
"""Parts of the data: what is trained on, and what a model is only judged by."""


@dataclass(frozen=True)
class TokenCount:
    """How much a part has.

    Attributes:
        tokens: how many.
        documents: how many; one that is cut by the split counts in both parts.
    """

    tokens: int
    documents: int


@dataclass(frozen=True)
class FileSum:
    """A file's size, and its SHA-256 in hexadecimal."""

    bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> FileSum:
        """Read and hash a file."""
        with path.open("rb") as file:
            return cls(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())

    @classmethod
    def of_content(cls, content: bytes) -> FileSum:
        """Hash what a file is to hold."""
        return cls(len(content), hashlib.sha256(content).hexdigest())


@dataclass(frozen=True)
class Manifest:
    """What a prepared folder holds.

    Attributes:
        sources: names of the files that were read, or where they come from.
        tokenizer: its kind: chars, bytes, gpt2 or tokenizer.json.
        vocab_size: how many tokens it knows.
        end: the token that ends a document (None: no token does).
        dtype: of a token in its file: uint8, uint16 or uint32, little-endian.
        training, validation: how much there is.
        files: every other file of the folder by name.
        largest: the largest token that occurs (None: nobody has looked).
        lost: characters, or words, without a token, and how often they occur; the most frequent ones.
    """

    sources: list[str]
    tokenizer: str
    vocab_size: int
    end: int | None
    dtype: str
    training: TokenCount
    validation: TokenCount
    files: dict[str, FileSum]
    largest: int | None = None
    lost: dict[str, int] = field(default_factory=dict[str, int])

    def written(self) -> str:
        """The manifest as a file."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """A folder's manifest.

        Raises:
            UserError: the folder has none, or none that this version reads.
        """
        path = folder / MANIFEST
        if not path.is_file():
            raise UserError(f"{folder} has no {MANIFEST}; name a folder that shardlab data prepare has made")
        found: dict[str, Any] = dict(read_file(path, "JSON"))
        try:
            if found.pop("format") != FORMAT:
                raise ValueError("another format")
            for part in PARTS:
                found[part] = TokenCount(**found[part])
            found["files"] = {name: FileSum(**each) for name, each in found["files"].items()}
            return cls(**found)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{path} is no manifest that this version of Shardlab reads ({error}); prepare the data again"
            ) from None


@dataclass(frozen=True)
class Prepared:
    """A prepared folder that was opened.

    Attributes:
        folder: where it is.
        manifest: what it holds.
        sha256: of the manifest, which has those of all files in it.
    """

    folder: Path
    manifest: Manifest
    sha256: str

    @classmethod
    def open(cls, folder: Path) -> Prepared:
        """Open a folder; of its files only the sizes are compared with the manifest.

        Raises:
            UserError: it has no manifest, or a file is missing or has another size.
        """
        manifest = Manifest.read(folder)
        for name, wanted in manifest.files.items():
            path = folder / name
            size = path.stat().st_size if path.is_file() else None
            if size != wanted.bytes:
                found = "is missing" if size is None else f"has {size:,} bytes, not {wanted.bytes:,}"
                raise UserError(f"{path} {found}: the data are torn; prepare them again, or copy them whole")
        return cls(folder, manifest, FileSum.of(folder / MANIFEST).sha256)

    @property
    def bytes(self) -> int:
        """Size of all files together."""
        return sum(each.bytes for each in self.manifest.files.values())

    def verify(self) -> None:
        """Read every file and compare its checksum.

        Raises:
            UserError: naming the first that differs.
        """
        for name, wanted in self.manifest.files.items():
            if FileSum.of(self.folder / name) != wanted:
                raise UserError(
                    f"{self.folder / name} has another checksum than its manifest says: the data are torn; prepare "
                    "them again, or copy them whole"
                )

    def run(self, part: str) -> TokenRun:
        """A part's tokens and documents, mapped into memory."""
        tokens = np.memmap(self.folder / f"{part}.bin", np.dtype(self.manifest.dtype).newbyteorder("<"), "r")
        starts, sizes = (self.folder / f"{part}.{name}.bin" for name in ("documents", "sizes"))
        return TokenRun(
            tokens,
            np.memmap(starts, "<i8", "r") if starts.stat().st_size else NO_STARTS,
            np.memmap(sizes, "<i8", "r") if sizes.name in self.manifest.files else None,
            self.manifest.largest,
        )

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the folder has with it."""
        names = [name for name in self.manifest.files if not name.endswith(".bin")]
        files = {name: (self.folder / name).read_bytes() for name in names}
        return made_again(self.manifest.tokenizer, files, self.manifest.end)


def made_again(kind: str, files: dict[str, bytes], end: int | None = None) -> Tokenizer:
    """A tokenizer, from its kind, its files, and the token that ends a document, if a record says which."""
    makers: dict[str, Callable[[dict[str, bytes]], Tokenizer]] = {
        ByteTokenizer.kind: lambda files: ByteTokenizer(),
        Characters.kind: Characters.read,
        Gpt2.kind: Gpt2,
        HuggingFace.kind: lambda files: HuggingFace(files["tokenizer.json"], beside=files, end=end),
    }
    return makers[kind](files)


# Checksums of texts, in a time that does not grow with the text.


PIECES = 64
"""How many pieces of a large text are hashed."""

RECORDED = 256 * 2**20
"""The most bytes that are hashed for a run's record, by one rank: in a second or less."""

COMPARED = 4 * 2**20
"""The most bytes that every rank hashes, to compare its text with the others': in some milliseconds."""


@dataclass(frozen=True)
class Checksum:
    """A SHA-256 of a text.

    Attributes:
        bytes: the text's length.
        sha256: the checksum, in hexadecimal.
        of: what was hashed, in words by which anybody can compute it again.
    """

    bytes: int
    sha256: str
    of: str


def checksum(text: Text, at_most: int) -> Checksum:
    """Hash a text, or pieces spread evenly over it where it has more than `at_most` bytes."""
    size = len(text)
    if size <= at_most:
        return Checksum(size, hashlib.sha256(text).hexdigest(), "the whole text")
    piece = at_most // PIECES
    hashed = hashlib.sha256()
    for number in range(PIECES):
        start = (size - piece) * number // (PIECES - 1)
        hashed.update(text[start : start + piece])
    return Checksum(
        size,
        hashed.hexdigest(),
        f"{PIECES} pieces of {piece} bytes, one after the other: piece i, from 0, starts at byte "
        f"(bytes - {piece}) * i // {PIECES - 1}",
    )


# The tokenizer of a model, kept beside its weights.


RECORD = "run.json"
"""Where a run's folder tells of its tokenizer; one of Hugging Face's has only the files."""

FILES: dict[str, tuple[str, ...]] = {
    Characters.kind: (Characters.FILE,),
    HuggingFace.kind: ("tokenizer.json",),
    Gpt2.kind: tuple(GPT2_FILES),
}
"""Files by which the kind of a tokenizer is known, where nothing else tells it."""


def described(tokenizer: Tokenizer) -> dict[str, Any]:
    """What a run's record says of its tokenizer: kind, sizes, and the checksums of the files that lie beside it."""
    sums = {name: asdict(FileSum.of_content(content)) for name, content in tokenizer.files().items()}
    return {"kind": tokenizer.kind, "vocab_size": tokenizer.vocab_size, "end": tokenizer.end, "files": sums}


def kept_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer in a folder of weights, a run's or one of Hugging Face's form; None where nothing tells of one.

    A run's checkpoints, and its files of weights, have the run's.

    Raises:
        UserError: when its files are missing or have changed.
    """
    folder = home(folder)
    record = _record(folder / RECORD)
    if (recorded := _recorded(record, folder / RECORD)) is not None:
        kind, sums, end = recorded
        contents = {name: _content(folder / name, wanted) for name, wanted in sums.items()}
        return made_again(kind, contents, end)
    path, of_bytes = folder / "tokenizer.json", exported(ByteTokenizer())["tokenizer.json"]
    if path.is_file() and path.read_bytes() == of_bytes:
        return ByteTokenizer()
    for kind, names in FILES.items():
        if all((folder / name).is_file() for name in names):
            if kind == HuggingFace.kind:
                return read_tokenizer(path, record.get("huggingface"))
            return made_again(kind, {name: (folder / name).read_bytes() for name in names})
    return None


def want_tokenizer(folder: Path, vocab_size: int) -> Tokenizer:
    """The tokenizer in a folder of weights; where nothing tells of one, a run's tokens are bytes.

    Args:
        vocab_size: the model's.

    Raises:
        UserError: when a folder of Hugging Face's form has none, and its vocabulary is not that of bytes.
    """
    found = kept_tokenizer(folder)
    if found is None and not (home(folder) / RECORD).is_file() and vocab_size != ByteTokenizer.vocab_size:
        raise UserError(
            f"{folder} has no tokenizer (such as a tokenizer.json), and a vocabulary of {vocab_size:,} tokens is not "
            "that of bytes; copy its tokenizer there, or name the prepared folder of its data with --data"
        )
    return found or ByteTokenizer()


def home(folder: Path) -> Path:
    """Where the files beside weights lie: in the run's folder, if it is a checkpoint or a file in there."""
    if folder.suffix == ".safetensors":
        return folder.parent
    return folder.parents[1] if folder.parent.name == "checkpoints" else folder


def _record(path: Path) -> dict[str, Any]:
    found: Any = read_file(path, "JSON") if path.is_file() else {}
    return cast(dict[str, Any], found) if isinstance(found, dict) else {}


def _recorded(found: dict[str, Any], path: Path) -> tuple[str, dict[str, FileSum], int | None] | None:
    """Kind, checksums and end token in a run's record; None where it does not tell."""
    try:
        record: dict[str, Any] | None = found.get("tokenizer")
        if record is None:
            return None
        return record["kind"], {name: FileSum(**each) for name, each in record["files"].items()}, record.get("end")
    except (AttributeError, KeyError, TypeError) as error:
        raise UserError(f"{path}: tokenizer is not what a run records ({error}); copy the run's folder anew") from None


def _content(path: Path, wanted: FileSum) -> bytes:
    content = path.read_bytes() if path.is_file() else None
    if content is None or FileSum.of_content(content) != wanted:
        found = "is missing" if content is None else "has another checksum than run.json says"
        raise UserError(f"{path} {found}: the model was trained with another tokenizer; copy the run's folder whole")
    return content
