"""The whole answer, where a part of it cannot be had."""

from __future__ import annotations

from concurrent.futures import Future

from rich.console import Console

from shardlab.cli.plan_json import as_json
from shardlab.cli.plan_report import print_choice, print_explained
from shardlab.planner.chosen import PlanChoice, choose
from shardlab.planner.problem import Limits
from shardlab.planner.workers import Answer, Asked, answer
from shardlab.program.bounds import bounded
from tests.planner.test_search import problem


def chosen(ops: int | None = None) -> PlanChoice:
    """A choice of a pipeline of which at most so many ops are traced."""
    asked = problem(sequences=32, limits=Limits({"pp": 4, "schedule": "gpipe", "recompute": "none"}, {}, 1))

    def ask(question: Asked) -> Future[Answer | None]:
        future: Future[Answer | None] = Future()
        future.set_result(answer(asked, question))
        return future

    with bounded(ops):
        return choose(asked, ask)


def test_a_plan_whose_step_has_more_ops_than_are_traced_is_chosen_all_the_same() -> None:
    """Its forecast replays stages as wholes; what its time goes to takes every op."""
    whole, cut = chosen(), chosen(1000)
    assert cut.best == whole.best
    assert cut.answer.forecast == whole.answer.forecast
    assert (cut.answer.shares, cut.path) == (None, {})
    assert whole.path
    told = as_json(cut, "small", "h100x4", 1)
    assert told["chosen"]["shares"] == {}
    for show in (
        lambda console: print_choice(cut, "m", "c", "", None, 1, console),
        lambda console: print_explained(cut, "m", "c", "", None, console),
    ):
        console = Console(record=True, width=80)
        show(console)
        assert "the step has more ops than are traced" in " ".join(console.export_text().split())
