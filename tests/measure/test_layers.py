"""Layers are timed in a real step: every op of every kind of layer, with one process and with all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from shardlab.language import UserError
from shardlab.measure.fits import (
    LayerPoint,
    PeakPoint,
    Shape,
    fit_kernels,
    heads_of,
    parse_batch,
    rate_errors,
    read_points,
    subjects,
)
from shardlab.measure.layers import ComputeBench
from shardlab.models import GPT
from tests.measure import jobs
from tests.support.ranks import Ranks

MeasuringRanks = Callable[[int], Ranks]
WHOLE = {"first block", "block", "last block"}
HALVES = {"embedding", "norm", "attention", "mlp", "head"}
PASSES = {"forward", "backward", "backward_input", "backward_weight"}


@pytest.mark.starts_ranks
def test_every_pass_of_every_layer_is_measured_alone_and_together(ranks: MeasuringRanks, tmp_path: Path) -> None:
    bench = ComputeBench((Shape(16, 2, 8),), vocab_size=32, seconds=1e-4)
    assert ranks(2).call(jobs.compute, bench, tmp_path / "points") == [True, False]
    points = read_points(tmp_path / "points")
    assert [point.processes for point in points if isinstance(point, PeakPoint)] == [1, 2]
    layers = [point for point in points if isinstance(point, LayerPoint)]
    for processes in (1, 2):
        mine = [point for point in layers if point.processes == processes]
        passes = {(point.layer, point.op) for point in mine}
        expected = {(layer, op) for layer in HALVES for op in PASSES} | {
            ("loss", "loss"),
            ("batch", "load_batch"),
            ("gradient", "add"),
            ("model", "update"),
        }
        expected |= {(layer, "norm") for layer in HALVES | WHOLE}
        assert passes == expected | {(layer, op) for layer in WHOLE for op in PASSES}
        assert all(point.seconds >= point.fastest > 0 for point in mine)
        assert rate_errors(mine, fit_kernels(mine)).points == len(mine)


def test_a_layers_arithmetic_is_counted_in_both_directions() -> None:
    """Twice as many products backward as forward (arXiv 2104.04473, appendix), and one half each if it is split."""
    whole, halves, _, split, _ = subjects(Shape(64, 2, 32), "float32", 256)
    assert isinstance(whole.model, GPT)
    flops: dict[tuple[int, str, str], float] = {}
    for number, subject in enumerate((whole, halves, split)):
        for op in subject.checked().program.tapes[0]:
            if op.kind.value in PASSES and op.layer >= 0:
                name = subject.layer_name(op)
                flops[number, name, op.kind.value] = sum(kernel_flops for _, kernel_flops, _ in subject.work(op, 0))
    assert flops[0, "block", "forward"] == pytest.approx(flops[1, "attention", "forward"] + flops[1, "mlp", "forward"])
    assert flops[1, "mlp", "backward"] == 2 * flops[1, "mlp", "forward"]
    assert flops[1, "mlp", "backward"] == flops[2, "mlp", "backward_input"] + flops[2, "mlp", "backward_weight"]


def test_heads_divide_the_width() -> None:
    assert [heads_of(width) for width in (16, 64, 100, 768)] == [2, 2, 2, 12]


@pytest.mark.parametrize("text", ["8", "8x", "x8", "0x8", "8x128x2", "-8x128"])
def test_invalid_microbatches_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="is not a microbatch; write SEQUENCESxTOKENS, such as 8x128"):
        parse_batch(text)
