"""What ranks would keep on the host or the disk must find room there, before they start."""

from __future__ import annotations

import pytest

from shardlab.cli import main
from shardlab.cli.train import this_machine

OFFLOADED = ["verify", "fsdp", "--ranks", "2", "--layers", "2", "--offload"]


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("host", "this host's memory has only 0.00 KiB free; offload less"),
        ("disk", "has only 0.00 KiB free; set TMPDIR to another folder, or offload less"),
    ],
)
def test_a_full_disk_is_reported_with_bytes(
    place: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    where = this_machine.free_bytes(place)[1]
    monkeypatch.setattr(this_machine, "free_bytes", lambda asked: (0 if asked == place else None, where))  # pyright: ignore
    assert main([*OFFLOADED, f"optimizer={place}"]) == 2
    output = capsys.readouterr().err
    assert output.startswith("shardlab: 2 ranks need ")
    assert says in output


def test_every_place_says_what_is_free() -> None:
    for place in ("host", "disk"):
        free, where = this_machine.free_bytes(place)
        assert free is None or free > 2**20
        assert where
