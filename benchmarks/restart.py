"""Measure the seconds from the kill of a rank to the first new step, for a repeated command and for torchrun.

python benchmarks/restart.py [--ranks 2] [--times 3]
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import tyro

MODEL = "--strategy fsdp --hidden-size 64 --layers 4 --seq-len 64 --microbatches 4 --micro-batch-size 1"


def children(pid: int) -> list[int]:
    """Processes that a process has started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def ranks_of(pid: int, *, torchrun: bool) -> list[int]:
    """The processes of a run's ranks: torchrun starts them, and a server of the command forks them."""
    found = children(pid)
    return sorted(found if torchrun else [rank for server in found for rank in children(server)])


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the run does not get on")
        time.sleep(0.005)


def restart(folder: Path, ranks: int, *, torchrun: bool) -> tuple[float, float]:
    """Seconds from a kill to the end of the last rank, and to the first new step."""
    out, log = folder / "run", folder / "log"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--max-restarts", "1", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *(launcher if torchrun else []), "-m", "shardlab", "train", *MODEL.split()]
    command += ["--ranks", str(ranks), "--steps", "100000", "--save-every", "5", "--resume", "auto", "--out", str(out)]

    def steps() -> int:
        metrics = out / "metrics.jsonl"
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

    def place_of(word: str) -> int:
        return log.read_text(errors="replace").rfind(word)

    with log.open("ab") as file:

        def start() -> subprocess.Popen[bytes]:
            return subprocess.Popen(command, stdout=file, stderr=file)

        process = start()
        try:
            wait_for(lambda: steps() >= 12)
            killed = ranks_of(process.pid, torchrun=torchrun)
            os.kill(killed[-1], signal.SIGKILL)
            began = time.monotonic()
            wait_for(lambda: not any(alive(pid) for pid in killed))
            ended = time.monotonic() - began
            if not torchrun:
                process.wait()
                process = start()
            wait_for(lambda: place_of("resumed after step ") >= 0)
            step = int(log.read_text(errors="replace").partition("resumed after step ")[2].partition(",")[0])
            wait_for(lambda: steps() > step)
            return ended, time.monotonic() - began
        finally:
            process.terminate()
            process.wait()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def main(ranks: int = 2, times: int = 3) -> None:
    """Kill the last rank of a run that saves every 5 steps; medians."""
    print(f"load before                        {os.getloadavg()[0]:6.1f}")
    for torchrun in (False, True):
        found: list[tuple[float, float]] = []
        for _ in range(times):
            with tempfile.TemporaryDirectory() as folder:
                found.append(restart(Path(folder), ranks, torchrun=torchrun))
        name = "torchrun --max-restarts" if torchrun else "the same command again"
        print(f"{name:24} all ended {median(each[0] for each in found):6.1f} s")
        print(f"{'':24} a new step {median(each[1] for each in found):5.1f} s")


if __name__ == "__main__":
    tyro.cli(main)
