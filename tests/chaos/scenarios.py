"""What may happen to a run beside kills, each with what must come of it.

    python -m tests.chaos.scenarios

Every scenario disturbs a run or its files, and lets it go on; its losses, weights and checkpoints must be those of a
run that nobody disturbed, bit by bit, and it has to say what happened. What this machine lacks for a scenario (root for
one with a disk of its own, libfaketime for one with a clock) is told; it then counts as not run.
"""

from __future__ import annotations

import json as as_json
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

import tyro
from rich.console import Console
from rich.table import Table

from tests.chaos.broken_files import BROKEN_FILES
from tests.chaos.scene import INTERRUPTIONS, NotRun, Scene
from tests.chaos.surroundings import SURROUNDINGS

SCENARIOS = {**INTERRUPTIONS, **BROKEN_FILES, **SURROUNDINGS}


def main(only: tuple[str, ...] = (), json: bool = False) -> int:
    """Play the scenarios.

    Args:
        only: those whose names begin so; all without it.
        json: print JSON alone.
    """
    console = Console(stderr=True)
    played: dict[str, tuple[float, str, list[str]]] = {}
    left_out: dict[str, str] = {}
    with (
        tempfile.TemporaryDirectory() as temporary,
        console.status("two runs to begin with") as status,
        closing(Scene(Path(temporary))) as scene,
    ):
        for name, play in SCENARIOS.items():
            if only and not name.startswith(only):
                continue
            status.update(name)
            began, scene.line = time.monotonic(), ""
            try:
                wrong = play(scene)
            except NotRun as missing:
                left_out[name] = str(missing)
                console.print(f"{name}: not run; {missing}")
                continue
            played[name] = time.monotonic() - began, scene.line.replace(temporary, "..."), wrong
            console.print(f"{name}: {'; '.join(wrong) or 'as it must be'}", markup=False)
    if json:
        rows = {name: {"seconds": took, "line": line, "wrong": wrong} for name, (took, line, wrong) in played.items()}
        print(as_json.dumps({"played": rows, "not run": left_out}, indent=1))
    else:
        table = Table("scenario", "seconds", "the run says", "wrong")
        for name, (took, line, wrong) in played.items():
            table.add_row(name, f"{took:.1f}", line, "\n".join(wrong) or "nothing")
        for name, missing in left_out.items():
            table.add_row(name, "", "", f"not run: {missing}")
        Console().print(table)
    return int(any(wrong for _, _, wrong in played.values()))


if __name__ == "__main__":
    sys.exit(tyro.cli(main, description=__doc__))
