"""Guesses are near the forecasts that they stand for."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import pytest

from shardlab.language.precision import find_precision
from shardlab.models import find_model
from shardlab.planner.guesses import guess_line
from shardlab.planner.lines import neighbours, seeds, with_share
from shardlab.planner.pass_costs import PassCosts
from shardlab.planner.problem import Limits, Problem
from shardlab.planner.workers import Query, answer_request
from shardlab.simulate.hardware import find_cluster
from shardlab.simulate.predict.recipe import find_recipe
from tests.support.thorough import sampled

PROBLEMS = {
    "dense": ("llama3-8b", "h100x16", "torchtitan"),
    "mixture": ("mixtral-8x7b", "h100x16", "megatron-core"),
    "context": ("llama3-8b", "h100x16", "torchtitan"),
}

LARGEST = 1.4
"""Largest ratio of a forecast's seconds to those of its guess, and of the guess's to the forecast's."""


def problem(name: str) -> Problem:
    model, cluster, recipe = PROBLEMS[name]
    switches = {"attention": "flash2", "loss": "float32"} if recipe == "torchtitan" else {}
    context, tokens = ({"cp": 4}, {"seq_len": 32768}) if name == "context" else ({}, {})
    return Problem(
        replace(find_model(model), layers=8, **tokens),
        find_cluster(cluster),
        128,
        (find_precision("bf16"),),
        find_recipe(recipe, switches),
        limits=Limits(context),
    )


@pytest.mark.parametrize("name", sampled(PROBLEMS, {"mixture"}.__contains__))
def test_seconds_and_bytes_are_near_the_forecasts(name: str) -> None:
    search_problem = problem(name)
    costs, lines = PassCosts(search_problem), seeds(search_problem)
    lines += [
        neighbour for line in lines[:: max(1, len(lines) // 4)] for neighbour in neighbours(search_problem, line)[::9]
    ]
    seconds: list[float] = []
    bytes: list[float] = []
    for line in lines[:: max(1, len(lines) // 40)]:
        for share in ("none", "full"):
            guess, plan = guess_line(costs, line), with_share(search_problem, line, share)
            answer = None if plan is None else answer_request(search_problem, Query(plan))
            if guess is None or answer is None:
                continue
            guessed = (guess.seconds, guess.bytes) if share == "none" else (guess.full_seconds, guess.full_bytes)
            seconds.append(answer.forecast.seconds / guessed[0])
            bytes.append(answer.forecast.memory.unlimited / guessed[1])
    assert len(seconds) > 40
    assert min(seconds) > 1 / LARGEST
    assert max(seconds) < LARGEST
    assert 0.97 < median(seconds) < 1.07
    assert 0.93 < median(bytes) < 1.07
    assert sum(0.9 < ratio < 1.25 for ratio in seconds) > 0.8 * len(seconds)
    assert sum(0.75 < ratio < 1.3 for ratio in bytes) > 0.85 * len(bytes)
