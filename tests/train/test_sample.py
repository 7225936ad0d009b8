"""Prompts that a trained model continues."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardlab.language import UserError
from shardlab.models import GPT, Blocks, MoE
from shardlab.models.tensors import TextGenerator, TokenSampling, initial_weights
from shardlab.train.data import Corpus
from shardlab.train.data.chat import chat_template
from shardlab.train.data.stream import SequenceStream, TokenRun
from shardlab.train.data.tokenizers import ByteTokenizer, HuggingFace
from shardlab.train.sample import PROMPT_BYTES, Conversation, choose_prompt, continue_prompt, cut_at, in_writing
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
    return choose_prompt(Corpus(training, held_out, ByteTokenizer(), ()))


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
    assert choose_prompt(Corpus(SequenceStream((run,)), SequenceStream((run,)), tokenizer, ())) == b"is it a line\x02"


def test_a_sample_goes_on_after_what_begins_every_text_and_keeps_its_spaces() -> None:
    tokenizer = HuggingFace(byte_fallback(["is", "it"], bos=True).to_str().encode())
    (tokens,) = tokenizer.encode([b"is it is"])
    read: list[int] = []

    def generate(prompt: Sequence[int], count: int) -> list[int]:
        read.extend(prompt)
        return tokens[1:].tolist()

    assert continue_prompt(generate, b"is", tokenizer) == "is it is"
    assert read == [1, tokens[0]]


# A conversation: turns that are cut where they end, and dropped where the model has no room for them.


MODEL = GPT(layers=1, hidden_size=16, heads=2, seq_len=64)


def conversation(monkeypatch: pytest.MonkeyPatch, folder: Path, answers: list[str]) -> tuple[Conversation, list[str]]:
    """A conversation with a model that says what it is given to say; and what it was given to read."""
    read: list[str] = []

    def generate(self: TextGenerator, tokens: list[int], count: int) -> Iterator[int]:
        read.append(bytes(tokens).decode())
        return iter(answers[len(read) - 1].encode()[:count])

    monkeypatch.setattr(TextGenerator, "generate", generate)
    tokenizer = ByteTokenizer()
    flats = [initial_weights(MODEL, 0, 0, torch.float32)]
    template = chat_template(folder, tokenizer)
    return Conversation(MODEL, flats, tokenizer, template, TokenSampling(), 16), read


def test_an_answer_ends_where_the_next_turn_begins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    talk, read = conversation(monkeypatch, tmp_path, [" I.\nUser: no", "Nay"])
    assert "".join(talk.answer("Who?")) == "I."
    assert "".join(talk.answer("So?")) == "Nay"
    assert read[1] == "User: Who?\nAssistant: I.\nUser: So?\nAssistant:"
    assert talk.dropped == 0


def test_an_answer_keeps_its_spaces_and_characters_and_is_fed_back_whole(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    library_tokenizer = byte_fallback(["is", "it", "so"])
    tokenizer, answer = HuggingFace(library_tokenizer.to_str().encode()), "so it is 漢字"
    read: list[list[int]] = []

    def generate(self: TextGenerator, tokens: list[int], count: int) -> Iterator[int]:
        read.append(tokens)
        return iter(library_tokenizer.encode(answer).ids)

    monkeypatch.setattr(TextGenerator, "generate", generate)
    model = replace(MODEL, seq_len=200, vocab_size=tokenizer.vocab_size)
    flats = [torch.zeros(model.layout(0).numel)]
    talk = Conversation(model, flats, tokenizer, chat_template(tmp_path, tokenizer), TokenSampling(), 40)
    assert "".join(talk.answer("is it?")) == answer
    "".join(talk.answer("so?"))
    assert tokenizer.decode(np.array(read[1])).decode() == f"User: is it?\nAssistant: {answer}\nUser: so?\nAssistant:"


def test_an_answer_ends_with_a_token_that_ends_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    talk, _ = conversation(monkeypatch, tmp_path, ["Ay.;no"])
    talk.template = replace(talk.template, ends=frozenset(b";"))
    assert "".join(talk.answer("Art thou?")) == "Ay."


def test_oldest_turns_are_dropped_so_that_there_is_room_for_an_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    talk, read = conversation(monkeypatch, tmp_path, ["one", "two", "three", "four"])
    for line in ("first", "second", "third", "fourth"):
        "".join(talk.answer(line))
    assert talk.dropped == 3
    assert read[1:] == [
        "User: second\nAssistant:",
        "User: third\nAssistant:",
        "User: fourth\nAssistant:",
    ]
    assert all(len(prompt) <= MODEL.seq_len - 16 for prompt in read)


def test_a_turn_without_room_is_refused_and_the_talk_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    talk, read = conversation(monkeypatch, tmp_path, ["Ay."])
    with pytest.raises(UserError, match=r"this turn has 77 tokens with its template, but the model sees 64; say less"):
        "".join(talk.answer("x" * 60))
    assert "".join(talk.answer("Art thou?")) == "Ay."
    assert read == ["User: Art thou?\nAssistant:"]


def test_each_answer_has_a_seed_of_its_own(tmp_path: Path) -> None:
    tokenizer = ByteTokenizer()
    flats = [torch.zeros(MODEL.layout(0).numel)]
    talk = Conversation(MODEL, flats, tokenizer, chat_template(tmp_path, tokenizer), TokenSampling(), 8)
    first = "".join(talk.answer("a"))
    talk.messages = []
    assert "".join(talk.answer("a")) != first


@pytest.mark.parametrize(
    ("parts", "shown"),
    [(["ab", "c\n", "Us", "er:", "d"], "abc"), (["a\nUs", "e"], "a\nUse"), (["a\n", "\nUser:"], "a\n"), ([], "")],
)
def test_a_text_is_shown_up_to_where_the_stop_begins(parts: list[str], shown: str) -> None:
    assert "".join(cut_at(iter(parts), "\nUser:")) == shown


def test_nothing_that_may_be_the_stop_is_shown_early() -> None:
    pieces: Any = iter(["a\nUs", "ually"])
    assert list(cut_at(pieces, "\nUser:")) == ["a", "\nUsually", ""]
