"""A device's roofline."""

from __future__ import annotations

import json
from collections.abc import Sized
from dataclasses import replace
from fnmatch import fnmatch
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.language import UserError
from shardlab.language.rules.kinds import bytes_of
from shardlab.models.layout import FusedAttention, Kernel, Matmul, Pointwise
from shardlab.simulate.hardware import DEVICES, LINKS, Link, find_cluster, find_device, find_link
from shardlab.simulate.hardware import device as formulas
from shardlab.simulate.hardware.cluster import NODES, NodeType
from shardlab.simulate.hardware.device import ALIASES, CONSTANTS, GIB, Device
from shardlab.simulate.predict.recipe import recipes

DEVICE = st.sampled_from(list(DEVICES.values()))
SIZE = st.integers(1, 40_000)


@given(DEVICE, SIZE, SIZE, SIZE, st.integers(1, 64))
def test_no_product_is_faster_than_the_data_sheet(device: Device, m: int, n: int, k: int, batch: int) -> None:
    kernel = Matmul(m, n, k, batch)
    dtype = "bfloat16" if "bfloat16" in device.flops else "float16"
    seconds = device.seconds(kernel, dtype)
    assert seconds >= kernel.flops / device.flops[dtype]
    assert seconds >= 2 * kernel.elements / device.bandwidth


@given(DEVICE, st.floats(1, 1e10))
def test_no_pointwise_kernel_is_faster_than_the_memory(device: Device, elements: float) -> None:
    dtype = next(iter(device.flops))
    assert device.seconds(Pointwise("gelu", elements, elements), dtype) >= bytes_of(dtype) * elements / device.bandwidth


@pytest.mark.parametrize(
    ("small", "large"),
    [
        (Matmul(256, 256, 256), Matmul(8192, 8192, 8192)),
        (Matmul(8192, 8192, 64), Matmul(8192, 8192, 4096)),
        (FusedAttention(1, 8, 8, 256, 256, 128, 0.5), FusedAttention(4, 32, 32, 4096, 4096, 128, 0.5)),
    ],
)
def test_a_larger_kernel_reaches_more_flops(small: Kernel, large: Kernel) -> None:
    device = find_device("a100")
    assert small.flops / device.seconds(small, "bfloat16") < large.flops / device.seconds(large, "bfloat16")


def test_one_row_more_than_a_wave_of_tiles_costs_more_than_its_share() -> None:
    """On 108 SMs 108 tiles fill one wave and 109 need two, or smaller tiles (NVIDIA, "Matrix multiplication")."""
    device = find_device("a100")
    wave = Matmul(256 * 108, 128, 4096)
    assert device.seconds(wave._replace(m=256 * 108 + 1), "float16") > 1.1 * device.seconds(wave, "float16")


def test_rows_of_odd_width_are_slow() -> None:
    """BLOOM's steps with heads of 108 features took 40 % longer (bigscience, chronicles-prequel.md)."""
    device = find_device("a100")
    odd, even = Matmul(2048, 2048, 108, 64), Matmul(2048, 2048, 112, 64)
    assert device.seconds(odd, "float16") > 1.3 * device.seconds(even, "float16")


def test_attention_backward_takes_longer_than_forward() -> None:
    forward = FusedAttention(2, 32, 32, 2048, 2048, 128, 0.5)
    (backward,) = forward.backward_input()
    device = find_device("h100")
    assert device.seconds(backward, "bfloat16") > 2 * device.seconds(forward, "bfloat16")


def test_in_float8_only_products_with_parameters_are_faster() -> None:
    device = find_device("h100")
    assert device.seconds(Matmul(8192, 8192, 8192), "float8") < 0.75 * device.seconds(
        Matmul(8192, 8192, 8192), "bfloat16"
    )
    scores = Matmul(2048, 2048, 128, 64, learned=False)
    for kernel in (scores, Pointwise("gelu", 1e8, 1e8), FusedAttention(4, 32, 32, 2048, 2048, 128, 0.5)):
        assert device.seconds(kernel, "float8") == device.seconds(kernel, "bfloat16")


def test_a_dtype_takes_a_peak_and_a_share_of_it() -> None:
    """Its name says how long it is; all but products with parameters is in bfloat16 if that is less than two bytes."""
    h100 = find_device("h100")
    efficiency = replace(h100.efficiency, matmul={**h100.efficiency.matmul, "float4": h100.efficiency.matmul["float8"]})
    device = replace(h100, flops={**h100.flops, "float4": 2 * h100.flops["float8"]}, efficiency=efficiency)
    product = Matmul(8192, 8192, 8192)
    assert device.seconds(product, "float4") < 0.75 * device.seconds(product, "float8")
    assert device.seconds(Pointwise("gelu", 1e8, 1e8), "float4") == h100.seconds(
        Pointwise("gelu", 1e8, 1e8), "bfloat16"
    )


def test_each_generation_of_attention_kernels_has_its_own_speed() -> None:
    kernel = FusedAttention(4, 32, 32, 4096, 4096, 128, 0.5)
    device = find_device("h100")
    seconds = [replace(device, attention=name).seconds(kernel, "bfloat16") for name in ("flash1", "flash2", "cudnn")]
    assert seconds == sorted(seconds, reverse=True)


def test_a_dtype_that_the_device_lacks_is_refused() -> None:
    with pytest.raises(UserError, match="p100 does not compute in bfloat16; it does in float64, float32, float16"):
        find_device("p100").seconds(Matmul(64, 64, 64), "bfloat16")
    with pytest.raises(UserError, match="a100-80gb does not compute in float8"):
        find_device("a100").seconds(Pointwise("gelu", 1.0, 1.0), "float8")


def test_an_unknown_device_suggests_the_nearest() -> None:
    with pytest.raises(UserError, match=r"there is no device 'a100-80'; did you mean a100-80gb"):
        find_device("a100-80")


def test_a100_is_the_one_of_80_gb() -> None:
    assert find_device("A100") is find_device("a100-80gb")


# What holds of every device, link and node, whatever its figures.


ROOT = Path(__file__).parents[3]
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
        output = device.efficiency.figures
        assert {f"matmul.{dtype}" for dtype in device.flops} <= output.keys(), device.name
        assert {"memory", "launch", "k_half", "bytes_half", f"attention.{device.attention}"} <= output.keys()
    for link in LINKS.values():
        optional_fields = {name for name in ("net_step", "half_speed_ranks") if getattr(link, name)}
        assert link.figures.keys() == {"latency", "efficiency"} | optional_fields


def test_a_figure_has_a_source_or_runs_or_is_assumed() -> None:
    """In one test: there are 900 figures."""
    for name, figure in FIGURES.items():
        assert bool(figure.source or figure.fitted_to), name
        assert not (figure.assumed and figure.fitted_to), name
        assert bool(figure.runs) <= bool(figure.fitted_to), name


def test_no_figure_rests_on_fewer_runs_than_were_fitted_together() -> None:
    """Of figures whose runs are in the file of published runs; the playbook's are in a file of their own."""
    ids = [row["id"] for row in json.loads((ROOT / "benchmarks" / "published_runs.json").read_text())]
    fitted_fields: dict[tuple[str, ...], dict[str, int]] = {}
    for name, figure in FIGURES.items():
        if figure.runs and not figure.runs[0].startswith("playbook"):
            owner, _, field = name.rpartition(" ")
            several = isinstance(figure.value, Sized) and not isinstance(figure.value, str)
            numbers = len(figure.value) if several else 1
            fitted_fields.setdefault((owner, figure.fitted_to, *figure.runs), {})[field] = numbers
    assert len(fitted_fields) > 10
    for (owner, _, *runs), counts in fitted_fields.items():
        matches = sum(any(fnmatch(run_id, pattern) for pattern in runs) for run_id in ids)
        assert matches >= sum(counts.values()), (owner, counts)


def test_what_a_row_changes_of_its_base_is_not_reported_as_the_bases() -> None:
    """H100s of 500 W reach shares of their own, of which some are fitted and others assumed."""
    h100, h100_of_500_watts = (find_device(name).efficiency.figures for name in ("h100", "h100-96gb"))
    assert h100["attention.cudnn"].fitted_to
    assert h100_of_500_watts["attention.cudnn"].assumed
    assert h100_of_500_watts["attention.flash2"].fitted_to == "torchtitan's runs"


@pytest.mark.parametrize(
    ("name", "owner"),
    [("h100-pcie", "h100"), ("a100-pcie", "a100-80gb"), ("a100-pcie", "a100-40gb")],
)
def test_what_another_device_was_fitted_to_is_assumed_of_one_that_no_run_was_of(name: str, owner: str) -> None:
    theirs, fitted = find_device(name).efficiency, find_device(owner).efficiency
    assert theirs.matmul == fitted.matmul
    assert all(figure.assumed for figure in theirs.figures.values())
    assert fitted.figures["matmul.bfloat16"].fitted_to


@pytest.mark.parametrize("name", ["infiniband-edr", "infiniband-xdr"])
def test_what_one_generation_of_a_network_was_fitted_to_is_assumed_of_the_others(name: str) -> None:
    link, fitted = LINKS[name], LINKS["infiniband-hdr"]
    assert (link.efficiency, link.latency) == (fitted.efficiency, fitted.latency)
    assert link.figures["efficiency"].assumed
    assert fitted.figures["efficiency"].fitted_to
    assert not link.figures["latency"].assumed


def test_every_row_says_where_it_was_looked_up_or_that_it_was_not() -> None:
    """A page or a paper that can be opened, another row, a unit by its name, or honestly none."""
    for row, source in SOURCES.items():
        openable = "/" in source or "arXiv" in source
        assert openable or any(words in source for words in ("not looked up", "its name", "fitted")), row


def test_names_are_those_of_the_rows_and_aliases_lead_to_one() -> None:
    assert all(name == device.name == name.lower() for name, device in DEVICES.items())
    assert all(name == link.name == name.lower() for name, link in LINKS.items())
    assert not set(ALIASES) & set(DEVICES)
    assert {find_device(alias) for alias in ALIASES} <= set(DEVICES.values())


@ALL_DEVICES
def test_every_device_can_be_asked_for_as_a_cluster(device: Device) -> None:
    count = 2 * NODES[device.name].devices
    assert find_cluster(f"{device.name}x{count}").nodes == 2


# The figures of the sources come out of the sources' formulas, and their conventions are told apart.


ELEMENTS = 100 * 1024**2  # CS336's float32 elements


def test_cs336s_all_reduce_is_bus_bandwidth() -> None:
    """277 "GB/s" on 4 H100: 400 MiB, 2 x 3/4 of it on each link, in 2.11 ms. In decimal units that is 297 GB/s."""
    seconds = ELEMENTS * 4 * 2 * 3 / 4 / (277 * GIB)
    assert seconds == pytest.approx(2.115e-3, rel=1e-3)
    assert formulas.cs336_bandwidth("all_reduce", 4 * ELEMENTS, 4, seconds) == pytest.approx(277)
    assert formulas.bus_bandwidth("all_reduce", 4 * ELEMENTS, 4, seconds) == pytest.approx(297.4e9, rel=1e-3)
    assert formulas.algorithm_bandwidth(4 * ELEMENTS, seconds) == pytest.approx(198.3e9, rel=1e-3)


def test_cs336s_reduce_scatter_is_bus_bandwidth_over_the_ranks() -> None:
    """70 "GB/s" on 4 H100: each input is 1600 MiB, but the formula counts the output, 400 MiB, so it took 4.19 ms.

    The links carried 3/4 of the input, 301 GB/s: as fast as in all_reduce. The collective did not run at a quarter of
    its speed; the formula counts a quarter of the bytes.
    """
    seconds = ELEMENTS * 4 * 3 / 4 / (70 * GIB)
    assert seconds == pytest.approx(4.185e-3, rel=1e-3)
    assert formulas.cs336_bandwidth("reduce_scatter", 4 * 4 * ELEMENTS, 4, seconds) == pytest.approx(70)
    bus = formulas.bus_bandwidth("reduce_scatter", 4 * 4 * ELEMENTS, 4, seconds)
    assert bus == pytest.approx(300.6e9, rel=1e-3)
    assert bus / GIB == pytest.approx(4 * 70)


@pytest.mark.parametrize(("milliseconds", "printed"), [(2.16, 272), (2.14, 273), (2.11, 278)])
def test_cs336s_all_reduces_print_what_its_formula_says(milliseconds: float, printed: int) -> None:
    """github.com/stanford-cs336/spring2025-lectures var/traces/lecture_08_stdout.txt; the times are rounded there."""
    assert formulas.cs336_bandwidth("all_reduce", 4 * ELEMENTS, 4, milliseconds / 1e3) == pytest.approx(
        printed, rel=0.005
    )


@pytest.mark.parametrize(("milliseconds", "printed"), [(3.92, 75), (4.03, 73), (4.06, 72)])
def test_cs336s_reduce_scatters_print_what_its_formula_says(milliseconds: float, printed: int) -> None:
    """From the file that the test of all-reduces names."""
    assert formulas.cs336_bandwidth("reduce_scatter", 4 * 4 * ELEMENTS, 4, milliseconds / 1e3) == pytest.approx(
        printed, rel=0.007
    )


@pytest.mark.parametrize(
    ("kind", "factor"),
    [("all_reduce", 1.75), ("all_gather", 0.875), ("reduce_scatter", 0.875), ("all_to_all", 0.875), ("broadcast", 1)],
)
def test_bus_factors_are_nccl_tests(kind: str, factor: float) -> None:
    assert formulas.bus_factor(kind, 8) == factor


def test_nanogpts_step_on_four_a100() -> None:
    """0.285 s for 64 sequences of 1024 on each GPU is 230 thousand tokens/s, which the source gives as 229, and 46 %.

    Parameters: 12 blocks of 12 x 768^2 + 2 x 768 (norms, no biases), the last norm, and 65 tied embeddings. FLOPs of a
    token, forward and backward: 6 N + 12 L H Q T, of an A100's 312 TFLOP/s in bfloat16 (nanoGPT model.py, estimate_mfu,
    after PaLM's appendix B); N leaves out the position embedding, attention is counted as if it were not causal.
    """
    parameters = 12 * (12 * 768**2 + 2 * 768) + 768 + 65 * 768
    flops = 6 * parameters + 12 * 12 * 12 * 64 * 1024
    tokens = 64 * 1024 / 0.285
    assert tokens == pytest.approx(229_000, rel=0.005)
    assert flops * tokens / find_cluster("a100x4").device.peak("bfloat16") == pytest.approx(0.46, abs=0.005)


def test_only_dimensions_along_which_rows_lie_must_be_whole_words() -> None:
    """A weight's gradient sums over tokens, of which there may be any number; a row of features of 150 is slow."""
    experts = Matmul(12287, 7168, 2048, batch=16)
    gradient, *_ = experts.backward_weight()
    assert isinstance(gradient, Matmul)
    assert (gradient.k, formulas.alignment(gradient, "bfloat16")) == (12287, 1.0)
    assert formulas.alignment(experts, "bfloat16") == 1.0
    assert formulas.alignment(Matmul(2048, 2048, 150, batch=64, learned=False), "bfloat16") < 1
    wide, *_ = Matmul(2048, 7168, 150).backward_weight()
    assert isinstance(wide, Matmul)
    assert formulas.alignment(wide, "bfloat16") < 1
