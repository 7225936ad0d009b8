"""`shardlab launch`: any command as ranks, here or in the world of a launcher."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from shardlab.cli import main
from shardlab.train.launch.environment import usable_cpus
from tests.support.processes import PATIENCE, started
from tests.support.thorough import sampled
from tests.support.warm import WarmStarts

pytestmark = pytest.mark.starts_ranks
Captured = pytest.CaptureFixture[str]

WORLD = """
import json, os
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")
print(json.dumps({**{name: os.environ[name] for name in names}, "cpus": sorted(os.sched_getaffinity(0))}))
"""

SUM = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(x)
print(f"the sum is {x.item():g}")
dist.destroy_process_group()
"""


Launched = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def launched(warm: WarmStarts) -> Launched:
    """`shardlab launch` with these words, and with variables beside those of this process."""

    def run(*words: str, environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        clean = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        return warm.run(["-m", "shardlab", "launch", *words], env={**clean, **(environment or {})})

    return run


@pytest.mark.thorough  # as the script of docs/launch.md does
def test_a_script_of_ones_own_meets_in_the_world_that_was_started(tmp_path: Path, launched: Launched) -> None:
    (tmp_path / "sum.py").write_text(SUM)
    done = launched("--ranks", "2", "--", str(tmp_path / "sum.py"))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] the sum is 3", "[1] the sum is 3"]


@pytest.mark.skipif(len(usable_cpus()) < 2, reason="needs two CPUs")
def test_each_rank_knows_its_world_and_runs_on_cpus_of_its_own(tmp_path: Path, launched: Launched) -> None:
    (tmp_path / "world.py").write_text(WORLD)
    done = launched("--ranks", "2", "--bind", "--", str(tmp_path / "world.py"))
    assert done.returncode == 0, done.stderr
    worlds = [json.loads(line.partition("] ")[2]) for line in sorted(done.stdout.splitlines())]
    assert [world["RANK"] for world in worlds] == [world["LOCAL_RANK"] for world in worlds] == ["0", "1"]
    assert {(world["WORLD_SIZE"], world["LOCAL_WORLD_SIZE"], world["MASTER_ADDR"]) for world in worlds} == {
        ("2", "2", "127.0.0.1")
    }
    assert sorted(cpu for world in worlds for cpu in world["cpus"]) == sorted(usable_cpus())
    assert [int(world["OMP_NUM_THREADS"]) for world in worlds] == [len(world["cpus"]) for world in worlds]


FAILING = """
if [ $RANK = 1 ]; then echo fish >&2; touch failing; exit 3; fi
until [ -e failing ]; do sleep 0.1; done
sleep 1
echo "Connection closed by peer" >&2; exit 1
"""


def test_the_first_failing_ranks_output_is_last_and_its_exit_code_is_kept(
    tmp_path: Path, launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = launched("--ranks", "2", "--", "sh", "-c", FAILING)
    assert done.returncode == 3
    assert done.stderr.endswith(
        "shardlab: last lines of rank 1 (at most 40):\nfish\n"
        "shardlab: rank 1 ended with exit code 3, so all ranks were stopped\n"
    )


def test_the_others_end_with_the_one_that_was_killed(launched: Launched) -> None:
    done = launched("--ranks", "2", "--", "sh", "-c", "if [ $RANK = 0 ]; then kill -9 $$; else sleep 100000; fi")
    assert done.returncode == 128 + signal.SIGKILL
    assert "rank 0 was killed (SIGKILL; out of memory?), so all ranks were stopped" in done.stderr


def test_ranks_are_started_again_as_often_as_asked(tmp_path: Path, launched: Launched) -> None:
    script = f'if [ $TORCHELASTIC_RESTART_COUNT = 0 ]; then exit 1; fi; echo again >> "{tmp_path}/$RANK"'
    done = launched("--ranks", "2", "--max-restarts", "2", "--", "sh", "-c", script)
    assert done.returncode == 0, done.stderr
    assert "failed; restart 1 of 2" in done.stderr
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["again\n"] * 2


def test_a_signal_reaches_every_rank(warm: WarmStarts) -> None:
    script = "trap 'echo asked; exit 0' TERM; echo ready; while :; do sleep 0.1; done"
    command = ["-m", "shardlab", "launch", "--ranks", "2", "--", "sh", "-c", script]
    with started(command, warm.start) as process:
        assert process.stdout is not None
        for _ in range(2):
            assert process.stdout.readline().endswith("ready\n")
        process.terminate()
        out, said = process.communicate(timeout=PATIENCE)
    assert sorted(out.splitlines()) == ["[0] asked", "[1] asked"]
    assert "interrupted (SIGTERM); all ranks have ended" in said
    assert process.returncode == 0  # they ended well


TERMINATED_WHILE_RANKS_START = """
import asyncio, signal
from shardlab.train.launch.commands import run_command

start, started = asyncio.create_subprocess_exec, []

async def start_and_terminate(*words, **options):
    started.append(await start(*words, **options))
    if len(started) == 1:
        signal.raise_signal(signal.SIGTERM)
    return started[-1]

asyncio.create_subprocess_exec = start_and_terminate
print(run_command(["sleep", "100000"], 2, bound=False).signal, [process.returncode for process in started])
"""


def test_a_signal_reaches_ranks_that_have_just_started(warm: WarmStarts) -> None:
    done = warm.run(["-c", TERMINATED_WHILE_RANKS_START])
    assert (done.returncode, done.stdout) == (0, f"{int(signal.SIGTERM)} [{-signal.SIGTERM}, {-signal.SIGTERM}]\n")


OMPI = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")


@pytest.mark.parametrize(
    "variables",
    sampled(
        [
            {f"OMPI_COMM_WORLD_{name}": "12"[name.endswith("SIZE")] for name in OMPI},
            {"PALS_RANKID": "1", "PALS_LOCAL_RANKID": "1", "PMI_RANK": "1", "PMI_SIZE": "2", "PMI_LOCAL_SIZE": "2"},
            {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "2"},
        ],
        lambda variables: "SLURM_PROCID" in variables,
    ),
)
def test_under_a_launcher_this_process_becomes_the_command(variables: Mapping[str, str], launched: Launched) -> None:
    done = launched("--", "sh", "-c", "echo $RANK of $WORLD_SIZE at $MASTER_ADDR", environment=variables)
    assert (done.returncode, done.stdout) == (0, "1 of 2 at 127.0.0.1\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("launch", "there is no command; give one after --"),
        ("launch -- no-such-program", "there is no program no-such-program"),
        ("launch -- nowhere.py", "there is no file nowhere.py"),
        ("launch --max-restarts -1 -- true", "--max-restarts is -1; give 0 or more"),
    ],
)
def test_what_cannot_be_launched_is_one_sentence(words: str, said: str, capsys: Captured) -> None:
    assert main(words.split()) == 2
    output = capsys.readouterr().err
    assert said in output
    assert output.count("\n") == 1


def test_a_launchers_world_has_its_own_size(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert main(["launch", "--ranks", "3", "--", "true"]) == 2
    assert "--ranks is 3, but torchrun started 2; leave out --ranks" in capsys.readouterr().err
