"""`shardlab simulate --costs`: times of one's own, and the bubble that follows from them."""

from __future__ import annotations

import json

import pytest

from shardlab.cli import main
from tests.strategies.action_clock import PassTimes
from tests.strategies.zero_bubble_table import TABLE, Row
from tests.support.thorough import sampled

Captured = pytest.CaptureFixture[str]
NAMES = ("1f1b", "zb-h1", "zb-h2")
QUICK = TABLE[:10]
"""The last two settings have 32 ranks as well, and so many microbatches that a program takes seconds."""


def as_option(times: PassTimes, stages_per_rank: int = 1) -> str:
    names = ("forward", "backward_input", "backward_weight")
    parts = [f"{name}={time / stages_per_rank:.6f}" for name, time in zip(names, times.passes, strict=True)]
    return ",".join([*parts, f"send={times.latency}"])


def facts_of(capsys: Captured, name: str, row: Row, *more: str) -> dict[str, float]:
    sizes = ["--pp", str(row.ranks), "--microbatches", str(row.microbatches)]
    assert main(["simulate", name, *sizes, *more, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("name", "row"),
    sampled([(NAMES[at % 3], row) for at, row in enumerate(QUICK)], lambda case: case[1] in (*QUICK[:2], *QUICK[5:7])),
)
def test_the_bubble_is_the_zero_bubble_papers(name: str, row: Row, capsys: Captured) -> None:
    """Schedules take the settings by turns, so that each has few and many ranks and microbatches."""
    facts = facts_of(capsys, name, row, "--costs", as_option(row.times))
    assert facts["layers"] == row.ranks
    assert round(facts["bubble_with_communication"], 4) == row.rates[name]


@pytest.mark.parametrize("at", sampled([0, 6], {0}.__contains__))
def test_interleaved_comes_near_with_equal_stages(at: int, capsys: Captured) -> None:
    row = QUICK[at]
    name, stages = "interleaved-1f1b", row.layers_per_rank
    facts = facts_of(capsys, name, row, "--stages-per-rank", str(stages), "--costs", as_option(row.times, stages))
    assert facts["layers"] == stages * row.ranks
    assert facts["bubble_with_communication"] == pytest.approx(row.rates[name], abs=0.004)


def test_flags_change_the_plan_of_a_name(capsys: Captured) -> None:
    costs = "forward=18.522,backward_input=18.086,backward_weight=9.337,send=0.601"
    assert main(["simulate", "zb-h1", "--pp", "8", "--microbatches", "24", "--costs", costs, "--json"]) == 0
    assert round(json.loads(capsys.readouterr().out)["bubble_with_communication"], 4) == 0.1585


def test_costs_left_out_are_0(capsys: Captured) -> None:
    assert main(["simulate", "ddp", "--costs", "forward=2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["end"] == 8  # 4 layers, one microbatch on each rank


def test_the_report_of_a_pipeline_names_its_bubble(capsys: Captured) -> None:
    free = "from first to last pass; 42.86% with communication"
    assert main(["simulate", "gpipe", "--costs", "forward=1,backward_input=1,backward_weight=1"]) == 0
    assert f"bubble             42.86%  {free}" in capsys.readouterr().out  # (p - 1) / (m + p - 1)
    assert main(["simulate", "gpipe"]) == 0
    out = capsys.readouterr().out
    assert "bubble             42.86%" in out
    assert free not in out
    assert main(["simulate", "fsdp"]) == 0
    assert "bubble" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("costs", "sentence"),
    [
        ("forwards=1", "--costs: there is no cost 'forwards'; give some of forward, recompute, backward_input, "),
        ("link_latency=1", "--costs: there is no cost 'link_latency'"),
        ("backward=2", "--costs: give backward_input and backward_weight; an unsplit backward costs their sum"),
        (
            "forward",
            "--costs: 'forward' is not a cost; give teaching, puzzle, or NAME=TIME,... such as forward=1,send=0.2",
        ),
        ("forward=1,", "--costs: '' is not a cost"),
        ("", "--costs is empty; give a value, or leave it out"),
        ("forward=", "--costs: forward= is not a time; give a number, 0 or more"),
        ("send=1ms", "--costs: send=1ms is not a time"),
        ("send=-1", "--costs: send=-1 is not a time"),
        ("send=inf", "--costs: send=inf is not a time"),
        ("send=nan", "--costs: send=nan is not a time"),
        ("send=1,send=2", "--costs: send is given twice; give it once"),
    ],
)
def test_costs_that_are_none_are_one_sentence(costs: str, sentence: str, capsys: Captured) -> None:
    assert main(["simulate", "1f1b", "--costs", costs]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"shardlab: {sentence}")
    assert captured.err.count("\n") == 1
    assert captured.out == ""
