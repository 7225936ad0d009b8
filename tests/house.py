"""Structure of the source tree: its modules, their imports, and its size. `python -m tests.house` prints the size.

The tests in `test_house.py` compare this structure with the rules of the project.
"""

from __future__ import annotations

import ast
import re
import statistics
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "shardlab"

CODE_LINES = {
    "": 405,
    "check": 2300,
    "cli": 8395,
    "common": 1070,
    "draw": 1760,
    "execute": 3775,
    "frameworks": 3375,
    "language": 4695,
    "learn": 5785,
    "measure": 2150,
    "models": 4625,
    "planner": 4160,
    "simulate": 7580,
    "strategies": 2765,
    "train": 8990,
}
"""The most code lines of each package, and of the modules beside them (""). A commit that raises a number says why."""


VAGUE_NAMES = frozenset(
    re.findall(
        r"\w+",
        """
    above after again alike and another asked before begun below beside between both called chosen coming crest done
    drawn each ended ending enough every few floor floors found given gone held here how inside its kept known lasting
    least leaving less letter loaded lost made many meant more most moved much named nothing own passed room rooms
    running said same saved seen sent settling shown such sure taken tells then there timed told tried under wanted way
    ways what where which who whose why within without waiting written
        """,
    )
)
"""Names of variables and parameters that say nothing: a participle, a pronoun, a preposition or an adverb alone."""


def files_of(folder: Path) -> list[Path]:
    """Return the Python files of a folder and its subfolders."""
    return sorted(folder.rglob("*.py"))


@cache
def tree_of(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of a file's syntax tree."""
    return tuple(ast.walk(tree_of(path)))


def package_of(path: Path) -> str:
    """Return the top package of a source file, such as "train"; "" for a module beside the packages."""
    parts = path.relative_to(SOURCE).parts
    return parts[0] if len(parts) > 1 else ""


def module_name(path: Path) -> str:
    """Return the dotted name of a source file, such as "shardlab.train.loop"."""
    name = ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts)
    return name.removesuffix(".__init__")


def code_lines(path: Path) -> int:
    """Count the lines of a file that hold code: not blank, not a comment, and not part of a docstring."""
    text = path.read_text(encoding="utf-8").splitlines()
    lines = {number for number, line in enumerate(text, 1) if line.strip() and not line.lstrip().startswith("#")}
    strings, docstrings = set[int](), set[int]()
    for node in nodes_of(path):
        if isinstance(node, ast.Constant | ast.JoinedStr) and node.end_lineno != node.lineno:
            strings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = (lines | strings) - docstrings
    return len(lines)


@cache
def modules() -> dict[str, Path]:
    """Return every module of the package by its dotted name."""
    return {module_name(path): path for path in files_of(SOURCE)}


@cache
def defining_module(module: str, name: str) -> str:
    """Return the module that defines a name. A package's `__init__` may only pass it on."""
    if f"{module}.{name}" in modules():
        return f"{module}.{name}"
    path = modules().get(module)
    if path is not None and path.name == "__init__.py":
        for node in nodes_of(path):
            if isinstance(node, ast.ImportFrom) and node.module in modules():
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return defining_module(node.module or "", alias.name)
    return module


def _outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that are outside of functions, those for type checkers included."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _outside_functions(child)


@cache
def imported_modules(path: Path, *, in_functions: bool = True) -> frozenset[str]:
    """Return the modules of Shardlab from which a source file imports names, each as the module that defines the name.

    Args:
        path: a source file.
        in_functions: include the imports inside functions, which run late.
    """
    nodes = nodes_of(path) if in_functions else _outside_functions(tree_of(path))
    found = {
        defining_module(node.module or "", alias.name)
        for node in nodes
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "shardlab"
        for alias in node.names
    }
    return frozenset(found - {module_name(path)})


def vague_names(path: Path) -> Iterator[str]:
    """Yield each variable or parameter of a function whose name is in `VAGUE_NAMES`, with its place."""
    functions = [node for node in nodes_of(path) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    for node in {node for function in functions for node in ast.walk(function)}:
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) | ast.ExceptHandler(name=str(name)):
                if name.strip("_") in VAGUE_NAMES:
                    yield f"{path.relative_to(ROOT)}:{node.lineno}: {name}"
            case _:
                pass


def sizes() -> dict[str, int]:
    """Return the code lines of each package; those of modules beside the packages under ""."""
    found: dict[str, int] = {}
    for path in files_of(SOURCE):
        found[package_of(path)] = found.get(package_of(path), 0) + code_lines(path)
    return dict(sorted(found.items()))


def main() -> None:
    """Print the code lines of each package beside the most that are allowed, and figures of all files."""
    found = sizes()
    print("package     files  code lines  at most")
    for name, lines in found.items():
        count = sum(package_of(path) == name for path in files_of(SOURCE))
        print(f"{name or '(top)':10} {count:6} {lines:11} {CODE_LINES.get(name, 0):8}")
    print(f"{'all':10} {len(modules()):6} {sum(found.values()):11} {sum(CODE_LINES.values()):8}")
    lengths = sorted((len(path.read_text(encoding="utf-8").splitlines()), name) for name, path in modules().items())
    print(f"lines of a file: median {statistics.median(lines for lines, _ in lengths):.0f}, ", end="")
    print(f"90th percentile {lengths[len(lengths) * 9 // 10][0]}, largest {lengths[-1][0]} ({lengths[-1][1]})")
    print(f"files of tests: {len(files_of(ROOT / 'tests'))}")


if __name__ == "__main__":
    main()
