"""Documents as files have them, and what is wrong with a file in one sentence."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportMissingTypeStubs=false

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardlab.common.errors import UserError
from shardlab.train.data import documents
from shardlab.train.data import documents as tiny
from shardlab.train.data.documents import (
    DEFAULT_BYTES,
    Documents,
    Input,
    decode_utf8,
    default_text,
    map_text,
    tiny_shakespeare,
)


def parquet_of(path: Path, columns: dict[str, Sequence[object]]) -> Path:
    table: Any = pa.table({name: list(values) for name, values in columns.items()})
    pq.write_table(table, path)
    return path


def documents_of(path: Path, field: str = "text") -> list[bytes]:
    texts: list[bytes] = []
    text = b""
    for piece in Input.from_path(path, None, field).pieces():
        text += piece.text
        if piece.ends:
            texts.append(text)
            text = b""
    assert not text
    return texts


@pytest.mark.parametrize("text", ["", "a", "line\n" * 9, "no line ends here " * 9, "ä€\U0001f41f" * 20])
def test_a_text_is_one_document_whatever_its_pieces(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "PIECE_BYTES", 7)
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
        (
            '{"txt": "a", "id": 1}',
            f"line 2 has no field 'text'; {documents.OTHER_FIELD}: did you mean txt?",
        ),
        (
            "{}",
            f"line 2 has no field 'text'; {documents.OTHER_FIELD}: it is empty",
        ),
        ('{"text": 3}', "line 2: 'text' is a number, but text was expected"),
        ('{"text": null}', "line 2: 'text' is null, but text was expected"),
        ('{"text": "\\ud800"}', "line 2: 'text' has half of a surrogate pair"),
        ('{"id": ' + "7" * 5000 + ', "text": 7}', "line 2: 'text' is a number, but text was expected"),
        ("[" * 100_000, "line 2 is not JSON (it is nested too deep)"),
        ('{"text": "\xff"}', 'line 2 is not JSON (it is not UTF-8: byte 0xff after b\'{"text": "\')'),
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


def test_a_number_of_any_length_beside_the_text_is_no_hindrance(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one", "id": 1}\n{"text": "two", "id": [' + "7" * 5000 + "]}\n")
    assert documents_of(tmp_path / "a.jsonl") == [b"one", b"two"]


def test_the_mark_that_windows_writes_before_utf8_is_no_text(tmp_path: Path) -> None:
    mark, texts = b"\xef\xbb\xbf", ["one", "zwei €"]
    lines = "\r\n\r\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in texts)
    (tmp_path / "a.jsonl").write_bytes(mark + lines.encode() + b"\r\n")
    (tmp_path / "a.txt").write_bytes(mark + b"plain " + mark)
    assert documents_of(tmp_path / "a.jsonl") == [text.encode() for text in texts]
    assert documents_of(tmp_path / "a.txt") == [b"plain " + mark]
    assert map_text(tmp_path / "a.txt")[:] == b"plain " + mark


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_another_encoding_is_named(encoding: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes('{"text": "one"}\r\n'.encode(encoding))
    with pytest.raises(UserError, match=rf"a\.jsonl is {encoding[:6].upper()}; convert it, as by: iconv"):
        documents_of(tmp_path / "a.jsonl")
    with pytest.raises(UserError, match=rf"the text is {encoding[:6].upper()}; convert it"):
        decode_utf8("zwölf€".encode("utf-16" if encoding.startswith("utf-16") else encoding))


def test_a_text_that_is_not_utf8_is_refused_with_its_row(tmp_path: Path) -> None:
    """As Spark writes them: a column of strings that nobody has looked at, or of bytes."""
    texts = [b"plain", b"R\xc9UNION", b"more"]
    array: Any = pa.array(texts, pa.binary())
    columns: list[Any] = [array.view(pa.string()), array]
    for number, column in enumerate(columns):
        table: Any = pa.table({"text": column})
        pq.write_table(table, tmp_path / f"{number}.parquet")
        with pytest.raises(UserError, match=r"row 2: 'text' is not UTF-8 \(byte 0xc9 after b'R'\); convert it"):
            documents_of(tmp_path / f"{number}.parquet")


KINDS: list[Any] = [pa.binary(), pa.string(), pa.large_string(), pa.dictionary(pa.int8(), pa.string())]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_texts_of_a_parquet_file_may_be_of_any_kind(kind: Any, tmp_path: Path) -> None:
    texts: Any = pa.array(["zwei €", "drei"], pa.string())
    table: Any = pa.table({"text": texts.cast(kind)})
    pq.write_table(table, tmp_path / "a.parquet")
    assert documents_of(tmp_path / "a.parquet") == ["zwei €".encode(), b"drei"]


def test_a_file_of_tokens_is_read_as_nanogpt_writes_it(tmp_path: Path) -> None:
    np.arange(5, dtype=np.uint16).tofile(tmp_path / "train.bin")
    (piece,) = Input.from_path(tmp_path / "train.bin", None, "text").pieces()
    assert piece.tokens is not None
    assert piece.tokens.tolist() == [0, 1, 2, 3, 4]
    (tmp_path / "train.bin").write_bytes(b"abc")
    with pytest.raises(UserError, match=r"has 3 bytes, but each token has 2; copy it whole"):
        list(Input.from_path(tmp_path / "train.bin", None, "text").pieces())


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\x1f\x8b\x08", "compressed by gzip"),
        (b"\x28\xb5\x2f\xfd.", "compressed by zstd"),
        (b"PK\x03\x04", "a zip archive"),
        (b"PAR1", "a Parquet file"),
        (b"\x93NUMPY", "an array of NumPy"),
    ],
)
def test_a_file_that_begins_as_no_text_does_is_not_guessed_to_be_one(content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.x").write_bytes(content)
    with pytest.raises(UserError, match=f"is {said}, not a text"):
        Input.guess(tmp_path / "a.jsonl.x")
    (tmp_path / "a.py").write_bytes(b"print()")
    assert Input.guess(tmp_path / "a.py").format == "text"
    assert Input.guess(tmp_path / "a.py").ends is False


def test_documents_of_an_iterable_are_texts_bytes_or_tokens() -> None:
    pieces = list(Documents(["a€", b"\xff", [1, 2], np.array([3], np.uint8)]).pieces())
    assert [piece.text for piece in pieces] == ["a€".encode(), b"\xff", b"", b""]
    assert [piece.tokens is None or piece.tokens.tolist() for piece in pieces] == [True, True, [1, 2], [3]]


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"text": "a"}, "the documents, document 2 is an object; give a text, bytes, or one row of tokens"),
        (None, "document 2 is null"),
        (3, "document 2 is a number"),
        ([[1, 2], [3]], "document 2 is a list"),
        ([0.5], "document 2 is a list"),
        ("\ud800", "document 2 has half of a surrogate pair"),
    ],
)
def test_invalid_documents_are_refused_with_their_number(document: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        list(Documents(["fine", document]).pieces())


def test_an_iterator_is_gone_through_once_and_a_function_as_often_as_need_be() -> None:
    once, often = Documents(iter(["a"])), Documents(lambda: iter(["a"]))
    assert len(list(once.pieces())) == len(list(often.pieces())) == len(list(often.pieces())) == 1
    with pytest.raises(UserError, match="can be read only once; give a list, or a function"):
        list(once.pieces())


def test_an_unknown_type_of_file_is_refused_and_can_be_named(tmp_path: Path) -> None:
    (tmp_path / "a.doc").write_text("text")
    with pytest.raises(UserError, match=r"unknown file type '.doc'; known are .txt, .* --format"):
        Input.from_path(tmp_path / "a.doc", None, "text")
    with pytest.raises(UserError, match="unknown format 'doc'"):
        Input.from_path(tmp_path / "a.doc", "doc", "text")
    assert Input.from_path(tmp_path / "a.doc", "text", "text").format == "text"


# Texts as bytes.


TEXT = bytes(i % 251 for i in range(5000))


def test_the_default_text_is_python_of_a_few_megabytes_and_always_the_same() -> None:
    text = default_text()
    assert b"import " in text
    assert 1_000_000 < len(text) <= DEFAULT_BYTES
    assert text == default_text()


def test_a_file_is_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(TEXT)
    (tmp_path / "empty").touch()
    assert map_text(tmp_path / "text")[:] == TEXT
    assert map_text(tmp_path / "empty")[:] == b""


def test_a_missing_file_and_a_folder_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"missing\.txt does not exist"):
        map_text(tmp_path / "missing.txt")
    with pytest.raises(UserError, match="is a folder"):
        map_text(tmp_path)


def test_files_without_random_access_are_refused_unopened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(UserError, match="fifo is a pipe, but text is read from random places"):
        map_text(tmp_path / "fifo")
    with pytest.raises(UserError, match="/dev/zero is a device"):
        map_text(Path("/dev/zero"))


# Tiny Shakespeare is that text and no other, from a file or from the net.


TEXT_of_shakespeare = b"First Citizen:\nBefore we proceed any further, hear me speak.\n"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that stands for the one on the net, with its checksum."""
    monkeypatch.setattr(tiny, "SHAKESPEARE_URL", (tmp_path / "input.txt").as_uri())
    monkeypatch.setattr(tiny, "SHAKESPEARE_SHA256", hashlib.sha256(TEXT_of_shakespeare).hexdigest())
    return tmp_path / "input.txt"


def test_it_is_downloaded_and_leaves_nothing_behind(server: Path) -> None:
    server.write_bytes(TEXT_of_shakespeare)
    with tiny_shakespeare(None) as path:
        assert path.read_bytes() == TEXT_of_shakespeare
    assert not path.exists()


def test_a_file_of_the_users_stays(server: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_bytes(TEXT_of_shakespeare)
    with tiny_shakespeare(tmp_path / "mine") as path:
        assert path == tmp_path / "mine"
    assert path.exists()


def test_another_text_is_refused_wherever_it_comes_from(server: Path) -> None:
    server.write_bytes(TEXT_of_shakespeare + b" ")
    for file in (None, server):
        with (
            pytest.raises(UserError, match=r"is not tiny Shakespeare \(62 bytes with the SHA-256 \w{8}\.\.\., not"),
            tiny_shakespeare(file),
        ):
            pass


@pytest.mark.usefixtures("server")
def test_without_the_net_it_says_what_to_do() -> None:
    with pytest.raises(UserError, match=r"cannot be downloaded \(.*; fetch it by other means"), tiny_shakespeare(None):
        pass
