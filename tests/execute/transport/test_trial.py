"""What is shown of a collective is what the rules say of holds and sums, and what others in a row give."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from shardlab.execute.transport.trial import BARRIER, CALLS, SEND, Numbers, TensorStates, show_rank
from shardlab.language import Holds, Kind, OpKind, Reduction, Sizes, Spec
from shardlab.language.collective_calls import Call, collective_results, value_counts
from shardlab.language.ops import ROOTED
from shardlab.language.rules.kinds import WHOLE, bits
from shardlab.language.rules.layer_rules import rules_of
from shardlab.language.rules.spec import Space, form_of
from tests.support.ranks import Ranks

pytestmark = pytest.mark.starts_ranks
World = Callable[[int], Ranks]
CPU = torch.device("cpu")


def show(world: World, count: int, *case: str, root: int = 0, by: Reduction = Reduction.SUM) -> TensorStates:
    (states,) = world(count).call(show_rank, CPU, [case], root, by)[0]
    return states


def spec_of(kind: OpKind, rank: int, ranks: int) -> Spec:
    """A value like the tensor that a rank is shown with: its own contribution to all slices, or its slice."""
    if kind in (OpKind.GATHER, OpKind.ALL_GATHER):
        holds, summed = Holds(1 << rank, ranks), (1 << ranks) - 1
    else:
        holds, summed = WHOLE, 1 << rank
    return Spec(form_of(Kind.GRAD_WEIGHT, 0, 0, Space(ranks), holds), summed)


def numbers_of(spec: Spec | None, kind: OpKind, ranks: int) -> Numbers:
    """The elements that a value has: slice i of it sums what its ranks had at place i."""
    if spec is None:
        return None
    places = bits(spec.holds.refined(ranks).mask)
    if kind in (OpKind.GATHER, OpKind.ALL_GATHER):
        return [11.0 * place for place in places]
    return [float(sum(10 * rank + place for rank in bits(spec.cells))) for place in places]


ROOTS = (OpKind.BROADCAST, OpKind.SCATTER, OpKind.GATHER, OpKind.REDUCE)
BY_RULE = [*ROOTS, OpKind.ALL_REDUCE, OpKind.ALL_GATHER, OpKind.REDUCE_SCATTER]


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("kind", BY_RULE, ids=lambda kind: kind.value)
def test_what_is_shown_is_what_the_rules_say(ranks: World, kind: OpKind, count: int) -> None:
    root = count - 1
    call = Call(kind, root if kind in ROOTED else -1)
    specs = [spec_of(kind, rank, count) if value_counts(call, rank)[0] else None for rank in range(count)]
    received = list(collective_results(call, specs, range(count), rules_of(Sizes.puzzle(1).signatures, Space(count))))
    if kind is OpKind.BROADCAST:
        received[root] = specs[root]  # it has it already
    states = show(ranks, count, kind.value, root=root)
    assert states.inputs == [numbers_of(spec, kind, count) for spec in specs]
    assert states.results == [numbers_of(spec, kind, count) for spec in received]


def test_an_all_to_all_turns_rows_into_columns(ranks: World) -> None:
    states = show(ranks, 3, "all_to_all")
    assert states.inputs == [[0, 1, 2], [10, 11, 12], [20, 21, 22]]
    assert states.results == [[0, 10, 20], [1, 11, 21], [2, 12, 22]]


def test_a_message_goes_to_the_next_rank(ranks: World) -> None:
    states = show(ranks, 3, "send", root=2)
    assert states.results == [[20, 21, 22], None, [20, 21, 22]]


@pytest.mark.parametrize("name", ["reduce", "all_reduce"])
@pytest.mark.parametrize(
    ("by", "expected"),
    [(Reduction.MEAN, [10, 11, 12]), (Reduction.MIN, [0, 1, 2]), (Reduction.MAX, [20, 21, 22])],
)
def test_reductions_are_element_by_element(ranks: World, name: str, by: Reduction, expected: list[float]) -> None:
    states = show(ranks, 3, name, root=1, by=by)
    assert states.results == ([None, expected, None] if name == "reduce" else [expected] * 3)


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("all_reduce", ("reduce_scatter", "all_gather")),
        ("broadcast", ("scatter", "all_gather")),
        ("reduce", ("reduce_scatter", "gather")),
    ],
)
def test_one_collective_is_two_others_in_a_row(ranks: World, name: str, steps: tuple[str, ...]) -> None:
    double = show(ranks, 4, *steps, root=2)
    single = show(ranks, 4, name, root=2)
    assert double.inputs == single.inputs
    assert double.results == single.results


def test_nobody_leaves_a_barrier_before_all_have_come(ranks: World) -> None:
    states = show(ranks, 3, BARRIER)
    arrivals, departures = (
        [number for numbers in side if numbers for number in numbers] for side in (states.inputs, states.results)
    )
    assert min(arrivals) == 0
    assert len(departures) == 3
    assert min(departures) >= max(arrivals) - 1, "clocks of one machine"


def test_everything_that_is_shown_can_follow_on_the_same_processes(ranks: World) -> None:
    cases = [(name,) for name in (*CALLS, SEND) if name != BARRIER]
    assert [states.steps for states in ranks(2).call(show_rank, CPU, cases, 1, Reduction.SUM)[0]] == cases
