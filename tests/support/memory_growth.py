"""Memory by which a process grows when it converts a large model after a small one. Linux only."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

BEFORE = """
import sys
from pathlib import Path
import torch
from shardlab.models.tensors import weights
from shardlab.train.checkpoint import contents
from shardlab.train.huggingface import convert_weights, open_source

torch.set_num_threads(1)
contents.PIECE_BYTES = weights.RELEASED_BYTES = int(sys.argv[1])

def field(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))
"""

AFTER = """
convert("small")
before = field("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far, which also counts that of the parent process
convert("large")
print(field("VmHWM") - before)
"""


def kib_grown(convert: str, folder: Path, piece: int) -> int:
    """Return the KiB by which a process grows at its peak, with the models of `small` and `large` in a folder.

    Args:
        convert: Python source of `convert(name)`.
        folder: folder in which the process runs.
        piece: bytes that are read at once; pages are freed after each piece.
    """
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    environment["MALLOC_MMAP_THRESHOLD_"] = str(2**18)  # or freed memory stays with the process
    command = [sys.executable, "-W", "ignore", "-c", BEFORE + convert + AFTER, str(piece)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)
