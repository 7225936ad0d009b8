"""The scripts of the page, tested by Node, which the type checker brings along."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from shardlab.cli.view.edit import EDIT_SCRIPTS
from shardlab.draw.viewer.page import SCRIPTS, asset, joined_scripts
from tests.draw.viewer.steps import write_tables
from tests.support.node import node_path

HERE = Path(__file__).parent
FILES = sorted(HERE.glob("*.test.mjs"))


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tables")
    write_tables(folder)
    return folder


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_the_scripts_do_what_their_tests_say(file: Path, tables: Path) -> None:
    environment = {**os.environ, "SHARDLAB_TABLES": str(tables)}
    command = [node_path(), "--test", "--test-reporter=tap", str(file)]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout[-6000:] + process.stderr[-2000:]
    assert "# fail 0" in process.stdout
    assert "# skipped 0" in process.stdout
    assert "# pass 0" not in process.stdout


def test_every_module_of_the_scripts_has_tests_but_for_those_that_need_a_browser() -> None:
    tested = {file.name.removesuffix(".test.mjs") for file in FILES}
    assert {*SCRIPTS, *EDIT_SCRIPTS} - tested == {"paint", "viewer", "start", "edit"}


@pytest.mark.parametrize("names", [SCRIPTS, EDIT_SCRIPTS])
def test_the_joined_script_is_one_module_that_node_can_parse(names: tuple[str, ...], tmp_path: Path) -> None:
    """So no two scripts have the same name at their top, and no import is left."""
    (tmp_path / "page.mjs").write_text(joined_scripts(names), encoding="utf-8")
    process = subprocess.run(
        [node_path(), "--check", str(tmp_path / "page.mjs")], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    assert "import {" not in joined_scripts(names)


@pytest.mark.parametrize("names", [SCRIPTS, EDIT_SCRIPTS])
def test_a_script_comes_after_those_that_it_imports(names: tuple[str, ...]) -> None:
    for place, name in enumerate(names):
        for line in asset(f"{name}.js").splitlines():
            if ' from "./' in line:
                assert line.partition('from "./')[2].removesuffix('.js";') in names[:place], f"{name}: {line}"
