"""Memory by which a process grows when it converts a large model after a small one. Linux only."""

from __future__ import annotations

from pathlib import Path

from tests.support.warm import WarmStarts

BEFORE = """
import ctypes
import sys
import warnings
from pathlib import Path
import torch
from shardlab.models.tensors import weights
from shardlab.train.checkpoint import contents
from shardlab.train.huggingface.convert import convert_weights
from shardlab.train.huggingface.sources import open_source

ctypes.CDLL(None).mallopt(-3, 2**18)  # M_MMAP_THRESHOLD: larger blocks leave the process as they are freed
warnings.simplefilter("ignore")
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


def kib_grown(warm: WarmStarts, convert: str, folder: Path, piece: int) -> int:
    """Return the KiB by which a process grows at its peak, with the models of `small` and `large` in a folder.

    Args:
        warm: starts of processes.
        convert: Python source of `convert(name)`.
        folder: folder in which the process runs.
        piece: bytes that are read at once; pages are freed after each piece.
    """
    program = folder / "convert.py"
    program.write_text(BEFORE + convert + AFTER)
    result = warm.run([str(program), str(piece)], cwd=folder)
    assert result.returncode == 0, result.stderr
    return int(result.stdout)
