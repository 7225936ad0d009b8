"""The search: floors are floors, and the result is that of simulating everything."""

from __future__ import annotations

import itertools
from concurrent.futures import Future
from dataclasses import replace

import pytest

from shardlab.hardware import find_cluster
from shardlab.models import GPT, Llama
from shardlab.planner.bounds import Floors
from shardlab.planner.problem import Candidate, Limits, Problem
from shardlab.planner.search import Search
from shardlab.planner.space import blocks_of, candidates, shapes
from shardlab.planner.workers import Answer, Asked, answer, with_memory
from shardlab.predict.recipe import OWN
from shardlab.program import OpKind
from shardlab.program.precision import find_precision

GIB = 2**30
SMALL = GPT(layers=4, heads=8, hidden_size=512, vocab_size=1024, seq_len=512)


def problem(
    devices: int = 4, sequences: int = 8, memory: float = 80 * GIB, limits: Limits | None = None, **model: int
) -> Problem:
    cluster = with_memory(find_cluster(f"h100x{devices}"), memory)
    return Problem(replace(SMALL, **model), cluster, sequences, (find_precision("bf16"),), limits=limits or Limits())


def every(asked: Problem) -> list[tuple[Candidate, Answer]]:
    """Every candidate that can be run, and its forecast."""
    found = [
        (candidate, answer(asked, Asked(candidate)))
        for shape in shapes(asked)
        for candidate in candidates(asked, shape)
    ]
    return [(candidate, each) for candidate, each in found if each is not None]


def search(asked: Problem, deadline: float = float("inf")) -> Search:
    def ask(question: Asked) -> Future[Answer | None]:
        future: Future[Answer | None] = Future()
        future.set_result(answer(asked, question))
        return future

    return Search(asked, ask, deadline=deadline)


@pytest.mark.parametrize(
    "asked",
    [
        problem(limits=Limits(fixed={"recompute": "none"}, most={"tp": 2, "micro_batch_size": 2})),
        problem(memory=0.7 * GIB + OWN.memory.context_bytes, limits=Limits(most={"pp": 1}), hidden_size=1024),
        problem(devices=8, limits=Limits(fixed={"tp": 2, "pp": 2, "recompute": "full"}, micro_batch_size=1)),
    ],
    ids=["all kinds", "little memory", "3d"],
)
def test_the_search_finds_what_simulating_everything_finds(asked: Problem) -> None:
    fitting = [
        (each.forecast.seconds, repr(candidate))
        for candidate, each in every(asked)
        if each.forecast.memory.fits and each.forecast.memory.safe
    ]
    found = search(asked).run()
    assert found.left is None
    assert found.best is not None
    assert found.best.seconds == min(fitting)[0]
    assert len(found.outcomes) < len(fitting)


def test_what_a_search_leaves_when_it_is_interrupted_is_no_faster_than_it_says() -> None:
    asked = problem(limits=Limits(fixed={"recompute": "none", "cp": 1, "pp": 1}, micro_batch_size=1))
    seconds = {repr(candidate): each.forecast.seconds for candidate, each in every(asked)}
    cut = 0
    for most in range(1, 16, 3):
        questions: list[Asked] = []

        def ask(question: Asked, most: int = most, questions: list[Asked] = questions) -> Future[Answer | None]:
            if len(questions) == most:
                raise KeyboardInterrupt
            questions.append(question)
            future: Future[Answer | None] = Future()
            future.set_result(answer(asked, question))
            return future

        found = Search(asked, ask, ahead=2).run()
        known = {repr(question.candidate) for question in questions}
        if found.left is not None:
            cut += 1
            assert found.left <= min(each for name, each in seconds.items() if name not in known)
    assert cut > 2


def test_a_search_whose_time_is_up_at_once_finds_a_plan_that_fits() -> None:
    asked = problem()
    found = search(asked, deadline=0).run()
    assert found.best is not None
    assert found.left == 0


def test_attention_that_is_not_fused_waits_for_its_host_once_in_a_backward_pass() -> None:
    """It computes its scores again there; more than it waits would be no floor."""
    waiting = replace(OWN, kernels=replace(OWN.kernels, host_seconds=1.5e-5))
    plain = problem(devices=1, sequences=1, limits=Limits(fixed={"recompute": "selective"}))
    asked = replace(plain, recipe=waiting, model=replace(SMALL, dropout=0.1))
    (shape,) = shapes(asked)
    (candidate,) = candidates(asked, shape)
    model, prices = blocks_of(asked, shape).short, asked.workload(candidate).prices
    layer = next(layer for layer in range(model.layers) if model.run(layer).attend is not None)
    kernels = model.attend_kernels(layer, 1, SMALL.seq_len, SMALL.seq_len, 0.5, 1)
    sums = Floors(asked).passes(shape).backward
    together = prices.seconds_of([*kernels, *(back for kernel in kernels for back in kernel.backward_input())])
    assert prices.layer_seconds(OpKind.ATTEND_BACKWARD, kernels) == together
    projected = prices.layer_seconds(OpKind.BACKWARD, model.kernels(layer, 1, SMALL.seq_len, 1))
    assert sums[layer + 1] - sums[layer] == pytest.approx(together + projected)


def test_a_floor_never_exceeds_the_forecast() -> None:
    llama = Llama(layers=5, heads=8, kv_heads=4, hidden_size=512, ffn_hidden_size=1536, vocab_size=1000, seq_len=2048)
    many = replace(problem(devices=8, sequences=16), model=llama)
    floors, seen = Floors(many), 0
    all = ((shape, candidate) for shape in shapes(many) for candidate in candidates(many, shape))
    for shape, candidate in itertools.islice(all, 0, None, 601):
        found = answer(many, Asked(candidate))
        if found is None:
            continue
        seen += 1
        peak = max(peak.bytes for peak in found.forecast.peaks)
        assert floors.seconds(shape, candidate) <= found.forecast.seconds, candidate
        assert floors.shape_seconds(shape) <= found.forecast.seconds, candidate
        assert floors.bytes(shape, candidate) <= peak, candidate
        assert floors.shape_bytes(shape) <= peak, candidate
    assert seen > 20
