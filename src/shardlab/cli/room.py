"""Whether a host has room for what its ranks keep beside their devices, before any of them is started."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from shardlab.check import Checked
from shardlab.program import UserError
from shardlab.rules.place import DISK, PLACES
from shardlab.timeline.memory import peak_elsewhere_in_bytes
from shardlab.timeline.units import bytes_text


def require_room(proof: Checked, ranks: Sequence[int]) -> None:
    """Refuse a program that keeps more in a place than is free there.

    Args:
        proof: the program.
        ranks: those of this host.

    Raises:
        UserError: with the bytes that it takes and that there are.
    """
    named = {op.place for tape in proof.program.tapes for op in tape}
    for place in (place for place in PLACES if place in named):
        taken = sum(peak_elsewhere_in_bytes(proof, place)[rank] for rank in ranks)
        free, where = free_room(place)
        if taken and free is not None and taken > free:
            remedy = "set TMPDIR to another folder, or offload less" if place == DISK else "offload less"
            raise UserError(
                f"{len(ranks)} ranks need {bytes_text(taken)} on the {place}, but {where} has only "
                f"{bytes_text(free)} free; {remedy}"
            )


def free_room(place: str) -> tuple[int | None, str]:
    """Bytes that are free in a place, None where the system does not say, and what has them."""
    if place == DISK:
        folder = tempfile.gettempdir()
        return shutil.disk_usage(folder).free, folder
    told = Path("/proc/meminfo")
    lines = told.read_text().splitlines() if told.exists() else []  # Linux alone has it
    free = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
    return free, "this host's memory"
