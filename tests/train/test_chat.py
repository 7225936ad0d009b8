"""A conversation: turns that are cut where they end, and dropped where the model has no room for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardlab.data.bpe import HuggingFace
from shardlab.data.chat import chat_template
from shardlab.data.tokenizers import ByteTokenizer
from shardlab.models import GPT
from shardlab.models.tensors import Choice, Writer, initial_weights
from shardlab.program import UserError
from shardlab.train.chat import Conversation, until
from tests.support.tokenizer_files import byte_fallback

MODEL = GPT(layers=1, hidden_size=16, heads=2, seq_len=64)


def conversation(monkeypatch: pytest.MonkeyPatch, folder: Path, answers: list[str]) -> tuple[Conversation, list[str]]:
    """A conversation with a model that says what it is given to say; and what it was given to read."""
    read: list[str] = []

    def go_on(self: Writer, tokens: list[int], count: int) -> Iterator[int]:
        read.append(bytes(tokens).decode())
        return iter(answers[len(read) - 1].encode()[:count])

    monkeypatch.setattr(Writer, "go_on", go_on)
    tokenizer = ByteTokenizer()
    flats = [initial_weights(MODEL, 0, 0, torch.float32)]
    template = chat_template(folder, tokenizer)
    return Conversation(MODEL, flats, tokenizer, template, Choice(), 16), read


def test_an_answer_ends_where_the_next_turn_begins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    talk, read = conversation(monkeypatch, tmp_path, [" I.\nUser: no", "Nay"])
    assert "".join(talk.answer("Who?")) == "I."
    assert "".join(talk.answer("So?")) == "Nay"
    assert read[1] == "User: Who?\nAssistant: I.\nUser: So?\nAssistant:"
    assert talk.dropped == 0


def test_an_answer_keeps_its_spaces_and_characters_and_is_fed_back_whole(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = byte_fallback(["is", "it", "so"])
    tokenizer, said = HuggingFace(made.to_str().encode()), "so it is 漢字"
    read: list[list[int]] = []

    def go_on(self: Writer, tokens: list[int], count: int) -> Iterator[int]:
        read.append(tokens)
        return iter(made.encode(said).ids)

    monkeypatch.setattr(Writer, "go_on", go_on)
    model = replace(MODEL, seq_len=200, vocab_size=tokenizer.vocab_size)
    flats = [torch.zeros(model.layout(0).numel)]
    talk = Conversation(model, flats, tokenizer, chat_template(tmp_path, tokenizer), Choice(), 40)
    assert "".join(talk.answer("is it?")) == said
    "".join(talk.answer("so?"))
    assert tokenizer.decode(np.array(read[1])).decode() == f"User: is it?\nAssistant: {said}\nUser: so?\nAssistant:"


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
    assert all(len(each) <= MODEL.seq_len - 16 for each in read)


def test_a_turn_without_room_is_refused_and_the_talk_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    talk, read = conversation(monkeypatch, tmp_path, ["Ay."])
    with pytest.raises(UserError, match=r"this turn has 77 tokens with its template, but the model sees 64; say less"):
        "".join(talk.answer("x" * 60))
    assert "".join(talk.answer("Art thou?")) == "Ay."
    assert read == ["User: Art thou?\nAssistant:"]


def test_each_answer_has_a_seed_of_its_own(tmp_path: Path) -> None:
    tokenizer = ByteTokenizer()
    flats = [torch.zeros(MODEL.layout(0).numel)]
    talk = Conversation(MODEL, flats, tokenizer, chat_template(tmp_path, tokenizer), Choice(), 8)
    first = "".join(talk.answer("a"))
    talk.messages = []
    assert "".join(talk.answer("a")) != first


@pytest.mark.parametrize(
    ("parts", "shown"),
    [(["ab", "c\n", "Us", "er:", "d"], "abc"), (["a\nUs", "e"], "a\nUse"), (["a\n", "\nUser:"], "a\n"), ([], "")],
)
def test_a_text_is_shown_up_to_where_the_stop_begins(parts: list[str], shown: str) -> None:
    assert "".join(until(iter(parts), "\nUser:")) == shown


def test_nothing_that_may_be_the_stop_is_shown_early() -> None:
    given: Any = iter(["a\nUs", "ually"])
    assert list(until(given, "\nUser:")) == ["a", "\nUsually", ""]
