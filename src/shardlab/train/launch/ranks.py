"""Ranks: started as processes of this machine, or joined to the world of a launcher.

`run_ranks` calls a function on every rank of a process group. Ranks that are started here meet at a file
(`rendezvous_file`); ranks of a launcher meet at a torch Store (`store_of`, commands.py). In both cases `_rendezvous`
sets up the device, the process group, and the threads of the rank. Further functions schedule the threads of a rank
(`set_wakeups`), report that it is out of memory (`out_of_memory`), and let it reuse freed memory (`set_heap`).
"""

# pyright: reportPrivateImportUsage=false, reportUnknownMemberType=false
# torch does not mark its stores as exported, and leaves some of its annotations out. Its import takes seconds, and the
# process that starts the ranks does not need it.

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import re
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from io import FileIO
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from shardlab.common.processes import end_with_starter
from shardlab.common.text import bytes_text, counted
from shardlab.execute.requirements import gpu_count
from shardlab.language import UserError
from shardlab.train.faults import START, Watchdog, WatchSettings
from shardlab.train.launch.environment import (
    LOOPBACK,
    CpuShare,
    LaunchEnvironment,
    bind,
    divide_cpus,
    find_launch_environment,
    may_restart,
    threads_of,
    usable_cpus,
)
from shardlab.train.launch.launchers import from_torchrun
from shardlab.train.launch.processes import run_processes

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist


Result = TypeVar("Result")


@dataclass(frozen=True)
class LazyFunction(Generic[Result]):
    """Reference to a function whose module only the ranks import.

    Attributes:
        module: name of the module.
        name: name of the function in it.
    """

    module: str
    name: str

    def __call__(self, *arguments: Any) -> Result:
        return resolve_name(f"{self.module}:{self.name}")(*arguments)


@dataclass(frozen=True)
class Rendezvous:
    """Options of the rendezvous of ranks.

    Attributes:
        bound: bind each rank to separate CPUs.
        timeout: time after which a rank that waits for another fails.
        start: time limit while the ranks of a launcher connect to each other.
        dynamo: import torch._dynamo once for all ranks that are started here. torch.compile, the classes of torch.optim
            and the measurement of memory for a trace need it. Otherwise a step in which each rank imports it takes
            seconds longer.
    """

    bound: bool = False
    timeout: timedelta = timedelta(minutes=30)  # torch's default
    start: timedelta = timedelta(minutes=30)
    dynamo: bool = False


RENDEZVOUS = Rendezvous()


def backend_of(device_type: str) -> str:
    """Return the torch.distributed backend for a type of device, cuda or cpu."""
    return "nccl" if device_type == "cuda" else "gloo"


def device_of(local_rank: int, local_ranks: int) -> torch.device:
    """Return the device of a rank: its GPU if every rank of this host has one, else the CPU."""
    import torch

    return torch.device("cuda", local_rank) if local_ranks <= gpu_count() else torch.device("cpu")


def pick_device(ranks: int = 1) -> torch.device:
    """Return the device of this rank, or without a launcher, of the first of `ranks` ranks to be started here.

    Raises:
        UserError: if a launcher has started more ranks on this host than it has GPUs, and it has any.
    """
    environment = find_launch_environment(os.environ)
    if environment is None or environment.world == 1:
        return device_of(0, ranks)
    return _launched_device(environment)


def device_type(ranks: int) -> str:
    """Return the type of the device that `pick_device` returns, cuda or cpu. Without a GPU, torch is not imported."""
    return pick_device(ranks).type if gpu_count() else "cpu"


ONE_GPU = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Variables by which a launcher makes a single GPU visible to each rank, as `srun --gpus-per-task=1` does."""


def launched_ranks(otherwise: int) -> int:
    """Return the number of processes that a launcher has started; `otherwise` without a launcher."""
    environment = find_launch_environment(os.environ)
    return otherwise if environment is None or environment.world == 1 else environment.world


def run_ranks(
    ranks: int,
    function: Callable[..., Result],
    *arguments: Any,
    joining: Rendezvous = RENDEZVOUS,
    watching: WatchSettings | None = None,
) -> Result:
    """Call `function(rank, device, *arguments)` on every rank of a process group.

    Under torchrun, SLURM or mpiexec this process is one of the ranks and joins that world; otherwise the ranks are
    started here.

    Args:
        function: function that is importable by name, since processes are started for it.
        joining: options of the rendezvous.
        watching: settings of the watch for hangs (None: no watch).

    Returns:
        The result of the call on this rank, or on rank 0 if the ranks were started here.

    Raises:
        RankFailed: if a rank that was started here failed or hung. The message has the traceback of the first rank that
            failed. In the world of a launcher, a watch raises this error on one rank of each host.
        UserError: if a rank raised one, the launcher's world has another size, or its port is in use.
        KeyboardInterrupt: if ranks that were started here were asked to end by a signal, and returned no result.
    """
    environment = find_launch_environment(os.environ)
    # An interactive shell under srun is a world of one rank.
    if environment is None or environment.world == 1 < ranks:
        if joining.bound:
            divide_cpus(usable_cpus(), ranks)  # refuses too few CPUs before ranks start
        return _start_local(ranks, joining, watching, function, *arguments)
    if environment.world != ranks:
        raise UserError(
            f"{ranks} ranks were asked for, but the launcher started {environment.world} processes; "
            f"give --ranks {environment.world}"
        )
    import torch.distributed as dist

    from shardlab.execute.transport.collectives import gather_objects
    from shardlab.train.launch.commands import RankExchange, default_ctrl_c, store_of

    if from_torchrun(os.environ):
        end_with_starter(_others_go_on())  # a launcher that is killed does not end its ranks
    device = _launched_device(environment)
    if environment.world > 1:
        require_own_devices(RankExchange(environment, joining.start).exchange(_identify(device)))
    with default_ctrl_c():
        try:
            _rendezvous(environment, device, store_of(environment, joining.start), joining, joining.start)
        except (RuntimeError, OSError) as error:
            raise UserError(
                f"rank {environment.rank} of {environment.world} could not connect to the others "
                f"({str(error).splitlines()[0]}); read their output"
            ) from error
    watched = nullcontext()
    if watching is not None:
        watched = Watchdog(environment.rank, watching, gather_objects)
    if joining.start != joining.timeout:
        dist.distributed_c10d._set_pg_timeout(joining.timeout)  # pyright: ignore[reportPrivateUsage]
    with watched:
        return _call(environment.rank, device, function, *arguments)


def require_own_devices(identities: Sequence[str]) -> None:
    """Refuse ranks on different types of devices, which use different backends, and several ranks on one GPU.

    Raises:
        UserError: if there are such ranks. The message names them.
    """
    rank_of_device: dict[str, int] = {}
    kinds: dict[str, tuple[int, str]] = {}
    for rank, identity in enumerate(identities):
        kind, host, gpu = json.loads(identity)
        kinds.setdefault(kind, (rank, host))
        if gpu and (first := rank_of_device.setdefault(identity, rank)) != rank:
            raise UserError(
                f"ranks {first} and {rank} compute on the same GPU of {host}; show each rank a different GPU by "
                "CUDA_VISIBLE_DEVICES (srun --gpus-per-task=1), or show all GPUs to all ranks"
            )
    if len(kinds) > 1:
        devices = " and ".join(f"rank {rank} ({host}) on {kind}" for kind, (rank, host) in kinds.items())
        raise UserError(
            f"the ranks compute on different kinds of device: {devices}; see why GPUs are missing there (shardlab "
            "doctor), or hide them all by CUDA_VISIBLE_DEVICES="
        )


LONGEST = 1e8
"""Longest timeout in seconds, three years, since torch counts in nanoseconds."""


def start_limit(timeout: float) -> timedelta:
    """Return the time limit for a launcher's ranks to meet."""
    return timedelta(seconds=min(timeout, LONGEST))


def torch_limit(timeout: float) -> timedelta:
    """Return the timeout of torch itself. It is longer than that of the watchdog, which reports which rank hangs."""
    return start_limit(timeout + 2 * START)


PREFIX = "shardlab-ranks-"

LOCK = "held"
"""Name of the lock file in a rendezvous's folder. The process that made the folder locks it until it ends."""

RESERVED_BYTES = 1 << 15
"""Largest number of bytes that ranks write into the rendezvous file. As many are written to the lock file first, to
notice a full disk."""


@contextmanager
def rendezvous_file() -> Generator[Path]:
    """Yield the path of a new file for torch's FileStore. Folders of processes that were killed are removed first.

    Raises:
        UserError: if the folder for temporary files is full or cannot be written.
    """
    with ExitStack() as stack:
        try:
            _remove_stale(Path(tempfile.gettempdir()))
            folder = Path(tempfile.mkdtemp(prefix=PREFIX))
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            stack.enter_context(_create_lock(folder))
        except OSError as error:
            raise UserError(
                "ranks meet at a file in the folder for temporary files, which cannot be written "
                f"({error.filename}: {error.strerror or error}); free some space there, or name another folder in the "
                "environment variable TMPDIR"
            ) from None
        yield folder / "store"


def set_wakeups() -> bool:
    """Keep this thread, and threads that it starts later, from preempting other threads when they wake up.

    gloo's own thread wakes up when a message arrives. Often the computing thread then holds the lock of the message's
    connection, because it has just written there. If the waking thread preempts it, it finds the lock held and polls it
    (`Pair::handleEvents` of gloo's `transport/tcp/pair.cc`) until its time slice is over. A message of microseconds
    then takes milliseconds. Under SCHED_BATCH (sched(7)) a waking thread does not preempt a running one.

    A policy that the user has chosen is kept. On other systems than Linux, the function does nothing.

    Returns:
        Whether the policy was changed.
    """
    return _change_policy("SCHED_OTHER", "SCHED_BATCH")


def restore_wakeups() -> None:
    """Let this thread, and threads that it starts later, preempt others when they wake up, as is Linux's default.

    Threads that compute an op together wait for each other at its end. If one of them has slept and has to wait for a
    core that another process uses, all of them wait. Threads that are already running keep their policy.
    """
    _change_policy("SCHED_BATCH", "SCHED_OTHER")


_REQUESTED = re.compile(r"(?:[Tt]ried to allocate|unable to mmap) (\d+ bytes|[\d.]+ [KMG]iB)")
"""Pattern of torch's message about the requested memory."""

_THREAD = "can't start new thread"  # there is no memory for the thread's stack


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that there is not enough memory."""
    text = str(error)
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and bool(_REQUESTED.search(text) or _THREAD in text)
    )


def out_of_memory(rank: int, device: torch.device, error: BaseException) -> UserError:
    """Return the error of a rank that is out of memory, with the requested and the available memory and the remedy."""
    match = _REQUESTED.search(str(error))
    requested = match[1] if match else "memory"
    if requested.endswith(" bytes"):
        requested = bytes_text(int(requested.partition(" ")[0]))
    limit = memory_limit()
    available = "its GPU has free" if device.type == "cuda" else "is free on this host"
    if device.type != "cuda" and limit is not None:
        available = f"the process may take by its limit of {bytes_text(limit)} (ulimit -d or -v)"
    target = "host" if device.type == "cuda" else "disk"
    return UserError(
        f"rank {rank} is out of memory: it asked for {requested}, more than {available}; keep less on each rank, by "
        f"--offload parameters={target} optimizer={target}, a strategy that shards such as fsdp or zero-3, more ranks, "
        "or a smaller --micro-batch-size"
    )


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h
_NEVER = 2**31 - 1
_SMALL = 2**18
_LARGEST = 32 * 2**20  # the most that glibc takes: HEAP_MAX_SIZE / 2 of its malloc/arena.c on 64 bits


def memory_limit() -> int | None:
    """Return the limit of this process's private memory in bytes (`ulimit -d` and `-v`); None without a limit."""
    limits = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS))
    return min((limit for limit in limits if limit != resource.RLIM_INFINITY), default=None)


def set_heap() -> None:
    """Make glibc keep freed memory for the next step, or return every large block if the process has a memory limit.

    Every training step allocates and frees the same memory. By default glibc returns the free end of the heap to the
    system (mallopt(3), M_TRIM_THRESHOLD) and asks for large blocks one by one (M_MMAP_THRESHOLD), so every step touches
    new pages, which the system fills with zeros.

    Freed memory is not always reused: torch asks for aligned blocks, and glibc before 2.38 seldom returns one from
    where it was freed, so a heap can grow to several times the memory in use. With a memory limit, large blocks are
    therefore returned, which is slower.

    Without glibc, the function does nothing.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    if memory_limit() is None:
        mallopt(_TRIM_THRESHOLD, _NEVER)
        mallopt(_MMAP_THRESHOLD, _LARGEST)
    else:
        mallopt(_MMAP_THRESHOLD, _SMALL)


def _launched_device(environment: LaunchEnvironment) -> torch.device:
    """Return the device of a launcher's rank.

    It is the only GPU that the rank sees, or the GPU whose number is the local rank, or the CPU if there is no GPU.

    Raises:
        UserError: if the host has fewer GPUs than ranks.
    """
    gpus, local_rank = gpu_count(), environment.local_rank
    ranks = environment.local_world or local_rank + 1
    setting = next((f"{name} is {os.environ[name]!r}" for name in ONE_GPU if name in os.environ), "")
    if gpus == 1 and setting:
        return device_of(0, 1)  # the rendezvous checks that no other rank has the same GPU
    if 0 < gpus < ranks:
        raise UserError(
            f"rank {environment.rank} is number {local_rank} of {ranks} on its host and sees {counted(gpus, 'GPU')} "
            f"({setting or 'CUDA_VISIBLE_DEVICES is not set'}); start one rank for each GPU, or show each rank one of "
            "its own (srun --gpus-per-task=1), or hide them all by CUDA_VISIBLE_DEVICES= to compute on the CPU"
        )
    return device_of(local_rank, ranks)


def _identify(device: torch.device) -> str:
    """Return the identity of a rank's device as JSON: its type, the host, and the GPU's UUID."""
    import torch

    properties: Any = cast(Any, torch.cuda).get_device_properties(device) if device.type == "cuda" else None
    gpu = "" if properties is None else str(getattr(properties, "uuid", ""))
    slices = any("MIG" in os.environ.get(name, "") for name in ONE_GPU)  # slices of one GPU may have the same UUID
    return json.dumps((device.type, socket.gethostname(), "" if slices else gpu))


def _start_local(
    ranks: int, joining: Rendezvous, watching: WatchSettings | None, function: Callable[..., Result], *arguments: Any
) -> Result:
    module = getattr(function, "module", function.__module__)
    preload = (module, "torch._dynamo") if joining.dynamo else (module,)
    with rendezvous_file() as store:  # it outlives every rank
        meeting = ranks, str(store), joining
        return run_processes(ranks, preload, _run_started, *meeting, function, *arguments, watching=watching)


def _run_started(
    rank: int, world: int, store: str, joining: Rendezvous, function: Callable[..., Result], *arguments: Any
) -> Result:
    """Call the function in a process that was started here."""
    import torch.distributed as dist

    device = device_of(rank, world)
    environment = LaunchEnvironment(rank, world, rank, LOOPBACK, 0, world)
    _rendezvous(environment, device, dist.FileStore(store), joining, joining.timeout)
    return _call(rank, device, function, *arguments)


def _rendezvous(
    environment: LaunchEnvironment, device: torch.device, store: dist.Store, joining: Rendezvous, limit: timedelta
) -> None:
    """Join the process group that meets at a store, with the device of this rank."""
    import torch
    import torch.distributed as dist

    from shardlab.execute.transport.collectives import gather_objects
    from shardlab.execute.transport.neighbours import connect_neighbours

    if joining.bound:
        bind(environment)  # must run before the threads of the process group start
    changed = False
    if device.type == "cpu":
        torch.set_num_threads(1)  # until the ranks have exchanged their CPUs
        set_heap()
        changed = set_wakeups()  # must run before these threads start as well
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
        # All ranks wait for each other here. gloo returns when this rank is connected; if this rank then ended, others
        # could not connect.
        connect_neighbours(limit, joining.timeout, shares=memory_limit() is None)
        torch.set_num_threads(threads := threads_of(gather_objects(CpuShare.of_this_process())))
        if changed and threads > 1:
            restore_wakeups()  # for the compute threads, which start later


def _call(rank: int, device: torch.device, function: Callable[..., Result], *arguments: Any) -> Result:
    import torch.distributed as dist

    from shardlab.execute.transport.neighbours import Neighbours

    try:
        result = function(rank, device, *arguments)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise out_of_memory(rank, device, error) from None
    Neighbours.part()
    dist.destroy_process_group()  # not after a failure: the others would fail before this rank has reported its error
    return result


def _others_go_on() -> bool:
    """Return whether torchrun restarts the ranks of other hosts when this host is lost."""
    return os.environ.get("GROUP_WORLD_SIZE", "1") != "1" and may_restart(os.environ)


def _create_lock(folder: Path) -> FileIO:
    """Create a folder's lock file. It gets its name after it is locked, so that no process finds it unlocked."""
    new = folder / "new"
    new.write_bytes(bytes(RESERVED_BYTES))
    file = FileIO(new, "ab")
    _lock(file)
    new.rename(folder / LOCK)
    return file


def _lock(file: FileIO) -> bool:
    """Lock a file and return True, unless another process has locked it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # without locks, no process removes stale folders
        return False
    return True


def _remove_stale(temporary: Path) -> None:
    """Remove folders of processes that were killed before they could remove them."""
    for lock in temporary.glob(f"{PREFIX}*/{LOCK}"):
        try:
            file = FileIO(lock, "ab")
        except OSError:  # the folder has just been removed, or belongs to another user
            continue
        with file:
            if _lock(file):
                shutil.rmtree(lock.parent, ignore_errors=True)


def _change_policy(old_policy: str, new_policy: str) -> bool:
    """Replace the policy `old_policy` of sched(7) by `new_policy`, and return whether this thread had it."""
    if sys.platform == "linux":
        with suppress(OSError):  # a sandbox may not allow it
            if os.sched_getscheduler(0) == getattr(os, old_policy):
                os.sched_setscheduler(0, getattr(os, new_policy), os.sched_param(0))
                return True
    return False
