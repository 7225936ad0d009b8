"""A prepared folder: token files, tokenizer, and a manifest that says what they are."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shardlab.data.bpe import Gpt2, HuggingFace
from shardlab.data.stream import NO_STARTS, TokenRun
from shardlab.data.tokenizers import ByteTokenizer, Characters, Tokenizer
from shardlab.errors import UserError
from shardlab.program.nesting import read_file

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
