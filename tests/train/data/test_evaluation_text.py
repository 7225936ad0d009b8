"""Evaluation texts: documents apart, every token but the first predicted once, and bytes counted."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from shardlab.common.errors import UserError
from shardlab.train.data.documents import Documents, Input
from shardlab.train.data.evaluation_text import EvaluationText, count_first_token_bytes, read_eval_text
from shardlab.train.data.prepare import encode_in_memory, prepare
from shardlab.train.data.tokenizers import ByteTokenizer, Characters, HuggingFace
from tests.support import tokenizer_files

DOCUMENTS = ["abcde", "f", "", "ghi", "jk" * 9]
BYTES = ByteTokenizer()
LLAMA = HuggingFace(tokenizer_files.byte_fallback(["is", "it"], bos=True).to_str().encode())
BYTE_LEVEL = HuggingFace(tokenizer_files.byte_level().to_str().encode())


def jsonl(path: Path, documents: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    return path


def read(text: EvaluationText) -> list[tuple[bytes, bytes]]:
    """Each sequence's tokens and targets that count, as text."""
    tokens, targets = text.cut(np.arange(len(text)))
    return [
        (text.tokenizer.decode(t[y >= 0]), text.tokenizer.decode(y[y >= 0]))
        for t, y in zip(tokens, targets, strict=True)
    ]


def test_a_document_begins_a_sequence_and_its_first_token_is_not_predicted(tmp_path: Path) -> None:
    text = read_eval_text(jsonl(tmp_path / "a.jsonl", DOCUMENTS[:4]), BYTES, 3)
    assert read(text) == [(b"abc", b"bcd"), (b"d", b"e"), (b"gh", b"hi")]
    assert text.bytes(len(text)) == 4 + 2
    assert [text.bytes(count) for count in range(4)] == [0, 3, 4, 6]


def test_beyond_the_last_sequence_nothing_counts(tmp_path: Path) -> None:
    text = read_eval_text(jsonl(tmp_path / "a.jsonl", DOCUMENTS), BYTES, 4)
    tokens, targets = text.cut(np.arange(len(text) - 1, len(text) + 2))
    assert (tokens.shape, targets.shape) == ((3, 4), (3, 4))
    assert (targets[0] >= 0).any()
    assert (targets[1:] == -1).all()


def test_a_text_is_one_document_whatever_its_name(tmp_path: Path) -> None:
    for name, format in (("a.txt", None), ("a.py", None), ("a.jsonl", "text")):
        (tmp_path / name).write_text("{}\nabc\n")
        text = read_eval_text(tmp_path / name, BYTES, 16, format=format)
        assert read(text) == [(b"{}\nabc", b"}\nabc\n")]


def test_the_end_of_a_document_is_predicted_but_is_no_text(tmp_path: Path) -> None:
    words = "the whole of it\n" * 20
    tokenizer = HuggingFace.train([words], 270)
    text = read_eval_text(jsonl(tmp_path / "a.jsonl", [words, words]), tokenizer, 64)
    _, targets = text.cut(np.arange(len(text)))
    assert (targets == tokenizer.end).sum() == 2
    (first,) = tokenizer.encode([words.encode()])
    assert text.bytes(len(text)) == 2 * (len(words) - len(tokenizer.decode(first[:1])))


def test_a_prepared_folder_is_evaluated_by_its_validation_part(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", ["some words", "other words", "the last words"])
    prepare([Input.from_path(source, None, "text")], tmp_path / "data", "chars", validation=0.3)
    characters = Characters.from_texts(["some words", "other words", "the last words"])
    text = read_eval_text(tmp_path / "data", characters, 16)
    assert read(text) == [(b"the last word", b"he last words")]
    assert read(read_eval_text(tmp_path / "data", None, 16)) == read(text)
    with pytest.raises(UserError, match=r"has another tokenizer \(chars, 12 tokens\) than the model \(bytes, 256 tok"):
        read_eval_text(tmp_path / "data", BYTES, 16)


def test_no_more_is_read_than_is_asked_for(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", ["abcdefgh"] * 50)
    path.write_text(path.read_text() + "no JSON\n")
    text = read_eval_text(path, BYTES, 4, at_most=10)
    assert 10 <= len(text) <= 20
    with pytest.raises(UserError, match="line 51 is not JSON"):
        read_eval_text(path, BYTES, 4)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("a", "has no token to predict"),
        ("", "has no token to predict"),
        ("abx", "a.txt: the character 'x' is not among the 2 characters of the vocabulary"),
        (b"ab\xff", "a.txt: the text is not UTF-8"),
    ],
)
def test_a_text_that_cannot_be_evaluated_is_refused_in_one_sentence(
    tmp_path: Path, content: str | bytes, said: str
) -> None:
    (tmp_path / "a.txt").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=said):
        read_eval_text(tmp_path / "a.txt", Characters.from_texts(["ab"]), 8)


def test_every_target_of_many_documents_is_there_once(tmp_path: Path) -> None:
    generator = random.Random(0)
    documents = ["".join(generator.choices("abcdefgh", k=generator.randrange(40))) for _ in range(60)]
    text = read_eval_text(jsonl(tmp_path / "a.jsonl", documents), BYTES, 7)
    joined = b"".join(targets for _, targets in read(text))
    assert joined == "".join(document[1:] for document in documents).encode()
    assert text.bytes(len(text)) == len(joined)


def test_a_document_that_begins_within_a_character_counts_its_other_bytes(tmp_path: Path) -> None:
    """Its first token is one byte of three."""
    texts = ["漢字です", "日本", "€5", "🐟"]
    tokenizer = HuggingFace(tokenizer_files.byte_level().to_str().encode())
    text = read_eval_text(jsonl(tmp_path / "a.jsonl", texts), tokenizer, 64)
    assert text.bytes(len(text)) == sum(len(document.encode()) - 1 for document in texts)
    assert int(text.lengths(len(text)).sum()) == sum(len(document.encode()) for document in texts), (
        "and the end of each"
    )


def test_after_begin_tokens_all_text_of_a_document_is_predicted(tmp_path: Path) -> None:
    texts = ["is it 漢", "it"]
    tokenizer = HuggingFace(tokenizer_files.byte_fallback(["is", "it"], bos=True).to_str().encode())
    text = read_eval_text(jsonl(tmp_path / "a.jsonl", texts), tokenizer, 64)
    assert text.bytes(len(text)) == sum(len(document.encode()) for document in texts)
    assert text.cut(np.arange(2))[0][:, 0].tolist() == [1, 1]


@pytest.mark.parametrize("prepared", [False, True])
def test_dropped_characters_count_as_text(tmp_path: Path, prepared: bool) -> None:
    tokenizer = HuggingFace(tokenizer_files.dropping("abcdefgh ").to_str().encode())
    source = jsonl(tmp_path / "a.jsonl", ["öa bad öd", "aßb"] * 2)
    path = prepare([Input.from_path(source, None, "text")], tmp_path / "out", tokenizer, validation=0.5).folder
    text = read_eval_text(path if prepared else source, tokenizer, 64)
    assert text.bytes(len(text)) == (10 + 3) * (1 if prepared else 2)
    assert text.lost_counts == {"ö": 4, "ß": 2}


def test_sequences_may_be_cut_narrower_in_any_order(tmp_path: Path) -> None:
    text = read_eval_text(jsonl(tmp_path / "a.jsonl", DOCUMENTS[:4]), BYTES, 8)
    tokens, targets = text.cut(np.array([1, 5, 0]), 5)
    assert bytes(tokens[0].tolist()) == b"gh\0\0\0"
    assert targets[1].tolist() == [-1] * 5
    assert bytes(targets[2][:4].tolist()) == b"bcde"


def test_the_first_token_of_each_document_is_left_out() -> None:
    text = encode_in_memory(Documents(["漢字", "€", "a"]), BYTE_LEVEL)
    run = text.ends.part(text.tokens, 0, len(text.tokens), BYTE_LEVEL)
    assert count_first_token_bytes(run, BYTE_LEVEL) == 3
    begun = encode_in_memory(Documents(["is", "it"]), LLAMA)
    assert count_first_token_bytes(begun.ends.part(begun.tokens, 0, len(begun.tokens), LLAMA), LLAMA) == 0
