"""Making a prepared folder: documents to tokens, in two parts, with checksums."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np

from shardlab.common.errors import UserError, unknown
from shardlab.common.files import whole_folder
from shardlab.train.data.documents import PIECE, DocumentSource, Input
from shardlab.train.data.evaluation_text import Ends, Progress, Reading, encoded, said_of
from shardlab.train.data.prepared_folder import MANIFEST, PARTS, FileSum, Manifest, Prepared, TokenCount, kept_tokenizer
from shardlab.train.data.stream import Tokens
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
