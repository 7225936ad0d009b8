"""An exported tokenizer gives the same tokens in Hugging Face's libraries."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportMissingTypeStubs=false
# transformers and tokenizers leave most of their annotations out.

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from shardlab.data.bpe import Gpt2, HuggingFace
from shardlab.data.exported import exported
from shardlab.data.kept import kept_tokenizer
from shardlab.data.tokenizers import ByteTokenizer, Characters, Tokenizer
from tests.data.test_tokenizers import small_gpt2

TEXT = " Zoë's 3 naïve\tcafés,  it 's \r\n\n “quoted” \x00\x7f . 東京 🙂!\n "
TOKENIZERS = [ByteTokenizer(), Characters.of([TEXT])]
AutoTokenizer: Any = transformers.AutoTokenizer


def written(folder: Path, tokenizer: Tokenizer) -> Path:
    for name, content in (exported(tokenizer) | tokenizer.files()).items():
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=lambda each: each.kind)
def test_both_libraries_give_our_tokens_and_the_text_again(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (ours,) = tokenizer.encode([TEXT.encode()])
    fast: Any = AutoTokenizer.from_pretrained(written(tmp_path, tokenizer))
    assert fast.is_fast
    assert len(fast) == tokenizer.vocab_size
    assert fast.encode(TEXT, add_special_tokens=False) == fast(TEXT)["input_ids"] == ours.tolist()
    assert fast.decode(ours.tolist()) == TEXT
    alone = HuggingFace((tmp_path / "tokenizer.json").read_bytes())
    assert np.array_equal(alone.encode([TEXT.encode()])[0], ours)
    assert alone.decode(ours) == TEXT.encode()


def test_every_byte_is_the_token_that_it_is_here(tmp_path: Path) -> None:
    written(tmp_path, ByteTokenizer())
    fast: Any = AutoTokenizer.from_pretrained(tmp_path)
    for point in range(0x110, 0x3000, 0xFF):
        assert fast.encode(chr(point)) == list(chr(point).encode())


def test_a_character_without_a_token_raises_there_too(tmp_path: Path) -> None:
    fast: Any = AutoTokenizer.from_pretrained(written(tmp_path, Characters.of(["abc"])))
    with pytest.raises(Exception, match="vocabulary"):
        fast.encode("abd")


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=lambda each: each.kind)
def test_what_was_exported_is_our_own_tokenizer_again(tmp_path: Path, tokenizer: Tokenizer) -> None:
    found = kept_tokenizer(written(tmp_path, tokenizer))
    assert type(found) is type(tokenizer)


def test_pairs_of_gpt2_become_a_file_that_gives_the_same_tokens(tmp_path: Path) -> None:
    tokenizer = Gpt2(small_gpt2())
    (ours,) = tokenizer.encode([TEXT.encode()])
    fast: Any = AutoTokenizer.from_pretrained(written(tmp_path, tokenizer))
    assert fast(TEXT)["input_ids"] == ours.tolist()
    assert (fast.eos_token_id, len(fast)) == (tokenizer.end, tokenizer.vocab_size)


def test_transformers_knows_which_token_ends_a_document(tmp_path: Path) -> None:
    tokenizer = HuggingFace.train([TEXT], 260)
    fast: Any = AutoTokenizer.from_pretrained(written(tmp_path, tokenizer))
    assert fast.eos_token_id == tokenizer.end
    assert transformers.GenerationConfig.from_pretrained(tmp_path).eos_token_id == tokenizer.end


def test_what_a_tokenizer_s_own_files_say_stays() -> None:
    own = {"tokenizer_config.json": b'{"eos_token": "a"}', "generation_config.json": b'{"eos_token_id": [1, 2]}'}
    plain = HuggingFace.train([TEXT], 260).files()
    tokenizer = HuggingFace(plain["tokenizer.json"], beside=own | {"config.json": b"{}"})
    assert exported(tokenizer) == plain | own
