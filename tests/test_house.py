"""The house's rules: who may import whom, who may import torch, and what may be in the repository."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "shardlab"

CORE = {"rules", "program"}

MAY_IMPORT = {
    "rules": set[str](),
    "program": {"rules"},
    "data": CORE,
    "strategies": CORE,
    "check": CORE,
    "timeline": CORE | {"check"},
    "passes": CORE | {"check", "timeline"},
    "predict": CORE | {"check", "timeline", "passes", "strategies", "models", "hardware"},
    "recorded": CORE | {"check", "timeline"},
    "draw": CORE | {"check", "timeline"},
    "models": CORE,
    "hardware": CORE | {"models"},
    "exchange": CORE | {"models", "checkpoint"},
    "optimizers": CORE,
    "execute": CORE | {"check", "models", "optimizers"},
    "checkpoint": CORE | {"check", "models", "execute"},
    "faults": CORE | {"check", "execute"},
    "train": CORE
    | {"data", "strategies", "check", "timeline", "passes", "recorded", "draw", "models", "optimizers", "execute"}
    | {"exchange", "checkpoint", "faults"},
    "measure": CORE | {"data", "strategies", "check", "draw", "models", "hardware", "optimizers", "execute", "train"},
    "doctor": CORE | {"strategies", "models", "execute", "measure", "train"},
    "puzzles": CORE | {"check", "timeline", "draw"},
    "published": CORE | {"strategies", "timeline", "predict", "models", "hardware"},
    "planner": CORE | {"strategies", "timeline", "predict", "published", "models", "hardware"},
}
"""Arrows point one way. `cli` and the package's own `__init__` may import everybody, and nobody imports them."""

TORCH = ("models/tensors", "exchange", "execute", "checkpoint", "train", "measure", "doctor", "cli")
"""Only these import torch; what a command line without training runs is tried without torch below."""

LONGEST = {"src": 700, "tests": 700, "benchmarks": 400, "examples": 400, "docs": 400}
"""Lines of a file, by the folder at the top."""


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imports(path: Path) -> set[str]:
    """Every module that a file imports anywhere, also inside functions and for annotations."""
    found: set[str] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            found.add(node.module or "")
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def packages(path: Path) -> set[str]:
    """The packages of Shardlab that a file imports."""
    names = {name.split(".")[1] for name in imports(path) if name.startswith("shardlab.")}
    return names - {path.relative_to(SOURCE).parts[0]} - {"errors"}  # a module of its own, which everybody may import


@cache
def tracked() -> list[Path]:
    """Every file that is in the repository, or would be after `git add`."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [ROOT / name for name in names.split("\0") if name and (ROOT / name).is_file()]


def test_every_package_has_its_rule() -> None:
    folders = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists()}
    assert folders - {"cli"} <= set(MAY_IMPORT)


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_arrows_point_one_way(package: str) -> None:
    for path in files_of(SOURCE / package):
        extra = packages(path) - MAY_IMPORT[package]
        assert not extra, f"{path.relative_to(ROOT)} imports {', '.join(sorted(extra))}"


def test_the_rules_have_no_cycle() -> None:
    done: list[str] = []
    while len(done) < len(MAY_IMPORT):
        ready = [name for name, needs in MAY_IMPORT.items() if name not in done and needs <= set(done)]
        assert ready, f"a cycle among {set(MAY_IMPORT) - set(done)}"
        done += ready


def test_only_the_tensor_half_imports_torch() -> None:
    for path in files_of(SOURCE):
        where = path.relative_to(SOURCE).as_posix()
        if not where.startswith(TORCH):
            assert not {name for name in imports(path) if name.split(".")[0] == "torch"}, where


def python(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter in a folder."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE.parent)}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


NO_TORCH = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError("torch is not installed")

sys.meta_path.insert(0, NoTorch())
"""

COMMANDS = """
from shardlab.cli import main
from shardlab.train import verdict
verdict.run_ranks = lambda *_, **__: verdict.Verdict(0.0, 0.0, 0, 0.0, 0)  # ranks are other processes
for arguments in {commands!r}:
    assert main(arguments) == 0, arguments
    assert ("matplotlib" in sys.modules) == ("--svg" in arguments), arguments
"""

PACKAGES = """
from importlib import import_module
for package in {packages!r}:
    for name in [name for name in sys.modules if name.startswith("shardlab")]:
        del sys.modules[name]
    import_module("shardlab." + package)
"""


def test_checking_timing_and_drawing_need_no_torch(tmp_path: Path) -> None:
    """Nor does starting the ranks that verify a strategy; and only drawing needs matplotlib."""
    commands = [
        ["strategies"],
        ["simulate", "fsdp", "--json"],
        ["simulate", "gpipe"],
        ["train", "--help"],
        ["launch", "--help"],
        ["doctor", "--help"],
        ["data", "prepare", "--help"],
        ["verify", "fsdp", "--ranks", "2"],
        ["convert", "--help"],
        ["bench", "collectives", "--help"],
        ["compare", "--help"],
        ["simulate", "fsdp", "--svg", "fsdp.svg"],
    ]
    done = python(NO_TORCH + COMMANDS.format(commands=commands), tmp_path)
    assert done.returncode == 0, done.stderr


def test_each_package_can_be_imported_alone_and_without_torch() -> None:
    packages = ["program", "data", "check", "timeline", "passes", "predict", "strategies", "models", "puzzles", "draw"]
    done = python(NO_TORCH + PACKAGES.format(packages=packages), ROOT)
    assert done.returncode == 0, done.stderr


def test_nothing_generated_is_tracked() -> None:
    generated = {".svg", ".png", ".pdf", ".jsonl", ".safetensors", ".pt", ".pyc", ".so", ".log", ".ipynb"}
    kept = ROOT / "docs" / "pictures"  # which a test draws again
    found = [path for path in tracked() if path.suffix in generated or "__pycache__" in path.parts]
    assert not [path for path in found if path.parent != kept]


def test_no_file_is_longer_than_a_reader_bears() -> None:
    for path in tracked():
        if path.suffix == ".py":
            lines = len(path.read_text(encoding="utf-8").splitlines())
            assert lines < LONGEST[path.relative_to(ROOT).parts[0]], f"{path.relative_to(ROOT)} has {lines} lines"


MACHINE_PATHS = re.compile("|".join(rf"(?<![\w.])/{folder}/\w" for folder in ("home", "root", "Users", "work", "opt")))


def test_no_path_of_one_machine_is_written_down() -> None:
    for path in tracked():
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            assert not MACHINE_PATHS.search(line), f"{path.relative_to(ROOT)}:{number}: {line.strip()}"


def test_every_class_has_a_name_of_its_own() -> None:
    where: dict[str, list[str]] = {}
    for path in files_of(SOURCE):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                where.setdefault(node.name, []).append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not {name: places for name, places in where.items() if len(places) > 1}


def test_every_module_says_what_it_is() -> None:
    for path in files_of(SOURCE):
        assert ast.get_docstring(tree_of(path)), path.relative_to(ROOT)


def test_a_build_runs_what_a_developer_runs() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert script.rstrip().endswith("make test")
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111


def test_the_license_is_apache() -> None:
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    assert 'license = "Apache-2.0"' in (ROOT / "pyproject.toml").read_text()
