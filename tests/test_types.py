"""All annotations hold: pyright, strict, over sources, tests, benchmarks and examples."""

from __future__ import annotations

import subprocess
from importlib.util import find_spec
from pathlib import Path

from tests.support.node import node_path

QUICKER = (
    "--max-semi-space-size=256",  # MiB of new objects: garbage is collected less often
    "--min-semi-space-size=256",
    "--max-old-space-size=8000",
    "--single-threaded-gc",  # helpers of the collection would take cores from other tests
    "--always-sparkplug",  # compiles each function at its first call
)
"""Options of Node, with which pyright takes about a seventh less of a core's time."""


def test_types_are_right() -> None:
    package = find_spec("pyright")
    assert package is not None
    assert package.origin is not None
    checker = Path(package.origin).parent / "dist" / "index.js"
    words = [node_path(), *QUICKER, str(checker)]
    process = subprocess.run(words, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout + process.stderr
