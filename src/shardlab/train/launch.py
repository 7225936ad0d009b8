"""Starting the ranks. Start-up, rendezvous and failure detection are torch elastic's, the machinery of torchrun."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from shardlab.program import UserError
from shardlab.program.files import whole_file
from shardlab.train.heap import keep_freed_memory
from shardlab.train.interrupt import leave_if_asked
from shardlab.train.place import Place, find_place

Result = TypeVar("Result")


_LOST = ("Connection closed by peer", "Connection reset by peer", "NCCL error", "Broken pipe")
"""What torch.distributed says when another rank has gone."""


class RankFailed(Exception):
    """A rank raised; the message ends with that rank's own traceback."""


def backend_of(device: torch.device) -> str:
    """The torch.distributed backend for tensors on a device."""
    return "nccl" if device.type == "cuda" else "gloo"


def pick_device(local_rank: int) -> torch.device:
    """This process's GPU if there is one for it, else the CPU."""
    if local_rank < torch.cuda.device_count():
        return torch.device("cuda", local_rank)
    return torch.device("cpu")


def ranks_here(otherwise: int) -> int:
    """How many processes a launcher started; `otherwise` if none did."""
    place = find_place(os.environ)
    return otherwise if place is None or place.world == 1 else place.world


def run_ranks(ranks: int, function: Callable[..., Result], *arguments: Any) -> Result:
    """Call `function(rank, device, *arguments)` on every rank of a process group.

    Under torchrun, SLURM or mpiexec this process is one of the ranks and joins that world; otherwise the ranks are
    started here.

    Args:
        function: importable by name, since processes are started for it.

    Returns:
        What this process's call returned; rank 0's, if the ranks were started here.

    Raises:
        RankFailed: when a rank raised, with the traceback of the first one.
        UserError: when a rank raised one; when the world that exists has another size, or its port is taken.
    """
    place = find_place(os.environ)
    if place is None or (place.world == 1 and ranks > 1):  # an interactive shell under srun is a world of one
        return _start_local(ranks, function, *arguments)
    if place.world != ranks:
        raise UserError(
            f"{ranks} ranks were asked for, but the launcher started {place.world} processes; "
            f"give --ranks {place.world}"
        )
    return _join(place, function, *arguments)


def _join(place: Place, function: Callable[..., Result], *arguments: Any) -> Result:
    device = pick_device(place.local_rank)
    if device.type == "cpu":
        torch.set_num_threads(1)
        keep_freed_memory()
    else:
        torch.cuda.set_device(device)
    address = f"tcp://{place.address}:{place.port}"
    try:
        dist.init_process_group(
            backend_of(device),
            init_method="env://" if _elastic() else address,
            rank=place.rank,
            world_size=place.world,
            device_id=None if device.type == "cpu" else device,  # so that all ranks make NCCL's communicator at once
        )
    except dist.DistNetworkError as error:
        raise UserError(
            f"rank {place.rank} could not meet the others at {place.address}:{place.port}: is the port in use? "
            f"Choose another in MASTER_PORT ({str(error).splitlines()[0]})"
        ) from error
    result = function(place.rank, device, *arguments)
    dist.destroy_process_group()  # not after a failure: the others would notice before this rank has said why
    return result


def _elastic() -> bool:
    """Whether torchrun's agent holds the meeting place, which a worker then only reads."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def _start_local(ranks: int, function: Callable[..., Result], *arguments: Any) -> Result:
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.multiprocessing")):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # they repeat every traceback
    context = multiprocessing.get_context("forkserver")
    # Imported once, not by every rank: torch, and what torch's optimizers import at their first use.
    context.set_forkserver_preload([function.__module__, "torch._dynamo"])
    with tempfile.TemporaryDirectory(prefix="shardlab-") as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            max_restarts=0,
            monitor_interval=0.1,
            start_method="forkserver",
            logs_specs=DefaultLogsSpecs(log_dir=folder),  # or it leaves a folder behind
        )
        try:
            return elastic_launch(config, _work)(folder, function, *arguments)[0]
        except ChildFailedError as failure:
            raise _first_failure(Path(folder), failure, ranks) from None
        except RendezvousError as error:
            raise UserError(f"the ranks could not meet on 127.0.0.1: {error}") from error


def _work(folder: str, function: Callable[..., Result], *arguments: Any) -> Result:
    """What a started rank does: join, and leave a note with the time if it fails."""
    place = find_place(os.environ)
    assert place is not None
    try:
        result = _join(place, function, *arguments)
    except Exception as error:
        lost = isinstance(error, RuntimeError) and any(word in str(error) for word in _LOST)
        note = {
            "rank": place.rank,
            "time": time.time_ns(),
            "lost": lost,
            "sentence": str(error) if isinstance(error, UserError) else None,
            "traceback": traceback.format_exc(),
        }
        with whole_file(Path(folder, f"rank-{place.rank}.json")) as part:  # the agent may end this process meanwhile
            part.write_text(json.dumps(note))
        raise
    leave_if_asked()
    return result


def _first_failure(folder: Path, failure: ChildFailedError, ranks: int) -> RankFailed | UserError:
    """The first rank that failed for a reason of its own: the others only lose their connection to it."""
    notes = sorted((json.loads(file.read_text()) for file in folder.glob("rank-*.json")), key=lambda note: note["time"])
    own = next((note for note in notes if not note["lost"]), None)
    if own is not None:
        if own["sentence"]:
            return UserError(own["sentence"])
        return RankFailed(f"rank {own['rank']} failed, and the run ended with it.\n\n{own['traceback']}")
    silent = sorted(set(range(ranks)) - {note["rank"] for note in notes})
    if silent and notes:
        names = ", ".join(map(str, silent))
        text = f"no word from rank {names}: killed, or out of memory? Rank {notes[0]['rank']} lost its connection."
        return RankFailed(f"{text}\n\n{notes[0]['traceback']}")
    rank, process = failure.get_first_failure()
    return RankFailed(
        f"rank {rank} ended with exit code {process.exitcode} ({process.signal_name()}), and the run ended with it."
    )
