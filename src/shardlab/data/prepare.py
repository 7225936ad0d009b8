"""Making a prepared folder: documents to tokens, in two parts, with checksums."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from shardlab.data.bpe import Gpt2, HuggingFace, read_tokenizer
from shardlab.data.documents import PIECE, Input, Piece, decoded
from shardlab.data.manifest import MANIFEST, FileSum, Manifest, Prepared, TokenCount
from shardlab.data.special_tokens import END
from shardlab.data.tokenizers import ByteTokenizer, Characters, Tokenizer
from shardlab.errors import UserError, unknown
from shardlab.program.files import whole_folder

SMALLEST_BPE = 257
"""Tokens of a BPE without any pair: all bytes, and the end of a document."""

Progress = Callable[[str, int], None]
"""Called with what is done, and how many bytes of the input have been read for it."""

BATCH = 1024
"""The most documents that are tokenized at once."""


class Documents:
    """The documents of some files, in order, as often as they are asked for."""

    def __init__(self, inputs: Sequence[Input], progress: Progress) -> None:
        self._inputs, self._progress = inputs, progress

    def pieces(self, doing: str) -> Iterator[tuple[Input, Piece]]:
        """Every piece with its file.

        Args:
            doing: what is done with them, for the progress.
        """
        before = 0
        for each in self._inputs:
            for piece in each.pieces():
                yield each, piece
                self._progress(doing, before + piece.done)
            before += each.size

    def texts(self, doing: str) -> Iterator[str]:
        """Every piece's text."""
        for each, piece in self.pieces(doing):
            with _named(each):
                text = decoded(piece.text)
            yield text

    def batches(self) -> Iterator[list[tuple[Input, Piece]]]:
        """Pieces of a file, as many as are tokenized at once."""
        batch: list[tuple[Input, Piece]] = []
        size = 0
        for each, piece in self.pieces("tokens"):
            if batch and (size >= PIECE or len(batch) == BATCH or each is not batch[0][0]):
                yield batch
                batch, size = [], 0
            batch.append((each, piece))
            size += len(piece.text)
        if batch:
            yield batch


@contextmanager
def _named(each: Input) -> Generator[None]:
    """Name the file in what is wrong with its text."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{each.path}: {error}") from None


def tokenizer_of(name: str, train_bpe: int | None, documents: Documents) -> Tokenizer:
    """The tokenizer of that name, or one trained on the documents.

    Args:
        name: chars, bytes, gpt2, or a path to a `tokenizer.json`.
        train_bpe: the vocabulary's size of one to be trained (None: none is).

    Raises:
        UserError: for an unknown name, and for a tokenizer that cannot be made.
    """
    if train_bpe is not None:
        if train_bpe < SMALLEST_BPE:
            raise UserError(f"--train-bpe {train_bpe}: every byte and {END} are tokens; give {SMALLEST_BPE} or more")
        return HuggingFace.train(documents.texts("training the BPE"), train_bpe)
    if name == Characters.kind:
        return Characters.of(documents.texts("vocabulary"))
    if name == ByteTokenizer.kind:
        return ByteTokenizer()
    if name == Gpt2.kind:
        return Gpt2.find()
    if name.endswith(".json"):
        return read_tokenizer(Path(name))
    names = Characters.kind, ByteTokenizer.kind, Gpt2.kind
    raise unknown("tokenizer", name, names, " and a path to a tokenizer.json")


def prepare(
    inputs: Sequence[Input],
    out: Path,
    tokenizer: str = "bytes",
    train_bpe: int | None = None,
    validation: float = 0.1,
    progress: Progress = lambda doing, done: None,
    sources: Sequence[str] | None = None,
) -> Prepared:
    """Turn files into a folder of tokens, which appears whole or not at all.

    Args:
        inputs: the files; one document follows the other.
        out: the folder, not there yet.
        tokenizer, train_bpe: see `tokenizer_of`.
        validation: the part of the tokens, at the end, that is not trained on.
        sources: what the manifest calls the files (None: their paths).

    Raises:
        UserError: for what cannot be read, tokenized or written; nothing is left of it.
    """
    if not 0 < validation < 1:
        raise UserError(f"--validation {validation:g}: a part of the tokens was expected; give 0.1, or less than 1")
    documents = Documents(inputs, progress)
    with whole_folder(out) as folder:
        chosen = tokenizer_of(tokenizer, train_bpe, documents)
        dtype = next(each for each in ("uint8", "uint16", "uint32") if chosen.vocab_size <= 1 << np.iinfo(each).bits)
        starts = _write_tokens(documents, chosen, np.dtype(dtype).newbyteorder("<"), folder / "training.bin")
        counts = _split(folder, np.dtype(dtype).itemsize, starts, validation)
        for name, content in chosen.files().items():
            (folder / name).write_bytes(content)
        progress("checksums", 0)
        files = {path.name: FileSum.of(path) for path in sorted(folder.iterdir())}
        named = [each.path.name for each in inputs] if sources is None else list(sources)
        manifest = Manifest(named, chosen.kind, chosen.vocab_size, chosen.end, dtype, *counts, files)
        (folder / MANIFEST).write_text(manifest.written(), encoding="utf-8")
    return Prepared.open(out)


def _write_tokens(documents: Documents, tokenizer: Tokenizer, dtype: np.dtype[np.void], path: Path) -> array[int]:
    """Write all tokens into one file; where each document begins, and where the last one ends."""
    starts, written, read = array("q", [0]), 0, 0
    with path.open("wb") as file:
        for batch in documents.batches():
            with _named(batch[0][0]):
                encoded = tokenizer.encode([piece.text for _, piece in batch])
            for (each, piece), tokens in zip(batch, encoded, strict=True):
                read += len(piece.text)
                if piece.ends and tokenizer.end is not None and each.format != "text" and piece.text:
                    tokens = np.append(tokens, tokenizer.end)
                _append(file, tokens, tokenizer, dtype)
                written += len(tokens)
                if piece.ends and written > starts[-1]:
                    starts.append(written)
    if written < 2:
        raise UserError(
            "the input is empty; give some text"
            if not read
            else f"the input has {written} token{'' if written == 1 else 's'}, but a token and the next one are needed "
            "in each part; give a longer text, or a tokenizer that fits it"
        )
    return starts


def _append(file: BinaryIO, tokens: NDArray[np.int64], tokenizer: Tokenizer, dtype: np.dtype[np.void]) -> None:
    if tokens.size and (largest := int(tokens.max())) >= tokenizer.vocab_size:
        raise UserError(f"the tokenizer gives token {largest}, but its vocabulary is {tokenizer.vocab_size}; mend it")
    file.write(tokens.astype(dtype).tobytes())


def _split(folder: Path, itemsize: int, starts: array[int], validation: float) -> tuple[TokenCount, TokenCount]:
    """Move the last tokens into a file of their own: the part asked for, to the end of a document if one is near."""
    ends = np.frombuffer(starts, np.int64)
    total = int(ends[-1])
    cut = min(max(1, int(total * (1 - validation))), total - 1)
    near = int(ends[np.abs(ends - cut).argmin()])
    if 0 < near < total and abs(near - cut) <= (total - cut) / 2:
        cut = near
    with (folder / "training.bin").open("r+b") as source, (folder / "validation.bin").open("wb") as target:
        source.seek(cut * itemsize)
        while block := source.read(PIECE):
            target.write(block)
        os.truncate(source.fileno(), cut * itemsize)
    inner = ends[1:-1]
    training, validating = inner[inner < cut], inner[inner > cut] - cut
    training.astype("<i8").tofile(folder / "training.documents.bin")
    validating.astype("<i8").tofile(folder / "validation.documents.bin")
    return TokenCount(cut, len(training) + 1), TokenCount(total - cut, len(validating) + 1)
