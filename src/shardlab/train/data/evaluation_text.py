"""Texts on which a model is evaluated. No sequence contains parts of two documents.

`read_eval_text` opens the validation part of a prepared folder, or any file of documents. Unlike in training, every
token but the first of a document is predicted exactly once. The bytes of text that the tokens represent are counted, so
that models with different tokenizers can be compared in bits per byte.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from shardlab.common.errors import UserError
from shardlab.train.data.documents import Input, map_text
from shardlab.train.data.prepare import encode_in_memory
from shardlab.train.data.prepared_folder import PreparedFolder
from shardlab.train.data.stream import Numbers, TokenRun
from shardlab.train.data.tokenizers import ByteTokenizer, Tokenizer, same_tokens


@dataclass(frozen=True)
class EvaluationText:
    """Text, cut into sequences that each lie within one document. The first token of a document is not predicted.

    Attributes:
        run: the tokens of all documents.
        tokenizer: maps the tokens to text.
        seq_len: largest number of tokens of a sequence.
        lost_counts: characters or words without a token, and how often they occur.
    """

    run: TokenRun
    tokenizer: Tokenizer
    seq_len: int
    lost_counts: Mapping[str, int] = field(default_factory=dict[str, int])

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self._spans[0])

    def lengths(self, sequences: int) -> Numbers:
        """Return the number of targets of each of the first `sequences` sequences: (sequences,)."""
        starts, ends = self._spans
        return (ends - starts)[:sequences]

    def cut(self, numbers: Numbers, width: int | None = None) -> tuple[Numbers, Numbers]:
        """Return tokens and targets of some sequences, (numbers, width) each, padded with token 0 and target -1.

        Args:
            numbers: indices of sequences; an index beyond the last gives an empty sequence.
            width: width of the result, at least the length of the longest sequence (None: `seq_len`).
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
        """Count the bytes of text of the targets of the first `sequences` sequences. An end token has no bytes.

        For a whole document, these are the bytes of its text without those of its first token.
        """
        first, last, counts = self._documents
        used_counts = np.clip(sequences - (np.cumsum(counts) - counts), 0, counts)
        ends = np.minimum(first + used_counts * self.seq_len, last)
        total = 0
        for document in np.flatnonzero(ends > first).tolist():
            start, end = int(first[document]), int(ends[document])
            document_bytes = None if self.run.sizes is None else int(self.run.sizes[document])
            size = (
                document_bytes
                if document_bytes is not None and end == last[document]
                else self._count_bytes(start, end + 1)
            )
            total += max(0, size - self._count_bytes(start, start + 1))
        return total

    @cached_property
    def _documents(self) -> tuple[Numbers, Numbers, Numbers]:
        """First token, last token, and number of sequences of each document: (documents,) each."""
        first, last = np.append(0, self.run.starts), np.append(self.run.starts, len(self.run.tokens)) - 1
        return first, last, -(-(last - first) // self.seq_len)

    @cached_property
    def _spans(self) -> tuple[Numbers, Numbers]:
        """Index of the first token and of the last target of each sequence: (sequences,) each."""
        first, last, counts = self._documents
        index: Numbers = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        starts: Numbers = np.repeat(first, counts) + index * self.seq_len
        return starts, np.minimum(starts + self.seq_len, np.repeat(last, counts))

    def _count_bytes(self, start: int, stop: int) -> int:
        return self.tokenizer.count_bytes(np.asarray(self.run.tokens[start:stop]))


def read_eval_text(
    path: Path,
    tokenizer: Tokenizer | None,
    seq_len: int,
    *,
    format: str | None = None,
    field: str = "text",
    at_most: int | None = None,
) -> EvaluationText:
    """Open a text to evaluate a model on.

    Args:
        path: a prepared folder, whose validation part is used, or a file.
        tokenizer: the model's tokenizer (None: unknown; a folder then uses its own).
        seq_len: largest number of tokens of a sequence.
        format: text, jsonl, parquet or tokens (None: by the file's suffix; text for an unknown suffix).
        field: field of a JSON line, or column of a Parquet file, that has the text.
        at_most: number of sequences after which reading may stop (None: read everything).

    Raises:
        UserError: if the text cannot be read or encoded, has another tokenizer, or has no token to predict.
    """
    if path.is_dir():
        prepared = PreparedFolder.open(path)
        if format is not None or field != "text":
            raise UserError(f"--format and --field are for a file, and {path} is a prepared folder; leave them out")
        folder_tokenizer = prepared.tokenizer()
        if tokenizer is not None and not same_tokens(folder_tokenizer, tokenizer):
            raise UserError(
                f"{path} has another tokenizer ({folder_tokenizer.kind}, {folder_tokenizer.vocab_size:,} tokens) than "
                f"the model ({tokenizer.kind}, {tokenizer.vocab_size:,} tokens); give the text, or prepare it for "
                "the model"
            )
        text = EvaluationText(prepared.run("validation"), folder_tokenizer, seq_len, prepared.manifest.lost)
    else:
        assert tokenizer is not None, "a file's tokens are the model's"
        file = Input.guess(path, field) if format is None else Input.from_path(path, format, field)
        if field != "text" and file.format not in ("jsonl", "parquet"):
            raise UserError(f"--field {field} is for JSON lines and Parquet, and {path} is {file.format}; leave it out")
        text = _read_file(file, tokenizer, seq_len, at_most)
    if not len(text):
        raise UserError(
            f"{path} has no token to predict, since the first token of a document is not predicted; give a longer text"
        )
    return text


def count_first_token_bytes(run: TokenRun, tokenizer: Tokenizer) -> int:
    """Count the bytes of text of all documents' first tokens, which are not predicted."""
    firsts = np.append(np.asarray(run.tokens[:1]), np.asarray(run.tokens)[run.starts])
    tokens, counts = np.unique(firsts, return_counts=True)
    sizes = [tokenizer.count_bytes(token[None]) for token in tokens]
    return int(np.dot(sizes, counts))


def _read_file(file: Input, tokenizer: Tokenizer, seq_len: int, at_most: int | None) -> EvaluationText:
    """Encode a file as `shardlab data prepare` does. If bytes are tokens, the text is mapped instead."""
    if file.format == "text" and isinstance(tokenizer, ByteTokenizer):
        text = map_text(file.path)
        run = TokenRun(np.frombuffer(text, np.uint8), sizes=np.array([len(text)]))
        return EvaluationText(run, tokenizer, seq_len)
    text = encode_in_memory(file, tokenizer, None if at_most is None else (at_most, seq_len))
    run = text.ends.part(text.tokens, 0, len(text.tokens), tokenizer)
    return EvaluationText(run, tokenizer, seq_len, text.lost_counts)
