"""All annotations hold: pyright, strict, over sources, tests, benchmarks and examples."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_types_are_right() -> None:
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-m", "pyright"], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
