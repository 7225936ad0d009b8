"""Techniques: each tells programs that use it from those that do not."""

from __future__ import annotations

from fractions import Fraction

import pytest

from shardlab.check import Checked, check
from shardlab.language import Kind, Mesh, OpKind, trace
from shardlab.learn.course.exercise import Technique
from shardlab.learn.course.techniques import (
    REDUCTIONS,
    at_most_of,
    avoids,
    computes_again,
    hidden,
    in_flight_at_most,
    live_at_most,
    loads_at_least,
    loads_at_most,
    microbatches_each,
    no_collective_of,
    runs_on,
    starts_before_last,
    uses,
)
from shardlab.strategies import find

GRADIENTS, WEIGHTS = Kind.GRAD_WEIGHT, Kind.WEIGHT
REDUCE, GATHER = frozenset({OpKind.ALL_REDUCE}), frozenset({OpKind.ALL_GATHER})


def checked(name: str, ranks: int = 4) -> Checked:
    entry = find(name)
    return check(trace(entry.program, entry.grid(ranks), entry.puzzle(ranks), 4))


def result(technique: Technique, name: str, ranks: int = 4) -> str:
    return technique(checked(name, ranks))


HELD = (
    "1,310,720 In all_reduce(layer 0) on world, rank 3 holds grad_weights[0-3] (microbatch 3), grad_weights[0] "
    "(microbatches 0-3) (op 51)."
)

CASES = {
    "uses": (uses(OpKind.ALL_REDUCE, "no: {found}", of=GRADIENTS), "ddp", "fsdp", "no: none"),
    "avoids": (avoids(REDUCE, "{found}", of=GRADIENTS), "fsdp", "ddp", "all_reduce(layer 3) on world on rank 0"),
    "no collective": (no_collective_of(WEIGHTS, "{found}"), "gpipe", "fsdp", "all_gather(layer 0) on world on rank 0"),
    "at most of": (at_most_of(GATHER, 1, "{found}", of=WEIGHTS), "zero-1", "fsdp", "2"),
    "hidden": (hidden(REDUCE, "{found}", of=GRADIENTS), "ddp", "wsdp", "0 of 4"),
    "starts": (starts_before_last(REDUCTIONS, "{found}", of=GRADIENTS), "ddp", "wsdp", "rank 0"),
    "loads at most": (loads_at_most(WEIGHTS, Fraction(1, 4), "{found}"), "fsdp", "ddp", "all"),
    "loads at least": (loads_at_least(WEIGHTS, Fraction(1), "{found}"), "ddp", "fsdp", "1/4"),
    "live": (live_at_most(GRADIENTS, 4 * 512 * 512 // 4 + 512 * 512, "{found}"), "fsdp", "wsdp", HELD),
    "in flight": (in_flight_at_most((4, 3, 2, 1), "{found}"), "1f1b", "gpipe", "rank 1 has 4"),
    "each": (microbatches_each(1, "{found}"), "gpipe", "pipeline", "4"),
}
"""A technique, a strategy that uses it, one that does not, and the sentence about the second."""


@pytest.mark.parametrize("case", CASES)
def test_a_technique_tells_strategies_apart(case: str) -> None:
    technique, used, unused, sentence = CASES[case]
    assert result(technique, used) == ""
    assert result(technique, unused) == sentence


def test_no_built_in_program_recomputes() -> None:
    assert result(computes_again("{found}"), "fsdp") == "none"


def test_every_built_in_program_runs_on_gloo_and_nccl() -> None:
    for backend in ("gloo", "nccl"):
        assert result(runs_on(backend, "{found}"), "1f1b") == ""


def test_a_collective_of_one_rank_is_none() -> None:
    entry = find("ddp")
    alone = check(trace(entry.program, Mesh(), 4, 4))
    assert uses(OpKind.ALL_REDUCE, "none")(alone) == "none"


def test_equal_calls_are_one_technique() -> None:
    assert uses(OpKind.SEND, "a sentence") is uses(OpKind.SEND, "a sentence")
    assert no_collective_of(WEIGHTS, "a sentence") is no_collective_of(WEIGHTS, "a sentence")
    assert uses(OpKind.SEND, "a sentence") is not uses(OpKind.SEND, "another")
