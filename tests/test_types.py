"""All annotations hold: pyright, strict, over sources, tests, benchmarks and examples."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_types_are_right() -> None:
    root = Path(__file__).parents[1]
    environment = {**os.environ, "NODE_OPTIONS": "--max-semi-space-size=64"}  # MiB, so that garbage is collected less
    done = subprocess.run(
        [sys.executable, "-m", "pyright"], cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
