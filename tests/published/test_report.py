"""The arithmetic of the report."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardlab.published.outcomes import Outcome
from shardlab.published.predict import Prediction
from shardlab.published.report import ErrorSummary, by_source, misjudged, worst_of
from shardlab.published.rows import Measurement

ERRORS = st.lists(st.floats(-1, 5), min_size=1)


def outcome(name: str, source: str, seconds: float, *, fits: bool = True, out: bool = False) -> Outcome:
    return Outcome(name, source, Measurement(1.0, None, "allocated", out), Prediction(seconds, 1.0, fits))


@given(ERRORS)
def test_errors_lie_in_order(each: list[float]) -> None:
    errors = ErrorSummary.of(each)
    assert errors.count == len(each)
    assert abs(errors.bias) <= errors.mean + 1e-12
    assert errors.mean <= errors.worst + 1e-12
    assert errors.median <= errors.worst
    assert errors.worst in map(abs, each)


def test_of_nothing_there_are_no_errors() -> None:
    assert by_source([], "seconds") == {}


def test_sources_are_grouped_and_signs_kept() -> None:
    runs = [outcome("a", "vTrain", 1.1), outcome("b", "vTrain", 0.7), outcome("c", "elsewhere", 1.0)]
    found = by_source(runs, "seconds")
    assert list(found) == ["vTrain", "elsewhere", "all"]
    assert found["all"].count == 3
    assert (round(found["vTrain"].mean, 9), round(found["vTrain"].bias, 9)) == (0.2, -0.1)
    assert [run.id for _, run in worst_of(runs, "seconds", 2)] == ["b", "a"]


def test_a_run_whose_room_was_misjudged_is_named() -> None:
    runs = [
        outcome("ran", "", 1.0),
        outcome("ended", "", 1.0, fits=False, out=True),
        outcome("thought too large", "", 1.0, fits=False),
        outcome("thought to fit", "", 1.0, out=True),
        Outcome("not asked", "", Measurement(1.0, None, "allocated"), None, "says nothing"),
    ]
    assert [run.id for run in misjudged(runs)] == ["thought too large", "thought to fit"]
