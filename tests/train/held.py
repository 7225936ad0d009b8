"""`shardlab` whose run waits, once it has the checkpoint HELD_AT, until the file HELD_UNTIL is there, and cannot end.

What is then done to the run is in time, however busy the machine: python -m tests.train.held WORDS
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from shardlab.cli import main
from shardlab.train import saving

_commit = saving.commit


def commit(disk: Any, folder: Path, *rest: Any) -> None:
    """The checkpoint is complete; nothing more is written in this thread before the file is there."""
    _commit(disk, folder, *rest)
    while folder.name == os.environ["HELD_AT"] and not os.path.exists(os.environ["HELD_UNTIL"]):
        time.sleep(0.02)


saving.commit = commit

if __name__ == "__main__":
    sys.exit(main())
