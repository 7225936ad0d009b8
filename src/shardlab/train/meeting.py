"""Meeting place of a launcher's ranks: rank 0 holds a store, and the others find it."""

# pyright: reportPrivateImportUsage=false
# torch does not mark its stores as exported.

from __future__ import annotations

import socket
import threading
import time

import torch.distributed as dist

from shardlab.program import UserError
from shardlab.train.place import Place, port_in_use

ANSWER = 5.0
"""Seconds in which rank 0's store answers, once something listens there; torch waits for ever for what is no store."""


def store_of(place: Place) -> dist.Store:
    """The store of this place's world.

    Raises:
        UserError: when its port is in use, or rank 0 does not come within torch's time limit.
    """
    where = f"{place.address}:{place.port}"
    if place.rank == 0:
        try:
            return dist.TCPStore(place.address, place.port, is_master=True, wait_for_workers=False)
        except dist.DistNetworkError as error:
            raise port_in_use(place, str(error).splitlines()[0]) from error
    _wait_for_listener(place)
    found: list[dist.Store] = []
    thread = threading.Thread(target=lambda: found.append(_client(place)), daemon=True)
    thread.start()
    thread.join(ANSWER)
    if not found:
        raise UserError(
            f"rank {place.rank} did not find rank 0 at {where}: the port is in use by something else; "
            "choose another in MASTER_PORT"
        )
    return found[0]


def _client(place: Place) -> dist.Store:
    return dist.TCPStore(place.address, place.port, is_master=False)


def _wait_for_listener(place: Place) -> None:
    limit = dist.default_pg_timeout.total_seconds()
    deadline = time.monotonic() + limit
    while True:
        try:
            socket.create_connection((place.address, place.port), timeout=ANSWER).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise UserError(
                    f"rank {place.rank} did not find rank 0 at {place.address}:{place.port} in {limit:.0f} s ({error})"
                ) from None
            time.sleep(0.1)
