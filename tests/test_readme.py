"""The README is true: its commands print what it shows, and its Python runs.

A comment before a console block says how much of its output is fixed: `test: the same`, `test: the same up to
numbers` (which differ between machines), `test: the same where it is shown` (`...` stands for the rest), or `test: it
runs`.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


class Block(NamedTuple):
    """A fenced block, and what the comment before it says."""

    comment: str
    language: str
    text: str


FENCE = re.compile(r"(?:<!-- (?P<comment>[^\n]*) -->\n)?```(?P<language>\w+)\n(?P<text>.*?)```", re.DOTALL)
BLOCKS = [Block(m["comment"] or "", m["language"], m["text"]) for m in FENCE.finditer(README)]
CONSOLE = [block for block in BLOCKS if block.language == "console"]
PYTHON = [block for block in BLOCKS if block.language == "python"]


class Command(NamedTuple):
    """A line of a console block that starts with `$`, and what follows it."""

    line: str
    output: str
    comment: str


def commands() -> list[Command]:
    found: list[Command] = []
    for block in CONSOLE:
        for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
            line, _, output = part.partition("\n")
            found.append(Command(line, output, block.comment))
    return found


def squeezed(text: str) -> str:
    """Every number as #, and runs of blanks as one."""
    return re.sub(r"[ \t]+", " ", re.sub(r"\d[\d.,]*(e[-+]?\d+)?", "#", text))


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder like a fresh checkout, to write into."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", [c for c in commands() if c.line.startswith("shardlab")], ids=lambda c: c.line)
def test_a_command_prints_what_the_readme_shows(command: Command, elsewhere: Path) -> None:
    environment = {**os.environ, "COLUMNS": "80", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    environment["XDG_CACHE_HOME"] = str(elsewhere)  # the machine's own profile stays as it is
    words = [sys.executable, "-m", *shlex.split(command.line)]
    done = subprocess.run(words, cwd=elsewhere, env=environment, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    if command.comment == "test: it runs":
        assert done.returncode == 0, done.stderr
        return
    printed = "".join(line.rstrip() + "\n" for line in (done.stdout + done.stderr).splitlines())
    if command.comment == "test: the same up to numbers":
        assert squeezed(printed) == squeezed(command.output)
    elif command.comment == "test: the same where it is shown":
        rest = printed
        for shown in command.output.split("...\n"):
            before, found, rest = rest.partition(shown)
            assert found == shown, f"{shown!r} is not in what follows {before!r}"
    else:
        assert command.comment == "test: the same"
        assert printed == command.output


def test_the_main_job_prints_what_the_readme_shows(elsewhere: Path) -> None:
    """`make train` in a folder of its own, shortened to 20 steps."""
    (shown,) = [command for command in commands() if command.line == "make train"]
    recipe = re.search(r"^train:.*\n\t\$\(BIN\)/(.*)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert recipe
    assert shown.output.startswith(f".venv/bin/{recipe[1]}\n")
    environment = {**os.environ, "COLUMNS": "80", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    words = [sys.executable, "-m", *recipe[1].replace("--steps 200", "--steps 20").split()]
    done = subprocess.run(words, cwd=elsewhere, env=environment, capture_output=True, text=True, check=True)
    printed = squeezed(done.stderr + done.stdout).splitlines()
    for line in shown.output.splitlines()[1:]:
        if line != "...":
            assert squeezed(line).strip() in map(str.strip, printed)


def test_other_commands_are_targets_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for command in commands():
        if not command.line.startswith("shardlab"):
            assert command.line in ("make train", "make test", "make verify-all")
            assert f"\n{command.line.split()[1]}:" in makefile


@pytest.mark.parametrize("block", PYTHON, ids=lambda block: block.comment or "python")
def test_python_runs(block: Block, elsewhere: Path) -> None:
    exec(compile(block.text, "README.md", "exec"), {"__name__": "readme"})


def test_an_example_is_the_file_that_it_says() -> None:
    examples = [block for block in PYTHON if block.comment.startswith("file: ")]
    assert examples
    for block in examples:
        assert (ROOT / block.comment.removeprefix("file: ")).read_text().endswith(block.text)


def test_the_mistake_is_the_strategy_without_its_reduction() -> None:
    right = (ROOT / "examples" / "my_strategy.py").read_text().splitlines()[3:]
    wrong = (ROOT / "examples" / "mistake.py").read_text().splitlines()[3:]
    without = [line.replace("(l, total,", "(l, grad_weight,") for line in right if "all_reduce" not in line]
    assert wrong == without


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\((?!https?://)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
