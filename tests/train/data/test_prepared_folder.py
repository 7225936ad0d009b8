"""Checksums of texts."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest

from shardlab.common.errors import UserError
from shardlab.train.data.prepared_folder import (
    HASHED_PIECES,
    checksum,
    find_tokenizer,
    require_tokenizer,
    tokenizer_record,
)
from shardlab.train.data.tokenizers import ByteTokenizer, Characters, HuggingFace, Tokenizer, same_tokens

TEXT = bytes(range(256)) * 40


def test_of_a_small_text_it_is_what_sha256sum_prints() -> None:
    result = checksum(TEXT, len(TEXT))
    assert (result.bytes, result.sha256, result.of) == (len(TEXT), hashlib.sha256(TEXT).hexdigest(), "the whole text")


def test_of_a_large_text_it_can_be_computed_again_from_its_own_words() -> None:
    result = checksum(TEXT, 1280)
    words = re.fullmatch(r"(\d+) pieces of (\d+) bytes.* \(bytes - (\d+)\) \* i // (\d+)", result.of)
    assert words
    pieces, size, same_size, steps = map(int, words.groups())
    assert (pieces, size, same_size, steps) == (HASHED_PIECES, 20, 20, HASHED_PIECES - 1)
    starts = [(result.bytes - size) * i // steps for i in range(pieces)]
    assert (starts[0], starts[-1]) == (0, len(TEXT) - size)
    assert result.sha256 == hashlib.sha256(b"".join(TEXT[start : start + size] for start in starts)).hexdigest()


def test_texts_that_differ_at_an_end_or_in_length_differ() -> None:
    texts = [TEXT, b"x" + TEXT[1:], TEXT[:-1] + b"x", TEXT + TEXT]
    assert len({checksum(text, 1280) for text in texts}) == 4


# The tokenizer beside a model's weights is the one that it was trained with, or a sentence says what is wrong.


TEXT_of_kept = "To be, or not to be, that is the question. " * 9
TOKENIZERS = [ByteTokenizer(), Characters.from_texts([TEXT_of_kept]), HuggingFace.train([TEXT_of_kept], 270)]


def written(folder: Path, tokenizer: Tokenizer, *, record: bool = True) -> Path:
    """A folder as a run leaves it, or as one of Hugging Face's form is."""
    for name, content in tokenizer.files().items():
        (folder / name).write_bytes(content)
    if record:
        (folder / "run.json").write_text(json.dumps({"tokenizer": tokenizer_record(tokenizer)}))
    return folder


@pytest.mark.parametrize("record", [True, False], ids=["run", "hf"])
@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=lambda tokenizer: tokenizer.kind)
def test_a_stored_tokenizer_is_restored(tmp_path: Path, tokenizer: Tokenizer, record: bool) -> None:
    restored = require_tokenizer(written(tmp_path, tokenizer, record=record), tokenizer.vocab_size)
    assert same_tokens(restored, tokenizer)
    (tokens,) = restored.encode([TEXT_of_kept.encode()])
    assert restored.decode(tokens) == TEXT_of_kept.encode()


@pytest.mark.parametrize("place", ["checkpoints/step-000004", "ema.safetensors"])
def test_checkpoints_and_files_of_a_run_have_the_run_s_tokenizer(tmp_path: Path, place: str) -> None:
    run = tmp_path / "run"
    run.mkdir()
    written(run, TOKENIZERS[1])
    assert same_tokens(require_tokenizer(run / place, TOKENIZERS[1].vocab_size), TOKENIZERS[1])


def test_a_run_without_a_record_has_bytes_and_another_folder_only_if_its_vocabulary_is_theirs(tmp_path: Path) -> None:
    assert find_tokenizer(tmp_path) is None
    assert require_tokenizer(tmp_path, 256).kind == "bytes"
    with pytest.raises(UserError, match=r"has no tokenizer .*, and a vocabulary of 50,257 tokens is not that of bytes"):
        require_tokenizer(tmp_path, 50257)
    (tmp_path / "run.json").write_text("{}")
    assert require_tokenizer(tmp_path, 65).kind == "bytes"


def test_a_tokenizer_that_has_changed_or_gone_is_refused(tmp_path: Path) -> None:
    written(tmp_path, TOKENIZERS[1])
    path = tmp_path / "vocabulary.json"
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(UserError, match=r"vocabulary\.json has another checksum than run\.json says"):
        find_tokenizer(tmp_path)
    path.unlink()
    with pytest.raises(UserError, match=r"vocabulary\.json is missing: .*; copy the run's folder whole"):
        find_tokenizer(tmp_path)


@pytest.mark.parametrize("tokenizer", ["chars", {"kind": "chars"}, {"kind": "chars", "files": {"a": {"size": 1}}}])
def test_a_record_that_is_none_is_refused(tmp_path: Path, tokenizer: object) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"tokenizer": tokenizer}))
    with pytest.raises(UserError, match=r"run\.json: tokenizer"):
        find_tokenizer(tmp_path)


@pytest.mark.parametrize("content", ["{}", '["ab"]', "[1]"])
def test_a_vocabulary_that_is_none_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "vocabulary.json").write_text(content)
    with pytest.raises(UserError, match=r"vocabulary\.json is not a list of characters"):
        find_tokenizer(tmp_path)


def test_special_tokens_are_text_unless_a_template_spells_them() -> None:
    tokenizer = TOKENIZERS[2]
    spelled = "to be<|endoftext|>"
    assert tokenizer.encode_spelled(spelled)[-1] == tokenizer.end
    (tokens,) = tokenizer.encode([spelled.encode()])
    assert tokenizer.end not in tokens.tolist()
    assert tokenizer.encode_spelled("to be") == tokenizer.encode([b"to be"])[0].tolist()
