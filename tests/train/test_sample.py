"""What a trained model goes on from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from shardlab.data import Corpus
from shardlab.data.bpe import HuggingFace
from shardlab.data.stream import SequenceStream, TokenRun
from shardlab.data.tokenizers import ByteTokenizer
from shardlab.models import GPT, Blocks, MoE
from shardlab.train.sample import PROMPT_BYTES, continued, in_writing, opening
from tests.support.tokenizer_files import byte_fallback


@pytest.mark.parametrize(
    ("model", "most", "threads"),
    [
        (GPT(layers=2, hidden_size=128, heads=2), 64, 1),
        (GPT(layers=2, hidden_size=128, heads=2, seq_len=65_536), 64, 1),  # positions are looked up
        (GPT(layers=2, hidden_size=512, heads=2), 64, 4),
        (GPT(layers=2, hidden_size=512, heads=2), 2, 2),
        (GPT(layers=2, hidden_size=64, heads=2, vocab_size=50_257), 64, 12),
        (MoE(layers=2, hidden_size=256, heads=2), 64, 1),  # each expert by itself
    ],
)
def test_a_text_is_written_on_as_many_threads_as_the_largest_matrix_can_use(
    model: Blocks, most: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    with in_writing(model, most):
        assert torch.get_num_threads() == threads
    assert torch.get_num_threads() == before
    monkeypatch.setenv("OMP_NUM_THREADS", str(before))
    with in_writing(model, most):
        assert torch.get_num_threads() == before


def prompt_of(validation: bytes) -> bytes:
    training, held_out = (SequenceStream((TokenRun(np.frombuffer(text, np.uint8)),)) for text in (b"a", validation))
    return opening(Corpus(training, held_out, ByteTokenizer(), ()))


def test_a_prompt_is_a_whole_line_of_the_validation_text() -> None:
    assert prompt_of(b"ort sys, a_line_that_was_cut\n\n)\n    return self\n# the end of all that") == b"return self"


def test_a_long_line_is_cut_between_characters() -> None:
    prompt = prompt_of(b"a line\n" + "xäöü€".encode() * 10 + b"\nand so on")
    assert PROMPT_BYTES - 3 <= len(prompt) <= PROMPT_BYTES
    assert prompt.decode().startswith("xäöü€xäöü€")


@pytest.mark.parametrize("text", [b"no line at all", b"\n" * 40, b"\x80" * 40, b" "])
def test_any_text_gives_a_prompt(text: bytes) -> None:
    prompt = prompt_of(text)
    assert 0 < len(prompt) <= PROMPT_BYTES
    assert prompt in text


def test_a_prompt_of_the_validation_text_has_no_special_tokens() -> None:
    tokenizer = HuggingFace(byte_fallback(["is"], bos=True).to_str().encode())
    (tokens,) = tokenizer.encode([b"is it a line"])
    run = TokenRun(np.array([*tokenizer.begin, *tokens, tokenizer.end, *tokenizer.begin, 5], np.uint16))
    assert opening(Corpus(SequenceStream((run,)), SequenceStream((run,)), tokenizer, ())) == b"is it a line\x02"


def test_a_sample_goes_on_after_what_begins_every_text_and_keeps_its_spaces() -> None:
    tokenizer = HuggingFace(byte_fallback(["is", "it"], bos=True).to_str().encode())
    (tokens,) = tokenizer.encode([b"is it is"])
    read: list[int] = []

    def go_on(given: Sequence[int], count: int) -> list[int]:
        read.extend(given)
        return tokens[1:].tolist()

    assert continued(go_on, b"is", tokenizer) == "is it is"
    assert read == [1, tokens[0]]
