"""Making a prepared folder: documents to tokens, in two parts, with checksums."""

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

from shardlab.common.errors import UserError, unknown
from shardlab.common.files import whole_folder
from shardlab.language.rules.kinds import counted
from shardlab.train.data.documents import PIECE, DocumentSource, Input, Piece, decoded
from shardlab.train.data.prepared_folder import MANIFEST, PARTS, FileSum, Manifest, Prepared, TokenCount, kept_tokenizer
from shardlab.train.data.stream import TokenRun, Tokens
from shardlab.train.data.tokenizers import END, ByteTokenizer, Characters, Gpt2, HuggingFace, Tokenizer, read_tokenizer

TRAINING = "training.bin"

KEPT = 100
"""Characters without a token that a manifest names."""

SMALLEST_BPE = 257
"""Tokens of a BPE without any pair: all bytes, and the end of a document."""


def tokenizer_of(name: str, train_bpe: int | None, documents: Reading) -> Tokenizer:
    """The tokenizer of that name, or one trained on the documents.

    Args:
        name: chars, bytes, gpt2, or a path to a `tokenizer.json` or to a folder that has a tokenizer.
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
    if (folder := Path(name)).is_dir():
        if (found := tokenizer_in(folder)) is None:
            raise UserError(f"--tokenizer {name} is a folder without a tokenizer; name one with a tokenizer.json")
        return found
    names = Characters.kind, ByteTokenizer.kind, Gpt2.kind
    raise unknown("tokenizer", name, names, ", a path to a tokenizer.json, and a folder that has one")


def tokenizer_in(folder: Path) -> Tokenizer | None:
    """The tokenizer of a folder: of prepared data, of a run, or of Hugging Face's form."""
    return Prepared.open(folder).tokenizer() if (folder / MANIFEST).is_file() else kept_tokenizer(folder)


def prepare(
    inputs: Sequence[DocumentSource],
    out: Path,
    tokenizer: str | Tokenizer = "bytes",
    train_bpe: int | None = None,
    validation: float = 0.1,
    progress: Progress = lambda doing, done: None,
    sources: Sequence[str] | None = None,
) -> Prepared:
    """Turn files, or documents of an iterable, into a folder of tokens, which appears whole or not at all.

    Args:
        inputs: files (`Input`) and iterables (`Documents`); one document follows the other.
        out: the folder, not there yet.
        tokenizer, train_bpe: a tokenizer, or its name; see `tokenizer_of`.
        validation: the part of the tokens, at the end, that is not trained on.
        sources: what the manifest calls the inputs (None: their names, of files without their folders).

    Raises:
        UserError: for what cannot be read, tokenized or written; nothing is left of it.
    """
    if not 0 < validation < 1:
        raise UserError(f"--validation {validation:g}: a part of the tokens was expected; give 0.1, or less than 1")
    if train_bpe is None and tokenizer == ByteTokenizer.kind:
        tokens = next((each for each in inputs if isinstance(each, Input) and each.format == "tokens"), None)
        if tokens is not None:
            raise UserError(f"{tokens.name} has tokens, not a text; --tokenizer says whose, such as gpt2 for nanoGPT's")
    reading = Reading(inputs, progress)
    with whole_folder(out) as folder:
        chosen = tokenizer if isinstance(tokenizer, Tokenizer) else tokenizer_of(tokenizer, train_bpe, reading)
        dtype = next(each for each in ("uint8", "uint16", "uint32") if chosen.vocab_size <= 1 << np.iinfo(each).bits)
        ends, largest, lost = _write_tokens(reading, chosen, np.dtype(dtype).newbyteorder("<"), folder / TRAINING)
        counts = _split(folder, np.dtype(dtype).newbyteorder("<"), ends, chosen, validation)
        for name, content in chosen.files().items():
            (folder / name).write_bytes(content)
        progress("checksums", 0)
        files = {path.name: FileSum.of(path) for path in sorted(folder.iterdir())}
        names = [each.path.name if isinstance(each, Input) else each.name for each in inputs]
        manifest = Manifest(
            sources=names if sources is None else list(sources),
            tokenizer=chosen.kind,
            vocab_size=chosen.vocab_size,
            end=chosen.end,
            dtype=dtype,
            training=counts[0],
            validation=counts[1],
            files=files,
            largest=largest,
            lost=dict(lost.most_common(KEPT)),
        )
        (folder / MANIFEST).write_text(manifest.written(), encoding="utf-8")
    return Prepared.open(out)


def _write_tokens(
    reading: Reading, tokenizer: Tokenizer, dtype: np.dtype[np.void], path: Path
) -> tuple[Ends, int, Counter[str]]:
    """Write all tokens into one file; where its pieces end, its largest token, and what has no token."""
    ends, largest, lost = Ends(), 0, Counter[str]()
    with path.open("wb") as file:
        for piece in encoded(reading, tokenizer, lost):
            ends.add(piece)
            largest = max(largest, int(piece.tokens.max(initial=0)))
            if largest >= tokenizer.vocab_size:
                size = tokenizer.vocab_size
                raise UserError(f"the tokenizer gives token {largest}, but its vocabulary is {size}; mend it")
            file.write(piece.tokens.astype(dtype).tobytes())
    if (written := ends.tokens[-1]) < 2:
        raise UserError(
            "the input is empty; give some text"
            if not ends.bytes[-1]
            else f"the input has {written} token{'' if written == 1 else 's'}, but a token and the next one are needed "
            "in each part; give a longer text, or a tokenizer that fits it" + (f": {said_of(lost)}" if lost else "")
        )
    return ends, largest, lost


def _split(
    folder: Path, dtype: np.dtype[np.void], ends: Ends, tokenizer: Tokenizer, validation: float
) -> list[TokenCount]:
    """Move the last tokens into a file of their own, and write where documents begin and how long their texts are."""
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
        while block := source.read(PIECE):
            target.write(block)
        os.truncate(source.fileno(), cut * dtype.itemsize)
    return counts


Progress = Callable[[str, int], None]
"""Called with what is done, and how many bytes of the input have been read for it."""

BATCH = 1024
"""The most documents that are tokenized at once."""


class Reading:
    """The documents of some sources, in order, as often as they are asked for."""

    def __init__(self, sources: Sequence[DocumentSource], progress: Progress = lambda doing, done: None) -> None:
        self._sources, self._progress = sources, progress

    def pieces(self, doing: str) -> Iterator[tuple[DocumentSource, Piece]]:
        """Every piece with its source.

        Args:
            doing: what is done with them, for the progress.
        """
        before = 0
        for each in self._sources:
            for piece in each.pieces():
                yield each, piece
                self._progress(doing, before + piece.done)
            before += each.size

    def texts(self, doing: str) -> Iterator[str]:
        """Every piece's text.

        Raises:
            UserError: for tokens, of which no tokenizer can be made.
        """
        for each, piece in self.pieces(doing):
            with named(each):
                if piece.tokens is not None:
                    raise UserError("these are tokens, not a text; say by which tokenizer, such as gpt2 or a folder")
                text = decoded(piece.text)
            yield text

    def batches(self, most: int) -> Iterator[list[tuple[DocumentSource, Piece]]]:
        """Pieces of a source, as many as are tokenized at once, `most` at the most."""
        batch: list[tuple[DocumentSource, Piece]] = []
        size = 0
        for each, piece in self.pieces("tokens"):
            if batch and (size >= PIECE or len(batch) == most or each is not batch[0][0]):
                yield batch
                batch, size = [], 0
            batch.append((each, piece))
            size += len(piece.text)
        if batch:
            yield batch


@contextmanager
def named(source: DocumentSource) -> Generator[None]:
    """Name the source in what is wrong with its text."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{source.name}: {error}") from None


class EncodedPiece(NamedTuple):
    """Tokens of a document, or of a piece of one.

    Attributes:
        tokens: with those that begin and end the document.
        size: bytes of the text that they stand for.
        ends: whether the document ends with them.
    """

    tokens: NDArray[np.int64]
    size: int
    ends: bool


def encoded(reading: Reading, tokenizer: Tokenizer, lost: Counter[str], batch: int = BATCH) -> Iterator[EncodedPiece]:
    """All documents as tokens.

    Args:
        reading: the documents.
        tokenizer: by which they become tokens.
        lost: what has no token is added to it; see `Tokenizer.lost`.
        batch: documents that are tokenized at once.

    Raises:
        UserError: for what cannot be read or encoded, with its source.
    """
    for pieces in reading.batches(batch):
        source = pieces[0][0]
        with named(source):
            found = iter(tokenizer.encode([piece.text for _, piece in pieces if piece.tokens is None]))
            for _, piece in pieces:
                if piece.tokens is None:
                    tokens = next(found)
                    if missing := tokenizer.lost(piece.text, tokens):
                        lost.update(missing)
                    yield EncodedPiece(_marked(tokens, piece, source, tokenizer), len(piece.text), piece.ends)
                else:
                    yield from _as_they_are(piece.tokens, piece.ends, tokenizer)


def _marked(tokens: NDArray[np.int64], piece: Piece, source: DocumentSource, tokenizer: Tokenizer) -> NDArray[np.int64]:
    """The tokens of a piece, with those that begin and end its document."""
    before = tokenizer.begin if piece.begins and piece.text else ()
    after = () if tokenizer.end is None or not (piece.ends and source.ends and piece.text) else (tokenizer.end,)
    return np.concatenate([before, tokens, after], dtype=np.int64, casting="unsafe") if before or after else tokens


def _as_they_are(tokens: NDArray[np.integer], ends: bool, tokenizer: Tokenizer) -> Iterator[EncodedPiece]:
    """Documents that are tokens already: after each that ends a document another begins."""
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < tokenizer.vocab_size:
        wrong = int(tokens.min() if tokens.min() < 0 else tokens.max())
        raise UserError(
            f"token {wrong:,} is none of the {tokenizer.vocab_size:,} of the tokenizer ({tokenizer.kind}); say which "
            "tokenizer they are of"
        )
    after = np.flatnonzero(tokens == tokenizer.end) + 1 if tokenizer.end is not None else np.empty(0, np.int64)
    parts = np.split(tokens.astype(np.int64), after)
    for number, part in enumerate(parts):
        last = number == len(parts) - 1
        if part.size or last:
            yield EncodedPiece(part, tokenizer.count_bytes(part), ends if last else True)


@dataclass
class Ends:
    """Where pieces end that follow one another, in tokens and in bytes of text, and which of them end a document."""

    tokens: array[int] = field(default_factory=lambda: array("q", [0]))
    bytes: array[int] = field(default_factory=lambda: array("q", [0]))
    documents: array[int] = field(default_factory=lambda: array("q", [0]))

    def add(self, piece: EncodedPiece) -> None:
        """Note a piece, and with the last one of a document that has any tokens its end."""
        self.tokens.append(self.tokens[-1] + len(piece.tokens))
        self.bytes.append(self.bytes[-1] + piece.size)
        if piece.ends and self.tokens[-1] > self.tokens[self.documents[-1]]:
            self.documents.append(len(self.tokens) - 1)

    def split(self, validation: float) -> int:
        """Where to cut the tokens in two: the last part is what was asked for, or whole documents if one ends near."""
        total = self.tokens[-1]
        cut = min(max(1, int(total * (1 - validation))), total - 1)
        ends = np.frombuffer(self.tokens, np.int64)[np.frombuffer(self.documents, np.int64)]
        near = int(ends[np.abs(ends - cut).argmin()])
        return near if 0 < near < total and abs(near - cut) <= (total - cut) / 2 else cut

    def part(self, tokens: Tokens, start: int, stop: int, tokenizer: Tokenizer) -> TokenRun:
        """Some of the tokens, and of their documents."""
        places, sizes = np.frombuffer(self.tokens, np.int64), np.frombuffer(self.bytes, np.int64)
        last = np.frombuffer(self.documents, np.int64)
        inner = (places[last] > start) & (places[last] < stop)
        starts = places[last][inner]
        at = [self._bytes_before(place, tokens, tokenizer) for place in (start, stop)]
        bytes_at = np.concatenate([at[:1], sizes[last][inner], at[1:]])
        return TokenRun(tokens[start:stop], starts - start, np.diff(bytes_at))

    def _bytes_before(self, place: int, tokens: Tokens, tokenizer: Tokenizer) -> int:
        """Bytes of the text before a token; within a piece, its tokens are decoded."""
        piece = int(np.searchsorted(np.frombuffer(self.tokens, np.int64), place))
        if self.tokens[piece] == place:
            return self.bytes[piece]
        before = tokenizer.count_bytes(np.asarray(tokens[self.tokens[piece - 1] : place]))
        return min(self.bytes[piece - 1] + before, self.bytes[piece])


@dataclass(frozen=True)
class EncodedText:
    """Documents as tokens, in memory.

    Attributes:
        tokens: of all documents.
        ends: where they end.
        lost: what has no token.
    """

    tokens: NDArray[np.uint32]
    ends: Ends
    lost: Counter[str]


def encoded_text(source: DocumentSource, tokenizer: Tokenizer, at_most: tuple[int, int] | None = None) -> EncodedText:
    """Read documents as tokens.

    Args:
        at_most: so many sequences of so many tokens are enough.

    Raises:
        UserError: for what cannot be read or encoded.
    """
    parts: list[NDArray[np.uint32]] = []
    ends, lost = Ends(), Counter[str]()
    for piece in encoded(Reading([source]), tokenizer, lost, BATCH if at_most is None else 1):
        documents, start = len(ends.documents) - 1, ends.tokens[ends.documents[-1]]
        parts.append(piece.tokens.astype(np.uint32))
        ends.add(piece)
        if at_most is not None and documents + (ends.tokens[-1] - start) // at_most[1] > at_most[0]:
            break
    return EncodedText(np.concatenate(parts) if parts else np.empty(0, np.uint32), ends, lost)


def said_of(lost: Mapping[str, int]) -> str:
    """How much of a text has no token, in a sentence; nothing where all has."""
    if not lost:
        return ""
    total, names = sum(lost.values()), [repr(each) for each, _ in Counter(lost).most_common(5)]
    if len(lost) == 1 and len(name := next(iter(lost))) > 1:
        what = f"{total:,} words or characters" if total > 1 else "1 word or character"
        return f"the tokenizer has no token for {what} of the text, which become{'' if total > 1 else 's'} {name!r}"
    which = ", ".join([*names, *(["..."] if len(lost) > 5 else [])])
    how = f"are dropped ({which})" if total > 1 else f"is dropped ({which})"
    return f"the tokenizer has no token for {counted(total, 'character')} of the text, which {how}"
