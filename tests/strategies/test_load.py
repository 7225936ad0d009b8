"""Strategies in a user's own file."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from shardlab.language import Mesh, UserError
from shardlab.strategies.load import load

FILE = """
from dataclasses import dataclass
from neighbour import NUMBER

@dataclass
class Something:
    number: int = NUMBER

async def mine(rank):
    pass

async def on_a_grid(rank):
    pass

def on_a_grid_mesh(ranks):
    from shardlab.language import Mesh
    return Mesh(pp=ranks // 2, dp_shard=2)

def plain(rank):
    pass
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "neighbour.py").write_text("NUMBER = 3\n")
    path = tmp_path / "user.py"
    path.write_text(FILE)
    return path


def test_a_function_of_a_file_is_a_strategy(file: Path) -> None:
    entry = load(f"{file}:mine")
    assert entry.name == f"{file}:mine"
    assert entry.program.__name__ == "mine"
    assert entry.mesh(4) == Mesh(dp_shard=4)


def test_a_file_may_say_which_grid_its_strategy_needs(file: Path) -> None:
    assert load(f"{file}:on_a_grid").mesh(4) == Mesh(pp=2, dp_shard=2)


def test_nothing_is_written_beside_the_file(file: Path) -> None:
    load(f"{file}:mine")
    assert not list(file.parent.glob("**/user*.pyc"))


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        ("min", "has no function 'min'; did you mean mine?"),
        ("zzz", "its strategies are: mine, on_a_grid"),
        ("plain", "is not a strategy; write it as `async def plain"),
        ("", "say which function of"),
    ],
)
def test_objects_that_are_no_strategies_are_refused(file: Path, function: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        load(f"{file}:{function}")


def test_a_file_without_a_function_is_refused(file: Path) -> None:
    with pytest.raises(UserError, match=r"user\.py:NAME; its strategies are"):
        load(str(file))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("any.py", "from shardlab.strategies.ddp import ddp\nasync def mine(rank): ...\n"),
        ("mine.py", "async def other(rank): ...\nasync def mine(rank): ...\n"),
    ],
)
def test_the_only_function_of_a_file_or_the_one_of_its_name_needs_no_name(file: Path, name: str, text: str) -> None:
    path = file.with_name(name)
    path.write_text(text)
    for name_given in (f"{path}", f"{path}:"):
        entry = load(name_given)
        assert (entry.name, entry.program.__name__) == (f"{path}:mine", "mine")


def test_a_file_with_a_schedule_is_no_strategy_and_says_how_to_give_it(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def mine(rank, ranks, microbatches, stages_per_rank):\n    yield\n")
    with pytest.raises(
        UserError, match=r"has no async function; .* or give a schedule as --pp N --schedule \S+mine\.py"
    ):
        load(str(path))


PLANS = "from shardlab.language import Mesh\nfrom shardlab.strategies import Plan\n"


@pytest.mark.parametrize("suffix", ["", ":mine"])
def test_a_function_that_returns_a_plan_is_a_strategy(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / "any.py"
    path.write_text(f"{PLANS}def mine() -> Plan:\n    return Plan(Mesh(dp_shard=8), passes='defer=1')\n")
    entry = load(f"{path}{suffix}")
    assert (entry.name, entry.ranks, entry.passes_on(8)) == (f"{path}:mine", 8, "defer=1")


@pytest.mark.parametrize("annotation", ["Plan", "'Plan'", "strategies.Plan"])
@pytest.mark.parametrize("first", ["", "from __future__ import annotations\n"])
def test_a_plan_is_recognized_by_any_spelling_of_its_annotation(tmp_path: Path, annotation: str, first: str) -> None:
    path = tmp_path / "any.py"
    path.write_text(f"{first}{PLANS}from shardlab import strategies\ndef mine() -> {annotation}:\n    return Plan()\n")
    assert load(str(path)).name == f"{path}:mine"


def test_a_function_that_helps_with_a_plan_hides_no_program(tmp_path: Path) -> None:
    path = tmp_path / "any.py"
    helpers = "def plan_of(ranks) -> Plan:\n    return Plan()\ndef small() -> Plan:\n    return Plan()\n"
    path.write_text(f"{PLANS}{helpers}async def step(rank):\n    pass\n")
    assert load(str(path)).name == f"{path}:step"


@pytest.mark.parametrize(
    ("returned", "sentence"),
    [
        ("3", r"mine in \S+any\.py returned 3; return a Plan"),
        ("Plan(Mesh(dp=3))", r"any\.py:4: there is no argument 'dp'; did you mean dp_shard\?"),
        ("Plan(passes='buckte=1')", r"any\.py:4: there is no pass 'buckte=1'|did you mean bucket\?"),
    ],
)
def test_a_function_that_returns_no_plan_is_refused(tmp_path: Path, returned: str, sentence: str) -> None:
    path = tmp_path / "any.py"
    path.write_text(f"{PLANS}def mine() -> Plan:\n    return {returned}\n")
    with pytest.raises(UserError, match=sentence):
        load(str(path))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.py is not a file"):
        load(f"{tmp_path}/none.py:mine")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("x = 1\n1 / 0\n", r"bad\.py:2 cannot be run: ZeroDivisionError: division by zero"),
        ("x = 1\ny = = 2\n", r"bad\.py:2 cannot be run: SyntaxError"),
        ("import no_such_module_anywhere\n", r"bad\.py:1 cannot be run: ModuleNotFoundError"),
    ],
)
def test_a_file_that_cannot_be_run_is_refused_with_its_line(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "bad.py").write_text(text)
    with pytest.raises(UserError, match=sentence):
        load(f"{tmp_path}/bad.py:mine")


@pytest.mark.parametrize(
    ("mesh", "sentence"),
    [
        ("Mesh(dp_shard=2 * ranks)", "gave a mesh of 8 ranks for 4 ranks; give a Mesh of 4"),
        ("5", "gave 5 for 4 ranks"),
        ("1 // 0", "raised ZeroDivisionError"),
    ],
)
def test_a_mesh_function_that_is_wrong_is_one_sentence(tmp_path: Path, mesh: str, sentence: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        f"from shardlab.language import Mesh\n\nasync def go(rank): ...\n\ndef go_mesh(ranks): return {mesh}\n"
    )
    with pytest.raises(UserError, match=sentence):
        load(f"{file}:go").grid(4)
