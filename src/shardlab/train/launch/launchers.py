"""Rank, world size and hosts of a process, read from the environment variables of launchers.

Variables of several launchers can be present at once. `srun --mpi=pmi2` also sets those of PMI, and a process of
torchrun or mpiexec inherits those of the SLURM step in which its launcher runs. `innermost` ignores the variables of an
outer step.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from typing import NamedTuple

from shardlab.common.errors import UserError
from shardlab.common.text import counted

MOST_HOSTS = 1 << 17
"""Largest accepted number of hosts in a list, more than any cluster has. A list with more hosts is damaged."""


class Fact(NamedTuple):
    """Environment variable whose value is a number."""

    variable: str
    value: int

    def __str__(self) -> str:
        return f"{self.variable} is {self.value}"


class Launcher(NamedTuple):
    """Name of a launcher, with its variables for rank, world size, local rank and local size."""

    name: str
    rank: str
    world: str
    local_rank: str
    local_world: str


@dataclass(frozen=True)
class LauncherFacts:
    """World that a launcher has started, as the launcher's variables describe it.

    Attributes:
        name: name of the launcher.
        rank, world: rank of this process, and number of processes in the world.
        local_rank, local_world: rank and number of processes on its host (None: no variable has them).
        hosts: number of hosts (None: no variable has it).
        first_host: name of rank 0's host (None: no variable has it).
        unsure: contradiction between the variables about `first_host`, as text (empty: there is none).
    """

    name: str
    rank: Fact
    world: Fact
    local_rank: Fact | None = None
    local_world: Fact | None = None
    hosts: Fact | None = None
    first_host: str | None = None
    unsure: str = ""


TORCHRUN = Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")

_OMPI, _MV2 = "OMPI_COMM_WORLD_", "MV2_COMM_WORLD_"

MPI = (
    Launcher("Open MPI's mpiexec", f"{_OMPI}RANK", f"{_OMPI}SIZE", f"{_OMPI}LOCAL_RANK", f"{_OMPI}LOCAL_SIZE"),
    Launcher("PALS's mpiexec", "PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PMI_LOCAL_SIZE"),
    Launcher("MVAPICH's mpiexec", f"{_MV2}RANK", f"{_MV2}SIZE", f"{_MV2}LOCAL_RANK", f"{_MV2}LOCAL_SIZE"),
    Launcher("MPICH's mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    Launcher("a launcher with PMI", "PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
)


def innermost(environment: Mapping[str, str]) -> list[LauncherFacts]:
    """Return the facts of the launchers whose variables describe the world of this process; empty without a launcher.

    If another launcher started this process inside a SLURM step, the step is left out. Launchers with more complete
    variables come first.

    Raises:
        UserError: if the value of a variable is not a number, or variables of SLURM contradict each other.
    """
    by_torchrun = _facts_of(TORCHRUN, environment)
    if by_torchrun is not None and from_torchrun(environment):
        return [by_torchrun]
    # The user's script has set these variables, perhaps under another launcher.
    users = [] if by_torchrun is None else [by_torchrun]
    launchers = [facts for launcher in MPI if (facts := _facts_of(launcher, environment)) is not None]
    # Launchers with a local rank are mpiexecs, since srun sets no local rank for PMI.
    inner = [facts for facts in launchers if facts.local_rank is not None]
    step = None if _is_shell(environment) else slurm_step(environment)
    if step is None:
        return [*(inner if "SLURM_STEP_NUM_TASKS" in environment else launchers), *users]
    if _starts_one_on_each_host(step):
        local = [facts for facts in [*inner, *users] if facts.local_rank is not None]
        other = [facts for facts in local if _numbers_of(facts) != _numbers_of(step)]
        if other:
            return [*inner, *users]  # a launcher starts its daemons by srun, or was itself started by srun
    return [*inner, step, *(facts for facts in launchers if facts not in inner), *users]


def from_torchrun(environment: Mapping[str, str]) -> bool:
    """Return whether torchrun or `shardlab launch` has started this process. Both set all variables of torchrun."""
    return "TORCHELASTIC_RUN_ID" in environment


def number(environment: Mapping[str, str], variable: str) -> Fact | None:
    """Read a variable whose value is a number; None if it is not set.

    Raises:
        UserError: if the value is not a number.
    """
    text = environment.get(variable)
    if text is None:
        return None
    if not re.fullmatch("[0-9]{1,9}", text):
        raise UserError(f"{variable} is {text!r}; it must be a whole number")
    return Fact(variable, int(text))


def slurm_step(environment: Mapping[str, str]) -> LauncherFacts | None:
    """Read the facts of srun's step; None if srun has started no step, as in a batch script.

    Rank 0 is on the first host in the step's list of hosts. SLURM_LAUNCH_NODE_IPADDR is not used: it names the submit
    host, on which perhaps no rank runs.

    Raises:
        UserError: if the value of a variable is malformed, or the variables contradict each other.
    """
    rank, world = number(environment, "SLURM_PROCID"), number(environment, "SLURM_STEP_NUM_TASKS")
    if rank is None or world is None:
        return None
    local_rank, node = number(environment, "SLURM_LOCALID"), number(environment, "SLURM_NODEID")
    hosts = number(environment, "SLURM_STEP_NUM_NODES")
    local_world: Fact | None = None
    if text := environment.get("SLURM_STEP_TASKS_PER_NODE"):
        name = "SLURM_STEP_TASKS_PER_NODE"
        counts = expand_counts(text, name)
        if sum(counts) != world.value:
            raise UserError(f"{world}, but {name} is {text}, which is {sum(counts)}; {_ONE_STEP}")
        hosts = _require_same(hosts, Fact(name, len(counts)), f"{name} is {text}")
        if node is not None and node.value >= len(counts):
            raise UserError(f"{node}, but {name} is {text}, of {counted(len(counts), 'host')}; {_ONE_STEP}")
        if node is not None or len(set(counts)) == 1:
            local_world = Fact(name, counts[0 if node is None else node.value])
    if hosts is None and (job := number(environment, "SLURM_JOB_NUM_NODES")) is not None:
        hosts = job if job.value == 1 else None  # a step may use only some of its job's hosts
    first, unsure = _first_host(environment, node, hosts)
    return LauncherFacts("SLURM's srun", rank, world, local_rank, local_world, hosts, first, unsure)


_ONE_STEP = "start the ranks by one srun, and set none of its variables"


_RANGE = r"[0-9]{1,9}(?:-[0-9]{1,9})?"
_NUMBERS = rf"\[{_RANGE}(?:,{_RANGE})*\]"
_HOST = rf"(?:[^\s,\[\]]|{_NUMBERS})+"


def expand_hosts(text: str, variable: str = "the list of hosts") -> list[str]:
    """Expand SLURM's list of hosts as `scontrol show hostnames` does. (Compute nodes may not have scontrol.)

    >>> expand_hosts("n[3-4,07],login")
    ['n3', 'n4', 'n07', 'login']
    >>> expand_hosts("r[1-2]n[09-10]")
    ['r1n09', 'r1n10', 'r2n09', 'r2n10']

    Args:
        variable: name of the variable that has the list, for messages.

    Raises:
        UserError: if `text` is not such a list, or names more than `MOST_HOSTS` hosts.
    """
    if not re.fullmatch(rf"{_HOST}(?:,{_HOST})*", text):
        raise UserError(f"{variable} is {text!r}, which is no list of hosts such as n[3-4,07]; set MASTER_ADDR")
    hosts: list[str] = []
    for words in re.findall(_HOST, text):
        ends = [""]
        for part in re.findall(rf"{_NUMBERS}|[^\[]+", words):
            expansions = [part] if part[0] != "[" else list(islice(_numbers(part[1:-1]), MOST_HOSTS + 1))
            if len(ends) * len(expansions) > MOST_HOSTS:
                raise UserError(f"{variable} is {text!r}, which names more than {MOST_HOSTS} hosts; set MASTER_ADDR")
            ends = ["".join(pair) for pair in product(ends, expansions)]
        hosts += ends
    return hosts


def expand_counts(text: str, variable: str) -> list[int]:
    """Return the number of tasks on each host, from a list of SLURM. `2(x3),1` gives [2, 2, 2, 1].

    Raises:
        UserError: if it is not such a list.
    """
    counts: list[int] = []
    for words in text.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,6})\))?", words)
        if match is None:
            raise UserError(f"{variable} is {text!r}, which is no list of tasks such as 2(x3),1; {_ONE_STEP}")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _numbers_of(facts: LauncherFacts) -> tuple[int, int]:
    return facts.rank.value, facts.world.value


def _facts_of(launcher: Launcher, environment: Mapping[str, str]) -> LauncherFacts | None:
    if launcher.rank not in environment or launcher.world not in environment:
        return None
    rank, world, local_rank, local_world = (number(environment, name) for name in launcher[1:])
    assert rank is not None
    assert world is not None
    return LauncherFacts(launcher.name, rank, world, local_rank, local_world)


def _starts_one_on_each_host(step: LauncherFacts) -> bool:
    return step.world.value == 1 or (step.hosts is not None and step.hosts.value == step.world.value)


def _is_shell(environment: Mapping[str, str]) -> bool:
    """Return whether this process was started from an interactive shell of `srun --pty`.

    SLURM's variables then describe the step of the shell, whose other tasks have already ended. If srun starts a new
    step from that shell, the tasks inherit SLURM_PTY_PORT, but have no terminal.
    """
    if "SLURM_PTY_PORT" not in environment or environment.get("SLURM_PROCID") != "0":
        return False
    task = environment.get("SLURM_TASK_PID", "")
    if task == str(os.getpid()):
        return False  # srun started the command itself, and all tasks run it
    with suppress(OSError, ValueError, IndexError):
        # Field 7 of stat is the number of the task's terminal; 0 means that it has none.
        return Path("/proc", task, "stat").read_text().rpartition(")")[2].split()[4] != "0"
    return True


def _require_same(fact: Fact | None, other: Fact, words: str) -> Fact:
    if fact is not None and fact.value != other.value:
        raise UserError(f"{fact}, but {words}, of {counted(other.value, 'host')}; {_ONE_STEP}")
    return fact or other


def _first_host(environment: Mapping[str, str], node: Fact | None, hosts: Fact | None) -> tuple[str | None, str]:
    """Return the name of a step's first host; None, with a reason, if it is unknown.

    The reason is a contradiction between variables, as text. It is empty if no variable lists the hosts.
    """
    name = "SLURM_STEP_NODELIST"
    text = environment.get(name)
    job = number(environment, "SLURM_JOB_NUM_NODES")
    if not text and hosts is not None and job is not None and hosts.value == job.value:
        name = "SLURM_JOB_NODELIST"  # the step has all hosts
        text = environment.get(name)
    if not text:
        return None, ""
    names = expand_hosts(text, name)
    if hosts is not None and len(names) != hosts.value:
        return None, f"{name} is {text}, of {counted(len(names), 'host')}, but {hosts.variable} says {hosts.value}"
    this_node = environment.get("SLURMD_NODENAME")
    if this_node and node is not None and (node.value >= len(names) or names[node.value] != this_node):
        return None, f"{name} is {text}, in which SLURM_NODEID {node.value} is not SLURMD_NODENAME {this_node}"
    return names[0], ""


def _numbers(ranges: str) -> Iterator[str]:
    """Yield the numbers of ranges, each as wide as the first number of its range: 08, 09 and 10 for 08-10."""
    for span in ranges.split(","):
        first, _, last = span.partition("-")
        for value in range(int(first), int(last or first) + 1):
            yield f"{value:0{len(first)}}"
