"""What holds of every device, link and node, whatever its figures."""

from __future__ import annotations

import json
from fnmatch import fnmatch
from itertools import pairwise
from pathlib import Path

import pytest

from shardlab.hardware import DEVICES, LINKS, Device, Link, find_cluster, find_device, find_link
from shardlab.hardware.clusters import NODES, NodeType
from shardlab.hardware.device import bytes_of
from shardlab.hardware.devices import ALIASES
from shardlab.hardware.figure import CONSTANTS
from shardlab.predict.recipe import recipes

ROOT = Path(__file__).parents[2]
ALL_DEVICES = pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
ALL_LINKS = pytest.mark.parametrize("link", LINKS.values(), ids=LINKS)
SOURCES = (
    {f"device {name}": device.source for name, device in DEVICES.items()}
    | {f"efficiency of {name}": device.efficiency.source for name, device in DEVICES.items()}
    | {f"link {name}": link.source for name, link in LINKS.items()}
    | {f"node of {name}": node.source for name, node in NODES.items()}
)


@ALL_DEVICES
def test_fewer_bytes_an_element_are_never_slower(device: Device) -> None:
    """A wider dtype may only be as fast: float64 on tensor cores is as fast as float32 without."""
    peaks = [device.flops[dtype] for dtype in sorted(device.flops, key=bytes_of, reverse=True)]
    assert all(wide <= narrow for wide, narrow in pairwise(peaks))


@ALL_DEVICES
def test_a_devices_figures_are_in_their_units(device: Device) -> None:
    """FLOP/s, bytes and bytes/s, not teras and gigas: from a card for inference to a module of 2025."""
    assert all(bytes_of(dtype) in (8, 4, 2, 1, 0.5) for dtype in device.flops)
    assert all(1e12 <= peak <= 1e16 for peak in device.flops.values())
    assert 8 * 2**30 <= device.memory <= 512 * 2**30
    assert 100e9 <= device.bandwidth <= 20e12
    assert 1 <= device.sms <= 512


@ALL_DEVICES
def test_an_element_that_is_read_takes_the_time_of_many_products(device: Device) -> None:
    """In its fastest dtype a device makes 25 to 2000 FLOPs while it reads a byte; a slip of a unit would show."""
    assert 25 <= max(device.flops.values()) / device.bandwidth <= 2000


@ALL_DEVICES
def test_a_device_reaches_a_share_of_its_data_sheet_in_each_dtype(device: Device) -> None:
    efficiency = device.efficiency
    assert all(0 < efficiency.matmul[dtype] <= 1 for dtype in device.flops)
    assert all(0 < share <= 1 for pair in efficiency.attention.values() for share in pair)
    assert 0 < efficiency.memory <= 1
    assert device.attention in efficiency.attention


@ALL_LINKS
def test_a_links_figures_are_in_their_units(link: Link) -> None:
    """Bytes/s and seconds: from an Ethernet of 1 Gb/s to memory of its own."""
    assert 0.125e9 <= link.bandwidth <= 2e12
    assert 0 <= link.pair <= link.bandwidth
    assert 0 < link.efficiency <= 1
    assert 0.1e-6 <= link.latency <= 100e-6


@pytest.mark.parametrize("node", NODES.values(), ids=NODES)
def test_links_inside_a_node_are_no_slower_than_its_share_of_the_network(node: NodeType) -> None:
    intra_node, inter_node = find_link(node.intra_node), find_link(node.inter_node)
    assert intra_node.bandwidth >= inter_node.bandwidth * node.nics / node.devices
    assert 1 <= node.nics <= node.devices


FIGURES = {
    **{f"{name} {key}": figure for name, each in DEVICES.items() for key, figure in each.efficiency.figures.items()},
    **{f"{name} {key}": figure for name, each in LINKS.items() for key, figure in each.figures.items()},
    **CONSTANTS,
    **{f"{name} {key}": figure for name, each in recipes().items() for key, figure in each.figures.items()},
}
"""What no data sheet gives."""


def test_every_share_of_a_device_and_every_speed_of_a_link_says_where_it_is_from() -> None:
    for device in DEVICES.values():
        told = device.efficiency.figures
        assert {f"matmul.{dtype}" for dtype in device.flops} <= told.keys(), device.name
        assert {"memory", "launch", "k_half", "bytes_half", f"attention.{device.attention}"} <= told.keys()
    for link in LINKS.values():
        assert link.figures.keys() == {"latency", "efficiency", *(["net_step"] if link.net_step else [])}


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_has_a_source_or_runs_or_is_assumed(name: str) -> None:
    figure = FIGURES[name]
    assert bool(figure.source or figure.fitted_to)
    assert not (figure.assumed and figure.fitted_to)
    assert bool(figure.runs) <= bool(figure.fitted_to)


def test_no_figure_rests_on_fewer_runs_than_were_fitted_together() -> None:
    """Of figures whose runs are in the file of published runs; the playbook's are in a file of their own."""
    ids = [row["id"] for row in json.loads((ROOT / "benchmarks" / "published_runs.json").read_text())]
    together: dict[tuple[str, ...], dict[str, int]] = {}
    for name, figure in FIGURES.items():
        if figure.runs and not figure.runs[0].startswith("playbook"):
            owner, _, field = name.rpartition(" ")
            together.setdefault((owner, figure.fitted_to, *figure.runs), {})[field] = figure.count
    assert len(together) > 10
    for (owner, _, *runs), counts in together.items():
        found = sum(any(fnmatch(each, pattern) for pattern in runs) for each in ids)
        assert found >= sum(counts.values()), (owner, counts)


def test_what_a_row_changes_of_its_base_is_not_told_as_the_bases() -> None:
    """H100s of 500 W reach shares of their own, of which some are fitted and others assumed."""
    full, less = (find_device(name).efficiency.figures for name in ("h100", "h100-96gb"))
    assert full["attention.cudnn"].fitted_to
    assert less["attention.cudnn"].assumed
    assert less["attention.flash2"].fitted_to == "torchtitan's runs"


@pytest.mark.parametrize(
    ("name", "owner"),
    [("h100-pcie", "h100"), ("a100-pcie", "a100-80gb"), ("a100-pcie", "a100-40gb"), ("b200", "gb200")],
)
def test_what_another_device_was_fitted_to_is_assumed_of_one_that_no_run_was_of(name: str, owner: str) -> None:
    theirs, fitted = find_device(name).efficiency, find_device(owner).efficiency
    assert theirs.matmul == fitted.matmul
    assert all(figure.assumed for figure in theirs.figures.values())
    assert fitted.figures["matmul.bfloat16"].fitted_to


@pytest.mark.parametrize("name", ["infiniband-edr", "infiniband-ndr", "infiniband-xdr"])
def test_what_one_generation_of_a_network_was_fitted_to_is_assumed_of_the_others(name: str) -> None:
    link, fitted = LINKS[name], LINKS["infiniband-hdr"]
    assert (link.efficiency, link.latency) == (fitted.efficiency, fitted.latency)
    assert link.figures["efficiency"].assumed
    assert fitted.figures["efficiency"].fitted_to
    assert not link.figures["latency"].assumed


@pytest.mark.parametrize("what", SOURCES)
def test_every_row_says_where_it_was_looked_up_or_that_it_was_not(what: str) -> None:
    """A page or a paper that can be opened, another row, a unit by its name, or honestly none."""
    source = SOURCES[what]
    openable = "/" in source or "arXiv" in source
    assert openable or any(words in source for words in ("not looked up", "its name", "fitted"))


def test_names_are_those_of_the_rows_and_aliases_lead_to_one() -> None:
    assert all(name == device.name == name.lower() for name, device in DEVICES.items())
    assert all(name == link.name == name.lower() for name, link in LINKS.items())
    assert not set(ALIASES) & set(DEVICES)
    assert {find_device(alias) for alias in ALIASES} <= set(DEVICES.values())


@ALL_DEVICES
def test_every_device_can_be_asked_for_as_a_cluster(device: Device) -> None:
    count = 2 * NODES[device.name].devices
    assert find_cluster(f"{device.name}x{count}").nodes == 2
