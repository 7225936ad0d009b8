"""`shardlab eval`: how well a folder's weights know a text, as a user sees it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from shardlab.cli import main
from shardlab.models import GPT, Llama
from shardlab.train.data.evaluation_text import EvaluationText
from shardlab.train.data.prepared_folder import PreparedFolder
from shardlab.train.data.tokenizers import ByteTokenizer, HuggingFace
from shardlab.train.evaluate import TextJob
from tests.support.tokenizer_files import dropping
from tests.train.huggingface.folders import random_run

pytestmark = pytest.mark.starts_ranks
Captured = pytest.CaptureFixture[str]
TEXT = b"one sentence after the other, none of which is long. " * 9


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    random_run(tmp_path / "run", GPT(layers=2, hidden_size=16, heads=2, seq_len=16))
    (tmp_path / "text").write_bytes(TEXT)
    return tmp_path


def evaluated(capsys: Captured, *arguments: str, data: str = "text") -> dict[str, float]:
    assert main(["eval", *arguments, "--data", *data.split(), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.usefixtures("folder")
def test_every_byte_but_the_first_is_predicted_once_and_equally_under_every_strategy(capsys: Captured) -> None:
    result = evaluated(capsys, "run")
    assert result["tokens"] == len(TEXT) - 1
    assert result["perplexity"] == pytest.approx(math.exp(result["loss"]))
    assert result["bits_per_byte"] == pytest.approx(result["loss"] / math.log(2))
    assert main(["convert", "run", "hf"]) == 0
    capsys.readouterr()
    for words in (["hf"], ["run", "--strategy", "fsdp", "--ranks", "2"], ["run", "--pp", "2"], ["run", "--cp", "2"]):
        other = evaluated(capsys, *words)
        assert other["loss"] == pytest.approx(result["loss"], rel=1e-6)
        assert other["tokens"] == result["tokens"]


@pytest.mark.usefixtures("folder")
def test_some_batches_and_shorter_sequences_are_evaluated_on_request(capsys: Captured) -> None:
    assert evaluated(capsys, "run", "--batches", "3", "--seq-len", "8")["tokens"] == 3 * 4 * 8
    assert main(["eval", "run", "--data", "text"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[:14].strip() for line in lines] == ["loss", "perplexity", "bits per byte"]


def test_documents_are_evaluated_separately_and_by_the_tokenizer_of_the_weights(folder: Path, capsys: Captured) -> None:
    documents = [TEXT.decode()[:40], TEXT.decode()[60:75]]
    (folder / "two.jsonl").write_text("".join(json.dumps({"body": document}) + "\n" for document in documents))
    for name, document in zip("ab", documents, strict=True):
        (folder / name).write_text(document)
    joint, *separate = (evaluated(capsys, "run", data=data) for data in ("two.jsonl --field body", "a", "b"))
    assert joint["tokens"] == joint["bytes"] == 39 + 14
    assert joint["total"] == pytest.approx(separate[0]["total"] + separate[1]["total"], rel=1e-6)


def test_a_prepared_folder_gives_what_its_text_does(folder: Path, capsys: Captured) -> None:
    assert main(["data", "prepare", "text", "--format", "text", "--tokenizer", "chars", "--out", "data"]) == 0
    prepared = PreparedFolder.open(folder / "data")
    tokenizer = prepared.tokenizer()
    model = GPT(layers=1, hidden_size=16, heads=2, seq_len=16, vocab_size=tokenizer.vocab_size)
    random_run(folder / "chars", model, tokenizer=tokenizer)
    random_run(folder / "bytes", GPT(layers=1, hidden_size=16, heads=2, seq_len=16), tokenizer=ByteTokenizer())
    (folder / "part").write_bytes(TEXT[-prepared.manifest.validation.tokens :])
    capsys.readouterr()
    assert evaluated(capsys, "chars", data="data") == evaluated(capsys, "chars", data="part")
    assert main(["eval", "bytes", "--data", "data"]) == 2
    assert "data has another tokenizer (chars, " in capsys.readouterr().err


def unchanged(job: TextJob, text: EvaluationText) -> TextJob:
    return job


@pytest.mark.parametrize("model", [GPT, Llama])
def test_documents_of_many_lengths_are_evaluated_as_if_all_were_padded(
    folder: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch, model: type[GPT]
) -> None:
    random_run(folder / "long", model(layers=1, hidden_size=16, heads=2, seq_len=256))
    lengths = [3, 70, 1, 20, 1, 2, 3, 4, 5, 200, 6, 7, 8, 9, 9, 9, 9, 9]
    lines = [json.dumps({"text": TEXT.decode()[:length]}) + "\n" for length in lengths]
    (folder / "a.jsonl").write_text("".join(lines))
    options = ("long", "--micro-batch-size", "1", "--microbatches", "2")
    results = [evaluated(capsys, *options, *layout, data="a.jsonl") for layout in ((), ("--cp", "2", "--ranks", "2"))]
    monkeypatch.setattr(TextJob, "with_widths", unchanged)
    whole = evaluated(capsys, *options, data="a.jsonl")
    for result in results:
        assert result["tokens"] == result["bytes"] == whole["tokens"] == sum(lengths) - len(lengths)
        assert result["loss"] == pytest.approx(whole["loss"], rel=1e-6)


def test_what_the_tokenizer_drops_is_said(folder: Path, capsys: Captured) -> None:
    tokenizer = HuggingFace(dropping("abcdefghijklmnopqrstuvwxyz .,").to_str().encode())
    model = GPT(layers=1, hidden_size=16, heads=2, seq_len=16, vocab_size=tokenizer.vocab_size)
    random_run(folder / "few", model, tokenizer=tokenizer)
    (folder / "a.txt").write_text("Die Größe ist 12 Meter.")
    assert main(["eval", "few", "--data", "a.txt", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["bytes"] == len("Die Größe ist 12 Meter.".encode()) - 1
    assert "a.txt: the tokenizer has no token for 7 characters of the text, which are dropped" in err


def test_a_tied_model_is_evaluated_on_one_device(folder: Path, capsys: Captured) -> None:
    random_run(folder / "tied", GPT(layers=2, hidden_size=16, heads=2, seq_len=16, tied=True))
    assert evaluated(capsys, "tied")["loss"] > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run"], "there is no text to predict; give --data PATH"),
        (["run", "--data", "nothing"], "nothing does not exist; name a text file"),
        (
            ["run", "--data", "short"],
            "short has no token to predict, since the first token of a document is not predicted",
        ),
        (
            ["run", "--data", "text", "--field", "body"],
            "--field body is for JSON lines and Parquet, and text is text; leave it out",
        ),
        (
            ["run", "--data", "prepared", "--format", "text"],
            "--format and --field are for a file, and prepared is a prepared folder; leave them out",
        ),
        (["run", "--data", "text", "--seq-len", "17"], "--seq-len 17 is more than the model's 16 positions"),
        (["run", "--data", "text", "--batches", "0"], "--batches: 0 is too few; give 1 or more"),
        (["run", "--data", "text", "--bathces", "2"], "there is no option --bathces; did you mean --batches?"),
        (["run", "--data", "text", "--strategy", "fdsp"], "there is no strategy 'fdsp'; did you mean fsdp?"),
        (["bare", "--data", "text"], "bare has no weights.safetensors, config.json or .metadata"),
        (["few", "--data", "text"], "text has token 119, which is outside the model's vocabulary of 65"),
    ],
)
def test_bad_input_is_one_sentence(folder: Path, capsys: Captured, arguments: list[str], said: str) -> None:
    assert main(["data", "prepare", "text", "--format", "text", "--out", "prepared"]) == 0
    capsys.readouterr()
    (folder / "bare").mkdir()
    (folder / "short").write_bytes(b"a")
    random_run(folder / "few", GPT(layers=1, hidden_size=16, heads=2, seq_len=8, vocab_size=65))
    assert main(["eval", *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("shardlab: ")
    assert said in err
