"""Documents to tokens, in memory or in a prepared folder.

`prepare` writes the folder: training.bin and validation.bin with the tokens, the beginnings and text lengths of
documents, the tokenizer's files, and a manifest with checksums (see prepared_folder.py). `encode_in_memory` encodes
small inputs when a run starts. Both read their documents with `encode_documents`, in batches, and record in
`PieceBoundaries` how many bytes of text the tokens represent.
"""

from __future__ import annotations

import os
from array import array
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from shardlab.common.errors import UserError, unknown_name
from shardlab.common.files import atomic_folder
from shardlab.common.text import counted
from shardlab.train.data.documents import PIECE_BYTES, DocumentSource, Input, Piece, decode_utf8
from shardlab.train.data.prepared_folder import PARTS, FileHash, Manifest, PreparedFolder, TokenCount, open_tokenizer
from shardlab.train.data.stream import TokenRun, Tokens
from shardlab.train.data.tokenizers import END, ByteTokenizer, Characters, Gpt2, HuggingFace, Tokenizer, read_tokenizer

TRAINING = "training.bin"

MOST_LOST_NAMED = 100
"""Largest number of characters without a token that a manifest lists."""

SMALLEST_BPE = 257
"""Smallest vocabulary of byte pair encoding: all bytes and the end token, without any pair."""


MAX_BATCH = 1024
"""Largest number of documents that are tokenized in one batch."""


Progress = Callable[[str, int], None]
"""Callback with the current activity and the bytes of input that have been read."""


def prepare(
    inputs: Sequence[DocumentSource],
    out: Path,
    tokenizer: str | Tokenizer = "bytes",
    train_bpe: int | None = None,
    validation: float = 0.1,
    progress: Progress = lambda doing, bytes_read: None,
    sources: Sequence[str] | None = None,
) -> PreparedFolder:
    """Encode files, or documents of an iterable, into a new folder. If that fails, there is no folder.

    Args:
        inputs: files (`Input`) and iterables (`Documents`), encoded in the order given.
        out: the new folder.
        tokenizer: a tokenizer, or its name (see `make_tokenizer`).
        train_bpe: vocabulary size of a BPE to train in place of a named tokenizer (None: none is trained).
        validation: share of the tokens that is held out, from the end.
        progress: called with the activity and the bytes of input that have been read.
        sources: names of the inputs in the manifest (None: names of the iterables, and file names without folders).

    Raises:
        UserError: if an input cannot be read or tokenized, or the folder cannot be written. Nothing is left behind.
    """
    if not 0 < validation < 1:
        raise UserError(f"--validation is {validation:g}; give a share of the tokens between 0 and 1, such as 0.1")
    if train_bpe is None and tokenizer == ByteTokenizer.kind:
        tokens = next((source for source in inputs if isinstance(source, Input) and source.format == "tokens"), None)
        if tokens is not None:
            remedy = "name their tokenizer by --tokenizer, such as gpt2 for nanoGPT's"
            raise UserError(f"{tokens.name} has tokens, not a text; {remedy}")
    reading = DocumentReader(inputs, progress)
    with atomic_folder(out) as folder:
        encoder = tokenizer if isinstance(tokenizer, Tokenizer) else make_tokenizer(tokenizer, train_bpe, reading)
        dtype = next(name for name in ("uint8", "uint16", "uint32") if encoder.vocab_size <= 1 << np.iinfo(name).bits)
        ends, largest, lost_counts = _write_tokens(
            reading, encoder, np.dtype(dtype).newbyteorder("<"), folder / TRAINING
        )
        counts = _split(folder, np.dtype(dtype).newbyteorder("<"), ends, encoder, validation)
        for name, content in encoder.files().items():
            (folder / name).write_bytes(content)
        progress("checksums", 0)
        files = {path.name: FileHash.of_file(path) for path in sorted(folder.iterdir())}
        names = [source.path.name if isinstance(source, Input) else source.name for source in inputs]
        manifest = Manifest(
            sources=tuple(names if sources is None else sources),
            tokenizer=encoder.kind,
            vocab_size=encoder.vocab_size,
            end=encoder.end,
            dtype=dtype,
            training=counts[0],
            validation=counts[1],
            files=files,
            largest=largest,
            lost=dict(lost_counts.most_common(MOST_LOST_NAMED)),
        )
        manifest.write(folder)
    return PreparedFolder.open(out)


def make_tokenizer(name: str, train_bpe: int | None, documents: DocumentReader) -> Tokenizer:
    """Return the tokenizer with a name, or train one on the documents.

    Args:
        name: chars, bytes, gpt2, or a path to a `tokenizer.json` or to a folder that has a tokenizer.
        train_bpe: vocabulary size of the byte pair encoding to train (None: none is trained).
        documents: the text for training, or for the vocabulary of characters.

    Raises:
        UserError: if the name is unknown, or the tokenizer cannot be built.
    """
    if train_bpe is not None:
        if train_bpe < SMALLEST_BPE:
            raise UserError(f"--train-bpe {train_bpe}: every byte and {END} are tokens; give {SMALLEST_BPE} or more")
        return HuggingFace.train(documents.texts("training the BPE"), train_bpe)
    if name == Characters.kind:
        return Characters.from_texts(documents.texts("vocabulary"))
    if name == ByteTokenizer.kind:
        return ByteTokenizer()
    if name == Gpt2.kind:
        return Gpt2.find()
    if name.endswith(".json"):
        return read_tokenizer(Path(name))
    if (folder := Path(name)).is_dir():
        if (tokenizer := open_tokenizer(folder)) is None:
            raise UserError(f"--tokenizer {name} is a folder without a tokenizer; name one with a tokenizer.json")
        return tokenizer
    names = Characters.kind, ByteTokenizer.kind, Gpt2.kind
    raise unknown_name("tokenizer", name, names, ", a path to a tokenizer.json, and a folder that has one")


@dataclass(frozen=True)
class EncodedText:
    """Documents as tokens, in memory.

    Attributes:
        tokens: the tokens of all documents.
        ends: where pieces and documents end in `tokens`.
        lost_counts: characters or words without a token, and how often they occur.
    """

    tokens: NDArray[np.uint32]
    ends: PieceBoundaries
    lost_counts: Counter[str]


class EncodedPiece(NamedTuple):
    """Tokens of a document, or of a piece of one.

    Attributes:
        tokens: the tokens, with those that begin and end the document.
        size: bytes of text that the tokens represent.
        ends: whether these are the last tokens of the document.
    """

    tokens: NDArray[np.int64]
    size: int
    ends: bool


def encode_in_memory(
    source: DocumentSource, tokenizer: Tokenizer, at_most: tuple[int, int] | None = None
) -> EncodedText:
    """Encode the documents of one source.

    Args:
        source: the documents.
        tokenizer: encodes them.
        at_most: (sequences, tokens of each) after which reading stops (None: everything is read).

    Raises:
        UserError: if a document cannot be read or encoded.
    """
    parts: list[NDArray[np.uint32]] = []
    ends, counts = PieceBoundaries(), Counter[str]()
    for piece in encode_documents(DocumentReader([source]), tokenizer, counts, MAX_BATCH if at_most is None else 1):
        documents, start = len(ends.documents) - 1, ends.tokens[ends.documents[-1]]
        parts.append(piece.tokens.astype(np.uint32))
        ends.add(piece)
        if at_most is not None and documents + (ends.tokens[-1] - start) // at_most[1] > at_most[0]:
            break
    return EncodedText(np.concatenate(parts) if parts else np.empty(0, np.uint32), ends, counts)


def lost_text(counts: Mapping[str, int]) -> str:
    """Return a sentence that says how much of a text has no token; empty if everything has one."""
    if not counts:
        return ""
    total, names = sum(counts.values()), [repr(word) for word, _ in Counter(counts).most_common(5)]
    if len(counts) == 1 and len(name := next(iter(counts))) > 1:
        amount = f"{total:,} words or characters" if total > 1 else "1 word or character"
        return f"the tokenizer has no token for {amount} of the text, which become{'' if total > 1 else 's'} {name!r}"
    listed_names = ", ".join([*names, *(["..."] if len(counts) > 5 else [])])
    consequence = f"are dropped ({listed_names})" if total > 1 else f"is dropped ({listed_names})"
    return f"the tokenizer has no token for {counted(total, 'character')} of the text, which {consequence}"


def encode_documents(
    reading: DocumentReader, tokenizer: Tokenizer, lost_counts: Counter[str], batch: int = MAX_BATCH
) -> Iterator[EncodedPiece]:
    """Yield all documents as tokens.

    Args:
        reading: the documents.
        tokenizer: encodes them.
        lost_counts: counter to which characters without a token are added; see `Tokenizer.count_lost`.
        batch: largest number of documents that are tokenized at once.

    Raises:
        UserError: if a document cannot be read or encoded. The message names its source.
    """
    for pieces in reading.batches(batch):
        source = pieces[0][0]
        with name_source_in_errors(source):
            token_arrays = iter(tokenizer.encode([piece.text for _, piece in pieces if piece.tokens is None]))
            for _, piece in pieces:
                if piece.tokens is None:
                    tokens = next(token_arrays)
                    if new_counts := tokenizer.count_lost(piece.text, tokens):
                        lost_counts.update(new_counts)
                    yield EncodedPiece(
                        _add_special_tokens(tokens, piece, source, tokenizer), len(piece.text), piece.ends
                    )
                else:
                    yield from _split_token_document(piece.tokens, piece.ends, tokenizer)


class DocumentReader:
    """Reader of the documents of several sources, in order. They can be read several times."""

    def __init__(self, sources: Sequence[DocumentSource], progress: Progress = lambda doing, bytes_read: None) -> None:
        self._sources, self._progress = sources, progress

    def pieces(self, doing: str) -> Iterator[tuple[DocumentSource, Piece]]:
        """Yield every piece with its source.

        Args:
            doing: the current activity, for the progress display.
        """
        start = 0
        for source in self._sources:
            for piece in source.pieces():
                yield source, piece
                self._progress(doing, start + piece.bytes_read)
            start += source.size

    def texts(self, doing: str) -> Iterator[str]:
        """Yield the text of every piece.

        Raises:
            UserError: if a source consists of tokens, since a tokenizer is trained on text.
        """
        for source, piece in self.pieces(doing):
            with name_source_in_errors(source):
                if piece.tokens is not None:
                    raise UserError("these are tokens, not a text; name their tokenizer, such as gpt2 or a folder")
                text = decode_utf8(piece.text)
            yield text

    def batches(self, limit: int) -> Iterator[list[tuple[DocumentSource, Piece]]]:
        """Yield batches of at most `limit` pieces and about PIECE_BYTES of text. A batch has pieces of one source."""
        batch: list[tuple[DocumentSource, Piece]] = []
        size = 0
        for source, piece in self.pieces("tokens"):
            if batch and (size >= PIECE_BYTES or len(batch) == limit or source is not batch[0][0]):
                yield batch
                batch, size = [], 0
            batch.append((source, piece))
            size += len(piece.text)
        if batch:
            yield batch


@contextmanager
def name_source_in_errors(source: DocumentSource) -> Generator[None]:
    """Prefix errors of the block with the name of the source."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{source.name}: {error}") from None


@dataclass
class PieceBoundaries:
    """Boundaries of consecutive pieces: the beginning of the first piece, and the end of each piece.

    Attributes:
        tokens: number of tokens before each boundary.
        bytes: number of bytes of text before each boundary.
        documents: index 0 for the beginning, then the indices of the boundaries at which a document ends.
    """

    tokens: array[int] = field(default_factory=lambda: array("q", [0]))
    bytes: array[int] = field(default_factory=lambda: array("q", [0]))
    documents: array[int] = field(default_factory=lambda: array("q", [0]))

    def add(self, piece: EncodedPiece) -> None:
        """Append a piece. A document ends with it if the piece is a document's last and the document is not empty."""
        self.tokens.append(self.tokens[-1] + len(piece.tokens))
        self.bytes.append(self.bytes[-1] + piece.size)
        if piece.ends and self.tokens[-1] > self.tokens[self.documents[-1]]:
            self.documents.append(len(self.tokens) - 1)

    def split(self, validation: float) -> int:
        """Return the index of the first validation token.

        The last `validation` (a share) of the tokens is for validation. It begins at the nearest start of a document
        instead if that moves the start by at most half of the validation tokens.
        """
        total = self.tokens[-1]
        cut = min(max(1, int(total * (1 - validation))), total - 1)
        ends = np.frombuffer(self.tokens, np.int64)[np.frombuffer(self.documents, np.int64)]
        near = int(ends[np.abs(ends - cut).argmin()])
        return near if 0 < near < total and abs(near - cut) <= (total - cut) / 2 else cut

    def part(self, tokens: Tokens, start: int, stop: int, tokenizer: Tokenizer) -> TokenRun:
        """Return a range of the tokens, with its documents and the bytes of their texts."""
        boundaries, sizes = np.frombuffer(self.tokens, np.int64), np.frombuffer(self.bytes, np.int64)
        last = np.frombuffer(self.documents, np.int64)
        inner = (boundaries[last] > start) & (boundaries[last] < stop)
        starts = boundaries[last][inner]
        byte_offsets = [self._bytes_before(place, tokens, tokenizer) for place in (start, stop)]
        bytes_at = np.concatenate([byte_offsets[:1], sizes[last][inner], byte_offsets[1:]])
        return TokenRun(tokens[start:stop], starts - start, np.diff(bytes_at))

    def _bytes_before(self, token: int, tokens: Tokens, tokenizer: Tokenizer) -> int:
        """Count the bytes of text before a token. If the token is inside of a piece, the piece is decoded up to it."""
        piece = int(np.searchsorted(np.frombuffer(self.tokens, np.int64), token))
        if self.tokens[piece] == token:
            return self.bytes[piece]
        bytes_in_piece = tokenizer.count_bytes(np.asarray(tokens[self.tokens[piece - 1] : token]))
        return min(self.bytes[piece - 1] + bytes_in_piece, self.bytes[piece])


def _write_tokens(
    reading: DocumentReader, tokenizer: Tokenizer, dtype: np.dtype[np.void], path: Path
) -> tuple[PieceBoundaries, int, Counter[str]]:
    """Write all tokens into one file; return the boundaries of its pieces, its largest token, and the lost
    characters.
    """
    ends, largest, lost_counts = PieceBoundaries(), 0, Counter[str]()
    with path.open("wb") as file:
        for piece in encode_documents(reading, tokenizer, lost_counts):
            ends.add(piece)
            largest = max(largest, int(piece.tokens.max(initial=0)))
            if largest >= tokenizer.vocab_size:
                size = tokenizer.vocab_size
                raise UserError(f"the tokenizer returned token {largest} of a vocabulary of {size}; use another one")
            file.write(piece.tokens.astype(dtype).tobytes())
    if (count := ends.tokens[-1]) < 2:
        raise UserError(
            "the input is empty; give some text"
            if not ends.bytes[-1]
            else f"the input has {count} token{'' if count == 1 else 's'}, but a token and the next one are needed "
            "in each part; give a longer text, or a tokenizer that fits it"
            + (f": {lost_text(lost_counts)}" if lost_counts else "")
        )
    return ends, largest, lost_counts


def _split(
    folder: Path, dtype: np.dtype[np.void], ends: PieceBoundaries, tokenizer: Tokenizer, validation: float
) -> list[TokenCount]:
    """Move the validation tokens into another file, and write the beginnings and the text lengths of documents."""
    cut, total = ends.split(validation), ends.tokens[-1]
    counts: list[TokenCount] = []
    whole = cast(Tokens, np.memmap(folder / TRAINING, dtype, "r"))
    for part, start, stop in zip(PARTS, (0, cut), (cut, total), strict=True):
        run = ends.part(whole, start, stop, tokenizer)
        run.starts.astype("<i8").tofile(folder / f"{part}.documents.bin")
        assert run.sizes is not None
        run.sizes.astype("<i8").tofile(folder / f"{part}.sizes.bin")
        counts.append(TokenCount(stop - start, run.documents))
    del whole
    with (folder / TRAINING).open("r+b") as source, (folder / "validation.bin").open("wb") as target:
        source.seek(cut * dtype.itemsize)
        while block := source.read(PIECE_BYTES):
            target.write(block)
        os.truncate(source.fileno(), cut * dtype.itemsize)
    return counts


def _add_special_tokens(
    tokens: NDArray[np.int64], piece: Piece, source: DocumentSource, tokenizer: Tokenizer
) -> NDArray[np.int64]:
    """Add the tokens that begin and end a document to the tokens of a piece."""
    begin = tokenizer.begin if piece.begins and piece.text else ()
    end = () if tokenizer.end is None or not (piece.ends and source.ends and piece.text) else (tokenizer.end,)
    return np.concatenate([begin, tokens, end], dtype=np.int64, casting="unsafe") if begin or end else tokens


def _split_token_document(tokens: NDArray[np.integer], ends: bool, tokenizer: Tokenizer) -> Iterator[EncodedPiece]:
    """Split a document of tokens after every token that ends a document."""
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < tokenizer.vocab_size:
        wrong = int(tokens.min() if tokens.min() < 0 else tokens.max())
        raise UserError(
            f"token {wrong:,} is not in the vocabulary of {tokenizer.vocab_size:,} tokens ({tokenizer.kind}); name the "
            "tokenizer of these tokens"
        )
    boundaries = np.flatnonzero(tokens == tokenizer.end) + 1 if tokenizer.end is not None else np.empty(0, np.int64)
    parts = np.split(tokens.astype(np.int64), boundaries)
    for number, part in enumerate(parts):
        last = number == len(parts) - 1
        if part.size or last:
            yield EncodedPiece(part, tokenizer.count_bytes(part), ends if last else True)
