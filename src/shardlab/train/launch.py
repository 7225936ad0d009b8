"""Starting the ranks as processes of this machine, or joining the world of a launcher."""

# pyright: reportPrivateImportUsage=false, reportUnknownMemberType=false
# torch does not mark its stores as exported, and leaves some of its annotations out. Its import takes seconds, and the
# process that starts ranks needs none.

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from shardlab.execute.gpus import gpu_count
from shardlab.faults import Watching
from shardlab.faults.watch import START
from shardlab.faults.watchdog import Watchdog
from shardlab.program import UserError
from shardlab.rules.pieces import counted
from shardlab.train.binding import CpuShare, bind, dealt, threads_of, usable_cpus
from shardlab.train.heap import memory_limit, set_heap
from shardlab.train.interrupt import end_with_starter
from shardlab.train.launch_environment import LOOPBACK, LaunchEnvironment, find_launch_environment, may_restart
from shardlab.train.meeting import meeting_file
from shardlab.train.out_of_memory import is_out_of_memory, out_of_memory
from shardlab.train.processes import RankFailed, is_lost, run_processes
from shardlab.train.wakeups import restore_wakeups, set_wakeups

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

Result = TypeVar("Result")


@dataclass(frozen=True)
class Named(Generic[Result]):
    """A function of a module that only ranks import.

    Attributes:
        module, name: where it is.
    """

    module: str
    name: str

    def __call__(self, *arguments: Any) -> Result:
        return resolve_name(f"{self.module}:{self.name}")(*arguments)


@dataclass(frozen=True)
class Joining:
    """How ranks meet.

    Attributes:
        bound: each gets CPUs of its own.
        timeout: after which a rank that waits for another fails.
        start: the same until all have met and are connected, where a launcher has started them.
        dynamo: torch._dynamo is imported once, for all ranks that are started here; torch.compile and the classes of
            torch.optim need it.
    """

    bound: bool = False
    timeout: timedelta = timedelta(minutes=30)  # torch's own
    start: timedelta = timedelta(minutes=30)
    dynamo: bool = False


JOINING = Joining()


def backend_of(device_type: str) -> str:
    """The torch.distributed backend for tensors on devices of a type, cuda or cpu."""
    return "nccl" if device_type == "cuda" else "gloo"


def device_of(local_rank: int, local_ranks: int) -> torch.device:
    """A rank's device: its GPU if each of this host's ranks has one, else the CPU, for all of them."""
    import torch

    return torch.device("cuda", local_rank) if local_ranks <= gpu_count() else torch.device("cpu")


def pick_device(ranks: int = 1) -> torch.device:
    """This process's device, or that of the first of `ranks` which it starts.

    Raises:
        UserError: when a launcher has started more ranks on this host than it has GPUs.
    """
    environment = find_launch_environment(os.environ)
    if environment is None or environment.world == 1:
        return device_of(0, ranks)
    return _launched_device(environment)


def device_type(ranks: int) -> str:
    """The type of the device that `pick_device` picks, for a process that is to import no torch: cuda or cpu."""
    return pick_device(ranks).type if gpu_count() else "cpu"


ONE_GPU = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Variables by which a launcher gives each of its ranks a GPU of its own, as `srun --gpus-per-task=1` does."""


def _launched_device(environment: LaunchEnvironment) -> torch.device:
    """The device of a launcher's rank: the only GPU that it is shown, or the one with its number on the host.

    Raises:
        UserError: when there are fewer than one for each rank of the host.
    """
    gpus, local_rank = gpu_count(), environment.local_rank
    ranks = environment.local_world or local_rank + 1
    shown = next((f"{name} is {os.environ[name]!r}" for name in ONE_GPU if name in os.environ), "")
    if gpus == 1 and shown:
        return device_of(0, 1)  # that no other rank has the same is seen when they meet
    if 0 < gpus < ranks:
        raise UserError(
            f"rank {environment.rank} is number {local_rank} of {ranks} on its host and sees {counted(gpus, 'GPU')} "
            f"({shown or 'CUDA_VISIBLE_DEVICES is not set'}); start one rank for each GPU, or show each rank one of "
            "its own (srun --gpus-per-task=1), or hide them all by CUDA_VISIBLE_DEVICES= to compute on the CPU"
        )
    return device_of(local_rank, ranks)


def ranks_here(otherwise: int) -> int:
    """How many processes a launcher started; `otherwise` if none did."""
    environment = find_launch_environment(os.environ)
    return otherwise if environment is None or environment.world == 1 else environment.world


def run_ranks(
    ranks: int,
    function: Callable[..., Result],
    *arguments: Any,
    joining: Joining = JOINING,
    watching: Watching | None = None,
) -> Result:
    """Call `function(rank, device, *arguments)` on every rank of a process group.

    Under torchrun, SLURM or mpiexec this process is one of the ranks and joins that world; otherwise the ranks are
    started here.

    Args:
        function: importable by name, since processes are started for it.
        joining: how the ranks meet.
        watching: how they are watched for hanging (None: they are not).

    Returns:
        What this process's call returned; rank 0's, if the ranks were started here.

    Raises:
        RankFailed: when a rank that was started here failed, with the traceback of the first one, or hung; if they are
            watched in a launcher's world, on one rank of a host.
        UserError: when a rank raised one; when the world that exists has another size, or its port is taken.
        KeyboardInterrupt: when ranks that were started here were asked to end by a signal, and gave no result.
    """
    environment = find_launch_environment(os.environ)
    # An interactive shell under srun is a world of one.
    if environment is None or environment.world == 1 < ranks:
        if joining.bound:
            dealt(usable_cpus(), ranks)  # a refusal needs no ranks
        return _start_local(ranks, joining, watching, function, *arguments)
    if environment.world != ranks:
        raise UserError(
            f"{ranks} ranks were asked for, but the launcher started {environment.world} processes; "
            f"give --ranks {environment.world}"
        )
    import torch.distributed as dist

    from shardlab.train.stores import Together, ended_by_ctrl_c, store_of

    if _elastic():
        end_with_starter(_others_go_on())  # a launcher that was killed has ended nobody
    device = _launched_device(environment)
    if environment.world > 1:
        require_own_devices(Together(environment, joining.start).exchange(_place_of(device)))
    with ended_by_ctrl_c():
        try:
            _meet(environment, device, store_of(environment, joining.start), joining, joining.start)
        except (RuntimeError, OSError) as error:
            raise UserError(
                f"rank {environment.rank} of {environment.world} could not connect to the others "
                f"({str(error).splitlines()[0]}); look at what they have printed"
            ) from error
    watched = contextlib.nullcontext()
    if watching is not None:
        watched = Watchdog(environment.rank, watching, _gathered, RankFailed, is_lost, UserError)
    if joining.start != joining.timeout:
        dist.distributed_c10d._set_pg_timeout(joining.timeout)  # pyright: ignore[reportPrivateUsage]
    with watched:
        return _call(environment.rank, device, function, *arguments)


def _place_of(device: torch.device) -> str:
    """What tells a rank's device from those of others, as JSON: its type, the host, and the GPU if it is one."""
    import torch

    found: Any = cast(Any, torch.cuda).get_device_properties(device) if device.type == "cuda" else None
    gpu = "" if found is None else str(getattr(found, "uuid", ""))
    slices = any("MIG" in os.environ.get(name, "") for name in ONE_GPU)  # of a GPU, which may have its identity
    return json.dumps((device.type, socket.gethostname(), "" if slices else gpu))


def require_own_devices(places: Sequence[str]) -> None:
    """Refuse ranks on devices of several types, which would wait in different backends, and several on one GPU.

    Raises:
        UserError: naming the ranks.
    """
    seen: dict[str, int] = {}
    kinds: dict[str, tuple[int, str]] = {}
    for rank, place in enumerate(places):
        kind, host, gpu = json.loads(place)
        kinds.setdefault(kind, (rank, host))
        if gpu and (first := seen.setdefault(place, rank)) != rank:
            raise UserError(
                f"ranks {first} and {rank} compute on the same GPU of {host}; show each rank one of its own by "
                "CUDA_VISIBLE_DEVICES (srun --gpus-per-task=1), or show all GPUs to all ranks"
            )
    if len(kinds) > 1:
        found = " and ".join(f"rank {rank} ({host}) on {kind}" for kind, (rank, host) in kinds.items())
        raise UserError(
            f"the ranks compute on different kinds of device: {found}; see why GPUs are missing there (shardlab "
            "doctor), or hide them all by CUDA_VISIBLE_DEVICES="
        )


def _gathered(mine: tuple[str, str]) -> list[tuple[str, str]]:
    import torch.distributed as dist

    everyone = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def _start_local(
    ranks: int, joining: Joining, watching: Watching | None, function: Callable[..., Result], *arguments: Any
) -> Result:
    module = getattr(function, "module", function.__module__)
    preload = (module, "torch._dynamo") if joining.dynamo else (module,)
    with meeting_file() as store:  # it outlives every rank
        meeting = ranks, str(store), joining
        return run_processes(ranks, preload, _started, *meeting, function, *arguments, watching=watching)


LONGEST = 1e8
"""Seconds of a wait at most, three years: torch counts in nanoseconds from its own beginning."""


def start_limit(timeout: float) -> timedelta:
    """Time in which a launcher's ranks meet: the seconds in which every rank gets on."""
    return timedelta(seconds=min(timeout, LONGEST))


def limit_of(timeout: float) -> timedelta:
    """Time after which torch itself gives a communication up: late, for the watch is to say first what hangs."""
    return start_limit(timeout + 2 * START)


def _started(
    rank: int, world: int, store: str, joining: Joining, function: Callable[..., Result], *arguments: Any
) -> Result:
    """What a process that was started here does."""
    import torch.distributed as dist

    device = device_of(rank, world)
    here = LaunchEnvironment(rank, world, rank, LOOPBACK, 0, world)
    _meet(here, device, dist.FileStore(store), joining, joining.timeout)
    return _call(rank, device, function, *arguments)


def _meet(
    environment: LaunchEnvironment, device: torch.device, store: dist.Store, joining: Joining, limit: timedelta
) -> None:
    """Join the world that meets at a store, with this rank's device, within a limit."""
    import torch
    import torch.distributed as dist

    from shardlab.execute.connecting import connect_neighbours

    if joining.bound:
        bind(environment)  # before the threads of the process group
    changed = False
    if device.type == "cpu":
        torch.set_num_threads(1)  # until all have said which CPUs they have
        set_heap()
        changed = set_wakeups()  # before these threads as well
    else:
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend_of(device.type),
        store=store,
        timeout=limit,
        rank=environment.rank,
        world_size=environment.world,
        # NCCL's communicator is made at once and carries all messages, as the check assumes (ChannelModel.QUEUED).
        device_id=None if device.type == "cpu" else device,
    )
    if device.type == "cpu":
        # Here all meet, too: gloo returns where this rank is connected; others, if it left then, could not be.
        connect_neighbours(limit, joining.timeout, shares=memory_limit() is None)
        mine = CpuShare.of_this_process()
        shares = [mine] * environment.world
        dist.all_gather_object(shares, mine)
        torch.set_num_threads(threads := threads_of(shares))
        if changed and threads > 1:
            restore_wakeups()  # for the threads that compute, which are started later


def _call(rank: int, device: torch.device, function: Callable[..., Result], *arguments: Any) -> Result:
    import torch.distributed as dist

    from shardlab.execute.neighbours import Neighbours

    try:
        result = function(rank, device, *arguments)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise out_of_memory(rank, device, error) from None
    Neighbours.part()
    dist.destroy_process_group()  # not after a failure: the others would notice before this rank has said why
    return result


def _others_go_on() -> bool:
    """Whether torchrun starts the other hosts' ranks again when this host is lost."""
    return os.environ.get("GROUP_WORLD_SIZE", "1") != "1" and may_restart(os.environ)


def _elastic() -> bool:
    """Whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ
