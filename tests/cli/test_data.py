"""`shardlab data`: what it prints, and what it refuses in a sentence without writing anything."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from shardlab.cli import main
from tests.support import tokenizer_files

FUNCTIONS = """
import random

def documents():
    for number in range(30):
        print("asked")
        yield f"document {number} has a few words"

def number():
    return 7

def tables():
    return [{"text": "a"}]

def broken():
    yield 1 / 0
"""

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Inputs of every type, right and wrong, in the current folder."""
    lines = [json.dumps({"text": f"Document {number} has a few words."}) + "\n" for number in range(40)]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    (tmp_path / "a.txt").write_text("a text of some words\n" * 200)
    (tmp_path / "broken.jsonl").write_text(lines[0] + '{"text": \n')
    (tmp_path / "empty.txt").touch()
    (tmp_path / "a.doc").write_text("a text")
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "train.bin").write_bytes(bytes(200))
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_prepare_and_show_say_the_same(capsys: Captured) -> None:
    assert main(["data", "prepare", "a.jsonl", "a.txt", "--out", "out", "--tokenizer", "chars"]) == 0
    prepared = capsys.readouterr().out
    assert main(["data", "show", "out", "--verify"]) == 0
    shown = capsys.readouterr().out
    assert prepared.replace("checksums in manifest.json", "all checksums are right") == shown
    assert "from            a.jsonl, a.txt\n" in shown
    assert "tokenizer       chars, 29 tokens\n" in shown


@pytest.mark.usefixtures("folder")
def test_json_has_the_whole_manifest(capsys: Captured) -> None:
    assert main(["data", "prepare", "a.jsonl", "--out", "out", "--train-bpe", "300", "--json"]) == 0
    prepared = json.loads(capsys.readouterr().out)
    assert main(["data", "show", "out", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == prepared
    manifest = json.loads(Path("out/manifest.json").read_text())
    assert manifest.pop("format")
    assert prepared == {"folder": "out", "sha256": prepared["sha256"], **manifest}
    assert (prepared["training"]["documents"], prepared["validation"]["documents"]) == (36, 4)


@pytest.mark.usefixtures("folder")
def test_documents_come_from_a_function_of_a_file(capsys: Captured) -> None:
    assert main(["data", "prepare", "mine.py:documents", "--tokenizer", "chars", "--out", "out"]) == 0
    out, err = capsys.readouterr()
    assert "from            mine.py:documents\n" in out
    assert "27 documents" in out
    assert "asked" in err


@pytest.mark.usefixtures("folder")
def test_what_the_tokenizer_drops_is_said_beside_the_table(capsys: Captured) -> None:
    tokenizer_files.dropping("abcdefghijklmnopqrstuvwxyz .\n").save("letters.json")
    Path("b.txt").write_text("Die Größe ist 12 Meter.\n" * 20)
    assert main(["data", "prepare", "b.txt", "--tokenizer", "letters.json", "--out", "out"]) == 0
    assert capsys.readouterr().err.startswith("shardlab: the tokenizer has no token for 140 characters of the text, ")
    assert main(["data", "show", "out"]) == 0
    assert "140 characters" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("prepare nowhere.txt", "nowhere.txt does not exist"),
        ("prepare broken.jsonl", "broken.jsonl, line 2 is not JSON (Expecting value, column 9)"),
        (
            "prepare a.jsonl --field body",
            "line 1 has no field 'body'; --field (of data prepare and eval) names the one",
        ),
        ("prepare empty.txt", "the input is empty; give some text"),
        ("prepare a.doc", "a.doc: unknown file type '.doc'"),
        ("prepare a.txt --format tex", "a.txt: unknown format 'tex'"),
        ("prepare a.txt --tokenizer byte", "there is no tokenizer 'byte'; did you mean bytes?"),
        ("prepare a.txt --tokenizer gpt2", "the tokenizer gpt2 needs two files that are not in"),
        ("prepare a.txt --tokenizer tokenizer.json", "tokenizer.json is not a tokenizer of Hugging Face"),
        ("prepare a.txt --tokenizer none.json", "the tokenizer none.json cannot be read (No such file or directory)"),
        ("prepare a.txt --tokenizer chars --train-bpe 300", "--tokenizer chars and --train-bpe exclude each other"),
        ("prepare a.txt --train-bpe 9", "--train-bpe 9: every byte and"),
        ("prepare a.txt --train-bpe 0", "--train-bpe: 0 is too few; give 1 or more"),
        ("prepare a.txt --validation 2", "--validation is 2; give a share of the tokens between 0 and 1"),
        ("prepare mine.py:documnets", "mine.py has no function 'documnets'; did you mean documents?"),
        ("prepare mine.py:number", "mine.py cannot be run: TypeError: 'int' object is not iterable"),
        ("prepare mine.py:broken", "mine.py:16 cannot be run: ZeroDivisionError: division by zero"),
        ("prepare mine.py:tables", "mine.py:tables, document 1 is an object; give a text, bytes, or one row of"),
        ("prepare a.txt --tokenizer sub", "--tokenizer sub is a folder without a tokenizer"),
        ("prepare train.bin", "train.bin has tokens, not a text; name their tokenizer by --tokenizer, such as gpt2"),
        ("shakespeare --file a.txt", "a.txt is not tiny Shakespeare (4,200 bytes"),
    ],
)
def test_a_request_that_cannot_be_is_a_sentence_and_writes_nothing(
    arguments: str, sentence: str, folder: Path, capsys: Captured
) -> None:
    before = sorted(folder.iterdir())
    assert main(["data", *arguments.split(), "--out", "out"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("shardlab: ")
    assert sentence in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize("package", ["pyarrow", "tokenizers", "tiktoken"])
@pytest.mark.usefixtures("folder")
def test_without_the_library_it_says_what_to_install(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    Path("a.parquet").touch()
    from shardlab.common.errors import UserError
    from shardlab.train.data.documents import import_extra

    with pytest.raises(UserError, match=rf"a file needs the Python package {package}.*pip install 'shardlab\[data\]'"):
        import_extra(f"{package}.something", "a file")
    if package == "pyarrow":
        assert main(["data", "prepare", "a.parquet", "--out", "out"]) == 2
        assert "a Parquet file needs the Python package pyarrow, which is not installed" in capsys.readouterr().err


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--data nowhere:0.5 a.txt:0.5", "nowhere does not exist"),
        ("--data a.txt:x", "a.txt:x: 'x' is no weight; give PATH:NUMBER, as in a.txt:0.7"),
        ("--data torn", "training.bin has another checksum than its manifest says"),
        ("--data chars a.txt", "a.txt has another tokenizer (bytes, 256 tokens) than chars (chars, 13 tokens)"),
        ("--data bytes --vocab-size 64", "bytes: tokens go up to 120 (bytes), but the model's vocabulary is 64"),
        ("--data chars --prompt zebra", "the character 'z' is not among the 13 characters"),
        ("--data train.bin", "train.bin has tokens, not a text; name their tokenizer (gpt2 for nanoGPT's) by shardlab"),
        ("--data chars --seq-len 5000", "chars has 3,780 tokens for training but 5,001 are needed"),
    ],
)
def test_training_refuses_data_that_do_not_fit(arguments: str, sentence: str, capsys: Captured) -> None:
    for name in ("chars", "bytes", "torn"):
        tokenizer = "bytes" if name == "torn" else name
        assert main(["data", "prepare", "a.txt", "--out", name, "--tokenizer", tokenizer]) == 0
    tokens = Path("torn/training.bin").read_bytes()
    Path("torn/training.bin").write_bytes(bytes([tokens[0] ^ 1]) + tokens[1:])
    capsys.readouterr()
    assert main(["train", "--ranks", "2", *arguments.split()]) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err
    assert not Path("runs").exists()
