"""Each sentence about a request that cannot be met, once: of worlds, bounds and users' files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from shardlab.common.errors import UserError
from shardlab.common.files import read_file, want_file
from shardlab.common.user_code import bounded, member, module_of, require_ops
from shardlab.language import Mesh, Rank, trace


async def of_two(rank: Rank, other: int) -> None: ...


def plain(rank: Rank) -> None: ...


async def shares(rank: Rank) -> None:
    rank.share()


def too_many() -> None:
    with bounded(ops=100):
        require_ops(2000, "passes")


REQUESTS: dict[str, Callable[[], object]] = {
    "--max-seconds-per-op: 0 is too little; give more than 0": lambda: bounded(seconds=0).__enter__(),
    "passes come to 2,000 ops or more, and at most 100 are traced; take fewer, or raise --max-ops if there is the time "
    "and the memory": too_many,
    "axis tp has 0 ranks; every axis of a mesh has at least 1": lambda: Mesh(tp=0),
    "axis 'dp' is not an axis of a mesh; the axes are pp, dp_replicate, dp_shard, cp, tp, ep": lambda: Mesh().group(
        0, "dp"
    ),
    "0 layers were asked for; give 1 or more": lambda: trace(shares, 1, 0, 1),
    "plain is not a strategy: write it as `async def plain(rank): ...`": lambda: trace(cast(Any, plain), 1, 1, 1),
    "of_two cannot be called with the rank alone: missing a required argument: 'other'": lambda: trace(
        cast(Any, of_two), 1, 1, 1
    ),
    "1 microbatch does not divide among 2 ranks; give a multiple of 2 microbatches": lambda: trace(shares, 2, 1, 1),
}


@pytest.mark.parametrize("sentence", REQUESTS)
def test_what_cannot_be_met_is_said_in_a_sentence(sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        REQUESTS[sentence]()
    assert str(caught.value) == sentence


def as_toml(path: Path) -> object:
    return read_file(path, "TOML")


def function_of(path: Path, name: str = "ddq") -> object:
    return member(module_of(path), path, name, ("function", "functions"), callable)


FILES: list[tuple[str, str, Callable[[Path], object]]] = [
    ("nowhere", "{path} does not exist; name a text file", want_file),
    ("x" * 300, "{path} cannot be read (File name too long); name a text file that can", want_file),
    ("folder", "{path} is a folder; name a text file", want_file),
    ("pipe", "{path} is a pipe, but text is read from random places; write it to a file and name that", want_file),
    ("nowhere", "{path} cannot be read: No such file or directory", as_toml),
    ("user.py", "{path} is not TOML: Expected '=' after a key in a key/value pair (at line 1, column 5)", as_toml),
    ("nowhere", "{path} is not a file; give path/to/file.py:NAME", module_of),
    ("broken.py", "{path}:2 cannot be run: ZeroDivisionError: division by zero", module_of),
    ("refuses.py", "{path}:3: axis tp has 0 ranks; every axis of a mesh has at least 1", module_of),
    ("user.py", "{path} has no function 'ddq'; did you mean ddp?", function_of),
    (
        "user.py",
        "say which function of {path}: {path}:NAME; its functions are: ddp",
        lambda path: function_of(path, ""),
    ),
]
"""A file's name, the sentence about its path, and what is done with it."""


@pytest.mark.parametrize(("name", "sentence", "call"), FILES)
def test_a_file_that_cannot_be_used_is_said_in_a_sentence(
    tmp_path: Path, name: str, sentence: str, call: Callable[[Path], object]
) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "user.py").write_text("def ddp(): ...\n")
    (tmp_path / "broken.py").write_text("\n1 / 0\n")
    (tmp_path / "refuses.py").write_text("from shardlab.language import Mesh\n\nMesh(tp=0)\n")
    with pytest.raises(UserError) as caught:
        call(tmp_path / name)
    assert str(caught.value) == sentence.format(path=tmp_path / name)
