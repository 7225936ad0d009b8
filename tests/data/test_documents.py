"""Documents as files have them, and what is wrong with a file in one sentence."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportMissingTypeStubs=false

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardlab.data import documents
from shardlab.data.documents import Input
from shardlab.errors import UserError


def parquet_of(path: Path, columns: dict[str, Sequence[object]]) -> Path:
    table: Any = pa.table({name: list(values) for name, values in columns.items()})
    pq.write_table(table, path)
    return path


def documents_of(path: Path, field: str = "text") -> list[bytes]:
    found: list[bytes] = []
    text = b""
    for piece in Input.of(path, None, field).pieces():
        text += piece.text
        if piece.ends:
            found.append(text)
            text = b""
    assert not text
    return found


@pytest.mark.parametrize("text", ["", "a", "line\n" * 9, "no line ends here " * 9, "ä€\U0001f41f" * 20])
def test_a_text_is_one_document_whatever_its_pieces(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "PIECE", 7)
    (tmp_path / "a.txt").write_bytes(text.encode())
    assert documents_of(tmp_path / "a.txt") == ([text.encode()] if text else [])
    for piece in Input(tmp_path / "a.txt", "text").pieces():
        assert piece.text.decode()


def test_each_line_of_jsonl_is_a_document(tmp_path: Path) -> None:
    texts = ["one", "zwei\n2", "", "\u2028三"]
    (tmp_path / "a.jsonl").write_text("\n\n".join(json.dumps({"body": text, "id": 1}) for text in texts))
    assert documents_of(tmp_path / "a.jsonl", "body") == [text.encode() for text in texts]


def test_each_row_of_parquet_is_a_document(tmp_path: Path) -> None:
    texts = [f"text {number}" for number in range(3000)]
    path = parquet_of(tmp_path / "a.parquet", {"text": texts, "id": range(3000)})
    assert documents_of(path) == [text.encode() for text in texts]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('{"text": "cut', "line 2 is not JSON (Unterminated string starting at, column 10)"),
        ("[1]", "line 2 is a list, but an object with a text in 'text' was expected"),
        ('{"txt": "a", "id": 1}', "line 2 has no field 'text'; --field names the one with the text: did you mean txt?"),
        ("{}", "line 2 has no field 'text'; --field names the one with the text: it is empty"),
        ('{"text": 3}', "line 2: 'text' is a number, but text was expected"),
        ('{"text": null}', "line 2: 'text' is null, but text was expected"),
        ('{"text": "\\ud800"}', "line 2: 'text' has half of a surrogate pair"),
        ("[" * 100_000, "line 2 is not JSON (it is nested too deep)"),
        ('{"text": "\xff"}', "line 2 is not JSON (it is not UTF-8)"),
    ],
)
def test_a_broken_line_is_refused_with_its_number(line: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "fine"}\n' + line.encode("latin-1") + b"\n")
    with pytest.raises(UserError) as refusal:
        documents_of(tmp_path / "a.jsonl")
    assert sentence in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_missing_column_is_refused_with_the_nearest(tmp_path: Path) -> None:
    path = parquet_of(tmp_path / "a.parquet", {"contents": ["a"], "id": [1]})
    with pytest.raises(UserError, match=r"no column 'content'; .* did you mean contents\?"):
        documents_of(path, "content")
    with pytest.raises(UserError, match=r"row 1: 'id' is a number, but text was expected"):
        documents_of(path, "id")


def test_a_torn_parquet_file_is_refused(tmp_path: Path) -> None:
    path = parquet_of(tmp_path / "a.parquet", {"text": ["a" * 999]})
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UserError, match="cannot be read as Parquet") as refusal:
        documents_of(path)
    assert "\n" not in str(refusal.value)


def test_an_unknown_type_of_file_is_refused_and_can_be_named(tmp_path: Path) -> None:
    (tmp_path / "a.doc").write_text("text")
    with pytest.raises(UserError, match=r"unknown file type '.doc'; known are .txt, .* --format"):
        Input.of(tmp_path / "a.doc", None, "text")
    with pytest.raises(UserError, match="unknown format 'doc'"):
        Input.of(tmp_path / "a.doc", "doc", "text")
    assert Input.of(tmp_path / "a.doc", "text", "text").format == "text"
