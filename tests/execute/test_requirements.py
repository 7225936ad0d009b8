"""If layers cannot be compiled, one sentence says so before any rank starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardlab.cli import main
from shardlab.execute.requirements import want_compilable
from shardlab.language import UserError
from shardlab.models import GPT
from shardlab.train.job import Job

CHECKED = Job("single", 1, 1, GPT(layers=2, hidden_size=16, heads=2, seq_len=8), 1).checked()


def find_none(name: str) -> None:
    """There is nothing of this name."""


def test_a_compiler_is_looked_for_where_torch_looks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    want_compilable(CHECKED, "cpu")
    monkeypatch.setenv("CXX", str(tmp_path / "nobody"))
    with pytest.raises(UserError, match=r"needs a C\+\+ compiler, and .*nobody is not here; install one"):
        want_compilable(CHECKED, "cpu")


def test_kernels_of_a_gpu_need_triton_and_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardlab.execute.requirements.find_spec", find_none)
    with pytest.raises(UserError, match="package triton, which is not installed here"):
        want_compilable(CHECKED, "cuda")
    monkeypatch.setattr("shardlab.execute.requirements.find_spec", bool)
    monkeypatch.setattr("shardlab.execute.requirements.which", find_none)
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(UserError, match="needs a C compiler, and gcc is not here; install one, name another in CC"):
        want_compilable(CHECKED, "cuda")


def test_headers_of_python_are_wanted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("shardlab.execute.requirements.sysconfig.get_paths", lambda: {"include": str(tmp_path)})
    with pytest.raises(UserError, match="needs Python's headers"):
        want_compilable(CHECKED, "cpu")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("train --pp 2 --schedule zb-h1", "hides the tensors that the second half of a backward pass needs"),
        ("verify --pp 2 --schedule zb-v", "hides the tensors that the second half of a backward pass needs"),
        ("train --strategy ddp --ranks 2 --trace", "cannot follow compiled layers on a CPU"),
    ],
)
def test_the_commands_refuse_before_they_start_ranks(
    words: str, sentence: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*words.split(), "--compile"]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    lines = [line for line in error.splitlines() if "under way for" not in line]  # a busy machine says that it works
    assert len(lines) == 1
    assert not list(tmp_path.iterdir())
