"""Documents that a model is judged by, each cut into sequences of its own."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardlab.common.errors import UserError
from shardlab.language.rules.kinds import counted
from shardlab.train.data.documents import PIECE, DocumentSource, Input, Piece, decoded, map_text
from shardlab.train.data.prepared_folder import Prepared
from shardlab.train.data.stream import Numbers, TokenRun, Tokens
from shardlab.train.data.tokenizers import ByteTokenizer, Tokenizer, same


@dataclass(frozen=True)
class JudgedText:
    """A text as sequences: a document's first token is not predicted, and no sequence goes on into the next document.

    Attributes:
        run: the documents' tokens.
        tokenizer: which text they stand for.
        seq_len: tokens of a sequence.
        lost: what has no token, and how often it occurs.
    """

    run: TokenRun
    tokenizer: Tokenizer
    seq_len: int
    lost: Mapping[str, int] = field(default_factory=dict[str, int])

    @cached_property
    def _documents(self) -> tuple[Numbers, Numbers, Numbers]:
        """Each document's first and last token, and its sequences: (documents,) each."""
        first, last = np.append(0, self.run.starts), np.append(self.run.starts, len(self.run.tokens)) - 1
        return first, last, -(-(last - first) // self.seq_len)

    @cached_property
    def _spans(self) -> tuple[Numbers, Numbers]:
        """Where each sequence begins, and its last target: (sequences,) each."""
        first, last, counts = self._documents
        place: Numbers = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        starts: Numbers = np.repeat(first, counts) + place * self.seq_len
        return starts, np.minimum(starts + self.seq_len, np.repeat(last, counts))

    def __len__(self) -> int:
        """How many sequences there are."""
        return len(self._spans[0])

    def lengths(self, sequences: int) -> Numbers:
        """Tokens that each of the first sequences predicts: (sequences,)."""
        starts, ends = self._spans
        return (ends - starts)[:sequences]

    def cut(self, numbers: Numbers, width: int | None = None) -> tuple[Numbers, Numbers]:
        """Tokens and targets of some sequences, (numbers, width) each; -1 and token 0 where there are no more.

        Args:
            numbers: of the sequences; beyond the last there are empty ones.
            width: no less than the longest of them has (None: `seq_len`).
        """
        shape = len(numbers), self.seq_len if width is None else width
        tokens, targets = np.zeros(shape, np.int64), np.full(shape, -1)
        starts, ends = self._spans
        for row, number in enumerate(numbers.tolist()):
            if number < len(starts):
                start, end = int(starts[number]), int(ends[number])
                tokens[row, : end - start] = self.run.tokens[start:end]
                targets[row, : end - start] = self.run.tokens[start + 1 : end + 1]
        return tokens, targets

    def bytes(self, sequences: int) -> int:
        """Bytes of the text that the first sequences predict; the token that ends a document stands for none.

        Those of a whole document are the bytes of the text that was encoded, less those of its first token.
        """
        first, last, counts = self._documents
        judged = np.clip(sequences - (np.cumsum(counts) - counts), 0, counts)
        ends = np.minimum(first + judged * self.seq_len, last)
        found = 0
        for number in np.flatnonzero(ends > first).tolist():
            a, b = int(first[number]), int(ends[number])
            whole = None if self.run.sizes is None else int(self.run.sizes[number])
            size = whole if whole is not None and b == last[number] else self._count(a, b + 1)
            found += max(0, size - self._count(a, a + 1))
        return found

    def _count(self, start: int, stop: int) -> int:
        return self.tokenizer.count_bytes(np.asarray(self.run.tokens[start:stop]))


def judged_text(
    path: Path,
    tokenizer: Tokenizer | None,
    seq_len: int,
    *,
    format: str | None = None,
    field: str = "text",
    at_most: int | None = None,
) -> JudgedText:
    """Read what a model is judged by.

    Args:
        path: a prepared folder, whose validation part is taken, or a file.
        tokenizer: the model's (None: nobody says; a folder has its own).
        format: text, jsonl, parquet or tokens (None: by the file's name; a text, if that does not tell).
        field: of a line, or column, that has the text.
        at_most: so many sequences are enough.

    Raises:
        UserError: for what cannot be read or encoded, or has another tokenizer, or no token to predict.
    """
    if path.is_dir():
        prepared = Prepared.open(path)
        own = prepared.tokenizer()
        if tokenizer is not None and not same(own, tokenizer):
            raise UserError(
                f"{path} has another tokenizer ({own.kind}, {own.vocab_size:,} tokens) than the model "
                f"({tokenizer.kind}, {tokenizer.vocab_size:,} tokens); give the text itself, or prepare it alike"
            )
        found = JudgedText(prepared.run("validation"), own, seq_len, prepared.manifest.lost)
    else:
        assert tokenizer is not None, "a file's tokens are the model's"
        given = Input.guess(path, field) if format is None else Input.of(path, format, field)
        found = _encoded(given, tokenizer, seq_len, at_most)
    if not len(found):
        raise UserError(
            f"{path} has no token to predict: each is predicted from those before it in its document; give two or more"
        )
    return found


def _encoded(given: Input, tokenizer: Tokenizer, seq_len: int, at_most: int | None) -> JudgedText:
    """A file's tokens, as `shardlab data prepare` would make them; bytes of a text stay in its file."""
    if given.format == "text" and isinstance(tokenizer, ByteTokenizer):
        text = map_text(given.path)
        run = TokenRun(np.frombuffer(text, np.uint8), sizes=np.array([len(text)]))
        return JudgedText(run, tokenizer, seq_len)
    text = encoded_text(given, tokenizer, None if at_most is None else (at_most, seq_len))
    run = text.ends.part(text.tokens, 0, len(text.tokens), tokenizer)
    return JudgedText(run, tokenizer, seq_len, text.lost)


# Documents as tokens: those of files or of an iterable, with the bytes of text that they stand for.


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


def first_bytes(run: TokenRun, tokenizer: Tokenizer) -> int:
    """Bytes of the first token of each document, which nothing predicts."""
    firsts = np.append(np.asarray(run.tokens[:1]), np.asarray(run.tokens)[run.starts])
    each, counts = np.unique(firsts, return_counts=True)
    sizes = [tokenizer.count_bytes(token[None]) for token in each]
    return int(np.dot(sizes, counts))
