"""The world of a process follows from its launcher's variables alone."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.language import UserError
from shardlab.train.launch import environment as binding
from shardlab.train.launch.environment import (
    CpuShare,
    LaunchEnvironment,
    as_ranges,
    asked_threads,
    bind,
    cpu_quota,
    divide_cpus,
    find_launch_environment,
    require_port,
    threads_of,
    usable_cpus,
)

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "node7", "MASTER_PORT": "1234"}


NO_TORCH = """
import sys
from shardlab.cli import main

print([main(words.split()) for words in sys.argv[1:]], "torch" in sys.modules)
"""


def test_a_port_in_use_is_reported_before_torch_is_imported() -> None:
    commands = ["train", "verify ddp", "collectives show barrier"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = {**TORCHRUN, "RANK": "0", "MASTER_PORT": str(taken.getsockname()[1])}
        environment = {**os.environ, "PYTHONPATH": "src", **place}
        done = subprocess.run(
            [sys.executable, "-c", NO_TORCH, *commands], env=environment, capture_output=True, text=True
        )
    assert done.stdout == "[2, 2, 2] False\n"
    assert done.stderr.count("is the port in use? Choose another in MASTER_PORT (Address already in use)") == 3
    assert done.stderr.count("\n") == 3


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


STEP = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_LAUNCH_NODE_IPADDR": "192.0.2.1",  # a login node, on which no rank runs
    "SLURM_SUBMIT_HOST": "login1",
}
ONE_HOST = {**STEP, "SLURM_LOCALID": "5", "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "8"}
HOSTS = {"SLURM_STEP_NODELIST": "n[3-4]", "SLURMD_NODENAME": "n4"}


@pytest.mark.parametrize(
    "environment",
    [
        ONE_HOST,
        {**ONE_HOST, "SLURM_STEP_NODELIST": "n3", "SLURMD_NODENAME": "n3"},
        {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_JOB_NUM_NODES": "1"},
        {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "1", "SLURM_JOB_NUM_NODES": "2"},
    ],
)
def test_slurm_on_one_host_meets_on_this_one(environment: dict[str, str]) -> None:
    assert find_launch_environment(environment) == LaunchEnvironment(5, 8, 5, "127.0.0.1", 29500, 8)


@pytest.mark.parametrize(
    "hosts", [HOSTS, {"SLURM_STEP_NODELIST": "n[3-4]"}, {"SLURM_JOB_NODELIST": "n[3-4]", "SLURM_JOB_NUM_NODES": "2"}]
)
def test_slurm_on_several_hosts_meets_on_the_first_of_the_step(hosts: dict[str, str]) -> None:
    assert find_launch_environment({**STEP, **hosts}) == LaunchEnvironment(5, 8, 1, "n3", 29500, 4)
    assert find_launch_environment({**STEP, **hosts, "MASTER_ADDR": "n3-ib"}) == LaunchEnvironment(
        5, 8, 1, "n3-ib", 29500, 4
    )


@pytest.mark.parametrize(
    ("hosts", "said"),
    [
        ({}, "they are on several hosts, and where rank 0 is"),
        ({"SLURM_JOB_NODELIST": "n[3-5]", "SLURM_JOB_NUM_NODES": "3"}, "they are on several hosts"),
        ({**HOSTS, "SLURMD_NODENAME": "n3"}, "in which SLURM_NODEID 1 is not SLURMD_NODENAME n3"),
        ({**HOSTS, "SLURM_STEP_NODELIST": "n[3-5]"}, "SLURM_STEP_NODELIST is n[3-5], of 3 hosts"),
    ],
)
def test_hosts_of_slurm_that_leave_rank_0_open_are_refused(hosts: dict[str, str], said: str) -> None:
    with pytest.raises(UserError, match=r"; set MASTER_ADDR to the host of rank 0$") as refused:
        find_launch_environment({**STEP, **hosts})
    assert said in str(refused.value)


def test_missing_facts_are_refused_with_the_variables_read_and_the_one_to_set() -> None:
    pmi = {"PMI_RANK": "5", "PMI_SIZE": "8"}
    with pytest.raises(UserError, match=r"^PMI_RANK is 5, PMI_SIZE is 8: no variable says on how many hosts.*MASTER_A"):
        find_launch_environment(pmi)
    with pytest.raises(UserError, match=r"^PMI_RANK is 5, PMI_SIZE is 8, but no variable says which.*set LOCAL_RANK "):
        find_launch_environment({**pmi, "MASTER_ADDR": "n1"})
    expected = LaunchEnvironment(5, 8, 1, "n1", 29500)
    assert find_launch_environment({**pmi, "MASTER_ADDR": "n1", "LOCAL_RANK": "1"}) == expected
    here = LaunchEnvironment(5, 8, 5, "localhost", 29500, 8)
    assert find_launch_environment({**pmi, "MASTER_ADDR": "localhost"}) == here
    alone = LaunchEnvironment(5, 8, 0, "n1", 29500, 1)
    assert find_launch_environment({**pmi, "MASTER_ADDR": "n1", "LOCAL_WORLD_SIZE": "1"}) == alone


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"MASTER_ADDR": "127.0.0.1"}, "MASTER_ADDR is 127.0.0.1, by which each host means itself"),
        ({"LOCAL_WORLD_SIZE": "8"}, "SLURM_STEP_TASKS_PER_NODE is 4 but LOCAL_WORLD_SIZE is 8"),
        ({"LOCAL_RANK": "0"}, "SLURM_LOCALID is 1 but LOCAL_RANK is 0"),
        ({"PMI_RANK": "5", "PMI_SIZE": "4"}, "SLURM_STEP_NUM_TASKS is 8 but PMI_SIZE is 4"),
        ({"RANK": "0", "WORLD_SIZE": "8"}, "SLURM_PROCID is 5 but RANK is 0"),
        ({"SLURM_LOCALID": "4"}, "SLURM_LOCALID is 4 but SLURM_STEP_TASKS_PER_NODE is 4"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT is 70000; give a port from 1 to 65535"),
    ],
)
def test_facts_that_do_not_agree_are_refused_by_name(change: dict[str, str], said: str) -> None:
    with pytest.raises(UserError) as refused:
        find_launch_environment({**STEP, **HOSTS, **change})
    assert said in str(refused.value)


def test_ranks_of_one_host_with_one_local_rank_are_refused() -> None:
    with pytest.raises(UserError, match="LOCAL_RANK is 0 but RANK is 3, and all ranks are on one host; set LOCAL_RANK"):
        find_launch_environment({**TORCHRUN, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"})


def place_of(rank: int, counts: list[int]) -> tuple[int, int]:
    """The number of a rank's host, and its own number there."""
    node = next(node for node in range(len(counts)) if rank < sum(counts[: node + 1]))
    return node, rank - sum(counts[:node])


NAMES = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "Open MPI": tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    "PALS": ("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PMI_LOCAL_SIZE"),
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "srun's PMI": ("PMI_RANK", "PMI_SIZE"),
}


def variables_of(launcher: str, rank: int, counts: list[int]) -> dict[str, str]:
    """Return the variables that a launcher sets for a rank, given the ranks on each host."""
    node, local = place_of(rank, counts)
    numbers = [str(number) for number in (rank, sum(counts), local, counts[node])]
    if launcher != "srun":
        return dict(zip(NAMES[launcher], numbers, strict=False))
    return {
        **dict(zip(("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"), numbers, strict=False)),
        "SLURM_STEP_TASKS_PER_NODE": ",".join(map(str, counts)),
        "SLURM_NODEID": str(node),
        "SLURM_STEP_NODELIST": f"n[1-{len(counts)}]",
        "SLURMD_NODENAME": f"n{node + 1}",
    }


worlds = st.lists(st.integers(1, 4), min_size=1, max_size=4).flatmap(
    lambda counts: st.tuples(st.integers(0, sum(counts) - 1), st.just(counts))
)


@given(worlds, st.sets(st.sampled_from(["srun", *NAMES]), min_size=1).filter(lambda names: names != {"srun's PMI"}))
def test_facts_of_several_launchers_together_give_the_world(world: tuple[int, list[int]], launchers: set[str]) -> None:
    rank, counts = world
    environment = {} if "srun" in launchers or len(counts) == 1 else {"MASTER_ADDR": "n1"}
    for launcher in launchers:
        environment |= variables_of(launcher, rank, counts)
    node, local = place_of(rank, counts)
    address = "n1" if len(counts) > 1 else "127.0.0.1"
    launch = find_launch_environment(environment)
    assert launch == LaunchEnvironment(rank, sum(counts), local, address, 29500, counts[node])


@given(worlds.filter(lambda world: max(world[1]) > 1), st.sampled_from(list(NAMES)), st.data())
def test_a_number_on_which_two_launchers_differ_is_never_taken(
    world: tuple[int, list[int]], other: str, data: st.DataObject
) -> None:
    environment = variables_of("srun", *world) | variables_of(other, *world)
    name = data.draw(st.sampled_from(NAMES[other]))
    wrong = data.draw(st.integers(0, 20).map(str).filter(lambda text: text != environment[name]))
    with pytest.raises(UserError, match=name):
        find_launch_environment({**environment, name: wrong})


@given(worlds, st.sampled_from(["srun", *NAMES]), st.data())
def test_a_variable_that_is_not_there_never_makes_another_world(
    world: tuple[int, list[int]], launcher: str, data: st.DataObject
) -> None:
    rank, counts = world
    environment = variables_of(launcher, *world) | {"MASTER_ADDR": "n1"}
    del environment[data.draw(st.sampled_from(sorted(environment)))]
    node, local = place_of(rank, counts)
    launch, refused = None, ""
    try:
        launch = find_launch_environment(environment)
    except UserError as error:
        refused = str(error)
    assert not refused or "set " in refused
    if launch is not None:  # without its rank or its size there is no world
        assert (launch.rank, launch.world, launch.local_rank) == (rank, sum(counts), local)
        assert launch.local_world in (counts[node], None)
        assert launch.address in ("n1", "127.0.0.1" if len(counts) == 1 else "n1")


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
    launch = find_launch_environment({**pals, "PBS_NODEFILE": str(hosts)})
    assert launch == LaunchEnvironment(5, 8, 1, "x1", 29500, 4)
    hosts.write_text("x1\n")
    with pytest.raises(UserError, match="PBS_NODEFILE names one host, but PMI_LOCAL_SIZE is 4 and PMI_SIZE is 8"):
        find_launch_environment({**pals, "PBS_NODEFILE": str(hosts)})
    alone = {**pals, "PMI_LOCAL_SIZE": "8", "PALS_LOCAL_RANKID": "5", "PBS_NODEFILE": str(hosts)}
    assert find_launch_environment(alone) == LaunchEnvironment(5, 8, 5, "127.0.0.1", 29500, 8)
    with pytest.raises(UserError, match="PBS_NODEFILE is 'gone', which cannot be read"):
        find_launch_environment({**pals, "PBS_NODEFILE": "gone"})


@pytest.mark.parametrize(("node", "local_world"), [("0", 2), ("2", 2), ("3", 1)])
def test_slurm_says_how_many_ranks_are_on_each_host(node: str, local_world: int) -> None:
    step = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1"}
    step["SLURM_LOCALID"] = "0"
    launch = find_launch_environment({**step, "SLURM_NODEID": node, "MASTER_ADDR": "a"})
    assert launch is not None
    assert launch.local_world == local_world


def test_a_world_as_variables_is_read_back() -> None:
    world = LaunchEnvironment(3, 4, 1, "node7", 1234, 2)
    assert find_launch_environment(world.variables()) == world


# CPUs are dealt to the ranks of a host, whole cores and neighbours to each.


def test_every_cpu_is_dealt_once_and_evenly() -> None:
    for ranks in range(1, 8):
        shares = divide_cpus(range(7), ranks)
        assert [cpu for share in shares for cpu in share] == list(range(7))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_more_ranks_than_cpus_cannot_be_bound() -> None:
    with pytest.raises(UserError, match="3 ranks are to share 2; start fewer ranks here, or leave out --bind"):
        divide_cpus([0, 1], 3)


def test_hyperthreads_of_a_core_are_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for cpu in range(4):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text("0\n")
        (folder / "core_id").write_text(f"{cpu % 2}\n")
    monkeypatch.setattr(binding, "TOPOLOGY", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", Mock(return_value={0, 1, 2, 3}))
    assert usable_cpus() == [0, 2, 1, 3]


def test_a_rank_that_its_launcher_has_bound_stays_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "usable_cpus", lambda process=0: [0, 1, 2, 3] if process else [3])
    monkeypatch.setattr(os, "sched_setaffinity", Mock(side_effect=AssertionError("it was bound again")))
    bind(LaunchEnvironment(1, 2, 1, "127.0.0.1", 1, 2))


def test_a_launcher_that_does_not_say_how_many_are_here_is_asked_to() -> None:
    with pytest.raises(UserError, match="LOCAL_WORLD_SIZE"):
        bind(LaunchEnvironment(1, 2, 1, "127.0.0.1", 1))


def test_cpus_are_spelled_as_ranges() -> None:
    assert as_ranges([5, 0, 1, 2, 8, 9]) == "0-2,5,8-9"


def share(host: str, cpus: str, quota: float | None = None, asked: int | None = None) -> CpuShare:
    """A share of CPUs of one digit each."""
    return CpuShare(host, frozenset(map(int, cpus)), quota, asked)


@pytest.mark.parametrize(
    ("shares", "threads"),
    [
        ([share("a", "01234567")], 8),
        ([share("a", "01234567")] * 3, 2),
        ([share("a", "01")] * 4, 1),
        ([share("a", "0123"), share("a", "4567")], 4),  # the launcher, or --bind, has dealt them
        ([share("a", "0123"), share("a", "3456")], 2),
        ([share("a", "0123"), share("b", "0123")], 4),
        ([share("a", "01234567"), share("b", "01")], 2),  # alike on all ranks
        ([share("a", "01234567", quota=2.5)] * 1, 2),
        ([share("a", "01234567", quota=0.5)] * 2, 1),
        ([share("a", "01234567", quota=6)] * 2, 3),
        ([share("a", "01", asked=5)] * 2, 5),
        ([share("a", "01234567", asked=5), share("a", "01234567")], 4),
    ],
)
def test_ranks_share_the_cpus_that_they_are_given(shares: list[CpuShare], threads: int) -> None:
    assert threads_of(shares) == threads


@pytest.mark.parametrize(
    ("variable", "threads"), [("4", 4), ("3,2", 3), (" 2 ", 2), ("", None), ("0", None), ("many", None), ("-1", None)]
)
def test_omp_num_threads_is_read_as_openmp_reads_it(variable: str, threads: int | None) -> None:
    assert asked_threads({"OMP_NUM_THREADS": variable}) == threads
    assert asked_threads({}) is None


@pytest.mark.parametrize(
    ("limits", "cpus"),
    [
        ({}, None),
        ({"a/b": "max 100000"}, None),
        ({"a/b": "250000 100000"}, 2.5),
        ({"a": "50000 100000", "a/b": "max 1"}, 0.5),
    ],
)
def test_the_quota_of_a_container_is_that_of_its_group_and_those_above(
    limits: dict[str, str], cpus: float | None, tmp_path: Path
) -> None:
    groups, root = tmp_path / "cgroup", tmp_path / "root"
    groups.write_text("12:cpuset:/other\n0::/a/b\n")
    (root / "a" / "b").mkdir(parents=True)
    for folder, limit in limits.items():
        (root / folder / "cpu.max").write_text(f"{limit}\n")
    assert cpu_quota(groups, root) == cpus
    assert cpu_quota(tmp_path / "none", root) is None


CODE = """
import os
from shardlab.train.launch.environment import bind, usable_cpus
from shardlab.train.launch.environment import LaunchEnvironment
bind(LaunchEnvironment(1, 2, 1, "127.0.0.1", 1, 2))
print(usable_cpus())
"""


@pytest.mark.skipif(len(usable_cpus()) < 2, reason="needs two CPUs")
def test_a_process_is_bound_to_its_share() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert done.stdout == f"{divide_cpus(usable_cpus(), 2)[1]}\n"
