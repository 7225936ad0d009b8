"""Pictures of runs, values and stores."""

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from shardlab.program import UserError
from shardlab.puzzles import Activation, ActivationGrad, Model, OptState, Weight, WeightGrad, draw, draw_group
from shardlab.puzzles.drawing import timeline_of
from tests.puzzles import solutions
from tests.puzzles.drive import figures, run

VALUES = [
    Weight(2, 5, 0, {0}, 2),
    OptState(2, 5, 0),
    WeightGrad(2, 5, {0}, 2, {1}, 2),
    Activation(5, 5, {0}, 2),
    ActivationGrad(-1, 5, {1}, 2),
]


def is_svg(text: str) -> bool:
    return ET.fromstring(text).tag.endswith("svg")


def test_drawing_prints_time_and_peak_as_published(capsys: pytest.CaptureFixture[str]) -> None:
    draw(run(solutions.gpipe, 4, 8, 4))
    expected = "Timesteps: 33.3 \nMaximum Memory: 4194304.0 at GPU: 1 time: 30.4\n"
    assert capsys.readouterr().out == expected


def test_a_run_is_drawn(tmp_path: Path) -> None:
    picture = draw(run(solutions.pipeline, 4, 4, 2))
    picture.save(tmp_path / "pipeline.svg")
    assert is_svg((tmp_path / "pipeline.svg").read_text())


def test_some_of_the_ranks_are_drawn_by_themselves() -> None:
    assert is_svg(draw(run(solutions.pipeline, 4, 4, 2)[1:3])._repr_svg_())


def test_a_model_that_has_done_nothing_is_drawn() -> None:
    assert is_svg(draw([Model(layers=2, batches=4)]).svg)


def test_nothing_is_not_drawn() -> None:
    with pytest.raises(UserError, match="no models were given"):
        draw([])


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_every_value_shows_itself(value: Weight) -> None:
    assert is_svg(value._repr_svg_())
    assert value.draw().svg == value._repr_svg_()


def test_a_store_is_drawn_as_one_network() -> None:
    assert is_svg(draw_group(dict(enumerate(VALUES))).svg)
    assert is_svg(draw_group({}).svg)


@pytest.mark.parametrize("name", ["ddp", "gpipe"])
def test_the_timeline_has_the_figures_of_the_logs(name: str) -> None:
    models = run(getattr(solutions, name), 4, 4, 4)
    timeline = timeline_of(models)
    assert (timeline.steps, timeline.end, timeline.peak_memory) == figures(models)
