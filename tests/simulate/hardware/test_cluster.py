"""Clusters by name and by file."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardlab.common.fields import field_types, read_fields
from shardlab.language import UserError
from shardlab.simulate.hardware import DEVICES, LINKS, Device, Link, find_cluster
from shardlab.simulate.hardware.cluster import NODES

DEVICE_NUMBERS = ("memory", "bandwidth", "sms")


def test_a_name_is_a_device_and_a_count() -> None:
    cluster = find_cluster("H100x16")
    assert (cluster.device.name, cluster.per_node, cluster.nodes, cluster.size) == ("h100", 8, 2, 16)
    assert find_cluster("mi300xx8").device.name == "mi300x"


def test_fewer_devices_than_a_node_are_part_of_one() -> None:
    cluster = find_cluster("a100-40gbx4")
    assert (cluster.per_node, cluster.nodes, cluster.nics) == (4, 1, 4)


def test_every_device_has_a_node_of_known_links() -> None:
    assert set(NODES) == set(DEVICES)
    assert {node.intra_node for node in NODES.values()} | {node.inter_node for node in NODES.values()} <= set(LINKS)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("h10x16", "there is no device 'h10'; did you mean h100"),
        ("h100", "'h100' is not a cluster; write DEVICExCOUNT such as h100x16"),
        ("h100x0", "'h100x0' is not a cluster"),
        ("h100x12", "12 x h100 are not whole nodes of 8; take 8 or 16"),
        ("mi300x8", "since the device is called mi300x; give mi300xx8"),
        ("4x8xh100", "'4x8xh100' is not a cluster; write h100x32, which is 4 nodes of 8"),
        ("H100x4x8", "write h100x32, which is 4 nodes of 8"),
        ("16xmi300x", "write mi300xx16, which is 2 nodes of 8"),
        ("4x4xh100", 'have 8 devices; for 4 of 4, write a .toml file with device = "h100", nodes = 4 and per_node = 4'),
        ("nowhere.toml", "nowhere.toml cannot be read: No such file"),
    ],
)
def test_what_is_no_cluster_is_refused(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        find_cluster(name)


def test_a_mesh_larger_than_the_cluster_is_refused() -> None:
    find_cluster("h100x16").require(16)
    with pytest.raises(UserError, match=r"17 ranks do not fit on 16 devices \(2 x 8 h100\)"):
        find_cluster("h100x16").require(17)


def test_a_file_changes_the_figures_that_it_names(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(
        'nodes = 4\nper_node = 4\ninter_node = "ethernet-25"\n'
        '[device]\nbase = "h100"\nmemory = 96e9\n[intra_node]\nbase = "nvlink3"\nefficiency = 0.5\n'
    )
    cluster = find_cluster(str(path))
    assert cluster.size == 16
    assert cluster.nics == 4
    assert cluster.device.memory == 96e9
    assert cluster.device.bandwidth == DEVICES["h100"].bandwidth
    assert cluster.intra_node.speed == 0.5 * LINKS["nvlink3"].bandwidth
    assert cluster.inter_node is LINKS["ethernet-25"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nodes = 2", "does not say device"),
        ('device = "h100"\nnods = 2', "cluster.toml has no 'nods'; did you mean nodes"),
        ('device = "h100"\nnodes = 0', "nodes is 0; give 1 or more"),
        ('device = "h100"\nnodes = "2"', "nodes is '2'; give a whole number"),
        ('device = "h100"\nintra_node = "nvlink"', "there is no link 'nvlink'; did you mean nvlink"),
        ('device = "h100"\nintra_node = 5', "intra_node is 5; give a word in quotes"),
        ("[device]\nmemory = 1", r'\[device\] has no base; write base = "h100"'),
        ('[device]\nbase = "h100"\nmemry = 1', "h100 has no 'memry'; did you mean memory"),
        ('[device]\nbase = "h100"\nmemory = "1"', "h100.memory is '1'; give a number above 0"),
        ("device = ", "is not TOML"),
        ('device = "h100"\nnics = 0', "nics is 0; give 1 or more"),
        ('device = "h100"\nper_node = 0', "per_node is 0; give 1 or more"),
        *((f'[device]\nbase = "h100"\n{key} = 0', f"h100.{key} is 0; give") for key in DEVICE_NUMBERS),
        ('[device]\nbase = "h100"\nsms = 1.5', "h100.sms is 1.5; give a whole number"),
        (
            'device = "h100"\n[intra_node]\nefficiency = 0',
            "nvlink4.efficiency is 0; give the share of its bandwidth",
        ),
        ('device = "h100"\n[intra_node]\nefficiency = 50', "is 50; give the share .* above 0 and at most 1.1"),
        ('device = "h100"\n[inter_node]\nbandwidth = 0', "infiniband-ndr.bandwidth is 0; give a number above 0"),
        ('device = "h100"\n[inter_node]\nbandwidth = inf', "infiniband-ndr.bandwidth is inf; give a number above 0"),
        (
            'device = "h100"\n[inter_node]\nlatency = -1e-6',
            "infiniband-ndr.latency is -1e-06; give seconds, 0 or more",
        ),
        ('device = "h100"\n[inter_node]\nlatency = nan', "infiniband-ndr.latency is nan; give seconds, 0 or more"),
    ],
)
def test_a_file_that_describes_no_cluster_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        find_cluster(str(path))


def test_every_figure_of_the_tables_could_stand_in_a_file() -> None:
    rows: list[Device | Link] = [*DEVICES.values(), *LINKS.values()]
    for row in rows:
        numbers = {name: getattr(row, name) for name in field_types(type(row))}
        file_fields = {name: number for name, number in numbers.items() if (name, number) != ("pair", 0.0)}
        assert len(file_fields) >= 3
        assert read_fields(field_types(type(row)), file_fields, "") == file_fields


def test_a_link_without_latency_is_one(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text('device = "h100"\n[intra_node]\nlatency = 0\n')
    assert find_cluster(str(path)).intra_node.latency == 0


def test_the_network_is_reported_with_what_was_assumed(tmp_path: Path) -> None:
    text = "8 NICs of infiniband-ndr a node, nvlink4 inside a node; assumed, as in the usual node of h100"
    assert find_cluster("h100x16").network_text == text
    assert find_cluster("h100x8").network_text == "nvlink4 inside a node; assumed, as in the usual node of h100"
    assert find_cluster("h100x1").network_text == ""
    file = tmp_path / "ours.toml"
    file.write_text('device = "h100"\nnodes = 2\ninter_node = "roce-400"\nintra_node = "nvlink4"\n')
    cluster = find_cluster(str(file))
    assert cluster.assumed == ("nics",)
    text = "8 NICs of roce-400 a node, nvlink4 inside a node; nics assumed, as in the usual node of h100"
    assert cluster.network_text == text
    file.write_text(file.read_text() + "nics = 1\n")
    assert find_cluster(str(file)).network_text == "1 NIC of roce-400 a node, nvlink4 inside a node"


def test_two_of_four_gpus_without_a_switch_have_a_third_of_their_links(tmp_path: Path) -> None:
    """Boards of four GPUs of HGX: each has 6 of its 18 links to each of the others."""
    path = tmp_path / "four.toml"
    path.write_text('device = "h200"\nnodes = 2\nper_node = 4\n')
    board, switched = find_cluster(str(path)), find_cluster("h200x8")
    assert board.intra_node.name == "nvlink4-mesh"
    for ranks, share in (((0, 1), 3.0), ((0, 1, 2), 1.5), ((0, 1, 2, 3), 1.0)):
        mine, theirs = (cluster.collective_seconds("all_gather", 1e12, ranks) for cluster in (board, switched))
        assert mine / theirs == pytest.approx(share, rel=1e-3)
