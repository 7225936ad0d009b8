"""Places in a student's program."""

import re
import sys
from pathlib import Path
from types import FrameType, SimpleNamespace

import pytest

from shardlab.program.lines import SourceLine, line_of
from shardlab.puzzles import Model, PuzzleRefused
from tests.support.refusing import refuses


def test_a_file_is_named_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = str(tmp_path / "mine.py")
    assert str(SourceLine(file, 3)) == f"{file}:3"
    monkeypatch.chdir(tmp_path)
    assert str(SourceLine(file, 3)) == "mine.py:3"
    assert str(SourceLine("<stdin>", 3)) == "<stdin>:3"


def test_a_notebooks_cell_is_named_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = {"/tmp/ipykernel_1/2.py": ("Cell", "In[7]")}
    shell = SimpleNamespace(compile=SimpleNamespace(format_code_name=cells.get))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert str(SourceLine("/tmp/ipykernel_1/2.py", 4)) == "In[7]:4"
    assert str(SourceLine("<stdin>", 4)) == "<stdin>:4"


def test_a_refusal_names_the_innermost_line_of_the_students_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = "def twice(gradient):\n    return gradient + gradient\n\ntwice(model.fake_grad(0, [0]))\n"
    with refuses("counted twice", rank=0, op=0, layer=0, doubled=(0,), error=PuzzleRefused):
        exec(compile(text, str(tmp_path / "mine.py"), "exec"), {"model": Model(rank=0)})


def test_a_line_is_the_students_own_although_the_standard_library_runs() -> None:
    lines: list[SourceLine | None] = []

    def note(_: re.Match[str]) -> str:
        inside = sys._getframe().f_back
        assert inside is not None
        assert inside.f_code.co_filename == re.__file__
        lines.append(line_of(inside))
        return ""

    re.sub("x", note, "x")
    assert lines[0] is not None
    assert lines[0].file == __file__
    assert "re.sub(" in Path(__file__).read_text(encoding="utf-8").splitlines()[lines[0].number - 1]


def test_a_named_tuple_being_made_is_not_the_students_line() -> None:
    lines: list[SourceLine | None] = []

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename == "<string>":
            lines.append(line_of(frame))

    sys.setprofile(profile)
    try:
        SourceLine("mine.py", 3)
    finally:
        sys.setprofile(None)
    assert [line and line.file for line in lines] == [__file__]
