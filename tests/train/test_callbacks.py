"""Display of a run: in terminals of several widths, and in a pipe."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console

from shardlab.train.callbacks import TrainingProgress

FIRST = ["step 12000/20000", "loss 2.522", "lr 0.000254", "norm 12.3", "tps 1,211,974", "left "]
"""What comes first, of numbers as long as they may be."""


def metrics(step: int = 11_999, **more: float) -> dict[str, Any]:
    return {
        "step": step,
        "loss": 2.5217,
        "learning_rate": 0.00025413,
        "grad_norm": 12.345,
        "dt": 1.0625,
        "dtf": 0.0235,
        "dtb": 0.0371,
        "sps": 187.12,
        "sps_per_gpu": 93.56,
        "tps": 1_211_974.2,
        "tps_per_gpu": 605_987.1,
        "mfu": 0.2814,
        **more,
    }


def terminal(width: int) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)


def live(progress: TrainingProgress, width: int) -> list[str]:
    """The lines below those that stay."""
    console = terminal(width)
    console.print(progress)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_nothing_is_redrawn_in_a_cell_of_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JPY_PARENT_PID", "1")
    console = terminal(80)
    with TrainingProgress(20, console=console) as progress:
        progress.show(metrics())
    assert isinstance(console.file, io.StringIO)
    assert "\x1b" not in console.file.getvalue()


@pytest.mark.parametrize(("width", "more"), [(80, []), (160, ["dt 1.062", "mfu 28.1%", "dtf 0.024", "sps 187.1"])])
def test_important_figures_come_first_and_others_as_width_allows(width: int, more: list[str]) -> None:
    progress = TrainingProgress(20_000, console=terminal(width))
    progress.show(metrics())
    line, bar = live(progress, width)
    places = [line.index(piece) for piece in (*FIRST, *more)]
    assert places == sorted(places)
    assert len(line) <= width
    assert "60%" in bar
    assert len(bar) <= width


@pytest.mark.parametrize("width", [10, 20, 40, 60])
def test_a_narrow_terminal_has_whole_figures_in_one_line(width: int) -> None:
    progress = TrainingProgress(20_000, console=terminal(width))
    progress.show(metrics())
    line, _ = live(progress, width)
    words = "step 12000/20000  loss 2.522 lr 0.000254 norm 12.3 tps 1,211,974"
    assert line == words[: len(line)]
    assert width < 16 or words[len(line) : len(line) + 1] in (" ", "")


def test_the_current_activity_is_shown_with_the_step(capsys: pytest.CaptureFixture[str]) -> None:
    progress = TrainingProgress(20_000, console=terminal(80))
    progress.show(metrics())
    progress.begin("writing the weights")
    assert live(progress, 80)[0] == "step 12000/20000  writing the weights"


def test_a_resumed_run_begins_at_the_step_of_its_checkpoint() -> None:
    assert live(TrainingProgress(350, console=terminal(80), past_steps=346), 80)[0] == "step   346/350  starting"


@pytest.mark.parametrize("width", [80, None], ids=["terminal", "pipe"])
@pytest.mark.parametrize(("log_every", "expected"), [(1, [1, 10, 20, 25, 30, 40]), (8, [1, 8, 16, 24, 25, 32, 40])])
def test_logged_and_validated_steps_stay_in_a_terminal_and_in_a_pipe(
    log_every: int, expected: list[int], width: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(TrainingProgress, "say", lambda self, text: lines.append(text))  # pyright: ignore
    with TrainingProgress(100, log_every, console=None if width is None else terminal(width)) as progress:
        progress.show_validation({"validation_loss": 4.2134})
        for step in range(40):
            progress.show(metrics(step, **({"validation_loss": 2.4981} if step == 24 else {})))
    validated, *steps = lines
    assert validated == "step     0/100  validation loss 4.213"
    assert [int(line[5:10]) for line in steps] == expected
    assert [int(line[5:10]) for line in steps if "loss 2.522 validation loss 2.498 lr" in line] == [25]
    if width is None:
        assert all(line.endswith("tps_per_gpu 605,987") for line in steps), "a pipe has all figures"
    else:
        assert max(map(len, steps)) <= width


def test_a_line_stays_above_what_is_live() -> None:
    console = terminal(80)
    with TrainingProgress(100, console=console) as progress:
        progress.say("a sample [bold] of text\nin two lines")
        assert isinstance(console.file, io.StringIO)
        shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue()).splitlines()
    at = shown.index("a sample [bold] of text")
    assert shown[at + 1] == "in two lines"
    assert shown[at + 2] == "step     0/100  starting"


def test_the_time_left_follows_from_the_pace_of_recent_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("shardlab.train.callbacks.time.monotonic", lambda: now)
    progress = TrainingProgress(100, console=terminal(160))
    progress.show(metrics(0, dt=3.0))
    assert "left 4:57" in live(progress, 160)[0]
    for step in range(1, 80):
        now += 1.0 if step < 20 else 2.0
        progress.show(metrics(step))
    assert "left 0:40" in live(progress, 160)[0]
