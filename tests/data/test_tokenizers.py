"""Every tokenizer gives back the text that it was given, also from its files."""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.data import bpe
from shardlab.data.bpe import END, Gpt2, HuggingFace, read_tokenizer
from shardlab.data.tokenizers import ByteTokenizer, Characters, Tokenizer
from shardlab.errors import UserError

TEXT = "The fish swims; the fishes swim. Der Fisch schwimmt über den Fluß. \U0001f41f\n\n  def f(x):\n\treturn\r\n" * 9


def letters() -> dict[int, str]:
    """How GPT-2's files write each byte: as itself where it can be seen, else as a character from 256 on."""
    seen = [byte for byte in range(256) if chr(byte).isprintable() and chr(byte) != " "]
    unseen = [byte for byte in range(256) if byte not in seen]
    return {byte: chr(byte) for byte in seen} | {byte: chr(256 + number) for number, byte in enumerate(unseen)}


def small_gpt2() -> dict[str, bytes]:
    """Files like GPT-2's with three pairs."""
    names = list(letters().values())
    merges = [("t", "h"), ("th", "e"), ("f", "i")]
    vocabulary = {name: number for number, name in enumerate([*names, *("".join(pair) for pair in merges), END])}
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges), ""]
    return {"vocab.bpe": "\n".join(lines).encode(), "encoder.json": json.dumps(vocabulary).encode()}


@pytest.fixture
def gpt2_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder where tiktoken keeps small files like GPT-2's, which are taken for them."""
    files = small_gpt2()
    monkeypatch.setattr(bpe, "GPT2_FILES", {name: hashlib.sha256(text).hexdigest() for name, text in files.items()})
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    for name, text in files.items():
        (tmp_path / name).write_bytes(text)
    return tmp_path


def tokens_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode([text.encode()])[0].tolist()


def test_bytes_are_any_file_at_all() -> None:
    every = bytes(range(256))
    (tokens,) = ByteTokenizer().encode([every])
    assert tokens.tolist() == list(range(256))
    assert ByteTokenizer().decode(tokens) == every


def test_characters_are_numbered_by_their_code_points() -> None:
    tokenizer = Characters.of(["cab", "é€\U0001f41f"])
    assert tokenizer.characters == ["a", "b", "c", "é", "€", "\U0001f41f"]
    assert tokens_of(tokenizer, "bé\U0001f41fa") == [1, 3, 5, 0]


def test_a_character_that_the_vocabulary_lacks_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"the character 'z' is not among the 3 characters"):
        Characters("abc").encode([b"az"])


@given(st.text(min_size=1))
def test_characters_come_back(text: str) -> None:
    try:
        encoded = text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return
    tokenizer = Characters.of([text])
    (tokens,) = Characters.read(tokenizer.files()).encode([encoded])
    assert tokenizer.decode(tokens) == encoded


def test_a_trained_bpe_gives_back_any_text_with_fewer_tokens() -> None:
    trained = HuggingFace.train([TEXT], 300)
    assert 257 < trained.vocab_size <= 300
    tokenizer = HuggingFace(trained.files()["tokenizer.json"])
    for text in (TEXT, "something else: 漢字 \x00\x7f"):
        assert tokenizer.decode(np.array(tokens_of(tokenizer, text))) == text.encode()
    assert len(tokens_of(tokenizer, TEXT)) < 0.7 * len(TEXT.encode())


def test_a_text_that_spells_out_the_end_of_a_document_does_not_end_it() -> None:
    tokenizer = HuggingFace.train([TEXT], 300)
    assert tokenizer.end is not None
    tokens = tokens_of(tokenizer, f"a{END}b")
    assert tokenizer.end not in tokens
    assert tokenizer.decode(np.array(tokens)) == f"a{END}b".encode()


@pytest.mark.usefixtures("gpt2_files")
def test_gpt2_merges_pairs_in_their_order_and_gives_text_back() -> None:
    tokenizer = Gpt2.find()
    assert (tokenizer.vocab_size, tokenizer.end) == (260, 259)
    assert tokens_of(tokenizer, "thefi") == [257, 258]
    again = Gpt2(tokenizer.files())
    assert again.decode(np.array(tokens_of(again, TEXT))) == TEXT.encode()


def test_gpt2_is_found_under_tiktokens_own_names_and_nothing_there_changes(gpt2_files: Path) -> None:
    for name in small_gpt2():
        (gpt2_files / name).rename(gpt2_files / hashlib.sha1((bpe.GPT2_URL + name).encode()).hexdigest())
    before = sorted(gpt2_files.iterdir())
    assert tokens_of(Gpt2.find(), "the") == [257]
    assert sorted(gpt2_files.iterdir()) == before


def test_without_its_files_gpt2_says_what_to_fetch_and_where_to_put_it(gpt2_files: Path) -> None:
    (gpt2_files / "encoder.json").unlink()
    with pytest.raises(UserError, match=r"fetch https://\S+/vocab.bpe and https://\S+/encoder.json .* TIKTOKEN"):
        Gpt2.find()


def test_another_file_in_gpt2s_place_is_refused_and_stays(gpt2_files: Path) -> None:
    (gpt2_files / "vocab.bpe").write_text("something else")
    with pytest.raises(UserError, match=r"vocab.bpe is not GPT-2's vocab.bpe \(its checksum differs\)"):
        Gpt2.find()
    assert (gpt2_files / "vocab.bpe").exists()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": "1.0"}'])
def test_a_file_that_is_no_tokenizer_is_refused_in_a_sentence(content: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match="give a whole") as refusal:
        read_tokenizer(tmp_path / "tokenizer.json")
    assert "\n" not in str(refusal.value)


def test_a_text_that_is_not_utf8_is_refused_with_its_place() -> None:
    with pytest.raises(UserError, match=r"not UTF-8 \(byte 0xff after b'caf'\)"):
        Characters("acf").encode([b"caf\xff"])
