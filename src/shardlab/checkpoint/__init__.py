"""Checkpoints: what ranks keep, in folders that are complete or not there, and read back under any plan."""

from shardlab.checkpoint.commit import commit, folder_of, steps_in, write_shard
from shardlab.checkpoint.disk import Disk
from shardlab.checkpoint.held import WEIGHTS as WEIGHTS_KIND
from shardlab.checkpoint.held import Snapshot, updates_of
from shardlab.checkpoint.read import CONFIG, STATE, Checkpoint, CheckpointTensors
from shardlab.checkpoint.tensor_file import bytes_of, chunks_of, header_of

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
