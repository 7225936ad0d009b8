"""The server of the editor: it listens on this machine only, and answers only those who know its token."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.client import HTTPConnection
from threading import Thread
from typing import Any

import pytest

from shardlab.cli.simulate.step_options import StepOptions
from shardlab.cli.view.edit import EDIT_SCRIPTS, MOST_BYTES, EditServer
from shardlab.cli.view.editing import editor_of
from shardlab.draw.viewer.columns import decode


@pytest.fixture(scope="module")
def server() -> Iterator[EditServer]:
    edit_server = EditServer(editor_of(StepOptions(strategy="gpipe")))
    thread = Thread(target=edit_server.serve)
    thread.start()
    yield edit_server
    edit_server.close()
    thread.join()


def request(server: EditServer, method: str, path: str, content: str = "", **headers: str) -> tuple[int, str]:
    host, _, port = server.address.removeprefix("http://").partition("/")[0].partition(":")
    connection = HTTPConnection(host, int(port))
    connection.request(method, path, content, headers)
    response = connection.getresponse()
    return response.status, response.read().decode()


def answer_to(server: EditServer, **body: Any) -> dict[str, Any]:
    status, text = request(server, "POST", f"/{server.token}/judge", json.dumps(body))
    assert status == 200, text
    return json.loads(text)


def test_it_is_bound_to_this_machine(server: EditServer) -> None:
    assert server._server.server_address[0] == "127.0.0.1"
    assert len(server.token) >= 32


def test_without_the_token_every_request_is_forbidden(server: EditServer) -> None:
    wrong = server.token[:-1] + ("a" if server.token[-1] != "a" else "b")
    for path in (
        "/",
        "/judge",
        f"/{wrong}/",
        f"/{wrong}/judge",
        "/x/../",
        f"/?{server.token}",
        f"/{server.token}",
        "//",
    ):
        for method in ("GET", "POST"):
            status, text = request(server, method, path, "{}")
            assert status == 403, path
            assert "token" in text
            assert server.token not in text


def test_two_servers_have_two_tokens(server: EditServer) -> None:
    other = EditServer(server.editors[""])
    other._server.server_close()
    assert other.token != server.token


def test_the_page_may_ask_only_this_server(server: EditServer) -> None:
    status, page = request(server, "GET", f"/{server.token}/")
    assert status == 200
    assert "connect-src 'self'" in page
    assert "default-src 'none'" in page
    assert server.token not in page
    assert EDIT_SCRIPTS[-1] == "edit"


def test_the_starting_point_and_another_version_are_checked(server: EditServer) -> None:
    start = answer_to(server)
    assert start["legal"]
    assert start["schedule"]
    header, _ = decode(start["data"])
    assert len(header["rows"]) == 4
    words = start["start"].splitlines()[0].split(",")
    text = start["start"].replace(",".join(words), ",".join(reversed(words)), 1)
    answer = answer_to(server, text=text)
    assert not answer["legal"]
    assert answer["sentence"].startswith("row 1 (rank 0), column 1")
    assert answer_to(server)["start"] == start["start"], "the server keeps nothing of a page"


def test_a_level_of_the_course_has_its_goals(server: EditServer) -> None:
    (level,) = [candidate for candidate in answer_to(server)["levels"] if candidate["title"].startswith("15:")]
    answer = answer_to(server, level=level["name"])
    assert answer["legal"]
    assert "goal" in answer["sentence"]
    status, text = request(server, "POST", f"/{server.token}/judge", '{"level": "none"}')
    assert (status, text) == (404, "there is no level 'none'")


@pytest.mark.parametrize("content", ["", "[", "[]", "3", '{"text": 3}', "[" * 100_000])
def test_a_request_that_is_no_question_is_refused(server: EditServer, content: str) -> None:
    status, _ = request(server, "POST", f"/{server.token}/judge", content)
    assert status == 400


def test_a_request_that_is_too_large_or_unknown_is_refused(server: EditServer) -> None:
    headers = {"Content-Length": str(MOST_BYTES + 1)}
    assert request(server, "POST", f"/{server.token}/judge", **headers)[0] == 413
    assert request(server, "GET", f"/{server.token}/other")[0] == 404
