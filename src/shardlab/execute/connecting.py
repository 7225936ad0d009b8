"""How a rank finds its neighbours, the ranks of its host, and shares its memory with them."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import os
import platform
import secrets
import socket
import struct
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from shardlab.execute.neighbours import Neighbours
from shardlab.execute.shared_memory import IN_ORDER, Outbox, SharedMemory

HELLO = struct.Struct("=16sI")
"""The first message of a connection: the token of whom it is for, and the sender's rank; its memory comes along."""

MAPPED = 2**46
"""Bytes that all memories of a world may have together: half of what a process of 64 bits can map."""


class Address(NamedTuple):
    """Where a rank is found by others.

    Attributes:
        host: the name of its host, equal for ranks that can share memory; empty for a rank that shares none.
        name: the name of the Unix socket at which it listens.
        token: a secret by which who connects to that socket shows that this rank has told it the address.
        size: bytes of the memory that it shares.
    """

    host: str = ""
    name: bytes = b""
    token: bytes = b""
    size: int = 0


def connect_neighbours(limit: timedelta, later: timedelta | None = None, *, shares: bool = True) -> None:
    """Find this rank's neighbours; every rank of the default process group calls this.

    Args:
        limit: how long is waited for them now.
        later: how long is waited for each letter later (None: as long).
        shares: whether this rank may have any: what it shares counts where a process's memory is limited.
    """
    Neighbours.part()
    rank, world = dist.get_rank(), dist.get_world_size()
    with ExitStack() as opened:
        host = _host() if shares else ""
        outbox = _outbox(world) if host else None
        listener = None if outbox is None else opened.enter_context(_socket(limit))
        address, addresses = Address(), [Address()] * world
        if outbox is not None and listener is not None:
            name, token = b"\0shardlab-" + secrets.token_hex(16).encode(), secrets.token_bytes(16)
            listener.bind(name)
            listener.listen(world)
            address = Address(host, name, token, outbox.size)
        dist.all_gather_object(addresses, address)
        others = {other: each for other, each in enumerate(addresses) if other != rank and each.host == host}
        if outbox is None or listener is None or not others:
            return
        sockets, files = _connected(rank, address.token, outbox.file, listener, others, limit)
        memories = {other: SharedMemory(others[other].size, world, file) for other, file in files.items()}
        for file in (outbox.file, *files.values()):
            os.close(file)  # what is mapped stays
        Neighbours.here = Neighbours(rank, outbox, sockets, memories, later or limit)


def _host() -> str:
    """Name this host, the same for all its processes that can reach each other's sockets; empty if they share none.

    Processes share memory by Linux's files without a name. They reach each other's sockets if they are in one network
    namespace of one host, as one user. The host's processor must be one whose order of writes `shared_memory` rests on.
    """
    if not hasattr(os, "memfd_create") or platform.machine() != IN_ORDER:
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/net').stat().st_ino} {os.getuid()}"
    except OSError:
        return ""


def _outbox(world: int) -> Outbox | None:
    """Make this rank's memory; None where a limit of the process forbids it, such as that of files' sizes."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError):
        return Outbox(min(physical, MAPPED // world), world)
    return None


def _socket(limit: timedelta) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.settimeout(limit.total_seconds())
    return made


def _connected(
    rank: int, token: bytes, file: int, listener: socket.socket, others: dict[int, Address], limit: timedelta
) -> tuple[dict[int, socket.socket], dict[int, int]]:
    """Connect to each: the sockets, and the descriptors of their memories. Of two ranks the lower one listens."""
    sockets: dict[int, socket.socket] = {}
    files: dict[int, int] = {}
    for other, address in others.items():
        if other < rank:
            sockets[other] = made = _socket(limit)
            made.connect(address.name)
            socket.send_fds(made, [HELLO.pack(address.token, rank)], [file])
    while any(other > rank and other not in sockets for other in others):
        accepted, _ = listener.accept()
        accepted.settimeout(limit.total_seconds())
        hello, theirs, *_ = socket.recv_fds(accepted, HELLO.size, 1)
        known, other = HELLO.unpack(hello) if len(hello) == HELLO.size else (b"", -1)
        if not secrets.compare_digest(known, token):  # any process of the host may connect
            accepted.close()
            for each in theirs:
                os.close(each)
            continue
        (files[other],) = theirs
        sockets[other] = accepted
        socket.send_fds(accepted, [HELLO.pack(others[other].token, rank)], [file])
    for other in others:
        if other < rank:
            _, (files[other],), *_ = socket.recv_fds(sockets[other], HELLO.size, 1)
    return sockets, files
