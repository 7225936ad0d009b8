"""`shardlab sample`: text from a folder's weights, as a user sees it."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from shardlab.cli import main
from shardlab.models import GPT, Mixtral
from shardlab.models.tensors import TextGenerator
from shardlab.train.data.tokenizers import Characters, HuggingFace, Tokenizer
from tests.support.tokenizer_files import byte_fallback, dropping
from tests.train.huggingface.folders import random_run

SMALL = GPT(layers=1, hidden_size=16, heads=2, seq_len=32)
Captured = pytest.CaptureFixture[str]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    random_run(tmp_path / "run", GPT(layers=2, hidden_size=16, heads=2, seq_len=64))
    return tmp_path


def sampled(capsys: Captured, *arguments: str) -> dict[str, object]:
    assert main(["sample", *arguments, "--json"]) == 0
    out, err = capsys.readouterr()
    assert not err
    return json.loads(out)


@pytest.mark.usefixtures("folder")
def test_the_text_begins_with_the_prompt_and_follows_from_the_seed(capsys: Captured) -> None:
    sample = sampled(capsys, "run", "--prompt", "def ", "--tokens", "20")
    assert (sample["prompt"], sample["tokens"], sample["seed"]) == ("def ", 20, 0)
    assert main(["sample", "run", "--prompt", "def ", "--tokens", "20"]) == 0
    out, err = capsys.readouterr()
    assert out == f"def {sample['text']}\n"
    assert err.startswith("20 tokens, ")
    assert sampled(capsys, "run", "--prompt", "def ", "--tokens", "20", "--seed", "1")["text"] != sample["text"]


@pytest.mark.usefixtures("folder")
def test_a_hugging_face_folder_writes_what_the_run_does_with_and_without_a_cache(capsys: Captured) -> None:
    assert main(["convert", "run", "hf"]) == 0
    capsys.readouterr()
    greedy = ("--prompt", "x", "--tokens", "30", "--temperature", "0")
    texts = [
        sampled(capsys, *words)["text"] for words in (["run", *greedy], ["hf", *greedy], ["run", *greedy, "--no-cache"])
    ]
    assert texts[0] == texts[1] == texts[2]


def test_experts_of_a_bounded_mixture_drop_no_token(folder: Path, capsys: Captured) -> None:
    random_run(folder / "experts", Mixtral(layers=1, hidden_size=16, heads=2, seq_len=64))
    random_run(folder / "free", Mixtral(layers=1, hidden_size=16, heads=2, seq_len=64, capacity_factor=None))
    texts = [
        sampled(capsys, name, "--prompt", "a text", "--tokens", "30", "--temperature", "0")
        for name in ("experts", "free")
    ]
    assert texts[0] == texts[1]


@pytest.mark.usefixtures("folder")
def test_a_text_longer_than_the_positions_goes_on_and_says_what_is_seen(capsys: Captured) -> None:
    assert main(["sample", "run", "--prompt", "x", "--tokens", "70"]) == 0
    assert capsys.readouterr().err.endswith("; the model sees the last 64\n")


@pytest.mark.usefixtures("folder")
def test_a_chat_through_a_pipe_answers_each_line_and_says_what_is_dropped(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n\nagain\n"))
    assert main(["sample", "run", "--chat", "--tokens", "5", "--temperature", "0"]) == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 2
    assert err == "1 turn dropped from the beginning: the model sees 64 tokens\n"


@pytest.mark.usefixtures("folder")
def test_a_turn_that_cannot_be_taken_ends_a_pipe_with_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello " * 20))
    assert main(["sample", "run", "--chat", "--tokens", "5"]) == 2
    assert "but the model sees 64; say less" in capsys.readouterr().err


WORDS = "to be or not to be, that is the question"


@pytest.mark.parametrize(
    "tokenizer", [Characters.from_texts([WORDS]), HuggingFace.train([WORDS], 260)], ids=lambda t: t.kind
)
def test_the_tokenizer_beside_the_weights_is_taken_also_after_a_conversion(
    folder: Path, capsys: Captured, tokenizer: Tokenizer
) -> None:
    model = GPT(layers=1, hidden_size=16, heads=2, seq_len=32, vocab_size=tokenizer.vocab_size)
    random_run(folder / "run of words", model, tokenizer=tokenizer)
    assert main(["convert", "run of words", "hf"]) == 0
    assert main(["convert", "hf", "back"]) == 0
    for name, content in tokenizer.files().items():
        assert (folder / "hf" / name).read_bytes() == content
    capsys.readouterr()
    options = ("--prompt", "to be", "--tokens", "9")
    texts = [sampled(capsys, name, *options)["text"] for name in ("run of words", "hf", "back")]
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.usefixtures("folder")
def test_a_prompt_begins_as_the_tokenizer_says_and_the_text_keeps_its_spaces(
    folder: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    library_tokenizer = byte_fallback(["to", "be"], bos=True)
    tokenizer = HuggingFace(library_tokenizer.to_str().encode())
    random_run(folder / "words", replace(SMALL, vocab_size=tokenizer.vocab_size), tokenizer=tokenizer)
    prompt, whole = library_tokenizer.encode("to").ids, library_tokenizer.encode("to be 漢").ids
    read: list[list[int]] = []

    def generate(self: TextGenerator, tokens: list[int], count: int) -> Iterator[int]:
        read.append(tokens)
        return iter(whole[len(prompt) :])

    monkeypatch.setattr(TextGenerator, "generate", generate)
    assert sampled(capsys, "words", "--prompt", "to")["text"] == " be 漢"
    assert read == [prompt]
    assert prompt[0] == 1


def test_characters_of_a_prompt_that_have_no_token_are_said(folder: Path, capsys: Captured) -> None:
    tokenizer = HuggingFace(dropping("abc").to_str().encode())
    random_run(folder / "few", replace(SMALL, vocab_size=4), tokenizer=tokenizer)
    assert main(["sample", "few", "--prompt", "öbö", "--tokens", "3"]) == 0
    assert capsys.readouterr().err.startswith("shardlab: --prompt: the tokenizer has no token for 2 characters")


def test_a_chat_follows_the_template_of_a_hugging_face_folder(
    folder: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = HuggingFace.train([WORDS], 260)
    model = GPT(layers=1, hidden_size=16, heads=2, seq_len=64, vocab_size=tokenizer.vocab_size)
    random_run(folder / "words", model, tokenizer=tokenizer)
    assert main(["convert", "words", "hf"]) == 0
    template = "{% for message in messages %}[{{ message.content }}]{{ eos_token }}{% endfor %}"
    config = {"chat_template": template, "eos_token": "<|endoftext|>"}
    (folder / "hf" / "tokenizer_config.json").write_text(json.dumps(config))
    read: list[list[int]] = []

    def generate(self: TextGenerator, tokens: list[int], count: int) -> Iterator[int]:
        read.append(tokens)
        return iter([*tokenizer.encode_spelled("or not"), tokenizer.end or 0, 1, 2])

    monkeypatch.setattr(TextGenerator, "generate", generate)
    monkeypatch.setattr("sys.stdin", io.StringIO("to be"))
    capsys.readouterr()
    assert main(["sample", "hf", "--chat"]) == 0
    assert capsys.readouterr().out == "or not\n"
    assert read == [tokenizer.encode_spelled("[to be]<|endoftext|>")]
    assert read[0][-1] == tokenizer.end


def test_a_prompt_that_the_tokenizer_cannot_encode_is_one_sentence(folder: Path, capsys: Captured) -> None:
    tokenizer = Characters.from_texts([WORDS])
    model = GPT(layers=1, hidden_size=16, heads=2, seq_len=32, vocab_size=tokenizer.vocab_size)
    random_run(folder / "chars", model, tokenizer=tokenizer)
    assert main(["sample", "chars", "--prompt", "x"]) == 2
    assert "the character 'x' is not among the 14 characters of the vocabulary" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run"], "there is no text to continue; give --prompt TEXT, or --chat"),
        (["run", "--prompt", ""], "--prompt is empty; give a value, or leave it out"),
        (["run", "--chat", "--json"], "both --chat and --json were given; give one of them"),
        (["run", "--prompt", "x", "--temperature", "-1"], "temperature is -1; give 0 or more"),
        (["run", "--prompt", "x", "--top-p", "2"], "top-p is 2; give a probability above 0 and of at most 1"),
        (["run", "--prompt", "x", "--top-k", "0"], "--top-k: 0 is too few; give 1 or more"),
        (
            ["run", "--prompt", "x", "--temperature", "0", "--top-k", "5"],
            "--top-k has no effect, because --temperature 0",
        ),
        (
            ["run", "--prompt", "x", "--temperature", "0", "--top-p", ".5"],
            "--top-p has no effect, because --temperature",
        ),
        (["run", "--prompt", "x", "--tokens", "0"], "--tokens: 0 is too few; give 1 or more"),
        (["run", "--prompt", "x", "--temprature", "1"], "there is no option --temprature; did you mean --temperature?"),
        (["nowhere", "--prompt", "x"], "nowhere does not exist; name the folder of a run"),
        (["bare", "--prompt", "x"], "bare has no weights.safetensors, config.json or .metadata"),
        (["few", "--prompt", "x"], "token 120 of the text is outside the model's vocabulary of 65"),
    ],
)
def test_bad_input_is_one_sentence(folder: Path, capsys: Captured, arguments: list[str], said: str) -> None:
    (folder / "bare").mkdir()
    random_run(folder / "few", GPT(layers=1, hidden_size=16, heads=2, seq_len=8, vocab_size=65))
    assert main(["sample", *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("shardlab: ")
    assert said in err
