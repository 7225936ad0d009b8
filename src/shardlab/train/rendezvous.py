"""Meeting environment of a launcher's ranks: rank 0 holds a store, and the others find it."""

# pyright: reportPrivateImportUsage=false
# torch does not mark its stores as exported.

from __future__ import annotations

import socket
import threading
import time

import torch.distributed as dist

from shardlab.program import UserError
from shardlab.train.launch_environment import LaunchEnvironment, port_in_use

ANSWER = 5.0
"""Seconds in which rank 0's store answers, once something listens there; torch waits for ever for what is no store."""


def store_of(environment: LaunchEnvironment) -> dist.Store:
    """Find the store of this world.

    Raises:
        UserError: when its port is in use, or rank 0 does not come within torch's time limit.
    """
    where = f"{environment.address}:{environment.port}"
    if environment.rank == 0:
        try:
            return dist.TCPStore(environment.address, environment.port, is_master=True, wait_for_workers=False)
        except dist.DistNetworkError as error:
            raise port_in_use(environment, str(error).splitlines()[0]) from error
    _wait_for_listener(environment)
    found: list[dist.Store] = []
    thread = threading.Thread(target=lambda: found.append(_client(environment)), daemon=True)
    thread.start()
    thread.join(ANSWER)
    if not found:
        raise UserError(
            f"rank {environment.rank} did not find rank 0 at {where}: the port is in use by something else; "
            "choose another in MASTER_PORT"
        )
    return found[0]


def _client(environment: LaunchEnvironment) -> dist.Store:
    return dist.TCPStore(environment.address, environment.port, is_master=False)


def _wait_for_listener(environment: LaunchEnvironment) -> None:
    limit = dist.default_pg_timeout.total_seconds()
    deadline = time.monotonic() + limit
    while True:
        try:
            socket.create_connection((environment.address, environment.port), timeout=ANSWER).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise UserError(
                    f"rank {environment.rank} did not find rank 0 at {environment.address}:{environment.port} in "
                    f"{limit:.0f} s ({error})"
                ) from None
            time.sleep(0.1)
