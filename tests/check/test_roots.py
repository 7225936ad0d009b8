"""Programs that go by way of a root are right, and every mistake put into them is refused."""

from __future__ import annotations

import re
from functools import cache
from random import Random

import pytest

from shardlab.check import check
from shardlab.language import Mesh, Program, Strategy, trace
from tests.check.programs import PLACE
from tests.support.interpreter import judge
from tests.support.mutations import MUTATIONS
from tests.support.random_plan import Plan
from tests.support.random_programs import Shape, random_program
from tests.support.refusing import Told, refusal, says, told
from tests.train.rooted_programs import by_root, by_root_mesh, parameter_server, replicas

SAMPLE = {
    "another root": 10,
    "another reduction": 10,
    "another value from the root": 8,
    "root left out": 15,
    "reduced on the root again": 15,
}
"""Mutants tried of the kinds that roots alone have; one of each other kind and program."""

RANDOM_SHAPES = [Shape(1, 2, 2, 2, 5, 4), Shape(2, 1, 2, 2, 4, 5), Shape(2, 2, 1, 3, 5, 8)]


@cache
def subjects() -> dict[str, Program]:
    programs = {
        "parameter server": trace(parameter_server, 2, 2, 2),
        "by root": trace(by_root, by_root_mesh(4), 2, 4),
        "replicas": trace(replicas, 2, 2, 4),
    }
    return programs | {str(shape): random_program(shape) for shape in RANDOM_SHAPES}


@pytest.mark.parametrize(
    ("program", "mesh", "layers", "microbatches"),
    [
        (parameter_server, 1, 1, 1),
        (parameter_server, 3, 2, 6),
        (by_root, by_root_mesh(2), 3, 4),
        (by_root, by_root_mesh(8), 2, 8),
        (replicas, 3, 2, 3),
    ],
)
def test_what_goes_by_way_of_a_root_is_right_on_every_backend(
    program: Strategy, mesh: Mesh | int, layers: int, microbatches: int
) -> None:
    tapes = trace(program, mesh, layers, microbatches)
    assert check(tapes).backends() == ["gloo", "nccl"]
    assert judge(tapes).right


def test_the_random_programs_go_by_way_of_a_root() -> None:
    assert all(Plan(shape).by_root for shape in RANDOM_SHAPES)


@pytest.mark.parametrize("kind", [kind for kind in MUTATIONS if kind != "another world"])
def test_each_mistake_that_matters_is_refused_and_the_place_is_named(kind: str) -> None:
    wrong = False
    for name, program in subjects().items():
        found = list(MUTATIONS[kind](program))
        size = SAMPLE.get(kind, 1)
        for mutant in found if len(found) <= size else Random(f"{kind} {name}").sample(found, size):
            said = refusal(mutant)
            verdict = judge(mutant)
            wrong = wrong or not verdict.right
            if said is None:
                assert verdict.right, f"{kind} of {name} passes, but: {verdict.reason}"
            else:
                assert re.match(PLACE, str(said)), str(said)
    assert wrong or kind not in SAMPLE or kind == "another value from the root", "what it expects changes no numbers"


@pytest.mark.parametrize(
    ("kind", "name", "said"),
    [
        ("another root", "by root", told("malformed tape", layer=0)),
        ("another root", "by root", told("wrong root")),
        ("another root", "replicas", told("wrong root")),
        ("another reduction", "parameter server", told("scaled gradient", layer=1)),
        ("another reduction", "parameter server", told("replicas differ", layer=1)),
        ("another reduction", "parameter server", told("no reduction")),
        ("another reduction", "by root", told("no sum of squares", layer=0)),
        ("another reduction", "replicas", told("counted twice", layer=0, doubled=(0, 1, 2, 3))),
        ("another value from the root", "parameter server", told("other message", layer=1)),
        ("root left out", "parameter server", told("other order", layer=1)),
        ("reduced on the root again", "replicas", told("counted twice", layer=0, doubled=(0, 1, 2, 3))),
        ("malformed op", "parameter server", told("malformed tape", layer=0)),
    ],
)
def test_the_refusal_says_what_the_mistake_is(kind: str, name: str, said: Told) -> None:
    found = [refusal(mutant) for mutant in MUTATIONS[kind](subjects()[name])]
    assert any(each and says(each, said) for each in found), sorted({str(each) for each in found})
