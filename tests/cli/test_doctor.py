"""`shardlab doctor`: what it prints, and its exit status."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from shardlab.cli import main
from tests.support.processes import PATIENCE, free_port
from tests.support.warm import WarmStarts

pytestmark = pytest.mark.starts_ranks
Captured = pytest.CaptureFixture[str]


def test_this_machine_is_examined_with_two_ranks_that_meet(capsys: Captured) -> None:
    status = main(["doctor", "--json"])
    output = json.loads(capsys.readouterr().out)
    assert status == (0 if output["ok"] else 1)
    states = {finding["check"]: finding["state"] for finding in output["findings"]}
    assert states["python"] == states["torch"] == states["backend"] == states["messages"] == states["versions"] == "ok"
    (link,) = output["links"]
    assert link["bandwidth"] > 0 < link["latency"]
    assert output["clocks"][0] == 0
    assert abs(output["clocks"][1]) < 1


def test_too_few_open_files_are_an_error_with_a_remedy() -> None:
    command = f"ulimit -n 200; exec {sys.executable} -m shardlab doctor"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.returncode == 1
    assert "ulimit -n 4096" in done.stdout
    assert "1 error" in done.stdout


def test_ranks_that_do_not_meet_are_an_error_and_the_host_is_examined_all_the_same(warm: WarmStarts) -> None:
    port = str(free_port())
    world = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    done = warm.run(["-m", "shardlab", "doctor", "--timeout", "1", "--json"], env={**os.environ, **world})
    assert done.returncode == 1
    findings = {finding["check"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert findings["python"]["state"] == "ok"
    network = (
        f"rank 1 did not connect to the others: rank 1 of 2 waited 1 s for rank 0 at 127.0.0.1:{port}, and it has not "
    )
    assert findings["network"]["present"].startswith(network)
    assert "firewall" in findings["network"]["remedy"]


def test_a_torch_that_cannot_be_imported_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["doctor"]) == 1
    assert "pip install torch" in capsys.readouterr().out


def test_a_time_that_is_none_is_refused(capsys: Captured) -> None:
    assert main(["doctor", "--timeout", "0"]) == 2
    assert "--timeout is 0.0; give a positive number of seconds" in capsys.readouterr().err
