"""`shardlab` whose run waits at checkpoints until the file HELD_UNTIL is there, and cannot end.

It waits once it has a checkpoint whose name begins with HELD_AT. What is then done to the run is in time, however busy
the machine: python -m tests.train.held WORDS

It leaves its process id in the file HELD_PID, if that is given.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from shardlab.cli import main
from shardlab.train import checkpoints

_commit = checkpoints.commit


def commit(disk: Any, folder: Path, *rest: Any) -> None:
    """The checkpoint is complete; nothing more is written in this thread before the file is there."""
    _commit(disk, folder, *rest)
    while folder.name.startswith(os.environ["HELD_AT"]) and not os.path.exists(os.environ["HELD_UNTIL"]):
        time.sleep(0.02)


checkpoints.commit = commit

if __name__ == "__main__":
    if "HELD_PID" in os.environ:
        Path(os.environ["HELD_PID"]).write_text(str(os.getpid()))
    sys.exit(main())
