"""Which world a process belongs to is read from its launcher's variables, and from nothing else."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from shardlab.program import UserError
from shardlab.train.launch_environment import LaunchEnvironment, find_launch_environment, require_port

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "node7", "MASTER_PORT": "1234"}


NO_TORCH = "import sys; from shardlab.cli import main; print(main({words}), 'torch' in sys.modules)"


@pytest.mark.parametrize("command", ["train", "verify ddp", "collectives show barrier"])
def test_a_port_in_use_is_said_before_torch_is_imported(command: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = {**TORCHRUN, "RANK": "0", "MASTER_PORT": str(taken.getsockname()[1])}
        code = NO_TORCH.format(words=command.split())
        environment = {**os.environ, "PYTHONPATH": "src", **place}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout == "2 False\n"
    assert "is the port in use? Choose another in MASTER_PORT (Address already in use)" in done.stderr
    assert done.stderr.count("\n") == 1


def test_torchruns_own_port_is_in_use_by_its_agent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = {**TORCHRUN, "RANK": "0", "MASTER_PORT": str(taken.getsockname()[1])}
        require_port({**place, "TORCHELASTIC_RUN_ID": "1"})
        require_port({**place, "RANK": "1"})  # only rank 0 listens
        with pytest.raises(UserError, match="MASTER_PORT"):
            require_port(place)


def test_without_a_launcher_there_is_no_place() -> None:
    assert find_launch_environment({"HOME": "/root", "RANK": "1"}) is None


def test_torchrun_says_all() -> None:
    assert find_launch_environment(TORCHRUN) == LaunchEnvironment(3, 4, 1, "node7", 1234)


def test_slurm_on_one_host_meets_on_this_one() -> None:
    environment = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "1"}
    assert find_launch_environment(environment) == LaunchEnvironment(1, 2, 1, "127.0.0.1", 29500)


def test_slurm_on_several_hosts_meets_where_the_step_was_started() -> None:
    environment = {"SLURM_PROCID": "9", "SLURM_STEP_NUM_TASKS": "16", "SLURM_LOCALID": "1", "SLURM_JOB_NUM_NODES": "2"}
    with pytest.raises(UserError, match="MASTER_ADDR"):
        find_launch_environment(environment)
    assert find_launch_environment({**environment, "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1"}) == LaunchEnvironment(
        9, 16, 1, "10.0.0.1", 29500
    )


@pytest.mark.parametrize(
    ("change", "names"), [({"RANK": "4"}, "RANK is 4"), ({"WORLD_SIZE": "four"}, "WORLD_SIZE is 'four'")]
)
def test_contradicting_variables_are_refused_by_name(change: dict[str, str], names: str) -> None:
    with pytest.raises(UserError, match=names):
        find_launch_environment({**TORCHRUN, **change})


def test_pals_says_all_and_pbs_where_to_meet(tmp_path: Path) -> None:
    pals = {"PALS_RANKID": "5", "PALS_LOCAL_RANKID": "1", "PMI_RANK": "5", "PMI_SIZE": "8", "PMI_LOCAL_SIZE": "4"}
    hosts = tmp_path / "nodefile"
    hosts.write_text("x1\nx1\nx2\nx2\n")
    found = find_launch_environment({**pals, "PBS_NODEFILE": str(hosts)})
    assert found == LaunchEnvironment(5, 8, 1, "x1", 29500, 4)
    hosts.write_text("x1\n")
    assert find_launch_environment({**pals, "PBS_NODEFILE": str(hosts)}) == LaunchEnvironment(
        5, 8, 1, "127.0.0.1", 29500, 4
    )
    with pytest.raises(UserError, match="PBS_NODEFILE is 'gone', which cannot be read"):
        find_launch_environment({**pals, "PBS_NODEFILE": "gone"})


@pytest.mark.parametrize(("node", "here"), [("0", 2), ("2", 2), ("3", 1)])
def test_slurm_says_how_many_ranks_are_on_each_host(node: str, here: int) -> None:
    step = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1"}
    found = find_launch_environment({**step, "SLURM_NODEID": node, "MASTER_ADDR": "a"})
    assert found is not None
    assert found.local_world == here


def test_a_world_as_variables_is_read_back() -> None:
    world = LaunchEnvironment(3, 4, 1, "node7", 1234, 2)
    assert find_launch_environment(world.variables()) == world
