"""Corpora: documents of files and iterables become tokens by the model's tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from shardlab.common.errors import UserError
from shardlab.train.data import Corpus, DataSource, Documents, corpus
from shardlab.train.data.documents import Input
from shardlab.train.data.prepare import prepare
from shardlab.train.data.tokenizers import ByteTokenizer, HuggingFace
from tests.support import tokenizer_files

TEXTS = [f"is it document {number}?" for number in range(40)]
LLAMA = HuggingFace(tokenizer_files.byte_fallback(["is", "it"], bos=True).to_str().encode())


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"id": 7, "text": text}) + "\n" for text in TEXTS))
    return tmp_path / "a.jsonl"


def all_of(corpus: Corpus) -> list[int]:
    return [*corpus.training.runs[0].tokens.tolist(), *corpus.validation.runs[0].tokens.tolist()]


def test_documents_of_a_file_are_those_that_prepare_makes(lines: Path, tmp_path: Path) -> None:
    for number, tokenizer in enumerate((ByteTokenizer(), LLAMA)):
        corpus = Corpus.open([DataSource(lines)], 8, tokenizer=tokenizer)
        folder = prepare([Input.from_path(lines, None, "text")], tmp_path / f"out{number}", tokenizer).folder
        expected = Corpus.open([DataSource(folder)], 8)
        for mine, theirs in ((corpus.training, expected.training), (corpus.validation, expected.validation)):
            assert mine.runs[0].tokens.tolist() == theirs.runs[0].tokens.tolist()
            assert mine.runs[0].starts.tolist() == theirs.runs[0].starts.tolist()
            assert np.array_equal(mine.runs[0].sizes, theirs.runs[0].sizes)  # pyright: ignore[reportArgumentType]
        tokens, about = f"{len(all_of(corpus)):,} tokens", f"{tokenizer.kind}, {tokenizer.vocab_size} tokens"
        assert corpus.notes == (f"{lines}: 40 documents, {tokens} ({about})",)


def test_without_a_tokenizer_the_bytes_of_documents_are_tokens_but_not_those_around_them(lines: Path) -> None:
    corpus = Corpus.open([DataSource(lines)], 8)
    assert bytes(all_of(corpus)) == "".join(TEXTS).encode()
    assert corpus.training.runs[0].documents == 36


def test_a_text_becomes_tokens_of_the_model_s_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("is it so? " * 50)
    corpus = Corpus.open([DataSource(tmp_path / "a.txt")], 8, tokenizer=LLAMA)
    assert all_of(corpus) == [1, *LLAMA.encode([b"is it so? " * 50])[0].tolist()]
    assert Corpus.open([DataSource(tmp_path / "a.txt")], 8, tokenizer=ByteTokenizer()).notes == ()


def test_the_default_text_becomes_tokens_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "default_text", lambda: b"is it so?\n" * 20 + "€".encode()[:2])
    assert all_of(Corpus.open([], 8, tokenizer=LLAMA))[:2] == [1, LLAMA.encode([b"is"])[0][0]]


def test_data_of_another_tokenizer_than_the_model_s_are_refused(lines: Path, tmp_path: Path) -> None:
    folder = prepare([Documents(TEXTS)], tmp_path / "out", "chars").folder
    with pytest.raises(UserError, match=r"out has another tokenizer \(chars, 22 tokens\) than hf \(tokenizer.json"):
        Corpus.open([DataSource(lines), DataSource(folder)], 8, tokenizer=LLAMA, owner="hf")


def test_tokens_of_unknown_meaning_are_refused_with_a_way_to_say_it(tmp_path: Path) -> None:
    np.arange(200, dtype=np.uint16).tofile(tmp_path / "train.bin")
    with pytest.raises(
        UserError, match=r"train.bin has tokens, not a text; name their tokenizer .* --tokenizer gpt2 --out"
    ):
        Corpus.open([DataSource(tmp_path / "train.bin")], 8)
    corpus = Corpus.open([DataSource(tmp_path / "train.bin")], 8, tokenizer=LLAMA)
    assert all_of(corpus) == list(range(200))


def test_a_large_file_is_to_be_prepared_once(lines: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "MOST_BYTES_ENCODED", 100)
    with pytest.raises(UserError, match=r"encode them once by shardlab data prepare \S+ --tokenizer hf --out FOLDER"):
        Corpus.open([DataSource(lines)], 8, tokenizer=LLAMA, owner="hf")


def test_documents_of_an_iterable_are_a_corpus() -> None:
    corpus = Corpus.encode(Documents(TEXTS, "mine"), LLAMA, seq_len=16, validation=0.25)
    assert corpus.training.runs[0].documents == 30
    assert corpus.record()[0]["source"] == "mine"
    same, other = (Corpus.encode(Documents(texts), LLAMA, seq_len=16) for texts in (TEXTS, TEXTS[1:]))
    assert same.identity == Corpus.encode(Documents(iter(TEXTS)), LLAMA, seq_len=16).identity != other.identity
    with pytest.raises(UserError, match="mine has 10 tokens but 34 are needed: 17 in the training part"):
        Corpus.encode(Documents([list(range(10))], "mine"), LLAMA, seq_len=16)
    with pytest.raises(UserError, match="every document of a part has one token"):
        Corpus.encode(Documents([[5]] * 40, "mine"), LLAMA, seq_len=4)


def test_dropped_characters_are_noted() -> None:
    letters = HuggingFace(tokenizer_files.dropping("abcdefgh ").to_str().encode())
    corpus = Corpus.encode(Documents(["a bad öd"] * 20, "mine"), letters, seq_len=4)
    assert corpus.notes[1].startswith(
        "mine: the tokenizer has no token for 20 characters of the text, which are dropped"
    )
