"""A comparison: its two timelines stand in one picture, on one axis."""

from __future__ import annotations

import xml.etree.ElementTree as xml
from pathlib import Path

from shardlab.check import check
from shardlab.draw import comparison_svg, save_comparison
from shardlab.program import trace
from shardlab.strategies.fsdp import fsdp
from shardlab.timeline import Costs, simulate

CHECKED = check(trace(fsdp, ranks=2, layers=3, microbatches=2))
SLOW = simulate(CHECKED, Costs(forward=2.0, collective=0.9))


def words(svg: str) -> list[str]:
    return [
        "".join(element.itertext()).strip() for element in xml.fromstring(svg).iter() if element.tag.endswith("text")
    ]


def test_both_are_named_with_their_lengths_in_milliseconds() -> None:
    told = simulate(CHECKED)
    said = words(comparison_svg({"predicted": told, "measured": SLOW}, "fsdp"))
    assert {"predicted", "measured", "fsdp", "milliseconds since the first rank began"} <= set(said)
    assert f"predicted {1000 * told.end:.4g} ms  ·  measured {1000 * SLOW.end:.4g} ms" in said
    assert said.count("rank 0") == said.count("rank 1") == 2


def test_a_measurement_alone_is_drawn_alone(tmp_path: Path) -> None:
    save_comparison({"measured": SLOW}, tmp_path / "c.svg", "fsdp")
    assert words((tmp_path / "c.svg").read_text()).count("rank 0") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["c.svg"]
