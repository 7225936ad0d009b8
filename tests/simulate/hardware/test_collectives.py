"""What a collective takes on the links that its group crosses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.language import UserError
from shardlab.simulate.hardware import find_cluster, find_link
from shardlab.simulate.hardware.collectives import COSTS
from shardlab.simulate.hardware.device import bus_bandwidth

KIND = st.sampled_from(sorted(COSTS))
BYTES = st.floats(1, 1e11)
CLUSTER = find_cluster("h100x64")
GROUPS = st.sampled_from([range(8), range(4), range(64), range(0, 64, 8), range(0, 32, 4), (3, 11), (0, 1)])


@given(KIND, BYTES, GROUPS)
def test_more_bytes_take_no_less_time(kind: str, bytes: float, group: Sequence[int]) -> None:
    assert 0 < CLUSTER.collective_seconds(kind, bytes, group) <= CLUSTER.collective_seconds(kind, 2 * bytes, group)


@given(KIND.filter(lambda kind: kind not in ("barrier", "gather", "scatter")), st.floats(1e6, 1e11), GROUPS)
def test_no_bus_bandwidth_exceeds_the_links(kind: str, bytes: float, group: Sequence[int]) -> None:
    crosses = len({rank // 8 for rank in group}) > 1
    seconds = CLUSTER.collective_seconds(kind, bytes, group)
    # a node's eight NICs together, for the part that leaves it
    limit = max(CLUSTER.intra_node.speed, 8 * CLUSTER.inter_node.speed) if crosses else CLUSTER.intra_node.speed
    assert bus_bandwidth(kind, bytes, len(group), seconds) < limit


@given(KIND, BYTES)
def test_a_group_on_one_node_is_no_slower_than_one_over_eight(kind: str, bytes: float) -> None:
    assert CLUSTER.collective_seconds(kind, bytes, range(8)) <= CLUSTER.collective_seconds(kind, bytes, range(0, 64, 8))


@given(KIND, BYTES)
def test_a_group_of_one_takes_no_time(kind: str, bytes: float) -> None:
    assert CLUSTER.collective_seconds(kind, bytes, [5]) == 0


def test_all_reduce_of_a_large_value_is_reduce_scatter_and_all_gather() -> None:
    parts = sum(CLUSTER.collective_seconds(kind, 1e10, range(64)) for kind in ("reduce_scatter", "all_gather"))
    assert CLUSTER.collective_seconds("all_reduce", 1e10, range(64)) == pytest.approx(parts, rel=1e-3)


def test_a_small_all_reduce_over_many_nodes_goes_by_tree() -> None:
    """A ring's latency grows with the ranks, a tree's with their logarithm."""
    cluster = find_cluster("h100x1024")
    small, smaller = (cluster.collective_seconds("all_reduce", 1e3, range(count)) for count in (1024, 64))
    assert small < 3 * smaller


def test_every_step_of_a_ring_over_nodes_takes_the_network_s_overhead_where_it_is_known() -> None:
    """So tensor parallelism over two nodes waits 15 times; an all-reduce still has a tree, a node's own ring none."""
    with_overhead = replace(find_cluster("h100x1024"), inter_node=find_link("efa-100"), nics=32)
    without_overhead = replace(with_overhead, inter_node=replace(with_overhead.inter_node, net_step=0.0))
    step_seconds = with_overhead.inter_node.net_step
    assert with_overhead.collective_seconds("all_gather", 1.0, range(16)) == pytest.approx(15 * step_seconds, rel=0.02)
    assert without_overhead.collective_seconds("all_gather", 1.0, range(16)) < 2 * step_seconds
    assert with_overhead.collective_seconds("all_reduce", 1.0, range(1024)) < 2 * (7 + 7 + 1) * step_seconds
    for kind in COSTS:
        assert with_overhead.collective_seconds(kind, 1e8, range(8)) == without_overhead.collective_seconds(
            kind, 1e8, range(8)
        )


@given(KIND.filter(lambda kind: kind in ("all_reduce", "all_gather", "reduce_scatter")), st.floats(1e10, 1e12))
def test_large_collectives_are_half_as_fast_with_the_ranks_that_halve_the_speed(kind: str, bytes: float) -> None:
    """So a group over all devices takes longer than one with a member on each node, which has an eighth of the cards
    and of the bytes."""
    plain = replace(find_link("efa-100"), half_speed_ranks=0.0, latency=0.0, net_step=1e-12)
    fast = replace(find_cluster("h100x1024"), inter_node=plain, nics=32)
    slow = replace(fast, inter_node=replace(plain, half_speed_ranks=256.0))
    all_devices = [cluster.collective_seconds(kind, bytes, range(256)) for cluster in (slow, fast)]
    assert all_devices[0] == pytest.approx(2 * all_devices[1], rel=0.01)
    one_per_node = [cluster.collective_seconds(kind, bytes / 8, range(0, 256, 8)) for cluster in (slow, fast)]
    assert one_per_node[0] == pytest.approx((1 + 32 / 256) * one_per_node[1], rel=0.01)
    in_node = [cluster.collective_seconds(kind, bytes, range(8)) for cluster in (slow, fast)]
    assert in_node[0] == in_node[1]


def test_eight_groups_with_a_member_on_each_node_share_its_cards() -> None:
    """One NIC for each GPU: the group has its own. Two NICs for eight GPUs: it has a quarter of one."""
    nic_per_gpu = find_cluster("h100x16")
    assert nic_per_gpu.span([0, 8]).inter_node == nic_per_gpu.inter_node.speed
    assert nic_per_gpu.span([0, 1, 8, 9]).ring == 2 * nic_per_gpu.inter_node.speed
    two_nics = type(nic_per_gpu)(
        nic_per_gpu.device, 8, 2, nic_per_gpu.intra_node, nic_per_gpu.inter_node, nic_per_gpu.host, nics=2
    )
    assert two_nics.span([0, 8]).inter_node == nic_per_gpu.inter_node.speed / 4


def test_a_message_to_another_node_is_slower() -> None:
    assert CLUSTER.message_seconds(1e8, 0, 8) > CLUSTER.message_seconds(1e8, 0, 7) > CLUSTER.message_seconds(1e8, 0, 0)


def test_without_a_switch_a_message_has_only_the_lanes_to_its_target() -> None:
    cluster = find_cluster("v100x8")
    message = 1e9 / cluster.message_seconds(1e9, 0, 1)
    assert message < cluster.intra_node.bandwidth / 2


@pytest.mark.parametrize(
    ("kind", "bytes", "seconds"), [("all_reduce", 400, 2.115e-3), ("reduce_scatter", 1600, 4.185e-3)]
)
def test_collectives_on_four_h100_take_what_cs336_measured(kind: str, bytes: int, seconds: float) -> None:
    """MiB, and the seconds that the lecture's figures imply (test_formulas.py)."""
    predicted = find_cluster("h100x4").collective_seconds(kind, bytes * 2**20, range(4))
    assert predicted == pytest.approx(seconds, rel=0.1)


def test_an_unknown_collective_suggests_the_nearest() -> None:
    with pytest.raises(UserError, match="there is no collective 'allreduce'; did you mean all_reduce"):
        CLUSTER.collective_seconds("allreduce", 1.0, [0, 1])


@pytest.mark.parametrize(
    ("bytes", "ranks", "message"),
    [
        (-5, [0, 1], "-5 bytes cannot be sent; give 0 or more"),
        (float("nan"), [0, 1], "nan bytes cannot be sent"),
        (8, [0, 99], "there is no rank 99 on 2 x 8 h100; its ranks are 0 to 15"),
        (8, [-1, 0], "there is no rank -1 on 2 x 8 h100"),
        (8, [], "a collective of no ranks was asked for"),
        (8, [3, 3], r"ranks \[3, 3\] name one twice"),
    ],
)
def test_bytes_and_ranks_that_cannot_be_are_refused(bytes: float, ranks: list[int], message: str) -> None:
    cluster = find_cluster("h100x16")
    with pytest.raises(UserError, match=message):
        cluster.collective_seconds("all_reduce", bytes, ranks)


@pytest.mark.parametrize(("bytes", "target"), [(-5, 1), (8, 99)])
def test_a_message_of_negative_size_or_to_nobody_is_refused(bytes: float, target: int) -> None:
    with pytest.raises(UserError, match=r"-5 bytes cannot be sent|there is no rank 99"):
        find_cluster("h100x16").message_seconds(bytes, 0, target)


def test_a_message_goes_over_all_nics_of_a_device() -> None:
    one = replace(find_cluster("h100x16"), inter_node=find_link("efa-100"), nics=8)
    four = replace(one, nics=32)
    start = one.message_seconds(0, 0, 8)
    assert one.message_seconds(1e9, 0, 8) - start == pytest.approx(4 * (four.message_seconds(1e9, 0, 8) - start))
