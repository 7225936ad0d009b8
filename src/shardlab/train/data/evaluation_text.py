"""Documents that a model is judged by, each cut into sequences of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from shardlab.common.errors import UserError
from shardlab.train.data.documents import Input, map_text
from shardlab.train.data.prepare import encoded_text
from shardlab.train.data.prepared_folder import Prepared
from shardlab.train.data.stream import Numbers, TokenRun
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


def first_bytes(run: TokenRun, tokenizer: Tokenizer) -> int:
    """Bytes of the first token of each document, which nothing predicts."""
    firsts = np.append(np.asarray(run.tokens[:1]), np.asarray(run.tokens)[run.starts])
    each, counts = np.unique(firsts, return_counts=True)
    sizes = [tokenizer.count_bytes(token[None]) for token in each]
    return int(np.dot(sizes, counts))
