"""The table of precisions."""

from __future__ import annotations

import pytest

from shardlab.common.errors import UserError
from shardlab.language import Kind
from shardlab.language.precision import (
    FP32,
    FP64,
    find_precision,
    find_runnable_precision,
    precision_for_dtype,
)
from shardlab.train.config import PrecisionConfig


def test_mixed_precision_has_16_bytes_a_parameter() -> None:
    """Rajbhandari et al. 2020, arXiv 1910.02054, section 3.1: 2 + 2 + 12; without a copy, float32 has 4 + 4 + 8."""
    for name, bytes in (
        ("bf16", (2, 2, 12)),
        ("bf16-fp32-grads", (2, 4, 12)),
        ("fp8", (2, 2, 12)),
        ("fp32", (4, 4, 8)),
        ("tf32", (4, 4, 8)),
        ("fp64", (8, 8, 16)),
    ):
        precision = find_precision(name)
        kinds = (Kind.WEIGHT, Kind.GRAD_WEIGHT, Kind.OPT_STATE, Kind.OPT_STATE)
        weight, gradient, *state = map(precision.bytes, kinds)
        assert (weight, gradient, sum(state)) == bytes


def test_bf16_parameters_without_a_copy_have_8_bytes_a_parameter() -> None:
    precision = find_precision("bf16-params")
    assert (precision.bytes(Kind.WEIGHT), precision.bytes(Kind.GRAD_WEIGHT), precision.optimizer) == (2, 2, 4)
    assert precision.moved_by_update == 2 + 2 * 4 + 2 * 2
    assert precision.dtype(Kind.STATS) == precision.dtype(Kind.SCALAR) == "float32"
    assert find_precision("bf16-params-fp32-grads").bytes(Kind.GRAD_WEIGHT) == 4


@pytest.mark.parametrize("name", ["bf16", "bf16-params", "fp8", "mxfp8"])
def test_gradients_alone_change_their_dtype(name: str) -> None:
    wide = find_precision(name).with_gradients_of(4)
    assert wide is find_precision(f"{name}-fp32-grads")
    assert wide.with_gradients_of(2) is find_precision(name)
    assert find_precision("tf32").with_gradients_of(2) is find_precision("tf32")


@pytest.mark.parametrize(
    ("name", "instead"), [("fp8", "bf16"), ("mxfp8-fp32-grads", "bf16-fp32-grads"), ("tf32", "fp32")]
)
def test_a_precision_of_predictions_is_refused_with_one_to_train_in(name: str, instead: str) -> None:
    with pytest.raises(UserError, match=rf"{name} is a precision of predictions.*give them {instead}$"):
        find_runnable_precision(name)
    with pytest.raises(UserError, match="is a precision of predictions"):
        PrecisionConfig(name)


def test_a_precision_is_found_by_name_and_by_what_it_computes_in() -> None:
    assert find_precision("FP32") is FP32
    assert precision_for_dtype("float64") is FP64
    assert precision_for_dtype("bfloat16").name == "bf16"
    with pytest.raises(UserError, match="did you mean bf16"):
        find_precision("bf61")
