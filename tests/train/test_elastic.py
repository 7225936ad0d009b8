"""What torchrun starts again goes on by itself, also with fewer ranks, and its numbers stay those of one device."""

# pyright: reportPrivateImportUsage=false
# torch does not mark its stores as exported.

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

pytestmark = pytest.mark.xdist_group("ranks")

ROOT = Path(__file__).parents[2]
LIMIT = 180.0
"""Seconds for everything that a test waits for; tests share a machine."""

STEPS = 60
TRAIN = ["-m", "shardlab", "train", "--steps", str(STEPS), "--hidden-size", "16", "--seq-len", "16", "--log-every", "1"]
SOON = "keep_alive_interval=1,keep_alive_max_attempt=2,last_call_timeout=1"
"""How soon torchrun misses a host, and goes on without it."""


class Agents:
    """Agents of torchrun, each as if it were a host's, which meet in a store that outlives them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=9))
        self.agents: list[subprocess.Popen[bytes]] = []

    def start(self, *words: str, count: int = 2, restarts: int = 3) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
        options = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", str(restarts)]
        options += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self.store.port}"]
        options += ["--rdzv-conf", f"is_host=0,{SOON}", "--local-addr", "127.0.0.1"]
        for _ in range(count):
            with (self.folder / f"agent-{len(self.agents)}.log").open("wb") as log:
                command = [sys.executable, "-m", "torch.distributed.run", *options, *words]
                agent = subprocess.Popen(command, env=environment, stderr=log, stdout=log, start_new_session=True)
            self.agents.append(agent)

    @property
    def said(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("agent-*.log")))


@pytest.fixture
def agents(tmp_path: Path) -> Generator[Agents]:
    found = Agents(tmp_path)
    yield found
    for agent in found.agents:
        with suppress(ProcessLookupError):
            os.killpg(agent.pid, signal.SIGKILL)
        agent.wait()


def until(happens: Callable[[], object], agents: Agents) -> None:
    deadline = time.monotonic() + LIMIT
    while not happens():
        assert time.monotonic() < deadline, agents.said
        time.sleep(0.05)


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def ranks_of(run: Path) -> int:
    with suppress(OSError, ValueError):
        return json.loads((run / "run.json").read_text())["ranks"]
    return 0


@pytest.mark.parametrize(
    ("plan", "smaller"),
    [
        (["--strategy", "fsdp"], ""),
        (["--dp-shard", "2", "--shard-parameters", "dp_shard", "--shard-optimizer", "dp_shard"], "mesh"),
    ],
    ids=["a strategy", "a plan by flags"],
)
def test_a_run_that_loses_a_host_goes_on_with_the_ranks_that_are_left(
    plan: list[str], smaller: str, agents: Agents, tmp_path: Path
) -> None:
    run, alone = tmp_path / "run", tmp_path / "alone"
    agents.start(*TRAIN, *plan, "--save-every", "5", "--out", str(run))
    until(lambda: list(run.glob("checkpoints/step-??????")), agents)
    os.kill(agents.agents[1].pid, signal.SIGKILL)  # its rank ends with it
    assert agents.agents[0].wait(LIMIT) == 0, agents.said
    assert "resumed after step" in agents.said
    assert ranks_of(run) == 1
    command = [sys.executable, *TRAIN, "--strategy", "grad-accum", "--ranks", "1", "--out", str(alone)]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, check=True, capture_output=True)
    assert len(losses(run)) == STEPS
    assert losses(run) == pytest.approx(losses(alone), rel=1e-4)
    assert smaller in (run / "config.toml").read_text()
