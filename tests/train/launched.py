"""A rank of torchrun's: python -m tests.train.launched FAULT."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from shardlab.cli.train.before_ranks import failures_as_exit, lines_of
from shardlab.models import find_model
from shardlab.strategies.load import load
from shardlab.train.faults import Watching
from shardlab.train.job import Job
from shardlab.train.launch.ranks import run_ranks
from tests.train import faulty

if __name__ == "__main__":
    program = Path(__file__).parents[2] / "examples" / "my_strategy.py"
    job = Job(f"{program}:my_ddp", 2, 2, find_model("mlp"), 1)
    fault, first = sys.argv[1], os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    with failures_as_exit():
        watching = Watching(3.0, job.checked(), lines_of(load(job.strategy), job))
        run_ranks(2, faulty.train, job, fault, 1 if first else -1, 5, watching=watching)
    os.write(2, b"all steps taken\n")  # at once, since two ranks say so
