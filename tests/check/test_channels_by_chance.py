"""What the check says of channel models agrees with ranks and channels that step at random."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from random import Random

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shardlab.check import ChannelModel, check
from shardlab.check.deadlock import Replay, empties
from shardlab.language import Program, Refused
from tests.support.channel_judge import hangs
from tests.support.mutations import MUTATIONS
from tests.support.random_chatter import chatter
from tests.support.random_programs import Shape, random_program, shapes
from tests.support.thorough import examples

REORDERINGS = ("late wait", "swapped neighbours", "broken batch")
"""Changes that often leave the numbers right, but move communication about."""


@settings(max_examples=examples(60))
@given(shapes(), st.integers(0, 10**6))
def test_a_program_hangs_under_a_model_exactly_if_the_check_says_so(shape: Shape, seed: int) -> None:
    program = random_program(shape)
    random = Random(seed)
    for candidate in [program, *_reordered(program, random)]:
        with suppress(Refused):
            agree(candidate, check(candidate).models, random)


@settings(max_examples=examples(200))
@given(st.integers(0, 10**6))
def test_ranks_that_talk_in_crossing_orders_hang_exactly_if_the_check_says_so(seed: int) -> None:
    program = chatter(seed)
    assume(program is not None)
    assert program is not None
    agree(program, check(program).models, Random(seed))


@settings(max_examples=examples(200))
@given(st.integers(0, 10**6))
def test_a_single_queue_that_empties_is_one_that_a_replay_with_all_waits_ends(seed: int) -> None:
    program = chatter(seed)
    assume(program is not None)
    assert program is not None
    checked = check(program)
    replay = Replay(program, checked.communications, checked.communication_of, ChannelModel.QUEUED)
    assert empties(program, checked.communications) == (replay.deadlock() is None)


def agree(program: Program, models: Mapping[ChannelModel, str | None], random: Random) -> None:
    for model in ChannelModel:
        assert hangs(program, model, random.randrange(10**6)) == (models[model] is not None), model


@settings(max_examples=examples(200))
@given(shapes(), st.integers(0, 10**6))
def test_a_stricter_model_never_passes_what_a_more_lenient_one_fails(shape: Shape, seed: int) -> None:
    """But for a message between an exchange and a single call, which two communicators never let meet."""
    for program in (random_program(shape), chatter(seed)):
        models = check(program).models if program is not None else {}
        if HALF_EXCHANGED in (models.get(ChannelModel.QUEUED_PER_PAIR) or ""):
            del models[ChannelModel.QUEUED_PER_PAIR]
        passed = [deadlock is None for deadlock in models.values()]
        assert passed == sorted(passed, reverse=True)


HALF_EXCHANGED = "one is part of an exchange and the other is not"


def _reordered(program: Program, random: Random) -> list[Program]:
    mutants = [list(MUTATIONS[name](program)) for name in REORDERINGS]
    return [random.choice(some) for some in mutants if some]


@settings(max_examples=examples(100))
@given(shapes())
def test_a_deadlock_names_at_least_two_ranks_and_the_ops_between_them(shape: Shape) -> None:
    for text in check(random_program(shape)).models.values():
        if text is not None:
            assert text.startswith("deadlock: rank ")
            assert len(set(re.findall(r"rank \d+", text))) > 1
            assert "(its op " in text
