"""What torchrun starts again goes on by itself, also with fewer ranks, and its numbers stay those of one device."""

# pyright: reportPrivateImportUsage=false
# torch does not mark its stores as exported.

from __future__ import annotations

import json
import os
import select
import signal
from collections.abc import Generator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.waiting import PATIENCE, until
from tests.support.warm import WarmProcess, WarmStarts

pytestmark = pytest.mark.xdist_group("ranks")

STEPS = 20
TRAIN = ["train", "--steps", str(STEPS), "--hidden-size", "16", "--seq-len", "16", "--log-every", "1"]
SOON = "keep_alive_interval=1,keep_alive_max_attempt=6,last_call_timeout=1"
"""How soon torchrun misses a host, and goes on without it: after 6 s, in which a busy machine lets each agent speak."""


class Agents:
    """Agents of torchrun, each as if it were a host's, which meet in a store that outlives them."""

    def __init__(self, warm: WarmStarts, folder: Path) -> None:
        self.warm, self.folder = warm, folder
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=9))
        self.agents: list[WarmProcess] = []

    def start(self, *words: str, count: int = 2, restarts: int = 3) -> None:
        environment = {**os.environ, "HELD_AT": "step-", "HELD_UNTIL": str(self.folder / "lost")}
        options = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", str(restarts)]
        options += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self.store.port}"]
        options += ["--rdzv-conf", f"is_host=0,{SOON}", "--local-addr", "127.0.0.1"]
        for _ in range(count):
            with (self.folder / f"agent-{len(self.agents)}.log").open("wb") as log:
                command = ["-m", "torch.distributed.run", *options, "-m", "tests.train.held", *words]
                held = {**environment, "HELD_PID": str(self.pid_file(len(self.agents)))}
                agent = self.warm.start(command, env=held, stderr=log, stdout=log, start_new_session=True)
            self.agents.append(agent)

    def pid_file(self, number: int) -> Path:
        """Where the rank of an agent leaves its id."""
        return self.folder / f"pid-{number}"

    def lose(self, number: int) -> None:
        """Kill one, whose rank ends soon after it; the run waits for that."""
        rank = os.pidfd_open(int(self.pid_file(number).read_text()))
        self.agents[number].kill()
        assert select.select([rank], [], [], PATIENCE)[0], "the rank of an agent that was killed goes on"
        os.close(rank)
        (self.folder / "lost").touch()

    @property
    def output(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("agent-*.log")))


@pytest.fixture
def agents(warm: WarmStarts, tmp_path: Path) -> Generator[Agents]:
    found = Agents(warm, tmp_path)
    yield found
    for agent in found.agents:
        with suppress(ProcessLookupError):
            os.killpg(agent.pid, signal.SIGKILL)
        agent.wait()


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def ranks_of(run: Path) -> int:
    with suppress(OSError, ValueError):
        return json.loads((run / "run.json").read_text())["ranks"]
    return 0


@pytest.fixture(scope="module")
def alone(warm: WarmStarts, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of one device."""
    out = tmp_path_factory.mktemp("alone") / "run"
    done = warm.run(["-m", "shardlab", *TRAIN, "--strategy", "grad-accum", "--ranks", "1", "--out", str(out)])
    assert done.returncode == 0, done.stderr
    return losses(out)


@pytest.mark.parametrize(
    ("plan", "smaller"),
    [
        pytest.param(["--strategy", "fsdp"], "", id="a strategy", marks=pytest.mark.thorough),
        pytest.param(
            ["--dp-shard", "2", "--shard-parameters", "dp_shard", "--shard-optimizer", "dp_shard"],
            "mesh",
            id="a plan by flags",
        ),
    ],
)
def test_a_run_that_loses_a_host_goes_on_with_the_ranks_that_are_left(
    plan: list[str], smaller: str, agents: Agents, alone: list[float], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    agents.start(*TRAIN, *plan, "--save-every", "5", "--out", str(run))
    until(lambda: ranks_of(run) == 2 and list(run.glob("checkpoints/step-??????")), lambda: agents.output)
    agents.lose(1)
    assert agents.agents[0].wait(PATIENCE) == 0, agents.output
    assert "resumed after step" in agents.output
    assert ranks_of(run) == 1
    assert len(losses(run)) == STEPS
    assert losses(run) == pytest.approx(alone, rel=1e-4)
    assert smaller in (run / "config.toml").read_text()
