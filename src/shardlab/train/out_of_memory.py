"""What a rank says when its device, its host or its limit has no more memory."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from shardlab.program import UserError
from shardlab.timeline.units import bytes_text
from shardlab.train.heap import memory_limit

if TYPE_CHECKING:
    import torch

_ASKED = re.compile(r"(?:[Tt]ried to allocate|unable to mmap) (\d+ bytes|[\d.]+ [KMG]iB)")
"""In torch's words for it."""

_THREAD = "can't start new thread"  # for which there is no stack


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory was asked for that is not there."""
    text = str(error)
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and bool(_ASKED.search(text) or _THREAD in text)
    )


def out_of_memory(rank: int, device: torch.device, error: BaseException) -> UserError:
    """One sentence of what a rank has asked for, what it had, and what to do."""
    found = _ASKED.search(str(error))
    asked = found[1] if found else "memory"
    if asked.endswith(" bytes"):
        asked = bytes_text(int(asked.partition(" ")[0]))
    limit = memory_limit()
    has = "its GPU has free" if device.type == "cuda" else "is free on this host"
    if device.type != "cuda" and limit is not None:
        has = f"the process may take by its limit of {bytes_text(limit)} (ulimit -d or -v)"
    place = "host" if device.type == "cuda" else "disk"
    return UserError(
        f"rank {rank} is out of memory: it asked for {asked}, more than {has}; keep less on each rank, by "
        f"--offload parameters={place} optimizer={place}, a strategy that shards such as fsdp or zero-3, more ranks, "
        "or a smaller --micro-batch-size"
    )
