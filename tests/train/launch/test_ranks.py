"""Ranks are started here, or join the world of a launcher; the file of a rendezvous goes with its process."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from shardlab.language import UserError
from shardlab.train.faults import RankFailed
from shardlab.train.launch import ranks as launch
from shardlab.train.launch.environment import CpuShare, threads_of
from shardlab.train.launch.processes import run_processes
from shardlab.train.launch.ranks import PREFIX, rendezvous_file, run_ranks
from tests.support.processes import PATIENCE, free_port
from tests.support.ranks import PRELOAD
from tests.support.thorough import sampled
from tests.support.warm import WarmStarts
from tests.train import jobs

pytestmark = pytest.mark.starts_ranks


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") or name.startswith(("SLURM_", "PMI_", "OMPI_", "MASTER_")):
            monkeypatch.delenv(name)


def test_ranks_started_here_meet_and_rank_0_answers() -> None:
    assert run_ranks(3, jobs.sum_of_ranks, 10) == 0 + 1 + 2 + 10


def test_the_first_failing_rank_ends_the_run_with_its_own_traceback_last() -> None:
    with pytest.raises(RankFailed) as failure:
        run_ranks(3, jobs.raise_on, 1)
    text = str(failure.value)
    assert text.startswith("rank 1 failed")
    assert "raise_on" in text
    assert text.rstrip().endswith("ValueError: the batch is a fish")


def test_a_users_mistake_that_only_a_rank_can_see_is_one_sentence() -> None:
    with pytest.raises(UserError, match=r"^the fish is not a batch; give a batch$"):
        run_ranks(2, jobs.complain)


def test_a_rank_that_is_killed_is_named() -> None:
    with pytest.raises(RankFailed, match=r"\b1\b.*(killed|SIGKILL)"):
        run_ranks(2, jobs.die_on, 1)


def test_a_rank_that_lost_its_connection_is_named_where_others_did_not_notice_and_were_killed() -> None:
    with pytest.raises(RankFailed, match="rank 1 lost its connection"):
        run_ranks(2, jobs.lose)


def test_a_rank_that_is_asked_to_end_ends_what_saves_nothing() -> None:
    with pytest.raises(KeyboardInterrupt, match="rank 1 got SIGTERM"):
        run_ranks(2, jobs.die_on, 1, signal.SIGTERM)


SUM = partial(jobs.sum_of_ranks, addend=5)


def launched(environments: list[dict[str, str]], function: Callable[..., float] = SUM) -> list[float | str]:
    """Return the results or errors of `run_ranks`, in one process for each environment."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    pipes: list[Connection] = []
    for more in environments:
        ours, theirs = context.Pipe()
        context.Process(target=_join, args=(theirs, {**os.environ, **more}, function), daemon=True).start()
        pipes.append(ours)
    assert all(pipe.poll(PATIENCE) for pipe in pipes)
    return [pipe.recv() for pipe in pipes]


def _join(pipe: Connection, environment: dict[str, str], function: Callable[..., float]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    try:
        pipe.send(run_ranks(2, function))
    except UserError as error:
        pipe.send(str(error))


Environment = Callable[[int, str], dict[str, str]]
LAUNCHERS: dict[str, Environment] = {
    "torchrun's variables": lambda rank, port: {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    },
    "srun": lambda rank, port: {
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_LOCALID": str(rank),
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_LAUNCH_NODE_IPADDR": "192.0.2.1",  # a login node, on which no rank runs
        "MASTER_PORT": port,
    },
    "Open MPI": lambda rank, port: {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "MASTER_PORT": port,
    },
    "MPICH": lambda rank, port: {
        "PMI_RANK": str(rank),
        "PMI_SIZE": "2",
        "MPI_LOCALRANKID": str(rank),
        "MPI_LOCALNRANKS": "2",
        "MASTER_PORT": port,
    },
}


@pytest.mark.parametrize("launcher", sampled(LAUNCHERS, {"torchrun's variables", "srun"}.__contains__))
def test_under_a_launcher_the_process_joins_its_world(launcher: str) -> None:
    port = str(free_port())
    assert launched([LAUNCHERS[launcher](rank, port) for rank in range(2)]) == [6, 6]


@pytest.mark.parametrize(
    ("asked", "expected"),
    sampled([(("", ""), None), (("3", "3"), 3), (("2", "3"), 2)], lambda case: case[1] == 2),
    ids=["nobody asks", "all ask", "they ask for other numbers"],
)
def test_ranks_compute_on_the_same_number_of_threads(asked: tuple[str, str], expected: int | None) -> None:
    port = str(free_port())
    variables = [LAUNCHERS["torchrun's variables"](rank, port) for rank in range(2)]
    ours = replace(CpuShare.of_this_process(), omp_num_threads=None)
    environments = [{**more, "OMP_NUM_THREADS": threads} for more, threads in zip(variables, asked, strict=True)]
    assert launched(environments, jobs.threads) == [expected or threads_of([ours, ours])] * 2


def test_no_rank_can_leave_before_all_have_met(tmp_path: Path) -> None:
    """Under load it could: gloo fails on a rank that is still to be connected with one that has gone."""
    port = str(free_port())
    environments = [LAUNCHERS["torchrun's variables"](rank, port) for rank in range(2)]
    assert run_processes(2, PRELOAD, jobs.connect_slowly, environments, tmp_path / "met")


def test_torchrun_itself_can_start_the_training_command(warm: WarmStarts, tmp_path: Path) -> None:
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m", "shardlab", "train"]
    words += ["--strategy", "ddp", "--steps", "2", "--hidden-size", "16", "--json", "--out", str(tmp_path / "run")]
    done = warm.run(words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('"validation_after"') == 1
    assert (tmp_path / "run" / "weights.safetensors").exists()


def test_a_world_of_another_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"2 ranks were asked for.*3 processes.*--ranks 3"):
        run_ranks(2, jobs.sum_of_ranks, 5)


def test_an_interactive_shell_under_srun_starts_its_own_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_LOCALID": "0"}.items():
        monkeypatch.setenv(name, value)
    assert launch.launched_ranks(otherwise=4) == 4
    assert run_ranks(2, jobs.sum_of_ranks, 5) == 6


def test_a_port_in_use_is_one_sentence_from_every_rank() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        said = launched([LAUNCHERS["torchrun's variables"](rank, port) for rank in range(2)])
    for rank, sentence in enumerate(said):
        assert isinstance(sentence, str)
        assert sentence.startswith(f"rank {rank} ")
        assert f"127.0.0.1:{port}" in sentence
        assert "MASTER_PORT" in sentence
        assert "\n" not in sentence


def test_gpus_are_used_where_there_is_one_for_each_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "gpu_count", lambda: 2)
    assert launch.device_of(1, 2) == torch.device("cuda", 1)
    assert launch.backend_of(launch.device_of(1, 2).type) == "nccl"
    assert [launch.device_of(rank, 3).type for rank in range(3)] == ["cpu"] * 3
    assert [launch.pick_device(ranks).type for ranks in (1, 2, 3)] == ["cuda", "cuda", "cpu"]


def test_a_launchers_rank_without_a_gpu_is_refused_where_others_have_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "gpu_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in {"RANK": "7", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "MASTER_ADDR": "n1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="rank 7 is number 3 of 4 on its host and sees 2 GPUs"):
        launch.pick_device()
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert launch.pick_device() == torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(UserError, match="rank 7 is number 1 of 4 on its host"):
        launch.pick_device()  # all of them are, not those alone whose number no GPU has


def test_a_rank_that_is_shown_one_gpu_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "gpu_count", lambda: 1)
    for name, value in {"RANK": "7", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "MASTER_ADDR": "n1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")  # as srun --gpus-per-task=1 does
    assert launch.pick_device() == torch.device("cuda", 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with pytest.raises(UserError, match=r"sees 1 GPU \(CUDA_VISIBLE_DEVICES is not set\); start one rank for each GPU"):
        launch.pick_device()


def test_two_ranks_of_a_host_on_one_gpu_are_refused_when_they_meet() -> None:
    places = [
        json.dumps(place) for place in (("cuda", "n1", "GPU-a"), ("cuda", "n2", "GPU-a"), ("cuda", "n1", "GPU-b"))
    ]
    launch.require_own_devices(places)
    launch.require_own_devices([json.dumps(("cpu", "n1", ""))] * 3)
    with pytest.raises(UserError, match="ranks 1 and 3 compute on the same GPU of n2; show each rank a different GPU"):
        launch.require_own_devices([*places, places[1]])
    with pytest.raises(UserError, match=r"different kinds of device: rank 0 \(n1\) on cuda and rank 3 \(n3\) on cpu"):
        launch.require_own_devices([*places, json.dumps(("cpu", "n3", ""))])


def own_device(_: int, device: torch.device) -> torch.device:
    return device


def test_gpus_meet_with_the_device_id_for_which_messages_were_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it two ranks' messages would have a communicator of their own, which is another channel model."""
    for name, value in {**LAUNCHERS["torchrun's variables"](0, "29500"), "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    init = Mock()
    monkeypatch.setattr(launch, "gpu_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.set_device", Mock())
    monkeypatch.setattr("shardlab.train.launch.commands.store_of", Mock())
    monkeypatch.setattr("torch.distributed.init_process_group", init)
    monkeypatch.setattr("torch.distributed.destroy_process_group", lambda: None)
    device = run_ranks(1, own_device)
    assert device == torch.device("cuda", 0)
    assert (init.call_args.args, init.call_args.kwargs["device_id"]) == (("nccl",), device)


KILLED = """
import os, signal
from shardlab.train.launch.ranks import rendezvous_file
with rendezvous_file() as store:
    store.write_bytes(b"met")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def left(folder: Path) -> int:
    return len([*folder.glob(f"{PREFIX}*")])


def test_folders_of_killed_processes_are_removed_and_those_of_live_ones_stay(folder: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", KILLED], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert left(folder) == 1
    with rendezvous_file() as first:
        assert left(folder) == 1
        assert not first.exists()
        with rendezvous_file() as second:
            assert first.parent != second.parent
            assert left(folder) == 2
        assert left(folder) == 1
    assert left(folder) == 0


def test_a_full_temporary_folder_is_reported_in_one_sentence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(Path, "write_bytes", full)
    output = r"cannot be written \(.*: No space left on device\); free some space there, or name another folder"
    with pytest.raises(UserError, match=output), rendezvous_file():
        pass
    assert left(folder) == 0


def test_a_missing_temporary_folder_is_reported_in_one_sentence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(folder / "gone"))
    output = r"cannot be written \(.*gone.*: No such file or directory\)"
    with pytest.raises(UserError, match=output), rendezvous_file():
        pass
