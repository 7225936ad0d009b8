"""Facts in launchers' variables: lists of hosts are expanded, and outer steps are ignored."""

from __future__ import annotations

import os
from itertools import chain
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.common.errors import UserError
from shardlab.train.launch.launchers import MOST_HOSTS, expand_counts, expand_hosts, innermost

names = st.text("abcxyz-.", min_size=1, max_size=5)
ranges = st.tuples(st.integers(0, 120), st.integers(0, 12), st.integers(1, 4))
"""First number, how many follow, and how many digits the first is written with at least."""


def written(number_range: tuple[int, int, int]) -> tuple[str, list[str]]:
    first, extra, width = number_range
    start = f"{first:0{width}}"
    numbers = [f"{first + step:0{len(start)}}" for step in range(extra + 1)]
    return (f"{start}-{numbers[-1]}" if extra else start), numbers


@given(st.lists(st.tuples(names, st.lists(ranges, max_size=3), names | st.just("")), min_size=1, max_size=4))
def test_a_list_of_hosts_has_every_number_of_every_range(
    groups: list[tuple[str, list[tuple[int, int, int]], str]],
) -> None:
    words: list[str] = []
    hosts: list[str] = []
    for prefix, numbers, suffix in groups:
        texts = [written(number_range) for number_range in numbers]
        words.append(prefix + (f"[{','.join(text for text, _ in texts)}]" if texts else "") + suffix)
        hosts += [
            prefix + number + suffix for number in chain.from_iterable(host_numbers for _, host_numbers in texts)
        ] or [prefix + suffix]
    assert expand_hosts(",".join(words)) == hosts


@given(st.lists(st.tuples(st.integers(0, 64), st.integers(1, 9)), min_size=1))
def test_a_list_of_tasks_has_a_number_for_each_host(runs: list[tuple[int, int]]) -> None:
    text = ",".join(f"{tasks}(x{hosts})" if hosts > 1 else str(tasks) for tasks, hosts in runs)
    assert expand_counts(text, "X") == [tasks for tasks, hosts in runs for _ in range(hosts)]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "n[",
        "n[]",
        "n[1-]",
        "n[a-b]",
        "n]1[",
        "n[1,[2]]",
        "a,,b",
        "a b",
        ",a",
        "n[0-999999999]",
        "a[1-9999]b[1-9999]",
    ],
)
def test_a_torn_list_of_hosts_is_refused_by_the_name_of_its_variable(text: str) -> None:
    with pytest.raises(UserError, match=r"^SLURM_STEP_NODELIST is .*; set MASTER_ADDR$"):
        expand_hosts(text, "SLURM_STEP_NODELIST")


def test_the_longest_list_of_hosts_is_read() -> None:
    assert len(expand_hosts(f"n[1-{MOST_HOSTS}]")) == MOST_HOSTS


STEP = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
ONE_EACH = {**STEP, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "3",
}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "3"}
SRUN_PMI = {"PMI_RANK": "0", "PMI_SIZE": "4"}
SHELL = {**STEP, "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_PTY_PORT": "40123"}
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3"}


def worlds_in(environment: dict[str, str]) -> list[tuple[str, int, int]]:
    return [(launcher.name, launcher.rank.value, launcher.world.value) for launcher in innermost(environment)]


@pytest.mark.parametrize("outer", [ONE_EACH, {**STEP, "SLURM_STEP_NUM_TASKS": "1"}, SHELL, {**SHELL, **SRUN_PMI}])
@pytest.mark.parametrize(
    ("inner", "name"),
    [(OPEN_MPI, "Open MPI's mpiexec"), (HYDRA, "MPICH's mpiexec"), (TORCHRUN, "torchrun")],
)
def test_processes_started_by_a_step_of_one_task_a_host_are_the_world(
    inner: dict[str, str], name: str, outer: dict[str, str]
) -> None:
    assert worlds_in({**outer, **inner}) == [(name, 3, 8)]


def test_torchruns_agents_may_be_any_tasks_of_srun() -> None:
    step = {**STEP, "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}
    assert worlds_in({**step, **TORCHRUN, "TORCHELASTIC_RUN_ID": "x"}) == [("torchrun", 3, 8)]
    assert len(worlds_in({**step, **TORCHRUN})) == 2  # who must agree


def test_a_batch_script_is_no_step() -> None:
    assert worlds_in({**STEP, "SLURM_NTASKS": "4"}) == []


def test_a_shell_of_srun_is_no_rank_but_the_steps_that_it_starts_are() -> None:
    assert worlds_in(SHELL) == []
    assert worlds_in({**SHELL, **SRUN_PMI}) == []
    assert worlds_in({**SHELL, "SLURM_TASK_PID": "999999999"}) == []  # another host's, or a container's
    assert worlds_in({**SHELL, "SLURM_PROCID": "1"}) == [("SLURM's srun", 1, 4)]
    assert worlds_in({**SHELL, "SLURM_TASK_PID": str(os.getpid())}) == [("SLURM's srun", 0, 4)]  # srun --pty shardlab


@pytest.mark.parametrize(("terminal", "world"), [("0", [("SLURM's srun", 0, 4)]), ("34816", [])])
def test_a_step_within_a_shell_has_no_terminal(
    terminal: str, world: list[tuple[str, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    stat = f"77 (a b) c) S 1 77 77 {terminal} -1 4194304"
    monkeypatch.setattr("shardlab.train.launch.launchers.Path.read_text", Mock(return_value=stat))
    assert worlds_in({**SHELL, "SLURM_TASK_PID": "77"}) == world


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"SLURM_STEP_TASKS_PER_NODE": "4(x2)"},
            "SLURM_STEP_NUM_TASKS is 4, but SLURM_STEP_TASKS_PER_NODE is 4(x2), which is 8",
        ),
        ({"SLURM_STEP_TASKS_PER_NODE": "4,x"}, "SLURM_STEP_TASKS_PER_NODE is '4,x', which is no list of tasks"),
        ({"SLURM_STEP_NUM_NODES": "2"}, "SLURM_STEP_NUM_NODES is 2, but SLURM_STEP_TASKS_PER_NODE is 4, of 1 host"),
        ({"SLURM_NODEID": "1"}, "SLURM_NODEID is 1, but SLURM_STEP_TASKS_PER_NODE is 4, of 1 host"),
        ({"SLURM_LOCALID": "x"}, "SLURM_LOCALID is 'x'; it must be a whole number"),
        ({"SLURM_PROCID": "9" * 5000}, "it must be a whole number"),
    ],
)
def test_a_step_that_contradicts_itself_is_refused_by_name(change: dict[str, str], said: str) -> None:
    step = {name: value for name, value in SHELL.items() if name != "SLURM_PTY_PORT"}
    with pytest.raises(UserError) as refused:
        innermost({**step, **change})
    assert said in str(refused.value)
