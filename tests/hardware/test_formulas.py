"""The figures of the sources come out of the sources' formulas, and their conventions are told apart."""

from __future__ import annotations

import pytest

from shardlab.hardware import find_cluster, formulas
from shardlab.hardware.formulas import GIB

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
