"""Format of checkpoints: folders that are complete or not there, and that any plan can read.

Read `write.py` first: the files of a checkpoint, and the order in which they are written. `contents.py` says what a
rank keeps from step to step, and which rank writes which part of it. `read.py` opens a checkpoint, and restores the
state of a rank under a plan that may differ from the plan that wrote it. `distributed.py` reads and writes the weights
of torch.distributed.checkpoint. `train/checkpoints.py` decides when to save.
"""

from shardlab.train.checkpoint.contents import WEIGHTS as WEIGHTS_KIND
from shardlab.train.checkpoint.contents import (
    OutputTensor,
    Snapshot,
    bytes_of,
    chunks_of,
    file_chunks,
    header_of,
    updates_of,
)
from shardlab.train.checkpoint.read import CONFIG, METADATA, STATE, Checkpoint, CheckpointTensors
from shardlab.train.checkpoint.write import Disk, commit, folder_of, steps_in, write_shard

__all__ = [
    "CONFIG",
    "METADATA",
    "STATE",
    "WEIGHTS_KIND",
    "Checkpoint",
    "CheckpointTensors",
    "Disk",
    "OutputTensor",
    "Snapshot",
    "bytes_of",
    "chunks_of",
    "commit",
    "file_chunks",
    "folder_of",
    "header_of",
    "steps_in",
    "updates_of",
    "write_shard",
]
