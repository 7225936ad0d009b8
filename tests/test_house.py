"""Rules of the project: imports between packages, imports of torch, sizes, and contents of the repository."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.house import (
    CODE_LINES,
    ROOT,
    SOURCE,
    files_of,
    imported_modules,
    module_name,
    modules,
    nodes_of,
    package_of,
    sizes,
    tree_of,
    vague_names,
)

CORE = {"common", "language"}

MAY_IMPORT = {
    "common": set[str](),
    "language": {"common"},
    "check": CORE,
    "strategies": CORE,
    "models": CORE,
    "simulate": CORE | {"check", "strategies", "models"},
    "draw": CORE | {"check", "simulate"},
    "execute": CORE | {"check", "models"},
    "planner": CORE | {"check", "strategies", "models", "simulate"},
    "frameworks": CORE | {"strategies", "models", "simulate", "planner"},
    "train": CORE | {"check", "strategies", "models", "simulate", "draw", "execute"},
    "measure": CORE | {"check", "strategies", "models", "simulate", "draw", "execute", "train"},
    "learn": CORE | {"check", "strategies", "models", "simulate", "draw", "execute", "train"},
}
"""Imports between packages point one way. `cli` and the package's own `__init__` may import all of them."""

TORCH = ("models/tensors", "execute", "train", "measure", "cli")
"""Only these import torch. The commands that need no training are tried without torch below."""

LONGEST = {"src": 700, "tests": 700, "benchmarks": 400, "examples": 400, "docs": 450}
"""The most lines of a Python file, by the folder at the top."""

MOST_MODULES = 20
"""The most modules of a folder of `src`."""

FEWEST_LINES = 60
"""A module with fewer lines and a single importer belongs into its importer."""

CATALOGUES = ("strategies/", "strategies/schedules/", "simulate/passes/", "cli/")
"""Folders whose modules are entries of a catalogue (a strategy, a schedule, a pass, a command), however short."""


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
    assert folders - {"cli"} == set(MAY_IMPORT)


def test_imports_are_absolute() -> None:
    for path in files_of(SOURCE):
        assert all(node.level == 0 for node in nodes_of(path) if isinstance(node, ast.ImportFrom)), path


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_between_packages_point_one_way(package: str) -> None:
    for path in files_of(SOURCE / package):
        imported = {package_of(modules()[name]) for name in imported_modules(path)} - {package}
        assert imported <= MAY_IMPORT[package], f"{path.relative_to(ROOT)} imports {imported - MAY_IMPORT[package]}"


def test_the_rules_have_no_cycle() -> None:
    assert list(TopologicalSorter(MAY_IMPORT).static_order())


def test_no_module_is_in_an_import_cycle() -> None:
    """Imports for type checkers count; imports inside functions, which run late, do not."""
    graph = {name: imported_modules(path, in_functions=False) for name, path in modules().items()}
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(" -> ".join(reversed(error.args[1])))


def test_a_folder_has_few_modules() -> None:
    for folder in {path.parent for path in modules().values()}:
        assert len(list(folder.glob("*.py"))) <= MOST_MODULES, folder.relative_to(ROOT)


def test_a_short_module_with_one_importer_is_part_of_that_importer() -> None:
    importers: dict[str, list[str]] = {}
    for name, path in modules().items():
        for imported in imported_modules(path):
            importers.setdefault(imported, []).append(name)
    for name, path in modules().items():
        place = path.relative_to(SOURCE).as_posix()
        in_catalogue = f"{place.rpartition('/')[0]}/" in CATALOGUES or place.startswith("cli/")
        if len(importers.get(name, [])) == 1 and path.name != "__init__.py" and not in_catalogue:
            lines = len(path.read_text(encoding="utf-8").splitlines())
            assert lines >= FEWEST_LINES, f"{place} has {lines} lines and is imported by {importers[name][0]} alone"


def test_no_package_has_more_code_than_its_limit() -> None:
    found = sizes()
    assert set(found) == set(CODE_LINES)
    larger = {name: lines for name, lines in found.items() if lines > CODE_LINES[name]}
    assert not larger, f"more code lines than tests/house.py allows: {larger}"


def test_names_of_variables_say_what_they_hold() -> None:
    assert not [name for path in files_of(SOURCE) for name in vague_names(path)]


def test_only_the_tensor_half_imports_torch() -> None:
    for path in files_of(SOURCE):
        where = path.relative_to(SOURCE).as_posix()
        if not where.startswith(TORCH):
            for node in nodes_of(path):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                assert "torch" not in {name.split(".")[0] for name in names}, where


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
from shardlab.train.verification import cases
cases.run_ranks = lambda *_, **__: cases.Verdict(0.0, 0.0, 0, 0.0, 0)  # ranks are other processes
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
    packages = ["language", "train.data", "check", "simulate.timeline", "simulate.passes", "simulate.predict"]
    packages += ["strategies", "models", "learn.puzzles", "draw", "planner"]
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


MACHINE_PATHS = re.compile(r"/(?<![\w.]/)(?:home|root|Users|work|opt)/\w")


def test_no_path_of_one_machine_is_written_down() -> None:
    for path in tracked():
        text = path.read_text(encoding="utf-8")
        found = MACHINE_PATHS.search(text)
        assert not found, f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, found.start()) + 1}: {found[0]}"


def test_class_names_are_unique_within_a_package() -> None:
    where: dict[tuple[str, str], list[str]] = {}
    for path in files_of(SOURCE):
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef):
                where.setdefault((package_of(path), node.name), []).append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not {name: places for name, places in where.items() if len(places) > 1}


def _fields(tree: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> set[str]:
    """Return the names that a class has: its fields, those set in `__init__`, properties, and those of its bases."""
    names = {
        node.target.id for node in tree.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    names |= {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree):
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        for target in targets:
            for each in ast.walk(target):
                if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) and each.value.id == "self":
                    names.add(each.attr)
                if isinstance(each, ast.Name) and node in tree.body:
                    names.add(each.id)
    for base in tree.bases:
        name = base.value if isinstance(base, ast.Subscript) else base
        if isinstance(name, ast.Name) and name.id in classes:
            names |= _fields(classes[name.id], classes)
    return names


DOCUMENTED = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def _entries(node: ast.AST, section: str) -> set[str]:
    """Return the names that a section of a docstring explains, such as "Args"."""
    text = (ast.get_docstring(node) or "") if isinstance(node, DOCUMENTED) else ""
    if f"{section}:\n" not in text:
        return set()
    lines = re.split(r"^\w", text.split(f"{section}:\n")[1], flags=re.MULTILINE)[0]
    entries = re.findall(r"^    (\w[\w, ]*):", lines, re.MULTILINE)
    return {name.strip() for entry in entries for name in entry.split(",")}


def test_the_attributes_of_a_docstring_are_fields_of_its_class() -> None:
    classes = {
        node.name: node for path in files_of(SOURCE) for node in nodes_of(path) if isinstance(node, ast.ClassDef)
    }
    for path in files_of(SOURCE):
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef) and (names := _entries(node, "Attributes")):
                extra = names - _fields(node, classes)
                assert not extra, f"{module_name(path)}: {node.name} has no {', '.join(sorted(extra))}"


def test_the_args_of_a_docstring_are_parameters() -> None:
    for path in files_of(SOURCE):
        for node in nodes_of(path):
            function = node
            if isinstance(node, ast.ClassDef):
                function = next((part for part in node.body if getattr(part, "name", "") == "__init__"), None)
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                extra = _entries(node, "Args") - {
                    part.arg for part in ast.walk(function.args) if isinstance(part, ast.arg)
                }
                assert not extra, f"{module_name(path)}:{function.lineno} has no {', '.join(sorted(extra))}"


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
