"""Candidates that are dealt many at a time, in another process or here, are those that are dealt one by one."""

from __future__ import annotations

import math
from concurrent.futures import Future
from unittest.mock import patch

import pytest

from shardlab.planner import scouts, waiting_queue
from shardlab.planner.dealer import AskedDeal, Dealer, Deals
from shardlab.planner.problem import Limits
from shardlab.planner.search import Search
from shardlab.planner.space import candidates, shapes
from shardlab.planner.waiting import Waiting
from shardlab.planner.workers import Answer, Asked, Workers, answer, workers
from tests.planner.problems import problem

PROBLEM = problem(limits=Limits(fixed={"recompute": "none"}, most={"tp": 2, "micro_batch_size": 2}))


def asked_of(dealer: Dealer, least: float = math.inf) -> AskedDeal:
    """All shapes of the problem, to be dealt."""
    floors = [(shape, dealer.floors.of_shape(shape)) for shape in shapes(dealer.problem)]
    waiting = [
        Waiting(0.0, 0, each.seconds, each.bytes, each.passes, shape, passes=each.passes) for shape, each in floors
    ]
    return AskedDeal(waiting, least)


def test_all_candidates_are_dealt_if_all_are_fast_enough() -> None:
    dealer = Dealer(PROBLEM)
    dealt = [each.plan for each in dealer.all(asked_of(dealer)).candidates]
    assert dealt == [each for shape in shapes(PROBLEM) for each in candidates(PROBLEM, shape)]


def test_a_worker_deals_as_this_process_does() -> None:
    dealer = Dealer(PROBLEM)
    seconds = sorted(each.seconds for each in dealer.all(asked_of(dealer)).candidates)
    asked = asked_of(dealer, seconds[len(seconds) // 4])
    with workers(PROBLEM, 2) as ask:
        found = ask.deal(asked).result()
    assert found == Dealer(PROBLEM).all(asked)
    assert 0 < len(found.candidates) < len(seconds)


@pytest.mark.parametrize("beside", [1, 3])
def test_a_search_finds_the_same_plans_when_workers_deal_beside_it(beside: int) -> None:
    dealer, handed = Dealer(PROBLEM), list[int]()

    def forecast(asked: Asked) -> Future[Answer | None]:
        future: Future[Answer | None] = Future()
        future.set_result(answer(PROBLEM, asked))
        return future

    def deal(asked: AskedDeal) -> Future[Deals]:
        handed.append(len(asked.waiting))
        future: Future[Deals] = Future()
        future.set_result(dealer.all(asked))
        return future

    with patch.object(waiting_queue, "HANDED_OUT", 2), patch.object(scouts, "SCOUTS", 0):
        alone = Search(PROBLEM, forecast, ahead=2).run()
        found = Search(PROBLEM, Workers(forecast, deal, beside), ahead=2).run()
    assert len(handed) > 2
    assert found.left is alone.left is None
    assert found.best == alone.best
    assert {each.rank for each in found.outcomes} == {each.rank for each in alone.outcomes}
