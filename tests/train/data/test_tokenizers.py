"""Every tokenizer gives back the text that it was given, also from its files."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportMissingTypeStubs=false
# tokenizers leaves its annotations out.

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from shardlab.common.errors import UserError
from shardlab.train.data import tokenizers as bpe
from shardlab.train.data.prepared_folder import find_tokenizer
from shardlab.train.data.tokenizers import (
    END,
    ByteTokenizer,
    Characters,
    Gpt2,
    HuggingFace,
    Tokenizer,
    decode_incrementally,
    export_tokenizer,
    read_tokenizer,
    same_tokens,
)
from tests.support import tokenizer_files
from tests.support.tokenizer_files import of_transformers

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
    tokenizer = Characters.from_texts(["cab", "é€\U0001f41f"])
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
    tokenizer = Characters.from_texts([text])
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
    with pytest.raises(UserError, match="give a complete") as refusal:
        read_tokenizer(tmp_path / "tokenizer.json")
    assert "\n" not in str(refusal.value)


def test_a_text_that_is_not_utf8_is_refused_with_its_place() -> None:
    with pytest.raises(UserError, match=r"not UTF-8 \(byte 0xff after b'caf'\)"):
        Characters("acf").encode([b"caf\xff"])


def of_library(library_tokenizer: Any, **beside: object) -> HuggingFace:
    """A tokenizer of the library as ours, with files beside it, by their names without .json."""
    files = {f"{name}.json": json.dumps(content).encode() for name, content in beside.items()}
    return HuggingFace(library_tokenizer.to_str().encode(), companions=files)


SENTENCE = "This is a test; Zoë saw 3 漢字 and a 🐟."
KINDS: dict[str, HuggingFace] = {
    "byte-level": HuggingFace.train([TEXT], 300),
    "byte fallback": of_library(tokenizer_files.byte_fallback(["This", "is", "a", "test"])),
    "metaspace": of_library(tokenizer_files.metaspace([TEXT, SENTENCE] * 3)),
    "words": of_library(tokenizer_files.words(["This", "is", "a", "test"])),
}


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_tokens_decoded_as_they_come_are_the_text_of_all_together(kind: str, data: st.DataObject) -> None:
    """Any tokens, those of broken characters too."""
    tokenizer = KINDS[kind]
    tokens = data.draw(st.lists(st.integers(0, tokenizer.vocab_size), max_size=40))
    before = data.draw(st.integers(0, len(tokens)))
    parts = list(decode_incrementally(tokens[before:], tokenizer, tokens[:before]))
    assert len(parts) == len(tokens) - before
    assert tokenizer.decode(np.array(tokens[:before], np.int64)) + b"".join(parts) == tokenizer.decode(np.array(tokens))


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text(st.sampled_from(" \n" + SENTENCE), max_size=30))
def test_a_text_is_decoded_as_the_library_decodes_it(kind: str, text: str) -> None:
    tokenizer = KINDS[kind]
    (tokens,) = tokenizer.encode([text.encode()])
    library = tokenizers.Tokenizer.from_str(tokenizer.files()["tokenizer.json"].decode())
    assert tokenizer.decode(tokens).decode() == library.decode(tokens.tolist(), skip_special_tokens=False)


def test_a_character_of_several_tokens_is_bytes_of_each() -> None:
    for kind in ("byte-level", "byte fallback"):
        tokens = tokens_of(KINDS[kind], "a漢")
        parts = list(decode_incrementally(tokens, KINDS[kind]))
        assert b"".join(parts) == "a漢".encode()
        assert parts[-3:] == [b"\xe6", b"\xbc", b"\xa2"]


def test_the_first_word_after_a_prompt_keeps_its_space() -> None:
    tokenizer = KINDS["byte fallback"]
    prompt, both = tokens_of(tokenizer, "This"), tokens_of(tokenizer, "This is a test")
    assert b"".join(decode_incrementally(both[len(prompt) :], tokenizer, prompt)) == b" is a test"


GEMMA = ("<pad>", "<bos>", "<eos>", "<unk>")


@pytest.mark.parametrize(
    ("beside", "end"),
    [
        ({}, "<eos>"),
        ({"tokenizer_config": {"eos_token": "<bos>"}}, "<bos>"),
        ({"tokenizer_config": {"eos_token": {"content": "<pad>"}}, "config": {"eos_token_id": 1}}, "<pad>"),
        ({"special_tokens_map": {"eos_token": "<pad>"}}, "<pad>"),
        ({"config": {"eos_token_id": 3}, "generation_config": {"eos_token_id": [1, 2]}}, "<unk>"),
        ({"config": {"eos_token_id": None}, "generation_config": {"eos_token_id": [1, 2]}}, "<bos>"),
        ({"config": {"eos_token_id": 9999}}, "<eos>"),
        ({"tokenizer_config": {"eos_token": "<not there>"}}, "<eos>"),
    ],
)
def test_files_beside_a_tokenizer_say_which_token_ends_a_document(beside: dict[str, object], end: str) -> None:
    """And a guess by name prefers special tokens: Gemma's vocabulary has the HTML tag </s> too."""
    library_tokenizer = tokenizer_files.byte_level(GEMMA, first=True)
    library_tokenizer.add_tokens([tokenizers.AddedToken("</s>", special=False)])
    assert of_library(library_tokenizer, **beside).end == GEMMA.index(end)


@pytest.mark.parametrize("name", ["<|endoftext|>", "</s>", "<eos>", "<\uff5cend▁of▁sentence\uff5c>"])
def test_the_end_of_a_document_has_many_names(name: str) -> None:
    assert of_library(tokenizer_files.byte_level(["<a>", name], first=True)).end == 1


@pytest.mark.parametrize(
    ("config", "begin"),
    [
        ({}, (1,)),
        ({"add_bos_token": True, "bos_token": "</s>"}, (2,)),
        ({"add_bos_token": False, "bos_token": "<s>"}, ()),
        ({"bos_token": "</s>"}, (1,)),
    ],
)
def test_the_post_processor_says_what_begins_a_text_unless_a_file_does(
    config: dict[str, object], begin: tuple[int, ...]
) -> None:
    library_tokenizer = tokenizer_files.byte_fallback(["is"], bos=True)
    assert of_library(library_tokenizer, tokenizer_config=config).begin == begin
    assert (
        tokens_of(of_library(library_tokenizer), "is") == library_tokenizer.encode("is", add_special_tokens=False).ids
    )


def test_bert_begins_a_text_too() -> None:
    library_tokenizer = tokenizer_files.byte_level(["[CLS]", "[SEP]"], first=True)
    library_tokenizer.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 1), ("[CLS]", 0))
    assert of_library(library_tokenizer).begin == (0,)


def test_tokens_that_only_files_beside_it_have_are_added() -> None:
    library_tokenizer = tokenizer_files.byte_level()
    listed = {"256": {"content": "<|endoftext|>"}, "257": {"content": "<tool>"}, "300": {"content": "<far>"}}
    tokenizer = of_library(
        library_tokenizer, tokenizer_config={"added_tokens_decoder": listed}, added_tokens={"<call>": 258}
    )
    assert tokenizer.vocab_size == 259
    assert tokenizer.encode_spelled("<tool><call>") == [257, 258]
    assert len(tokens_of(tokenizer, "<tool>")) == 6


@pytest.mark.parametrize(
    ("tokenizer", "lost"),
    [
        (of_library(tokenizer_files.dropping("abcdefgh .")), {"ö": 2, "ß": 1, "M": 1}),
        (of_library(tokenizer_files.words(["a", "bad"])), {"<unk>": 1}),
        (of_library(tokenizer_files.byte_level()), {}),
        (of_library(tokenizer_files.byte_fallback(["a"])), {}),
        (Characters.from_texts(["aböß Md"]), {}),
    ],
    ids=["dropped", "unknown words", "byte-level", "byte fallback", "characters"],
)
def test_characters_without_a_token_are_counted(tokenizer: Tokenizer, lost: dict[str, int]) -> None:
    text = "a bad ößöM".encode()
    (tokens,) = tokenizer.encode([text])
    assert tokenizer.count_lost(text, tokens) == lost


def test_tokenizers_are_the_same_if_their_tokens_mean_the_same_text() -> None:
    ours = Gpt2(small_gpt2())
    assert same_tokens(ours, HuggingFace(export_tokenizer(ours)["tokenizer.json"]))
    assert same_tokens(ByteTokenizer(), HuggingFace(export_tokenizer(ByteTokenizer())["tokenizer.json"]))
    library_tokenizer = tokenizer_files.byte_level()
    plain, configured = (
        of_library(library_tokenizer),
        of_library(library_tokenizer, tokenizer_config={"eos_token": "<|endoftext|>"}),
    )
    library_tokenizer.add_special_tokens(["[PAD]"])
    padded = of_library(library_tokenizer)
    assert same_tokens(plain, configured)
    assert same_tokens(plain, padded)
    assert same_tokens(padded, plain)
    assert not same_tokens(plain, of_library(tokenizer_files.byte_level(first=True)))
    assert not same_tokens(Characters.from_texts(map(chr, range(128))), ByteTokenizer())
    assert not same_tokens(KINDS["byte-level"], HuggingFace.train([TEXT], 290))


# An exported tokenizer gives the same tokens in Hugging Face's libraries.


TEXT_of_exported = " Zoë's 3 naïve\tcafés,  it 's \r\n\n “quoted” \x00\x7f . 東京 🙂!\n "
TOKENIZERS = [ByteTokenizer(), Characters.from_texts([TEXT_of_exported])]


def written(folder: Path, tokenizer: Tokenizer) -> Path:
    for name, content in (export_tokenizer(tokenizer) | tokenizer.files()).items():
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=lambda tokenizer: tokenizer.kind)
def test_both_libraries_give_our_tokens_and_the_text_again(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (ours,) = tokenizer.encode([TEXT_of_exported.encode()])
    fast = of_transformers("AutoTokenizer").from_pretrained(written(tmp_path, tokenizer))
    assert fast.is_fast
    assert len(fast) == tokenizer.vocab_size
    assert (
        fast.encode(TEXT_of_exported, add_special_tokens=False) == fast(TEXT_of_exported)["input_ids"] == ours.tolist()
    )
    assert fast.decode(ours.tolist()) == TEXT_of_exported
    alone = HuggingFace((tmp_path / "tokenizer.json").read_bytes())
    assert np.array_equal(alone.encode([TEXT_of_exported.encode()])[0], ours)
    assert alone.decode(ours) == TEXT_of_exported.encode()


def test_every_byte_is_the_token_that_it_is_here(tmp_path: Path) -> None:
    written(tmp_path, ByteTokenizer())
    fast = of_transformers("AutoTokenizer").from_pretrained(tmp_path)
    for point in range(0x110, 0x3000, 0xFF):
        assert fast.encode(chr(point)) == list(chr(point).encode())


def test_a_character_without_a_token_raises_there_too(tmp_path: Path) -> None:
    fast = of_transformers("AutoTokenizer").from_pretrained(written(tmp_path, Characters.from_texts(["abc"])))
    with pytest.raises(Exception, match="vocabulary"):
        fast.encode("abd")


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=lambda tokenizer: tokenizer.kind)
def test_an_exported_tokenizer_reads_back_as_ours(tmp_path: Path, tokenizer: Tokenizer) -> None:
    exported = find_tokenizer(written(tmp_path, tokenizer))
    assert type(exported) is type(tokenizer)


def test_pairs_of_gpt2_become_a_file_that_gives_the_same_tokens(tmp_path: Path) -> None:
    tokenizer = Gpt2(small_gpt2())
    (ours,) = tokenizer.encode([TEXT_of_exported.encode()])
    fast = of_transformers("AutoTokenizer").from_pretrained(written(tmp_path, tokenizer))
    assert fast(TEXT_of_exported)["input_ids"] == ours.tolist()
    assert (fast.eos_token_id, len(fast)) == (tokenizer.end, tokenizer.vocab_size)


def test_transformers_knows_which_token_ends_a_document(tmp_path: Path) -> None:
    tokenizer = HuggingFace.train([TEXT_of_exported], 260)
    fast = of_transformers("AutoTokenizer").from_pretrained(written(tmp_path, tokenizer))
    assert fast.eos_token_id == tokenizer.end
    assert of_transformers("GenerationConfig").from_pretrained(tmp_path).eos_token_id == tokenizer.end


def test_fields_in_a_tokenizers_own_files_stay() -> None:
    own = {"tokenizer_config.json": b'{"eos_token": "a"}', "generation_config.json": b'{"eos_token_id": [1, 2]}'}
    plain = HuggingFace.train([TEXT_of_exported], 260).files()
    tokenizer = HuggingFace(plain["tokenizer.json"], companions=own | {"config.json": b"{}"})
    assert export_tokenizer(tokenizer) == plain | own
