"""Documents that a model is judged by, each cut into sequences of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shardlab.data.documents import SUFFIXES, Input
from shardlab.data.manifest import Prepared
from shardlab.data.shuffle import Numbers
from shardlab.data.stream import NO_STARTS, TokenRun
from shardlab.data.text import map_text
from shardlab.data.tokenizers import ByteTokenizer, Tokenizer, same
from shardlab.errors import UserError


@dataclass(frozen=True)
class JudgedText:
    """A text as sequences: a document's first token is not predicted, and no sequence goes on into the next document.

    Attributes:
        run: the documents' tokens.
        tokenizer: which text they stand for.
        seq_len: tokens of a sequence.
    """

    run: TokenRun
    tokenizer: Tokenizer
    seq_len: int

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

    def cut(self, first: int, count: int) -> tuple[Numbers, Numbers]:
        """Tokens and targets of some sequences, (count, seq_len) each; -1 and token 0 where there are no more."""
        tokens, targets = np.zeros((count, self.seq_len), np.int64), np.full((count, self.seq_len), -1)
        for row, (start, end) in enumerate(zip(*(each[first : first + count] for each in self._spans), strict=True)):
            tokens[row, : end - start] = self.run.tokens[start:end]
            targets[row, : end - start] = self.run.tokens[start + 1 : end + 1]
        return tokens, targets

    def bytes(self, sequences: int) -> int:
        """Bytes of the text that the first sequences predict; the token that ends a document stands for none."""
        first, last, counts = self._documents
        judged = np.clip(sequences - (np.cumsum(counts) - counts), 0, counts)
        ends = np.minimum(first + judged * self.seq_len, last)
        pairs = zip(first.tolist(), ends.tolist(), strict=True)
        return sum(self._count(a, b + 1) - self._count(a, a + 1) for a, b in pairs if a < b)

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
        format: text, jsonl or parquet (None: by the file's name; a text, if that does not tell).
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
        found = JudgedText(prepared.run("validation"), own, seq_len)
    else:
        assert tokenizer is not None, "a file's tokens are the model's"
        given = Input.of(path, format or SUFFIXES.get(path.suffix.lower(), "text"), field)
        found = JudgedText(_encoded(given, tokenizer, seq_len, at_most), tokenizer, seq_len)
    if not len(found):
        raise UserError(
            f"{path} has no token to predict: each is predicted from those before it in its document; give two or more"
        )
    return found


def _encoded(given: Input, tokenizer: Tokenizer, seq_len: int, at_most: int | None) -> TokenRun:
    """A file's tokens, as `shardlab data prepare` would make them; bytes of a text stay in its file."""
    if given.format == "text" and isinstance(tokenizer, ByteTokenizer):
        return TokenRun(np.frombuffer(map_text(given.path), np.uint8))
    parts: list[NDArray[np.uint32]] = []
    starts, written = [0], 0
    for tokens, ends in _pieces(given, tokenizer):
        parts.append(tokens.astype(np.uint32))
        written += len(tokens)
        if at_most is not None and len(starts) - 1 + (written - starts[-1]) // seq_len > at_most:
            break
        if ends and written > starts[-1]:
            starts.append(written)
    inner = np.array([start for start in starts[1:] if start < written], np.int64)
    return TokenRun(np.concatenate(parts) if parts else np.empty(0, np.uint32), inner if inner.size else NO_STARTS)


def _pieces(given: Input, tokenizer: Tokenizer) -> Iterator[tuple[NDArray[np.int64], bool]]:
    """Tokens of each piece, and whether a document ends with it."""
    for piece in given.pieces():
        try:
            (tokens,) = tokenizer.encode([piece.text])
        except UserError as error:
            raise UserError(f"{given.path}: {error}") from None
        if piece.ends and tokenizer.end is not None and given.format != "text" and piece.text:
            tokens = np.append(tokens, tokenizer.end)
        yield tokens, piece.ends
