"""The README and the pages of docs/ are true: commands print what is shown, Python runs, pictures are drawn alike.

A comment before a console block says how much of its output is fixed: `test: the same`, with `up to numbers` (which
differ between machines) or `where it is shown` (`...` stands for the rest) if need be; or `test: it runs`, with fewer
steps of training. The commands of a block run one after the other in one folder; those of a session, a page whose
comments say `session: shown`, all do (tests/test_hands_on.py).
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

from shardlab.cli import main
from tests.support.warm import WarmStarts

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
PICTURES = DOCS / "pictures"
COMMENTS = ("it runs", "the same", "the same up to numbers", "the same where it is shown")


class Command(NamedTuple):
    """A line of a console block that starts with `$` (`\\` carries it on), and what follows it."""

    line: str
    output: str


class Block(NamedTuple):
    """A fenced block of a page, and what the comment before it says."""

    page: str
    comment: str
    language: str
    text: str

    @property
    def commands(self) -> list[Command]:
        parts = re.split(r"^\$ ", re.sub(r" \\\n +", " ", self.text), flags=re.MULTILINE)[1:]
        return [Command(line, output) for line, _, output in (part.partition("\n") for part in parts)]

    def __str__(self) -> str:
        return f"{self.page}: {self.commands[0].line if self.language == 'console' else self.comment or 'python'}"


FENCE = re.compile(r"(?:<!-- (?P<comment>[^\n]*) -->\n)?```(?P<language>\w+)\n(?P<text>.*?)```", re.DOTALL)
TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in PAGES}
BLOCKS = [
    Block(page, m["comment"] or "", m["language"], m["text"])
    for page, text in TEXTS.items()
    for m in FENCE.finditer(text)
]
CONSOLE = [block for block in BLOCKS if block.language == "console"]
OF_SESSIONS = [block for block in CONSOLE if block.comment == "session: shown"]
COMMANDS = [block for block in CONSOLE if block.commands[0].line.startswith("shardlab") and block not in OF_SESSIONS]
PYTHON = [block for block in BLOCKS if block.language == "python"]


def squeezed(text: str) -> str:
    """Every number as #, and runs of blanks as one."""
    return re.sub(r"[ \t]+", " ", re.sub(r"\d[\d.,]*(e[-+]?\d+)?", "#", text))


def shortened(line: str) -> str:
    """A command that trains for no more than 4 steps where it has 10 or more; --trace needs 15. It measures collectives
    and layers for no more than 0.01 s, and searches schedules among 50 proposals."""
    limit = 16 if "--trace" in line else 4
    line = re.sub(r" --seconds [\d.]+", "", line)
    line = re.sub(r"(?<=schedule search)(?!.*--proposals)", " --proposals 50", line)
    line = re.sub(r"(?<=bench )(collectives|compute)", r"\1 --seconds 0.01", line)
    return re.sub(r"--steps (\d\d+)", lambda m: f"--steps {min(int(m[1]), limit)}", line)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder like a fresh checkout, with the files that pages ask to save, and a terminal of 80 columns."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    for block in BLOCKS:
        if block.comment.startswith("save as: "):
            (tmp_path / block.comment.removeprefix("save as: ")).write_text(block.text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # the machine's own profile stays as it is
    return tmp_path


@pytest.mark.parametrize("block", COMMANDS, ids=str)
@pytest.mark.usefixtures("elsewhere")
def test_a_command_prints_what_the_page_shows(block: Block, capfd: pytest.CaptureFixture[str]) -> None:
    """In this process, so that all commands share one import of torch and one server that forks ranks."""
    comment = block.comment.removeprefix("test: ")
    assert comment in COMMENTS
    for command in block.commands:
        line = shortened(command.line) if comment == "it runs" else command.line
        if line.startswith("cd "):
            os.chdir(line.removeprefix("cd "))  # `elsewhere` goes back
            continue
        status = main(shlex.split(line)[1:])
        captured = capfd.readouterr()
        assert "Traceback" not in captured.err
        if comment == "it runs":
            assert status == 0, captured.err
            assert not command.output.strip()
            continue
        printed = "".join(line.rstrip() + "\n" for line in (captured.out + captured.err).splitlines())
        if comment == "the same":
            assert printed == command.output
        elif comment == "the same up to numbers":
            assert squeezed(printed) == squeezed(command.output)
        else:
            rest = re.sub(" +", " ", printed)  # a warning, as of a torch for GPUs without one, widens a column
            for expected in filter(None, re.sub(" +", " ", command.output).split("...\n")):
                skipped, match, rest = rest.partition(expected)
                assert match == expected, f"{expected!r} is not in what follows {skipped!r}"


def shown_by_make(target: str) -> list[str]:
    """What the README shows that `make` prints for a target."""
    (output,) = [c.output for block in CONSOLE for c in block.commands if c.line == f"make {target}"]
    return output.splitlines()


def recipe(target: str) -> list[str]:
    """A target's lines in the Makefile, as `make` prints them."""
    match = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert match
    return match[1].replace("\t", "").replace("$(BIN)", ".venv/bin").splitlines()


def test_make_train_prints_what_the_readme_shows(elsewhere: Path, warm: WarmStarts) -> None:
    """In a process and a folder of its own, shortened to 20 steps."""
    (line,) = recipe("train")
    echoed, *expected = shown_by_make("train")
    assert echoed == line
    words = shlex.split(line.removeprefix(".venv/bin/").replace("--steps 200", "--steps 20"))
    process = warm.run(["-m", *words], cwd=elsewhere)
    assert process.returncode == 0, process.stderr
    printed = squeezed(process.stderr + process.stdout).splitlines()
    for line in expected:
        if line != "...":
            assert squeezed(line).strip() in map(str.strip, printed)


def test_make_test_prints_what_the_readme_shows() -> None:
    """But for pytest, which takes minutes: its lines are `...`."""
    lines = shown_by_make("test")
    assert [line for line in lines if line.startswith(".venv")] == recipe("test")
    for line, printed in pairwise(lines):
        if line.startswith(".venv") and printed != "...":
            words = [sys.executable, "-m", *shlex.split(line.removeprefix(".venv/bin/"))]
            process = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
            assert squeezed(process.stdout) == squeezed(printed) + "\n"


def test_other_commands_are_targets_of_the_makefile() -> None:
    for text in TEXTS.values():
        for target in re.findall(r"`(?:\$ )?make ([\w-]+)`", text):
            recipe(target)


SHOWN = re.compile(r"^\s*print\(.*\)  # (.+)$")
"""A line of Python that prints, and in a comment what it prints; `...` stands for any text."""


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_python_runs_and_prints_what_the_page_shows(block: Block, elsewhere: Path) -> None:
    printed: dict[int, str] = {}

    def note(*values: object) -> None:
        printed[sys._getframe(1).f_lineno] = " ".join(map(str, values))  # pyright: ignore[reportPrivateUsage]

    exec(
        compile(block.text, block.page, "exec", dont_inherit=block.comment.startswith("save as: ")),
        {"__name__": "page", "print": note},
    )
    for number, line in enumerate(block.text.splitlines(), start=1):
        if match := SHOWN.match(line):
            pattern, text = ".*".join(map(re.escape, match[1].split("..."))), " ".join(printed[number].split())
            assert re.fullmatch(pattern, text), f"{line!r} prints {text!r}"


def test_an_example_is_the_file_that_it_says() -> None:
    examples = [block for block in PYTHON if block.comment.startswith("file: ")]
    assert examples
    for block in examples:
        assert (ROOT / block.comment.removeprefix("file: ")).read_text().endswith(block.text)


def test_the_mistake_is_the_strategy_without_its_reduction() -> None:
    right = (ROOT / "examples" / "my_strategy.py").read_text().splitlines()[3:]
    wrong = (ROOT / "examples" / "mistake.py").read_text().splitlines()[3:]
    unreduced = [line.replace("(l, total,", "(l, grad_weight,") for line in right if "all_reduce" not in line]
    assert wrong == unreduced


def test_the_pictures_are_what_is_drawn_today(tmp_path: Path) -> None:
    """Up to a tenth of a point, and to the names that matplotlib makes of what it draws."""
    spec = importlib.util.spec_from_file_location("pictures", DOCS / "pictures.py")
    assert spec is not None
    assert spec.loader is not None
    pictures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pictures)
    assert set(pictures.PICTURES) == {path.name for path in PICTURES.iterdir()}
    line = f"shardlab {' '.join(pictures.TIMELINE)} --svg timeline.svg"
    assert line in [command.line for block in COMMANDS for command in block.commands]
    for name, draw in pictures.PICTURES.items():
        draw(tmp_path / name)
        words, numbers = parts(tmp_path / name)
        kept_words, kept_numbers = parts(PICTURES / name)
        assert words == kept_words, f"{name} has changed: python docs/pictures.py draws it again"
        assert numbers == pytest.approx(kept_numbers, abs=0.1)


def parts(svg: Path) -> tuple[list[str], list[float]]:
    """The words of a picture and, apart from them, its numbers."""
    text = re.sub(r"\b[a-z][0-9a-f]{10}\b", "name", svg.read_text(encoding="utf-8"))
    number = r"(?<![\w#])-?\d+(?:\.\d+)?"
    return re.split(number, text), [float(digits) for digits in re.findall(number, text)]


def test_links_lead_somewhere() -> None:
    for page, text in TEXTS.items():
        for target, anchor in re.findall(r"\]\((?!\w+:)([^)#]*)(?:#([^)]+))?\)", text):
            path = Path(os.path.normpath((ROOT / page).parent / target)) if target else ROOT / page
            assert path.exists(), f"{page}: {target}"
            assert not anchor or anchor in anchors(path), f"{page}: {target}#{anchor}"


def anchors(page: Path) -> list[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]


def test_prose_is_wrapped() -> None:
    """At 120 columns, but for tables, links to pictures and what a command prints."""
    for page, text in TEXTS.items():
        for line in FENCE.sub("", text).splitlines():
            assert len(line) <= 120 or line.startswith(("|", "![")), f"{page}: {line}"
