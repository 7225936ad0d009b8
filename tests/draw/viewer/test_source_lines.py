"""Lines of a program: each op has the line that wrote it."""

from __future__ import annotations

import linecache
from pathlib import Path

import pytest

from shardlab.api import check
from shardlab.draw.viewer.source_lines import source_lines
from shardlab.language import OpKind
from shardlab.strategies import STRATEGIES
from shardlab.strategies.load import load
from tests.house import SOURCE

PROGRAM = """
async def alone(rank):
    '''One device.'''
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l)
    rank.activations[0] = rank.load_batch(rank.microbatches)
    for l in rank.layers:
        rank.activations[l + 1] = rank.forward(l, rank.activations[l], rank.weights[l])
    rank.grad_activations[len(rank.layers)] = rank.loss(rank.activations[len(rank.layers)])
    for l in reversed(rank.layers):
        grad, rank.grad_activations[l] = rank.backward(
            l, rank.activations[l], rank.grad_activations[l + 1], rank.weights[l]
        )
        rank.weights[l], rank.opt_states[l] = rank.update(l, grad, rank.weights[l], rank.opt_states[l])
"""


@pytest.mark.parametrize("name", ["fsdp", "ddp", "pipeline"])
def test_a_forward_pass_has_the_line_of_the_strategy_that_calls_it(name: str) -> None:
    program = check(name).program
    lines = source_lines(STRATEGIES[name].program, program)
    for tape, places in zip(program.tapes, lines, strict=True):
        for op, place in zip(tape, places, strict=True):
            if op.kind is OpKind.FORWARD:
                assert place is not None
                assert place[0] == f"shardlab/strategies/{name}.py"
                text = linecache.getline(str(SOURCE.parent / place[0]), place[1])
                assert "rank.forward(" in text, text


def test_an_op_of_a_plan_has_a_line_of_the_program_that_follows_plans() -> None:
    program = check("gpipe").program
    for places in source_lines(STRATEGIES["gpipe"].program, program):
        assert all(place is None or place[0].startswith("shardlab/strategies/") for place in places)
        assert sum(place is not None for place in places) > len(places) // 2


def test_an_op_of_a_users_file_has_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(PROGRAM)
    program = check("mine.py:alone", ranks=1).program
    (places,) = source_lines(load("mine.py:alone").program, program)
    for op, place in zip(program.tapes[0], places, strict=True):
        if op.kind is OpKind.UPDATE:
            assert place is not None
            assert place[0] == "mine.py"
            assert "rank.update(" in PROGRAM.splitlines()[place[1] - 1]


def test_a_program_that_passes_rewrote_has_no_lines() -> None:
    rewritten = check(load("fsdp", "prefetch").name)
    assert source_lines(STRATEGIES["fsdp"].program, rewritten.program)
    other = check("ddp").program
    assert source_lines(STRATEGIES["fsdp"].program, other) == []
