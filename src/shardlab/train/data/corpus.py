"""Corpus of a run: a text, documents, a prepared folder, or several of them mixed by weight.

`Corpus.open` takes the sources that a user names (`parse_sources`) and returns a training and a validation stream of
sequences. A text whose tokens are its bytes stays in its file. Every rank encodes other files when it opens them, so
they must be small: `shardlab data prepare` encodes large files once.

Every corpus has an identity, which the ranks compare, and a record, which says where the data come from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from shardlab.common.errors import UserError
from shardlab.common.files import require_regular_file
from shardlab.common.text import counted
from shardlab.train.data.documents import Documents, DocumentSource, Input, Text, default_text, map_text
from shardlab.train.data.prepare import encode_in_memory, lost_text
from shardlab.train.data.prepared_folder import MOST_COMPARED, MOST_RECORDED, PARTS, PreparedFolder, checksum
from shardlab.train.data.stream import FINEST, SequenceStream, TokenRun, shares_from_weights
from shardlab.train.data.tokenizers import ByteTokenizer, Tokenizer, same_tokens

MOST_BYTES_ENCODED = 100_000_000
"""Largest size in bytes of a file that every rank encodes when it starts."""

DEFAULT_NAME = "the source of Python's standard library"


@dataclass(frozen=True)
class Origin:
    """Origin of a corpus.

    Attributes:
        name: name of the text or path of the folder.
        identity: string that is equal for equal data. The ranks compare it.
        record: function that returns the fields by which the data can be found again. One rank calls it.
    """

    name: str
    identity: str
    record: Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Corpus:
    """Tokens of the training and the validation data, with their tokenizer.

    Attributes:
        training, validation: sequences on which a model is trained, and sequences on which it is evaluated.
        tokenizer: maps the tokens to text.
        origins: where each text or folder comes from (see `Origin`).
        notes: sentences about the texts that were encoded: their tokenizer, and characters without a token.
    """

    training: SequenceStream
    validation: SequenceStream
    tokenizer: Tokenizer
    origins: tuple[Origin, ...]
    notes: tuple[str, ...] = ()

    @classmethod
    def from_text(cls, text: Text, seq_len: int, source: str = "the text") -> Corpus:
        """Take the bytes of a text as tokens: nine tenths for training and the rest for validation.

        Args:
            text: the bytes.
            seq_len: tokens of a sequence. Each part has at least one sequence and the byte after it.
            source: name of the text in errors and in the record.

        Raises:
            UserError: if the text is too short.
        """
        needed = seq_len + 1  # a sequence and the next byte
        if len(text) < 2 * needed:
            raise UserError(
                f"{source} has {len(text)} bytes but {2 * needed} are needed: {needed} in the training part and "
                f"{needed} in the validation part (a sequence of {seq_len} and the next byte); "
                "take a longer text or a smaller --seq-len"
            )
        tokens = np.frombuffer(text, np.uint8)
        held_out = max(len(text) // 10, needed)
        origin = Origin(
            source,
            str(checksum(text, MOST_COMPARED)),
            lambda: {"source": source, **asdict(checksum(text, MOST_RECORDED))},
        )
        parts = tokens[:-held_out], tokens[-held_out:]
        training, validation = (TokenRun(part, sizes=np.array([len(part)])) for part in parts)
        return cls(SequenceStream((training,)), SequenceStream((validation,)), ByteTokenizer(), (origin,))

    @classmethod
    def encode(cls, documents: DocumentSource, tokenizer: Tokenizer, seq_len: int, validation: float = 0.1) -> Corpus:
        """Encode the documents of a file (`Input`) or of a Python iterable (`Documents`) in memory.

        Args:
            documents: the documents, which are read once.
            tokenizer: tokenizer that encodes the documents.
            seq_len: tokens of a sequence. Each part needs at least one sequence.
            validation: share of the tokens that is held out, from the end. The cut is moved to the end of a document if
                one is near.

        Raises:
            UserError: if the documents cannot be read or encoded, or are too short.

        >>> from shardlab.train.data import ByteTokenizer, Documents
        >>> documents = Documents(["a document", "and another one"] * 9)
        >>> corpus = Corpus.encode(documents, ByteTokenizer(), seq_len=8)
        >>> len(corpus.training.runs[0].tokens), corpus.training.runs[0].documents
        (200, 16)
        """
        text = encode_in_memory(documents, tokenizer)
        name, total = documents.name, len(text.tokens)
        if total < 2 * (needed := seq_len + 1):
            raise UserError(
                f"{name} has {total:,} tokens but {2 * needed:,} are needed: {needed:,} in the training part and "
                f"{needed:,} in the validation part (a sequence of {seq_len:,} and the next token); take a longer "
                "text or a smaller --seq-len"
            )
        cut = min(max(text.ends.split(validation), needed), total - needed)
        training, validating = (
            SequenceStream((text.ends.part(text.tokens, start, stop, tokenizer),))
            for start, stop in ((0, cut), (cut, total))
        )
        if any(run.documents >= len(run.tokens) for run in (*training.runs, *validating.runs)):
            raise UserError(
                f"{name}: every document of a part has one token, so no token is predicted; join the documents"
            )
        of_tokens = partial(checksum, text.tokens.data.cast("B"))
        identity = f"{tokenizer.kind} {of_tokens(MOST_COMPARED)}"
        record = {"source": name, "tokenizer": tokenizer.kind, "lost": dict(text.lost_counts)}
        origin = Origin(name, identity, lambda: {**record, "tokens": asdict(of_tokens(MOST_RECORDED))})
        documents_in = counted(len(text.ends.documents) - 1, "document")
        notes = [f"{name}: {documents_in}, {total:,} tokens ({_about(tokenizer)})"]
        if text.lost_counts:
            notes.append(f"{name}: {lost_text(text.lost_counts)}")
        return cls(training, validating, tokenizer, (origin,), tuple(notes))

    @classmethod
    def from_folder(cls, folder: Path, seq_len: int, *, verify: bool = False) -> Corpus:
        """Map a prepared folder into memory.

        Args:
            folder: folder that `shardlab data prepare` has written.
            seq_len: tokens of a sequence.
            verify: compare the checksums of all files, unless the folder has more than MOST_RECORDED bytes.

        Raises:
            UserError: if the folder is incomplete, or one of the parts is shorter than a sequence.
        """
        prepared = PreparedFolder.open(folder)
        if verify and prepared.bytes <= MOST_RECORDED:
            prepared.verify()
        for part, count in (("training", prepared.manifest.training), ("validation", prepared.manifest.validation)):
            if count.tokens <= seq_len:
                raise UserError(
                    f"{folder} has {count.tokens:,} tokens for {part} but {seq_len + 1:,} are needed (a sequence of "
                    f"{seq_len:,} and the next token); take more data or a smaller --seq-len"
                )
            if count.documents >= count.tokens:
                raise UserError(
                    f"{folder}: every document for {part} has one token, so no token is predicted; join the documents"
                )
        name, sha256 = str(folder), prepared.sha256
        origin = Origin(name, sha256, lambda: {"source": name, "manifest_sha256": sha256})
        training, validation = (SequenceStream((prepared.run(part),)) for part in PARTS)
        return cls(training, validation, prepared.tokenizer(), (origin,))

    @classmethod
    def open(
        cls,
        sources: Sequence[DataSource],
        seq_len: int,
        *,
        tokenizer: Tokenizer | None = None,
        owner: str = "the model",
        verify: bool = False,
    ) -> Corpus:
        """Mix the sources in the ratio of their weights. Without sources, open the default text.

        Args:
            sources: texts, files of documents, and prepared folders.
            seq_len: tokens of a sequence.
            tokenizer: tokenizer that encodes the files. Prepared folders must have the same (None: the tokens of files
                are bytes, and each folder has a tokenizer of its own).
            owner: owner of the tokenizer, for error messages.
            verify: compare the checksums of prepared folders, unless they are large.

        Raises:
            UserError: if a source cannot be read, or the tokens of two sources have different meanings.
        """
        if not sources:
            if tokenizer is None or isinstance(tokenizer, ByteTokenizer):
                return cls.from_text(default_text(), seq_len, DEFAULT_NAME)
            return cls.encode(Documents([default_text().rpartition(b"\n")[0]], DEFAULT_NAME), tokenizer, seq_len)
        corpora = [cls._open_source(source.path, seq_len, tokenizer, owner, verify=verify) for source in sources]
        first, *others = corpora
        for other, source in zip(others, sources[1:], strict=True):
            if not same_tokens(first.tokenizer, other.tokenizer):
                raise UserError(
                    f"{source.path} has another tokenizer ({_about(other.tokenizer)}) than {sources[0].path} "
                    f"({_about(first.tokenizer)}); prepare all with one tokenizer"
                )
        shares = shares_from_weights([source.weight for source in sources])
        if 0 in shares:
            path, weight = sources[shares.index(0)].path, sources[shares.index(0)].weight
            raise UserError(f"{path}: a weight of {weight:g} is less than a part in {FINEST}; give more, or leave out")
        return cls(
            SequenceStream(tuple(run for corpus in corpora for run in corpus.training.runs), shares),
            SequenceStream(tuple(run for corpus in corpora for run in corpus.validation.runs), shares),
            first.tokenizer if tokenizer is None else tokenizer,
            tuple(origin for corpus in corpora for origin in corpus.origins),
            tuple(note for corpus in corpora for note in corpus.notes),
        )

    @property
    def identity(self) -> str:
        """String that is equal for equal sources with equal weights in the mix."""
        shares = self.training.shares
        return repr([(origin.identity, share) for origin, share in zip(self.origins, shares, strict=True)])

    def record(self) -> list[dict[str, Any]]:
        """Return the record of each source, with its share of the sequences."""
        total = sum(self.training.shares)
        origins_and_shares = zip(self.origins, self.training.shares, strict=True)
        return [{**origin.record(), "share": share / total} for origin, share in origins_and_shares]

    def require_vocabulary(self, vocab_size: int, weights_folder: str | None = None) -> None:
        """Refuse a model whose vocabulary lacks tokens that occur in the data.

        Args:
            vocab_size: size of the model's vocabulary.
            weights_folder: folder of the model's weights (None: they are random, and may have a larger vocabulary).

        Raises:
            UserError: if the vocabulary is too small. The message names the largest token and the remedy.
        """
        if vocab_size >= self.tokenizer.vocab_size:
            return
        runs = (run for part in (self.training, self.validation) for run in part.runs)
        if (largest := max(run.largest for run in runs)) >= vocab_size:
            names = ", ".join(origin.name for origin in self.origins)
            remedy = (
                f"give --vocab-size {self.tokenizer.vocab_size}"
                if weights_folder is None
                else f"leave that token out, for {weights_folder} has no row for it"
            )
            raise UserError(
                f"{names}: tokens go up to {largest:,} ({self.tokenizer.kind}), but the model's vocabulary is "
                f"{vocab_size:,}; {remedy}"
            )

    @classmethod
    def _open_source(cls, path: Path, seq_len: int, tokenizer: Tokenizer | None, owner: str, *, verify: bool) -> Corpus:
        """Open one source. A text whose tokens are its bytes stays in its file."""
        if path.is_dir():
            corpus = cls.from_folder(path, seq_len, verify=verify)
            if tokenizer is not None and not same_tokens(corpus.tokenizer, tokenizer):
                raise UserError(
                    f"{path} has another tokenizer ({_about(corpus.tokenizer)}) than {owner} "
                    f"({_about(tokenizer)}); give the text itself, or prepare it by --tokenizer {owner}"
                )
            return corpus
        source, encoder = Input.guess(path), tokenizer or ByteTokenizer()
        if source.format == "text" and isinstance(encoder, ByteTokenizer):
            return cls.from_text(map_text(path), seq_len, str(path))
        if source.format == "tokens" and tokenizer is None:
            raise UserError(
                f"{path} has tokens, not a text; name their tokenizer (gpt2 for nanoGPT's) by shardlab data prepare "
                f"{path} --tokenizer gpt2 --out FOLDER, and give the folder"
            )
        if source.size > MOST_BYTES_ENCODED:
            option = "" if tokenizer is None else f" --tokenizer {owner}"
            raise UserError(
                f"{path} has {source.size:,} bytes, all of which every rank would encode; encode them once by shardlab "
                f"data prepare {path}{option} --out FOLDER, and give the folder"
            )
        return cls.encode(source, encoder, seq_len)


@dataclass(frozen=True)
class DataSource:
    """Prepared folder or text, with its weight in a mix.

    Raises:
        UserError: if the path does not exist, a file of the folder is missing or has another size, or the weight is
            not positive.
    """

    path: Path
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise UserError(f"{self.path}: the weight {self.weight:g} is not allowed; give a number greater than 0")
        if self.path.is_dir():
            PreparedFolder.open(self.path)
        else:
            require_regular_file(self.path)


def parse_sources(words: Sequence[str] | Mapping[str, float]) -> tuple[DataSource, ...]:
    """Parse sources that are given as `PATH` or `PATH:WEIGHT`, or as a table of paths and weights.

    If the whole text is an existing path, it is not split at a colon.

    Raises:
        UserError: if a path does not exist, or a weight is not a positive number.
    """
    if isinstance(words, Mapping):
        return tuple(DataSource(Path(path), weight) for path, weight in words.items())
    return tuple(_parse_source(word) for word in words)


def _about(tokenizer: Tokenizer) -> str:
    return f"{tokenizer.kind}, {tokenizer.vocab_size:,} tokens"


def _parse_source(text: str) -> DataSource:
    path, colon, weight = text.rpartition(":")
    if not colon or Path(text).exists():
        return DataSource(Path(text))
    try:
        number = float(weight)
    except ValueError:
        raise UserError(f"{text}: {weight!r} is no weight; give PATH:NUMBER, as in {path}:0.7") from None
    return DataSource(Path(path), number)
