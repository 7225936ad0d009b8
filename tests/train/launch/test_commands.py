"""Exchange of messages between the ranks of a launcher's world, by its store."""

# pyright: reportPrivateImportUsage=false
# torch does not mark its stores as exported.

from __future__ import annotations

import socket
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch.distributed as dist

from shardlab.common.errors import UserError
from shardlab.train.launch.commands import RankExchange
from shardlab.train.launch.environment import LaunchEnvironment
from tests.support.processes import PATIENCE, free_port

SHORT = timedelta(seconds=0.2)


def place(rank: int, port: int, world: int = 2) -> LaunchEnvironment:
    return LaunchEnvironment(rank, world, rank, "127.0.0.1", port)


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect the lines about waits, without delay."""
    said: list[str] = []
    monkeypatch.setattr("shardlab.train.launch.commands.say_waiting", said.append)
    monkeypatch.setattr("shardlab.train.launch.commands.SAY_SECONDS", 0.0)
    return said


def test_a_rank_whose_others_do_not_come_says_so_in_time(lines: list[str]) -> None:
    port = free_port()
    alone = RankExchange(place(0, port), SHORT)
    with pytest.raises(UserError) as refused:
        alone.exchange("here")
    said = str(refused.value)
    assert said.startswith(f"rank 0 of 2 waited 0.2 s for rank 1 at 127.0.0.1:{port}, and it has not answered; look at")
    assert "\n" not in said
    assert set(lines) == {f"waiting for rank 1 at 127.0.0.1:{port}, 0 s of 0.2 s"}


def test_every_rank_names_those_that_are_missing_and_no_other(lines: list[str]) -> None:
    port = free_port()
    ranks = [RankExchange(place(rank, port, world=4), timedelta(seconds=0.5)) for rank in (0, 2)]
    with ThreadPoolExecutor(2) as pool:
        waits = [pool.submit(peer.exchange, "here") for peer in ranks]
        for rank, wait in zip((0, 2), waits, strict=True):
            with pytest.raises(UserError, match=rf"^rank {rank} of 4 waited 0.5 s for ranks 1, 3 at .* they have not "):
                wait.result(PATIENCE)
    waited = {line.partition(",")[0] for line in lines}
    assert waited <= {"waiting for ranks 1", f"waiting for ranks 1-3 at 127.0.0.1:{port}"}, "rank 2 may come later"
    assert waited, "the first of a host alone says it"


def test_a_rank_without_rank_0_says_so_in_time_and_why(lines: list[str]) -> None:
    port = free_port()
    with pytest.raises(
        UserError, match=rf"for rank 0 at 127.0.0.1:{port}, and it has not answered \(Connection refused"
    ):
        RankExchange(place(1, port), SHORT)
    with pytest.raises(UserError, match=r"for rank 0 at n1\.invalid:29500, and it has not answered "):
        RankExchange(LaunchEnvironment(4, 8, 0, "n1.invalid", 29500), SHORT)
    assert any(line.startswith("waiting for rank 0 at n1.invalid:29500, 0 s of 0.2 s") for line in lines)


def test_a_port_that_is_only_tried_is_not_taken_for_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardlab.train.launch.commands.CLOSE_SECONDS", PATIENCE)
    port = free_port()
    with socket.create_server(("127.0.0.1", port)) as server, ThreadPoolExecutor(1) as pool:
        waits = pool.submit(RankExchange, place(1, port), SHORT)
        server.accept()[0].close()
        server.close()
        with pytest.raises(UserError, match="and it has not answered"):
            waits.result(PATIENCE)


def test_ranks_that_meet_at_an_agent_name_those_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    port = free_port()
    agent = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    for rank, others in ((0, "ranks 1-2"), (1, "rank 2")):  # rank 0 has come, and gone
        with pytest.raises(UserError, match=rf"^rank {rank} of 3 waited 0.2 s for {others} at 127.0.0.1:{port}, "):
            RankExchange(place(rank, port, world=3), SHORT)
    assert agent.check(["start/0"])


def test_rank_0_whose_store_it_is_leaves_when_all_have_heard() -> None:
    port, get, there = free_port(), dist.PrefixStore.get, list[bool]()
    first, second = RankExchange(place(0, port)), RankExchange(place(1, port))

    def look(store: dist.PrefixStore, key: str) -> bytes:
        value = get(store, key)
        if key == "words":
            with pytest.raises(TimeoutError):
                leaving.result(0.3)
            there.append(True)
        return value

    with ThreadPoolExecutor(1) as pool, patch.object(dist.PrefixStore, "get", look):
        leaving: Future[list[str]] = pool.submit(first.exchange, "a")
        assert second.exchange("b") == ["a", "b"]
        assert leaving.result(60) == ["a", "b"]
    assert there
