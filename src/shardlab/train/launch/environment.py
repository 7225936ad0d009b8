"""World of this process under torchrun, SLURM, PBS or mpiexec, and the CPUs of its host.

`find_launch_environment` returns rank, world size and meeting point from the variables that launchers.py reads, or an
error about variables that are missing or contradict each other (`_Hosts`). `require_port` checks the meeting point
before torch is imported. The second half divides the CPUs of a host among its ranks.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

from shardlab.common.text import listed
from shardlab.language import UserError
from shardlab.train.launch.launchers import Fact, LauncherFacts, from_torchrun, innermost, number

LOOPBACK = "127.0.0.1"

PORT = 29500
"""Default port of the meeting point, as under torchrun."""

CONNECT_SECONDS = 5.0
"""Seconds in which rank 0 must be able to connect to itself at the address that the others use."""


@dataclass(frozen=True)
class LaunchEnvironment:
    """World of a launcher, as its variables describe it to this process.

    Attributes:
        rank, world: number of this process, and number of processes.
        local_rank: number of this process on its host, and of its GPU if each process sees all GPUs of the host.
        address, port: meeting point of the processes.
        local_world: processes on this host; None if the launcher does not say.
    """

    rank: int
    world: int
    local_rank: int
    address: str
    port: int
    local_world: int | None = None

    @property
    def endpoint(self) -> str:
        """Meeting point, as host:port."""
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"{host}:{self.port}"

    def variables(self) -> dict[str, str]:
        """Return the variables that torch.distributed's `env://` reads, as torchrun sets them."""
        local = {} if self.local_world is None else {"LOCAL_WORLD_SIZE": str(self.local_world)}
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world),
            "LOCAL_RANK": str(self.local_rank),
            **local,
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }


def find_launch_environment(environment: Mapping[str, str]) -> LaunchEnvironment | None:
    """Read the launcher's environment variables; None if no launcher started this process.

    All processes meet at MASTER_ADDR:MASTER_PORT. torchrun sets both. Without MASTER_PORT, the port is `PORT`. Without
    MASTER_ADDR, the address is 127.0.0.1 if all ranks are on one host, else the first host of the step (SLURM) or of
    the job (PBS).

    Raises:
        UserError: if variables contradict each other, or do not determine the local rank or the meeting point. The
            message names the variables that were read, and the variable to set.
    """
    worlds = innermost(environment)
    if not worlds:
        return None
    rank, world = worlds[0].rank, worlds[0].world
    _agree([facts.rank for facts in worlds])
    _agree([facts.world for facts in worlds])
    if rank.value >= world.value:
        raise UserError(f"{rank} but {world}; ranks are counted from 0, so set {rank.variable} to less")
    port = number(environment, "MASTER_PORT") or Fact("MASTER_PORT", PORT)
    if not 0 < port.value < 1 << 16:
        raise UserError(f"{port}; give a port from 1 to 65535")
    local_rank, local_world = (
        _agree([*(getattr(facts, name) for facts in worlds), number(environment, variable)])
        for name, variable in (("local_rank", "LOCAL_RANK"), ("local_world", "LOCAL_WORLD_SIZE"))
    )
    hosts = _Hosts(environment, worlds, rank, world, local_rank, local_world)
    address, host_ranks = hosts.address(), hosts.local_world()
    return LaunchEnvironment(rank.value, world.value, hosts.local_rank(host_ranks), address, port.value, host_ranks)


@dataclass(frozen=True)
class _Hosts:
    """Hosts of a world, derived from the launchers' variables.

    Attributes:
        environment: all environment variables.
        worlds: facts of each launcher.
        rank, world: rank and world size, on which the launchers agree.
        own_rank, own_world: local rank of this process, and number of ranks on its host, if they are known.
    """

    environment: Mapping[str, str]
    worlds: Sequence[LauncherFacts]
    rank: Fact
    world: Fact
    own_rank: Fact | None
    own_world: Fact | None

    @property
    def read(self) -> str:
        """Variables that were read, as text for a message."""
        local = [fact for fact in (self.own_rank, self.own_world) if fact is not None]
        return ", ".join(map(str, (self.rank, self.world, *local)))

    @cached_property
    def hosts(self) -> Fact | None:
        """Number of hosts, if a launcher gives it."""
        return _agree([facts.hosts for facts in self.worlds])

    @cached_property
    def one_host(self) -> bool | None:
        """Whether all ranks are on this host; None if that is not known.

        Raises:
            UserError: when variables contradict each other.
        """
        hosts, local, meeting = self.hosts, self.own_world, self.environment.get("MASTER_ADDR")
        if local is not None and local.value > self.world.value:
            raise UserError(f"{local} but {self.world}; set {local.variable} to the ranks of this host")
        by_hosts = None if hosts is None else hosts.value == 1
        by_size = None if local is None else local.value == self.world.value
        if hosts is not None and None is not by_size != by_hosts:
            raise UserError(
                f"{local} and {self.world}, but {hosts}; unset the variables that the launcher of the ranks did not set"
            )
        by_variables = by_hosts if by_size is None else by_size
        one_host = True if self.world.value == 1 else by_variables
        if meeting and _is_loopback(meeting) and not from_torchrun(self.environment):
            if one_host is False:
                raise UserError(
                    f"MASTER_ADDR is {meeting}, by which each host means itself, but the {self.world.value} ranks are "
                    f"on several hosts ({self.read}); set MASTER_ADDR to the host of rank 0"
                )
            return True
        return one_host

    def local_world(self) -> int | None:
        """Return the number of ranks on this host; None if it is not known."""
        if self.own_world is not None:
            return self.own_world.value
        return self.world.value if self.one_host else None

    def local_rank(self, host_ranks: int | None) -> int:
        """Return the number of this rank on its host.

        Args:
            host_ranks: number of ranks on the host, if it is known.

        Raises:
            UserError: if it cannot be determined.
        """
        local_rank, alone = self.own_rank, self.rank.value if self.one_host else 0 if host_ranks == 1 else None
        if local_rank is None:
            if alone is None:
                raise UserError(
                    f"{self.read}, but no variable says which rank of its host this is; set LOCAL_RANK for each rank, "
                    "counted from 0 on each host"
                )
            return alone
        if local_rank.value >= (self.world.value if host_ranks is None else host_ranks):
            size = self.own_world or self.world
            raise UserError(f"{local_rank} but {size}; ranks are counted from 0, so set {local_rank.variable} to less")
        if alone is not None and local_rank.value != alone:
            reason = "all ranks are on one host" if self.one_host else f"{self.own_world}"
            raise UserError(f"{local_rank} but {self.rank}, and {reason}; set {local_rank.variable} to {alone}")
        return local_rank.value

    def address(self) -> str:
        """Return the address of the meeting point.

        Raises:
            UserError: if it is not known.
        """
        one_host = self.one_host  # this refuses contradictory variables
        if address := self.environment.get("MASTER_ADDR"):
            return address
        if one_host:
            return LOOPBACK
        step = next((facts for facts in self.worlds if facts.first_host or facts.unsure), None)
        if step is not None and step.first_host:
            return step.first_host
        hosts = [] if step is not None else _hosts_of_pbs(self.environment)
        if len(hosts) > 1:
            return hosts[0]
        if hosts and self.own_world is None:
            return LOOPBACK
        if hosts:
            raise UserError(
                f"PBS_NODEFILE names one host, but {self.own_world} and {self.world}; set MASTER_ADDR to the host of "
                "rank 0"
            )
        hosts_text = "they are on several hosts" if one_host is False else "no variable says on how many hosts they are"
        reason = step.unsure if step is not None and step.unsure else f"{self.read}: {hosts_text}, and where rank 0 is"
        raise UserError(f"{reason}; set MASTER_ADDR to the host of rank 0")


def launcher_of(environment: Mapping[str, str]) -> str:
    """Return the name of the launcher that started this process, or "shardlab" if none started several ranks."""
    return next((facts.name for facts in innermost(environment) if facts.world.value != 1), "shardlab")


def require_port(environment: Mapping[str, str]) -> None:
    """Check on rank 0 that the port of the meeting point is free, and that its address leads to this host.

    The check runs before torch is imported, which takes seconds. Under torchrun nothing is checked, because the agent
    listens on the port.

    Raises:
        UserError: if the port is in use, or rank 0 cannot connect to itself at the address. The message names the
            variable to change.
    """
    world = find_launch_environment(environment)
    if world is None or world.rank or world.world == 1 or from_torchrun(environment):
        return
    family, dualstack = (socket.AF_INET6, True) if socket.has_dualstack_ipv6() else (socket.AF_INET, False)
    try:
        server = socket.create_server(("", world.port), family=family, dualstack_ipv6=dualstack)
    except OSError as error:
        raise port_in_use(world, os.strerror(error.errno or 0)) from None
    with server:
        _require_own(world, server)


def port_in_use(environment: LaunchEnvironment, reason: str) -> UserError:
    """Return the error for a port at which rank 0 cannot listen."""
    return UserError(
        f"rank 0 could not meet the others at {environment.endpoint}: is the port in use? "
        f"Choose another in MASTER_PORT ({reason})"
    )


def may_restart(environment: Mapping[str, str]) -> bool:
    """Return whether torchrun restarts the ranks after a failure, perhaps on another number of hosts."""
    return environment.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"


def restarts(environment: Mapping[str, str]) -> int:
    """Return how many times torchrun has restarted the ranks after a failure."""
    return int(environment.get("TORCHELASTIC_RESTART_COUNT", "0"))


TOPOLOGY = Path("/sys/devices/system/cpu")


def usable_cpus(process: int = 0) -> list[int]:
    """Return the CPUs on which a process (0: this one) may run, sorted by socket and core."""
    if sys.platform != "linux":
        return list(range(os.cpu_count() or 1))
    return sorted(os.sched_getaffinity(process), key=_position)


def divide_cpus(cpus: Sequence[int], ranks: int) -> list[list[int]]:
    """Divide CPUs among ranks as evenly as possible. Each rank gets consecutive CPUs.

    >>> divide_cpus([0, 1, 2, 3, 4], 2)
    [[0, 1], [2, 3, 4]]

    Raises:
        UserError: if there are fewer CPUs than ranks.
    """
    if len(cpus) < ranks:
        raise UserError(
            f"--bind gives each rank CPUs of its own, but {ranks} ranks are to share {len(cpus)}; "
            "start fewer ranks here, or leave out --bind"
        )
    bounds = [rank * len(cpus) // ranks for rank in range(ranks + 1)]
    return [list(cpus[start:stop]) for start, stop in pairwise(bounds)]


def bind(environment: LaunchEnvironment) -> None:
    """Bind this process, and the threads that it starts from now on, to CPUs that no other rank of this host has.

    If a rank may use fewer CPUs than its parent, its launcher has bound it, and the binding is kept.

    Raises:
        UserError: if there are too few CPUs, or the launcher does not say how many ranks are on this host.
    """
    if sys.platform != "linux":
        raise UserError("--bind works on Linux; leave it out here")
    cpus = usable_cpus()
    if len(cpus) < len(usable_cpus(os.getppid())):
        return
    if environment.local_world is None:
        raise UserError("--bind needs to know how many ranks are on this host; set LOCAL_WORLD_SIZE")
    os.sched_setaffinity(0, divide_cpus(cpus, environment.local_world)[environment.local_rank])


@dataclass(frozen=True)
class CpuShare:
    """CPUs on which a rank may compute.

    Attributes:
        host: name of its host.
        cpus: numbers of the CPUs on which it may run.
        quota: limit on the CPU time of all processes of its container together, in CPUs (None: no limit).
        omp_num_threads: value of OMP_NUM_THREADS (None: not set).
    """

    host: str
    cpus: frozenset[int]
    quota: float | None
    omp_num_threads: int | None

    @classmethod
    def of_this_process(cls) -> CpuShare:
        """Return the share of this process."""
        return cls(socket.gethostname(), frozenset(usable_cpus()), cpu_quota(), asked_threads(os.environ))


def threads_of(shares: Sequence[CpuShare]) -> int:
    """Return the number of threads on which every rank computes: the CPUs of the rank with the fewest.

    Ranks of a host that may run on the same CPUs share them evenly. OMP_NUM_THREADS takes precedence. The number is
    equal on all ranks, because results differ in their last bits with the number of threads, but replicas must be
    equal.

    Args:
        shares: CPUs of all ranks.

    >>> eight = frozenset(range(8))
    >>> threads_of([CpuShare("a", eight, None, None)] * 2), threads_of([CpuShare("a", eight, None, 3)] * 2)
    (4, 3)
    """
    hosts: dict[str, list[CpuShare]] = {}
    for share in shares:
        hosts.setdefault(share.host, []).append(share)
    return min(mine.omp_num_threads or _threads_beside(mine, group) for group in hosts.values() for mine in group)


def asked_threads(environ: Mapping[str, str]) -> int | None:
    """Return the number of threads in OMP_NUM_THREADS; None if it is not set, or is no positive number.

    The variable may be a list of numbers for nested regions. The first one counts.
    """
    first = environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) > 0 else None


def cpu_quota(groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Return the smallest limit of CPU time, in CPUs, of the control groups of this process; None without a limit.

    Reads cpu.max (version 2; the kernel's Documentation/admin-guide/cgroup-v2.rst) of the group and its ancestors.
    """
    try:
        lines = groups.read_text().splitlines()
    except OSError:
        return None
    quotas: list[float] = []
    for line in lines:
        if line.startswith("0::"):
            folder = root / line.removeprefix("0::").strip().lstrip("/")
            for control_group in (folder, *folder.parents):
                if control_group.is_relative_to(root):
                    with suppress(OSError, ValueError):  # the root group has no such file, and "max" is not a number
                        quota, period = (control_group / "cpu.max").read_text().split()
                        quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def as_ranges(cpus: Iterable[int]) -> str:
    """Format numbers of CPUs as `taskset` does.

    >>> as_ranges([0, 1, 2, 8])
    '0-2,8'
    """
    return listed(sorted(cpus)).replace(", ", ",")


def _agree(facts: Sequence[Fact | None]) -> Fact | None:
    """Return the first known fact. All other known facts must be equal to it.

    Raises:
        UserError: if one differs.
    """
    known_facts = [fact for fact in facts if fact is not None]
    for other in known_facts[1:]:
        if other.value != known_facts[0].value:
            raise UserError(
                f"{known_facts[0]} but {other}, and they must agree; unset the variables that the launcher of the "
                "ranks did not set, or set them for each rank"
            )
    return known_facts[0] if known_facts else None


def _is_loopback(address: str) -> bool:
    return address in ("localhost", "::1") or address.startswith("127.")


def _hosts_of_pbs(environment: Mapping[str, str]) -> list[str]:
    """Return the hosts of a PBS job, each once. Rank 0 is on the first."""
    file = environment.get("PBS_NODEFILE")
    if file is None:
        return []
    try:
        return list(dict.fromkeys(Path(file).read_text().split()))
    except OSError as error:
        raise UserError(
            f"PBS_NODEFILE is {file!r}, which cannot be read ({error.strerror}); set MASTER_ADDR to the host of rank 0"
        ) from error


def _require_own(world: LaunchEnvironment, server: socket.socket) -> None:
    """Refuse an address at which rank 0 cannot connect to itself, since the others could not connect either."""
    token, reason = secrets.token_bytes(16), "something else answers there"
    deadline = time.monotonic() + CONNECT_SECONDS
    try:
        with socket.create_connection((world.address, world.port), timeout=CONNECT_SECONDS) as client:
            client.sendall(token)
            client.shutdown(socket.SHUT_WR)
            while (remaining := deadline - time.monotonic()) > 0:
                server.settimeout(remaining)
                accepted = server.accept()[0]  # other ranks may already test whether rank 0 listens
                with accepted:
                    accepted.settimeout(remaining)
                    if accepted.recv(len(token)) == token:
                        return
    except TimeoutError:
        pass
    except OSError as error:
        reason = error.strerror or str(error)
    raise UserError(
        f"rank 0 runs on {socket.gethostname()} and cannot connect to itself at {world.endpoint}, where the "
        f"others look for it ({reason}); set MASTER_ADDR to the host of rank 0"
    )


def _position(cpu: int) -> tuple[int, int, int]:
    folder = TOPOLOGY / f"cpu{cpu}" / "topology"
    try:
        package, core = (int((folder / name).read_text()) for name in ("physical_package_id", "core_id"))
    except OSError:
        return 0, cpu, cpu
    return package, core, cpu


def _threads_beside(own_share: CpuShare, host_shares: Sequence[CpuShare]) -> int:
    """Return the number of threads for one rank: its share of the CPUs that it may run on, and of the quota."""
    cpus = len(own_share.cpus) / sum(not own_share.cpus.isdisjoint(share.cpus) for share in host_shares)
    return max(1, int(cpus if own_share.quota is None else min(cpus, own_share.quota / len(host_shares))))
