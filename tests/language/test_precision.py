"""The table of precisions."""

from __future__ import annotations

from typing import get_args

import pytest

from shardlab.common.errors import UserError
from shardlab.language import Kind
from shardlab.language.precision import FP32, FP64, PRECISIONS, find_precision, precision_for_dtype
from shardlab.train.config import PrecisionName


def test_a_run_may_ask_for_every_precision() -> None:
    assert set(get_args(PrecisionName)) == set(PRECISIONS)


def test_mixed_precision_has_16_bytes_a_parameter() -> None:
    """Rajbhandari et al. 2020, arXiv 1910.02054, section 3.1: 2 + 2 + 12; without a copy, float32 has 4 + 4 + 8."""
    for name, each in (
        ("bf16", (2, 2, 12)),
        ("bf16-fp32-grads", (2, 4, 12)),
        ("fp32", (4, 4, 8)),
        ("fp64", (8, 8, 16)),
    ):
        precision = find_precision(name)
        kinds = (Kind.WEIGHT, Kind.GRAD_WEIGHT, Kind.OPT_STATE, Kind.OPT_STATE)
        weight, gradient, *state = map(precision.bytes, kinds)
        assert (weight, gradient, sum(state)) == each


def test_a_precision_is_found_by_name_and_by_what_it_computes_in() -> None:
    assert find_precision("FP32") is FP32
    assert precision_for_dtype("float64") is FP64
    assert precision_for_dtype("bfloat16").name == "bf16"
    with pytest.raises(UserError, match="did you mean bf16"):
        find_precision("bf61")
