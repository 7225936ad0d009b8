"""Unknown names are answered with what was probably meant, everywhere in the same words."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from shardlab.common import errors
from shardlab.common.errors import UserError, closest_name, find_by_name, suggest_name, unknown_name

SOURCE = Path(errors.__file__).parent


def test_the_nearest_name_is_found_in_any_case_of_letters() -> None:
    assert closest_name("unshardd", ["UNSHARD", "RESHARD"]) == "UNSHARD"
    assert closest_name("FSDQ", ["ddp", "fsdp"]) == "fsdp"
    assert closest_name("zzz", ["ddp", "fsdp"]) is None
    assert find_by_name({"ddp": 1}, " DDP ", "strategy") == 1


def test_a_name_like_no_other_is_answered_with_all() -> None:
    assert str(unknown_name("puzzle", 8, ["ddp", "fsdp"])) == "there is no puzzle 8; there are ddp, fsdp"
    assert suggest_name("zzz", ["ddp", "fsdp"], " and FILE.py") == "there are ddp, fsdp and FILE.py"
    with pytest.raises(UserError, match=r"there is no strategy 'fsdq'; did you mean fsdp\?"):
        find_by_name({"ddp": 1, "fsdp": 2}, "fsdq", "strategy")


def test_names_are_compared_in_one_place() -> None:
    for path in SOURCE.rglob("*.py"):
        names = {
            alias.name
            for node in ast.walk(ast.parse(path.read_text()))
            for alias in getattr(node, "names", [])
            if isinstance(alias, ast.alias)
        }
        assert path.name == "errors.py" or not names & {"difflib", "get_close_matches"}, path
