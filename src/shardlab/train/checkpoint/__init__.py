"""Checkpoints: what ranks keep, in folders that are complete or not there, and read back under any plan."""

from shardlab.train.checkpoint.contents import WEIGHTS as WEIGHTS_KIND
from shardlab.train.checkpoint.contents import Snapshot, bytes_of, chunks_of, header_of, updates_of
from shardlab.train.checkpoint.read import CONFIG, STATE, Checkpoint, CheckpointTensors
from shardlab.train.checkpoint.write import Disk, commit, folder_of, steps_in, write_shard

__all__ = [
    "CONFIG",
    "STATE",
    "WEIGHTS_KIND",
    "Checkpoint",
    "CheckpointTensors",
    "Disk",
    "Snapshot",
    "bytes_of",
    "chunks_of",
    "commit",
    "folder_of",
    "header_of",
    "steps_in",
    "updates_of",
    "write_shard",
]
