"""What a run trains on: texts, documents, prepared folders, or several of them with weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from shardlab.common.errors import UserError
from shardlab.common.files import want_file
from shardlab.language.rules.kinds import counted
from shardlab.train.data.documents import Documents, DocumentSource, Input, Text, default_text, map_text
from shardlab.train.data.prepare import encoded_text, said_of
from shardlab.train.data.prepared_folder import COMPARED, PARTS, RECORDED, Prepared, checksum
from shardlab.train.data.stream import FINEST, SequenceStream, TokenRun, shares_of
from shardlab.train.data.tokenizers import ByteTokenizer, Tokenizer, same

AT_ONCE = 100_000_000
"""Bytes of a file that every rank makes tokens of by itself."""

DEFAULT = "the source of Python's standard library"


@dataclass(frozen=True)
class Origin:
    """Where a corpus comes from.

    Attributes:
        name: the text's, or the folder's.
        identity: equal for equal data: a checksum, which every rank compares with the others'.
        record: by which anybody can find the data again; computed when it is asked for, by one rank.
    """

    name: str
    identity: str
    record: Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Corpus:
    """Tokens in two parts: one is trained on, the other only judged by.

    Attributes:
        training, validation: the parts.
        tokenizer: which text the tokens stand for.
        origins: one for each source.
        notes: sentences on texts that were encoded just now: by what, and what of them has no token.
    """

    training: SequenceStream
    validation: SequenceStream
    tokenizer: Tokenizer
    origins: tuple[Origin, ...]
    notes: tuple[str, ...] = ()

    @classmethod
    def split(cls, text: Text, seq_len: int, source: str = "the text") -> Corpus:
        """A text as bytes: the first nine tenths for training, the rest for validation, `seq_len` tokens at least each.

        Args:
            source: what an error and the record call the text.

        Raises:
            UserError: when it is too short for that.
        """
        needed = seq_len + 1  # a sequence and the byte that comes next
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
            str(checksum(text, COMPARED)),
            lambda: {"source": source, **asdict(checksum(text, RECORDED))},
        )
        parts = tokens[:-held_out], tokens[-held_out:]
        training, validation = (TokenRun(part, sizes=np.array([len(part)])) for part in parts)
        return cls(SequenceStream((training,)), SequenceStream((validation,)), ByteTokenizer(), (origin,))

    @classmethod
    def of(cls, documents: DocumentSource, tokenizer: Tokenizer, seq_len: int, validation: float = 0.1) -> Corpus:
        """Documents as tokens, in memory: of a file (`Input`), or of a Python iterable (`Documents`).

        Args:
            documents: what is read, once.
            tokenizer: by which they become tokens.
            seq_len: tokens of a sequence, of which each part has one at least.
            validation: the part of the tokens, at the end, that is not trained on; whole documents if one ends near.

        Raises:
            UserError: for what cannot be read or encoded, or is too short.

        >>> from shardlab.train.data import ByteTokenizer, Documents
        >>> corpus = Corpus.of(Documents(["a document", "and another one"] * 9), ByteTokenizer(), seq_len=8)
        >>> len(corpus.training.runs[0].tokens), corpus.training.runs[0].documents
        (200, 16)
        """
        text = encoded_text(documents, tokenizer)
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
            raise UserError(f"{name}: every document of a part is one token, so none is predicted; join them")
        of_tokens = partial(checksum, text.tokens.data.cast("B"))
        identity = f"{tokenizer.kind} {of_tokens(COMPARED)}"
        record = {"source": name, "tokenizer": tokenizer.kind, "lost": dict(text.lost)}
        origin = Origin(name, identity, lambda: {**record, "tokens": asdict(of_tokens(RECORDED))})
        documents_in = counted(len(text.ends.documents) - 1, "document")
        notes = [f"{name}: {documents_in}, {total:,} tokens ({_about(tokenizer)})"]
        if text.lost:
            notes.append(f"{name}: {said_of(text.lost)}")
        return cls(training, validating, tokenizer, (origin,), tuple(notes))

    @classmethod
    def prepared(cls, folder: Path, seq_len: int, *, verify: bool = False) -> Corpus:
        """A prepared folder, mapped into memory.

        Args:
            verify: compare all checksums, if the folder is small enough for that to take no longer than a second.

        Raises:
            UserError: for a torn folder, or one of which a part has no whole sequence.
        """
        found = Prepared.open(folder)
        if verify and found.bytes <= RECORDED:
            found.verify()
        for part, count in (("training", found.manifest.training), ("validation", found.manifest.validation)):
            if count.tokens <= seq_len:
                raise UserError(
                    f"{folder} has {count.tokens:,} tokens for {part} but {seq_len + 1:,} are needed (a sequence of "
                    f"{seq_len:,} and the next token); take more data or a smaller --seq-len"
                )
            if count.documents >= count.tokens:
                raise UserError(f"{folder}: every document for {part} is one token, so none is predicted; join them")
        origin = Origin(str(folder), found.sha256, lambda: {"source": str(folder), "manifest_sha256": found.sha256})
        training, validation = (SequenceStream((found.run(part),)) for part in PARTS)
        return cls(training, validation, found.tokenizer(), (origin,))

    @classmethod
    def open(
        cls,
        sources: Sequence[DataSource],
        seq_len: int,
        *,
        tokenizer: Tokenizer | None = None,
        of: str = "the model",
        verify: bool = False,
    ) -> Corpus:
        """The sources by turns, in the ratio of their weights; without any, the default text.

        Args:
            tokenizer: makes tokens of files, and is that of folders (None: bytes, and what folders have).
            of: whose tokenizer it is.
            verify: as in `prepared`.

        Raises:
            UserError: for what cannot be read, and for sources whose tokens mean different things.
        """
        if not sources:
            if tokenizer is None or isinstance(tokenizer, ByteTokenizer):
                return cls.split(default_text(), seq_len, DEFAULT)
            return cls.of(Documents([default_text().rpartition(b"\n")[0]], DEFAULT), tokenizer, seq_len)
        found = [cls._source(source.path, seq_len, tokenizer, of, verify=verify) for source in sources]
        first, *others = found
        for other, source in zip(others, sources[1:], strict=True):
            if not same(first.tokenizer, other.tokenizer):
                raise UserError(
                    f"{source.path} has another tokenizer ({_about(other.tokenizer)}) than {sources[0].path} "
                    f"({_about(first.tokenizer)}); prepare all with one tokenizer"
                )
        shares = shares_of([source.weight for source in sources])
        if 0 in shares:
            path, weight = sources[shares.index(0)].path, sources[shares.index(0)].weight
            raise UserError(f"{path}: a weight of {weight:g} is less than a part in {FINEST}; give more, or leave out")
        return cls(
            SequenceStream(tuple(run for each in found for run in each.training.runs), shares),
            SequenceStream(tuple(run for each in found for run in each.validation.runs), shares),
            first.tokenizer if tokenizer is None else tokenizer,
            tuple(origin for each in found for origin in each.origins),
            tuple(note for each in found for note in each.notes),
        )

    @classmethod
    def _source(cls, path: Path, seq_len: int, tokenizer: Tokenizer | None, of: str, *, verify: bool) -> Corpus:
        """One source; a text whose tokens are its bytes stays in its file."""
        if path.is_dir():
            found = cls.prepared(path, seq_len, verify=verify)
            if tokenizer is not None and not same(found.tokenizer, tokenizer):
                raise UserError(
                    f"{path} has another tokenizer ({_about(found.tokenizer)}) than {of} ({_about(tokenizer)}); give "
                    f"the text itself, or prepare it by --tokenizer {of}"
                )
            return found
        given, by = Input.guess(path), tokenizer or ByteTokenizer()
        if given.format == "text" and isinstance(by, ByteTokenizer):
            return cls.split(map_text(path), seq_len, str(path))
        if given.format == "tokens" and tokenizer is None:
            raise UserError(
                f"{path} has tokens, not a text; say whose they are (nanoGPT's are gpt2's) by shardlab data prepare "
                f"{path} --tokenizer gpt2 --out FOLDER, and give the folder"
            )
        if given.size > AT_ONCE:
            whose = "" if tokenizer is None else f" --tokenizer {of}"
            raise UserError(
                f"{path} has {given.size:,} bytes, of which every rank would make tokens; make them once by shardlab "
                f"data prepare {path}{whose} --out FOLDER, and give the folder"
            )
        return cls.of(given, by, seq_len)

    @property
    def identity(self) -> str:
        """Equal for equal data."""
        shares = self.training.shares
        return repr([(origin.identity, share) for origin, share in zip(self.origins, shares, strict=True)])

    def record(self) -> list[dict[str, Any]]:
        """Each source, by which it can be found again, with its share of the sequences."""
        total = sum(self.training.shares)
        each = zip(self.origins, self.training.shares, strict=True)
        return [{**origin.record(), "share": share / total} for origin, share in each]

    def want_vocabulary(self, vocab_size: int, of: str | None = None) -> None:
        """Refuse a model that does not know all tokens that occur.

        Args:
            vocab_size: the model's.
            of: the folder that its weights come from, if they do: their vocabulary is as large as it is.

        Raises:
            UserError: with the largest token, and what to do.
        """
        if vocab_size >= self.tokenizer.vocab_size:
            return
        runs = (run for part in (self.training, self.validation) for run in part.runs)
        if (largest := max(run.largest for run in runs)) >= vocab_size:
            names = ", ".join(origin.name for origin in self.origins)
            what = (
                f"give --vocab-size {self.tokenizer.vocab_size}"
                if of is None
                else f"leave that token out, for {of} has no row for it"
            )
            raise UserError(
                f"{names}: tokens go up to {largest:,} ({self.tokenizer.kind}), but the model's vocabulary is "
                f"{vocab_size:,}; {what}"
            )


def _about(tokenizer: Tokenizer) -> str:
    return f"{tokenizer.kind}, {tokenizer.vocab_size:,} tokens"


# Names of data on a command line or in a TOML file: paths, with weights if there are several.


@dataclass(frozen=True)
class DataSource:
    """A prepared folder or a text, and how often it is drawn from compared with others.

    Raises:
        UserError: neither is there, a file of the folder is missing or has another size, or the weight cannot be.
    """

    path: Path
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise UserError(f"{self.path}: a weight of {self.weight:g} cannot be; give a number greater than 0")
        if self.path.is_dir():
            Prepared.open(self.path)
        else:
            want_file(self.path)


def sources_of(words: Sequence[str] | Mapping[str, float]) -> tuple[DataSource, ...]:
    """The sources of `PATH`s or `PATH:WEIGHT`s, or of a table of paths and weights.

    A path that is there is taken as it is, also with a colon in it.

    Raises:
        UserError: for what is not there, and a weight that cannot be.
    """
    if isinstance(words, Mapping):
        return tuple(DataSource(Path(path), weight) for path, weight in words.items())
    return tuple(_source(word) for word in words)


def _source(word: str) -> DataSource:
    path, colon, weight = word.rpartition(":")
    if not colon or Path(word).exists():
        return DataSource(Path(word))
    try:
        return DataSource(Path(path), float(weight))
    except UserError:
        raise
    except ValueError:
        raise UserError(f"{word}: {weight!r} is no weight; give PATH:NUMBER, as in {path}:0.7") from None
