"""What the check says of channel models agrees with ranks and channels that step at random."""

from __future__ import annotations

import re
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from shardlab.check import ChannelModel, check
from shardlab.program import Program, Refused
from tests.support.channel_judge import hangs
from tests.support.mutations import MUTATIONS
from tests.support.random_programs import Shape, random_program, shapes

REORDERINGS = ("late wait", "swapped neighbours", "broken batch")
"""Changes that often leave the numbers right, but move communication about."""


@settings(max_examples=150)
@given(shapes(), st.integers(0, 10**6))
def test_a_program_hangs_under_a_model_exactly_if_the_check_says_so(shape: Shape, seed: int) -> None:
    program = random_program(shape)
    random = Random(seed)
    for candidate in [program, *_reordered(program, random)]:
        try:
            models = check(candidate).models
        except Refused:
            continue
        for model in ChannelModel:
            assert hangs(candidate, model, random.randrange(10**6)) == (models[model] is not None), model


def _reordered(program: Program, random: Random) -> list[Program]:
    mutants = [list(MUTATIONS[name](program)) for name in REORDERINGS]
    return [random.choice(some) for some in mutants if some]


@settings(max_examples=100)
@given(shapes())
def test_a_stricter_model_never_passes_what_a_more_lenient_one_fails(shape: Shape) -> None:
    models = check(random_program(shape)).models
    passed = [models[model] is None for model in ChannelModel]
    assert passed == sorted(passed, reverse=True)


@settings(max_examples=100)
@given(shapes())
def test_a_deadlock_names_at_least_two_ranks_and_the_ops_between_them(shape: Shape) -> None:
    for text in check(random_program(shape)).models.values():
        if text is not None:
            assert text.startswith("deadlock: rank ")
            assert len(set(re.findall(r"rank \d+", text))) > 1
            assert "(its op " in text
