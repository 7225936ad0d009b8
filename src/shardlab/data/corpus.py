"""What a run trains on: a text as bytes, a prepared folder, or several of them with weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardlab.data.checksum import COMPARED, RECORDED, checksum
from shardlab.data.manifest import PARTS, Prepared
from shardlab.data.sources import DataSource
from shardlab.data.stream import FINEST, SequenceStream, TokenRun, shares_of
from shardlab.data.text import Text, default_text, map_text
from shardlab.data.tokenizers import ByteTokenizer, Tokenizer, same
from shardlab.errors import UserError

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
    """

    training: SequenceStream
    validation: SequenceStream
    tokenizer: Tokenizer
    origins: tuple[Origin, ...]

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
        training, validation = TokenRun(tokens[:-held_out]), TokenRun(tokens[-held_out:])
        return cls(SequenceStream((training,)), SequenceStream((validation,)), ByteTokenizer(), (origin,))

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
    def open(cls, sources: Sequence[DataSource], seq_len: int, *, verify: bool = False) -> Corpus:
        """The sources by turns, in the ratio of their weights; without any, the default text.

        Args:
            verify: as in `prepared`.

        Raises:
            UserError: for what cannot be read, and for sources whose tokens mean different things.
        """
        if not sources:
            return cls.split(default_text(), seq_len, DEFAULT)
        found = [
            cls.prepared(source.path, seq_len, verify=verify)
            if source.path.is_dir()
            else cls.split(map_text(source.path), seq_len, str(source.path))
            for source in sources
        ]
        first, *others = found
        for other, source in zip(others, sources[1:], strict=True):
            if not same(first.tokenizer, other.tokenizer):
                raise UserError(
                    f"{source.path} has another tokenizer ({other.tokenizer.kind}, {other.tokenizer.vocab_size:,} "
                    f"tokens) than {sources[0].path} ({first.tokenizer.kind}, {first.tokenizer.vocab_size:,} tokens); "
                    "prepare all with one tokenizer"
                )
        shares = shares_of([source.weight for source in sources])
        if 0 in shares:
            path, weight = sources[shares.index(0)].path, sources[shares.index(0)].weight
            raise UserError(f"{path}: a weight of {weight:g} is less than a part in {FINEST}; give more, or leave out")
        return cls(
            SequenceStream(tuple(run for each in found for run in each.training.runs), shares),
            SequenceStream(tuple(run for each in found for run in each.validation.runs), shares),
            first.tokenizer,
            tuple(origin for each in found for origin in each.origins),
        )

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

    def want_vocabulary(self, vocab_size: int) -> None:
        """Refuse a model that does not know all tokens.

        Raises:
            UserError: with the size that is needed.
        """
        needed = self.tokenizer.vocab_size
        if vocab_size < needed:
            names = ", ".join(origin.name for origin in self.origins)
            raise UserError(
                f"{names}: tokens go up to {needed - 1:,} ({self.tokenizer.kind}), but the model's vocabulary is "
                f"{vocab_size:,}; give --vocab-size {needed}"
            )
