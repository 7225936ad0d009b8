"""Rows as they should not be: each has a prediction or a reason in one sentence, and none ends the command."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, cast

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardlab.planner.published.predict import outcome_of
from tests.planner.published.test_reading import ROWS
from tests.support.thorough import examples

SMALL = ("korthikanti-t5-22B-full", "titan-t1-8B-8gpu-eager", "zero-7.5B-Nd64-stage2")
"""Runs that are quickly predicted."""

SECTIONS = ("model", "hardware", "parallelism", "batch", "measured")
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 12),
    st.floats(),
    st.sampled_from(["8", "8.0", "OOM", "none", "", "A100", "1f1b", "zb-v", "interleaved", "swiglu", "fp8", "full"]),
    st.just([1]),
    st.just({"a": 1}),
)
PLACES = sorted(
    {(name, key) for run in SMALL for name in SECTIONS for key in ROWS[run].get(name, {})}
    | {("", key) for key in ("source", "framework", "precision", "recompute", "status", *SECTIONS)}
)


@given(
    st.sampled_from(SMALL),
    st.lists(st.tuples(st.sampled_from(PLACES), ODD, st.booleans()), min_size=1, max_size=4),
)
@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_an_odd_row_has_a_prediction_or_a_reason(name: str, changes: list[tuple[tuple[str, str], Any, bool]]) -> None:
    row = deepcopy(ROWS[name])
    for (part, key), value, absent in changes:
        place: Any = row.get(part) if part else row
        if not isinstance(place, dict):
            continue
        place = cast(dict[str, Any], place)
        if absent:
            place.pop(key, None)
        else:
            place[key] = value
    outcome = outcome_of(row)
    assert (outcome.prediction is None) == bool(outcome.reason)
    assert "\n" not in outcome.reason
