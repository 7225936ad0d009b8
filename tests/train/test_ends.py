"""Ends of runs: all processes end within seconds, and the weights that the output names exist."""

# pyright: reportPrivateImportUsage=false
# torch does not mark its stores as exported.

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from shardlab.common.text import counted
from tests.support.processes import PATIENCE, until
from tests.support.thorough import sampled
from tests.support.warm import WarmProcess, WarmStarts

pytestmark = pytest.mark.starts_ranks

ROOT = Path(__file__).parents[2]
LIMIT = 90
"""Seconds from the signal to the end of the last process: 10 are promised, and tests share a machine."""

PROGRAM = """
import os
from multiprocessing import current_process
from pathlib import Path

from shardlab.strategies.ddp import ddp

name = current_process().name
name = "rank-" + os.environ["RANK"] if "RANK" in os.environ else name
if name.startswith("rank-"):
    written = Path(__file__).with_name(f"{os.getpid()}.tmp")
    written.write_text(str(os.getpid()))
    written.replace(Path(__file__).with_name(name))
"""
"""A strategy whose processes leave their ids beside it."""

ADDITION = """
from shardlab.train import steps
from shardlab.train.launch import interrupt, processes

interrupt.GRACE = processes.GRACE = steps.GRACE = 60
"""
"""Addition to the strategy: ranks that are asked to end have more than 7 s, since tests share a machine."""


class Training:
    """A run of 2 ranks."""

    def __init__(
        self,
        warm: WarmStarts,
        folder: Path,
        start: Sequence[str] = (),
        stderr: int = subprocess.PIPE,
        options: Sequence[str] = (),
    ) -> None:
        (folder / "program.py").write_text(PROGRAM + ADDITION)
        self.folder, self.out = folder, folder / "run"
        words = [*start, "-m", "shardlab", "train", "--strategy", f"{folder}/program.py:ddp"]
        words += ["--ranks", "2", "--steps", "100000", "--hidden-size", "16", "--out", str(self.out), *options]
        self.process = warm.start(words, stdout=subprocess.DEVNULL, stderr=stderr, text=True, start_new_session=True)

    def take_steps(self) -> None:
        """Wait for the first ones."""
        metrics = self.out / "metrics.jsonl"
        until(lambda: metrics.exists() and metrics.stat().st_size)

    def kill(self, rank: int, number: int) -> None:
        """Send a rank a signal, once it has left its id."""
        place = self.folder / f"rank-{rank}"
        until(lambda: place.exists() and Path("/proc", place.read_text()).exists())
        os.kill(int(place.read_text()), number)

    def output(self) -> str:
        """What all its processes had written when the last of them ended, and nobody held the pipe."""
        return self.process.communicate(timeout=LIMIT)[1]

    @property
    def steps(self) -> int:
        return len((self.out / "metrics.jsonl").read_text().splitlines())

    @property
    def saves(self) -> bool:
        return (self.out / "weights.safetensors").exists()


Start = Callable[..., Training]


@pytest.fixture
def start(tmp_path: Path, warm: WarmStarts) -> Generator[Start]:
    """Start a training; what is left of it ends with the test."""
    started: list[Training] = []

    def begin(*arguments: Any) -> Training:
        started.append(Training(warm, tmp_path, *arguments))
        started[-1].take_steps()
        return started[-1]

    yield begin
    for training in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(training.process.pid, signal.SIGKILL)
        training.process.communicate()


def alone(training: Training, number: int) -> None:
    training.process.send_signal(number)


def group(training: Training, number: int) -> None:
    os.killpg(training.process.pid, number)


def rank_1(training: Training, number: int) -> None:
    training.kill(1, number)


@pytest.mark.parametrize(
    ("to", "number"),
    sampled(
        [
            (alone, signal.SIGTERM),
            (group, signal.SIGINT),
            (rank_1, signal.SIGTERM),
            (group, signal.SIGUSR1),
            (alone, signal.SIGKILL),
        ],
        lambda case: case[1] in (signal.SIGTERM, signal.SIGINT),
    ),
    ids=["SIGTERM", "Ctrl-C", "SIGTERM to a rank", "a scheduler's warning", "its parent killed"],
)
def test_a_run_that_is_asked_to_end_saves_and_says_so(
    start: Start, to: Callable[[Training, int], None], number: int
) -> None:
    training = start()
    to(training, number)
    output = training.output()
    files = {file.name for file in training.out.iterdir()}
    assert {"weights.safetensors", "strategy.svg", "run.json"} <= files, output
    where = f"the weights after {training.steps} steps are in {training.out}/weights.safetensors"
    assert output.count(where) == 1, output
    assert output.count(f"go on after step {training.steps} with: shardlab train --resume {training.out}") == 1, output
    assert "Traceback" not in output
    assert ("in at most 100 s" in output) == (number == signal.SIGUSR1), output
    assert training.process.returncode == (-signal.SIGKILL if number == signal.SIGKILL else 0)


def test_a_killed_rank_ends_all_and_leaves_figures_without_weights_or_partial_files(start: Start) -> None:
    training = start()
    for name in ("plots.svg.shardlab.part", "weights.safetensors.shardlab.part"):
        (training.out / name).write_text("half")
    training.kill(0, signal.SIGKILL)
    output = training.output()
    left = {file.name for file in training.out.iterdir()}
    assert left == {"config.toml", "run.json", "strategy.svg", "metrics.jsonl"}
    assert f"there are no weights in {training.out}, only the figures of {counted(training.steps, 'step')}" in output
    assert output.rstrip().endswith("shardlab: rank 0 was killed (SIGKILL; out of memory?), and the run ended with it.")
    assert "Traceback" not in output
    assert training.process.returncode == 1


@pytest.mark.parametrize("again", [False, True], ids=["Ctrl-C once", "Ctrl-C twice"])
def test_a_rank_that_hangs_keeps_no_other_from_ending(
    start: Start, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not again:
        monkeypatch.setattr("tests.train.test_ends.ADDITION", "")
    training = start()
    training.kill(1, signal.SIGSTOP)
    if again:
        alone(training, signal.SIGINT)
        assert training.process.stderr is not None
        assert any("ending after this step" in line for line in training.process.stderr), "the ranks were not told"
        time.sleep(1)  # a second signal soon after the first counts as its copy
    group(training, signal.SIGINT)
    output = training.output()
    assert not training.saves
    assert ("at once, since it was asked twice" if again else "did not end within 7 s") in output
    assert f"there are no weights in {training.out}" in output
    assert training.process.returncode == 130


OWN_TERMINAL = """
import fcntl, runpy, sys, termios
fcntl.ioctl(2, termios.TIOCSCTTY, 0)
sys.argv = sys.argv[2:]
runpy.run_module("shardlab", run_name="__main__", alter_sys=True)
"""


def test_a_terminal_that_is_closed_loses_no_weights(start: Start) -> None:
    ours, theirs = pty.openpty()
    training = start(["-c", OWN_TERMINAL], theirs)
    os.close(theirs)
    os.close(ours)
    assert training.process.wait(LIMIT) == 0
    assert training.saves


TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]


def test_ranks_whose_launcher_is_killed_save_and_say_so(start: Start) -> None:
    training = start(TORCHRUN)
    alone(training, signal.SIGKILL)
    output = training.output()
    assert "ending after this step, in at most 60 s" in output
    assert f"the weights after {training.steps} steps are in {training.out}/weights.safetensors" in output


SLOW_SAVE = """
import time

from shardlab.train import callbacks
from shardlab.train.weights import save_weights


def save_slowly(*arguments):
    time.sleep(6.6)
    return save_weights(*arguments)


callbacks.save_weights = save_slowly
"""
"""Another addition: weights are written just before the run is killed."""


def test_what_a_killed_rank_says_of_its_weights_stays_true(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.train.test_ends.ADDITION", SLOW_SAVE)
    training = start(TORCHRUN)
    alone(training, signal.SIGKILL)
    output = training.output()
    assert "the step did not end within 7 s" in output
    assert (f"there are no weights in {training.out}" in output) != training.saves, output
    assert (f"steps are in {training.out}/weights.safetensors" in output) == training.saves, output


def test_a_restart_by_torchrun_does_not_silently_begin_at_step_0(start: Start) -> None:
    training = start([*TORCHRUN, "--max-restarts", "1"])
    training.kill(1, signal.SIGKILL)
    output = training.process.communicate(timeout=PATIENCE)[1]
    assert "(restart 1), and a restarted run does not begin again at step 0" in output
    assert f"there are no weights in {training.out}, only the figures of {counted(training.steps, 'step')}" in output
    assert not training.saves


def test_a_restart_by_torchrun_continues_with_resume_auto(start: Start) -> None:
    options = ["--save-every", "5", "--resume", "auto"]
    training = start([*TORCHRUN, "--max-restarts", "1"], subprocess.PIPE, options)
    until(lambda: list(training.out.glob("checkpoints/step-??????")))
    training.kill(1, signal.SIGKILL)
    until(lambda: json.loads((training.out / "run.json").read_text())["resumed"] is not None)
    training.kill(1, signal.SIGTERM)
    output = training.output()
    assert "resumed after step" in output
    assert training.process.returncode == 0, output
    figures = (training.out / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in figures] == list(range(len(figures)))
    assert training.saves


def test_a_command_does_not_collect_all_of_torch_before_it_ends() -> None:
    code = "import atexit, gc; atexit.register(lambda: print(gc.get_freeze_count() > 0)); import shardlab.cli"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


# Runs restarted by torchrun continue by themselves, also with fewer ranks, with the numbers of one device.


STEPS = 20
TRAIN = ["train", "--steps", str(STEPS), "--hidden-size", "16", "--seq-len", "16", "--log-every", "1"]
SOON = "keep_alive_interval=1,keep_alive_max_attempt=6,last_call_timeout=6"
"""How soon torchrun misses a host, and goes on without it: after 6 s, in which a busy machine lets each agent speak.
As long does the first agent wait for the second."""


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
                command = ["-m", "torch.distributed.run", *options, "-m", "tests.train.jobs", *words]
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
    def ended(self) -> bool:
        """Whether an agent has ended."""
        return any(agent.poll() is not None for agent in self.agents)

    @property
    def output(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("agent-*.log")))


@pytest.fixture
def agents(warm: WarmStarts, tmp_path: Path) -> Generator[Agents]:
    group = Agents(warm, tmp_path)
    yield group
    for agent in group.agents:
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
def alone_of_elastic(warm: WarmStarts, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
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
    plan: list[str], smaller: str, agents: Agents, alone_of_elastic: list[float], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    agents.start(*TRAIN, *plan, "--save-every", "5", "--out", str(run))
    saves = partial(run.glob, "checkpoints/step-??????")
    until(lambda: agents.ended or (ranks_of(run) == 2 and list(saves())), lambda: agents.output)
    assert not agents.ended, agents.output
    agents.lose(1)
    assert agents.agents[0].wait(PATIENCE) == 0, agents.output
    assert "resumed after step" in agents.output
    assert ranks_of(run) == 1
    assert len(losses(run)) == STEPS
    assert losses(run) == pytest.approx(alone_of_elastic, rel=1e-4)
    assert smaller in (run / "config.toml").read_text()
