"""Passes one after the other: what is taken, and what is promised of it."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlab.check import Checked, check
from shardlab.common.errors import UserError
from shardlab.language import Mesh, OpKind, Program, Strategy, trace
from shardlab.language.pass_names import ONLY_NAMED, PASS_NAMES, EarlyStart, named_passes
from shardlab.models import GPT, MoE
from shardlab.simulate.passes import PASSES, Goal, find_passes, helpful_names, run_named, run_passes
from shardlab.simulate.timeline import PUZZLE_COSTS
from shardlab.strategies.ddp import ddp
from shardlab.strategies.fsdp import fsdp
from shardlab.strategies.load import load
from shardlab.strategies.pipeline import pipeline
from shardlab.strategies.plan.plan import Plan
from shardlab.strategies.registry import entry_from_plan
from shardlab.strategies.wsdp import wsdp
from shardlab.train.job import Job
from tests.check import empty_programs
from tests.simulate.passes.late_programs import awaited_at_once, checked, received_late, updated_last
from tests.support.passing import is_right
from tests.support.random_plans import random_plan
from tests.support.random_programs import random_program, random_shape
from tests.support.thorough import examples

PUZZLE = Goal(PUZZLE_COSTS)


def random_subject(seed: int) -> Program:
    """A program written at random, or a plan's."""
    return random_program(random_shape(seed)) if seed % 2 else random_plan(seed, ranks=4).program


@settings(max_examples=examples(30))
@given(st.integers(0, 10**6))
def test_passes_in_any_order_take_no_more_time_and_no_backend(seed: int) -> None:
    """The numbers are right after all of them."""
    random = Random(seed)
    program = check(random_subject(seed))
    results = run_passes(program, random.choices(list(PASSES.values()), k=4))
    times = [result.end for result in results]
    assert times == sorted(times, reverse=True)
    assert all(set(program.backends()) <= set(result.checked.backends()) for result in results)
    is_right(results[-1].checked.program)


@settings(max_examples=examples(30))
@given(st.integers(0, 10**6))
def test_where_memory_is_full_passes_take_no_more_of_it(seed: int) -> None:
    random = Random(seed)
    results = run_passes(check(random_subject(seed)), random.choices(list(PASSES.values()), k=4), Goal(memory=0))
    peaks, times = [result.peak for result in results], [result.end for result in results]
    assert peaks == sorted(peaks, reverse=True)
    assert times == sorted(times, reverse=True)


def test_the_fastest_that_fits_into_the_memory_is_taken() -> None:
    late = checked(awaited_at_once, 2, 3, 2)
    original, unlimited = run_named(late, "defer", PUZZLE)
    (_, fitting) = run_named(late, "defer", Goal(PUZZLE_COSTS, memory=unlimited.peak - 1))
    assert unlimited.end < fitting.end < original.end
    assert (unlimited.setting, fitting.setting) == (2, 1)
    assert run_named(late, "defer", Goal(PUZZLE_COSTS, memory=unlimited.peak))[-1].setting == unlimited.setting


def test_where_only_what_does_not_fit_is_faster_it_is_said() -> None:
    late = checked(awaited_at_once, 2, 3, 2)
    original, unlimited = run_named(late, "defer", PUZZLE)
    assert unlimited.peak > original.peak
    (_, limited) = run_named(late, "defer", Goal(PUZZLE_COSTS, memory=original.peak))
    assert (limited.setting, limited.why_not) == (None, "every faster program takes more memory than there is")
    assert limited.checked is original.checked


@pytest.mark.parametrize(("strategy", "name"), [(received_late, "receive-early"), (wsdp, "prefetch")])
def test_where_memory_has_no_room_for_all_that_may_start_early_the_rest_does(strategy: Strategy, name: str) -> None:
    """Only what stands at the peak stays where it was; a setting says which, and makes the same program again."""
    late = checked(strategy, 2, 2)
    original, unlimited = run_named(late, name, PUZZLE)
    assert unlimited.peak > original.peak
    results = run_named(late, name, Goal(PUZZLE_COSTS, memory=original.peak))
    fitting = results[-1]
    assert unlimited.end < fitting.end < original.end
    assert fitting.peak == original.peak
    assert isinstance(fitting.setting, EarlyStart)
    assert fitting.setting.but
    assert run_named(late, helpful_names(results), PUZZLE)[-1].checked.program == fitting.checked.program


# What each pass makes of small programs that wait for what it moves, and where it says that it has nothing to do.


def ends(program: Checked, names: str) -> list[float]:
    """When the step ends: as it is written, and after each pass."""
    return [round(result.end, 6) for result in run_named(program, names, PUZZLE)]


def test_fsdp_computes_the_norm_of_a_models_gradient_unless_it_is_to_update_early() -> None:
    model = GPT(layers=2, hidden_size=16, heads=2, seq_len=8)
    jobs = [Job("fsdp", 2, 2, model, 1, passes=passes) for passes in (None, "all", "prefetch,update-early")]
    assert [job.checked().clips for job in jobs] == [True, True, False]


def test_fsdp_gathers_ahead_and_updates_beside_what_is_left() -> None:
    """Updates hide nothing before gathers are out of their way."""
    program = checked(fsdp, 4)
    assert ends(program, "prefetch,update-early") == [13.6, 12.4, 11.5]
    assert ends(program, "update-early") == [13.6, 13.6]


def test_a_sum_that_is_awaited_at_once_is_awaited_later_with_its_update() -> None:
    """As the built-in data parallelism does it by hand."""
    late = checked(awaited_at_once, 2)
    assert ends(late, "defer") == [19.2, 18.0]
    assert ends(checked(ddp, 2), "none") == [18.0]


def test_a_deferred_bucket_counts_as_one_reduction() -> None:
    """With `defer=1` a bucket is awaited just before the next bucket starts, however many layers it has."""
    mesh = Mesh(dp_shard=4)
    program = check(trace(entry_from_plan(Plan(mesh), "plan").program, mesh, 8, 4))
    tape = run_named(program, "bucket=4,defer=1")[-1].checked.program.tapes[0]
    starts = [at for at, op in enumerate(tape) if op.batch >= 0]
    waits = [
        at for at, op in enumerate(tape) if op.kind is OpKind.WAIT and op.handle in {tape[s].handle for s in starts}
    ]
    assert len(starts) == 8
    for number in (0, 2, 4):
        assert starts[number + 1] < waits[number] < waits[number + 1] < starts[number + 2]
        assert sum(op.kind is OpKind.BACKWARD for op in tape[starts[number] : waits[number]]) == 2


def test_a_message_that_is_asked_for_late_travels_while_its_receiver_computes() -> None:
    """All but the first and the last of eight."""
    assert ends(checked(received_late, 2, 2), "receive-early") == [12.5, 11.3]


def test_small_collectives_share_a_latency() -> None:
    """Of four buckets of ZeRO-1's new weights, two take half the time."""
    original, bucketed = run_named(checked_plan("zero-1"), "bucket", PUZZLE)
    assert (round(original.end, 6), round(bucketed.end, 6), bucketed.setting) == (11.8, 11.2, 2)


def checked_plan(name: str) -> Checked:
    return checked(load(name).program, 4)


def test_an_update_follows_its_gradient_so_that_less_is_kept() -> None:
    """But not before its weight is read for the last time."""
    original, result = run_named(checked(updated_last, 1, 3, 1), "update-early", PUZZLE)
    assert result.end == original.end
    assert result.peak < original.peak


NOTHING_TO_DO = [
    ("prefetch", ddp, 2, "no weights are gathered"),
    ("receive-early", ddp, 2, "no rank receives a message"),
    ("copy-early", ddp, 2, "nothing is kept on the host or the disk"),
    ("fuse-steps", ddp, 2, "no step begins with a gather of weights"),
    ("defer", pipeline, 2, "no gradient of weights is reduced"),
    ("bucket", pipeline, 2, "no two collectives of weights or gradients"),
]


@pytest.mark.parametrize(("name", "strategy", "ranks", "reason"), NOTHING_TO_DO)
def test_a_pass_that_cannot_apply_says_why(name: str, strategy: Strategy, ranks: int, reason: str) -> None:
    program = checked(strategy, ranks)
    (_, alone) = run_passes(program, [PASSES[name]])
    assert (alone.applies, alone.setting) == (False, None)
    assert reason in alone.why_not
    with pytest.raises(UserError, match=f"the pass {name} has nothing to do: {reason}.*; leave the pass out$"):
        run_named(program, name)
    assert all(result.name != name or result.why_not == alone.why_not for result in run_named(program, "all"))


def test_no_gradient_is_final_before_the_norm_of_all() -> None:
    with pytest.raises(UserError, match="gradients are clipped by their common norm, so no gradient is final"):
        run_named(checked_plan("zero-3"), "update-early")


def test_every_name_has_a_pass_in_the_order_in_which_they_are_run() -> None:
    assert list(PASSES) == list(PASS_NAMES)
    assert [listed_pass.name for listed_pass in find_passes("all")] == [
        name for name in PASS_NAMES if name not in ONLY_NAMED
    ]
    assert find_passes("none") == []
    for name, listed_pass in PASSES.items():
        assert listed_pass.name == name
        assert bool(PASS_NAMES[name]) == (len(listed_pass.settings) != 1), "a number that means nothing"


def test_passes_are_read_in_any_order_and_run_in_one() -> None:
    assert [(setting.name, setting.setting) for setting in named_passes("defer=3, prefetch")] == [
        ("prefetch", None),
        ("defer", 3),
    ]
    (bucket,) = find_passes("bucket=5")
    assert (bucket.settings, bucket.is_forced) == ((5,), True)


READERS: list[Callable[[str], object]] = [
    named_passes,
    find_passes,
    lambda text: Plan(passes=text),
    lambda text: load("fsdp", text),
]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("prefech", "there is no pass 'prefech'; did you mean prefetch"),
        ("", "there is no pass ''; there are all, none, tile, offload"),
        ("defer,none", "there is no pass 'none'; there are all, tile, offload"),
        ("defer=0", r"the pass defer was given '0'; it takes a whole number, 1 or more \(reductions in flight\)"),
        ("defer=", "the pass defer was given ''"),
        ("prefetch=2~x", "the pass prefetch was given '2~x'; it takes a whole number, 1 or more"),
        ("defer=2~1", "the pass defer was given '2~1'"),
        ("update-early=1", "the pass update-early was given '1'; it takes no number"),
        ("tile", r"the pass tile was given ''; it takes a whole number, 2 or more \(tiles of each layer\)"),
        ("tile=1", "the pass tile was given '1'; it takes a whole number, 2 or more"),
    ],
)
def test_a_name_or_a_number_that_there_is_not_is_one_sentence(text: str, sentence: str) -> None:
    for refuses in READERS:
        with pytest.raises(UserError, match=sentence):
            refuses(text)


def test_all_stands_beside_names_of_which_each_must_apply() -> None:
    """As where something is offloaded, and all passes are wanted as well."""
    program = checked(fsdp, 4)
    results = {result.name: result for result in run_named(program, "prefetch=3,all")}
    assert list(results)[1:] == [listed_pass.name for listed_pass in find_passes("all")]
    assert results["prefetch"].setting == 3
    assert not results["receive-early"].applies
    with pytest.raises(UserError, match="the pass receive-early has nothing to do"):
        run_named(program, "receive-early,all")
    assert helpful_names(run_named(program, "offload=optimizer:host,all")).startswith(
        "offload=optimizer:host,prefetch="
    )


def test_what_is_settled_makes_the_same_program_again() -> None:
    results = run_named(checked(fsdp, 4), "all")
    assert helpful_names(results) == "prefetch=1,update-early"
    repeated = run_named(checked(fsdp, 4), helpful_names(results))
    assert repeated[-1].checked.program == results[-1].checked.program


def test_a_number_that_is_given_is_taken_even_where_it_gains_nothing() -> None:
    """The prices that have chosen it need not be those of who runs it."""
    original, prefetched = run_named(checked(fsdp, 4), "prefetch=3")
    assert prefetched.setting == 3
    assert prefetched.peak > original.peak


def test_collectives_of_no_bytes_share_a_bucket() -> None:
    program = f"{empty_programs.__file__}:layers_without_parameters"
    job = Job(program, 2, 4, MoE(layers=3, hidden_size=16, heads=2, seq_len=8), 2)
    bucketed = run_named(job.checked(), "bucket=2")[-1].checked
    assert any(op.batch >= 0 for op in bucketed.program.tapes[0])
