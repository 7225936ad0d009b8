"""Grading a solution of an exercise: the order of the checks, and the one thing to look at next."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from shardlab.common.user_code import trace_limits
from shardlab.language import Mesh, Rank, UserError
from shardlab.learn.course import check
from shardlab.learn.course.catalogue import CourseEntry, all_entries, course, find
from shardlab.learn.course.exercise import Exercise, Goals
from shardlab.learn.course.grading import elements_sent, grade, refused_grade
from shardlab.strategies import Plan
from shardlab.strategies import find as find_strategy
from shardlab.strategies.schedules import Action, Backward, Forward, Schedule
from tests.learn.course.exercises import grade_text

DDP = find("ddp")


def bare(name: str, **changes: object) -> Exercise:
    """An exercise without techniques and mistakes."""
    return replace(find(name).exercise, techniques=(), mistakes=(), **changes)  # pyright: ignore[reportArgumentType]


def test_the_built_in_strategies_pass_where_they_are_the_technique() -> None:
    assert check("fsdp", find_strategy("fsdp").program).passed
    assert check(8, find_strategy("wsdp").program).passed
    for name in ("wsdp", "pipeline", "gpipe"):
        assert not check(name, find_strategy("fsdp").program).passed


def test_an_unknown_exercise_is_refused() -> None:
    with pytest.raises(UserError, match="there is no exercise 'fsdq'; did you mean fsdp"):
        check("fsdq", find_strategy("fsdp").program)


def test_a_slow_program_gets_advice_on_its_longest_wait() -> None:
    slow = grade(bare("fsdp_prefetch", goals=Goals("a test", time=1.0)), find("fsdp").solution)
    assert slow.stage == "goals"
    assert slow.finding == "too slow: time 24.24, goal 1"
    pattern = r"rank 0 stands still longest for all_gather\(layer 0\) on world \(.*fsdp\.py:\d+\): 0\.33\."
    assert re.match(pattern, slow.advice)


def test_a_slow_program_without_waits_gets_advice_on_its_compute() -> None:
    slow = grade(bare("one_rank", goals=Goals("a test", time=1.0)), find("one_rank").solution)
    assert slow.advice.startswith("no rank waits for communication.")


def test_a_large_program_gets_advice_on_its_memory_peak() -> None:
    large = grade(bare("one_rank", goals=Goals("a test", memory=1)), find("one_rank").solution)
    assert large.finding == "too much memory: 2,621,440, goal 1"
    assert re.match(r"rank 0 holds most when loss\(layer 2\) \(.*one_rank\.py:\d+\) starts\.", large.advice)


KEPT = [entry for entry in course() if entry.exercise.kind == "rank" and "rank.activations.pop(" in entry.solution_text]
"""Exercises whose solution can be made to keep every activation."""


@pytest.mark.parametrize("entry", KEPT, ids=lambda entry: entry.name)
def test_advice_for_too_much_memory_is_about_the_values_that_take_it(entry: CourseEntry, tmp_path: Path) -> None:
    text = re.sub(r"(?<=rank\.activations)\.pop\(((?:[^()]|\([^()]*\))*)\)", r"[\1]", entry.solution_text)
    result = grade_text(entry, text, tmp_path)
    if result.stage == "goals":
        assert re.search(r"with an excess of activations: activations\[.*\]", result.finding)
        assert result.mistake is None or "activation" in result.advice
    else:
        assert result.stage == "technique"
        assert "activations" in result.finding


def test_gradients_that_stay_whole_are_named() -> None:
    missed = grade(bare("fsdp", goals=Goals("a test", memory=1_966_080)), find_strategy("wsdp").program)
    sentence = "too much memory: 2,621,440, goal 1,966,080, with an excess of weights' gradients: grad_weights["
    assert missed.finding.startswith(sentence)


def test_a_send_that_is_not_awaited_is_named_with_its_line(tmp_path: Path) -> None:
    text = find("pipeline").solution_text.replace("await rank.send(rank.activations", "rank.send(rank.activations")
    result = grade_text(find("pipeline"), text, tmp_path)
    at = 1 + next(n for n, line in enumerate(text.splitlines()) if "  rank.send(rank.activations" in line)
    assert result.mistake is None
    assert result.advice.startswith(
        f"rank 0 starts send to rank 1 ({tmp_path / 'pipeline.py'}:{at}), and does not await"
    )


@pytest.mark.parametrize("entry", KEPT, ids=lambda entry: entry.name)
def test_a_solution_awaits_every_handle_that_a_later_op_waits_for(entry: CourseEntry) -> None:
    result = grade(replace(entry.exercise, techniques=(), mistakes=(), goals=Goals("a test", memory=1)), entry.solution)
    assert "does not await" not in result.advice


GENERAL_MISTAKES: dict[str, tuple[str, str, str]] = {
    "no await": (r"= await (?=\w)", "= ", "its value exists after an `await`"),
    "a sum that is dropped": (
        r"(\w+) = await rank\.(all_reduce|reduce_scatter)\(rank\.grad_weights\.pop\(l\)",
        r"\1 = rank.grad_weights.pop(l); await rank.\2(\1",
        "no collective changes its argument in place",
    ),
    "a mean": (
        r"rank\.update\((\s*l, )(\w+|rank\.grad_weights\.pop\(l\)), ",
        r"rank.update(\1rank.scale(\2, __import__('fractions').Fraction(1, 2)), ",
        "What do shares add up to",
    ),
    "the whole batch on each rank": (
        r"load_batch\(rank\.share\(\)\)(?=(.|\n)*all_reduce|(.|\n)*reduce_scatter)",
        "load_batch(rank.microbatches)",
        "may be in the sum once. Which of them does each rank load",
    ),
    "the same shard on each rank": (r"shard=rank\.index", "shard=0", r"(slice|shard).* Which "),
    "a factor that is no fraction": (
        r"rank\.update\((\s*l, )(\w+|rank\.grad_weights\.pop\(l\)), ",
        r"rank.update(\1rank.scale(\2, 1 / rank.world), ",
        "What do shares add up to",
    ),
}
"""Mistakes of which an exercise need not know: a pattern of its solution, the text in its place, and words of the
advice."""

GENERAL_CASES = [
    pytest.param(entry, *mistake, id=f"{entry.name}-{name}")
    for name, mistake in GENERAL_MISTAKES.items()
    for entry in course()
    if entry.exercise.kind == "rank" and entry.exercise.number <= 16 and re.search(mistake[0], entry.solution_text)
]


@pytest.mark.parametrize(("entry", "pattern", "wrong", "advice"), GENERAL_CASES)
def test_a_mistake_that_any_exercise_allows_gets_advice_in_each(
    entry: CourseEntry, pattern: str, wrong: str, advice: str, tmp_path: Path
) -> None:
    statement, program = entry.solution_text.split("async def ", 1)
    result = grade_text(entry, f"{statement}async def {re.sub(pattern, wrong, program)}", tmp_path)
    assert result.stage == "refused"
    assert re.search(advice, result.advice), result.verdict


def test_a_step_without_updates_is_told_so(tmp_path: Path) -> None:
    text = re.sub(r"rank\.update\(", "(lambda l, gradient, *kept: kept)(", find("ddp").solution_text)
    result = grade_text(find("ddp"), text, tmp_path)
    assert "weights[0] is loaded here and never updated" in result.finding
    assert result.advice.startswith("which part of the step is still missing?")


def test_a_whole_weight_that_waits_for_the_backward_pass_does_not_pass(tmp_path: Path) -> None:
    entry = find("pipeline_fsdp")
    gather = '    gather = rank.all_gather(rank.weights[l], axis="dp_shard")\n'
    text = entry.solution_text.replace('rank.weights.pop("full"))', 'rank.weights["full"])')
    text = text.replace(f"{gather}    if is_last", "    if is_last")
    text = text.replace('    rank.weights["full"] = await gather\n    grad_weight', "    grad_weight")
    result = grade_text(entry, text, tmp_path)
    assert result.stage == "technique"
    assert result.finding.startswith("weights[0] on rank 0 stays whole while the rank waits for the gradient")


@pytest.mark.parametrize("name", ["stage_norm", "shared_norm", "expert_norm"])
def test_a_norm_is_not_mended_by_leaving_out_the_clipping(name: str, tmp_path: Path) -> None:
    result = grade_text(find(name), find(name).solution_text.replace(", norm)\n", ")\n"), tmp_path)
    assert result.stage == "technique"
    assert "does not clip" in result.finding


def test_what_is_sent_in_surplus_is_named_with_its_line(tmp_path: Path) -> None:
    text = find("sequence_parallel").solution_text.replace('tp") if l else terms', 'tp")')
    result = grade_text(find("sequence_parallel"), text, tmp_path)
    assert re.match(r"rank 0 sends more than it has to in reduce_scatter\(layer 0\) on tp \(.*:\d+\)", result.advice)


def test_ranks_that_would_hang_are_reported_with_their_lines(tmp_path: Path) -> None:
    start = find("rendezvous").start_text
    result = grade_text(find("rendezvous"), start, tmp_path)
    assert result.finding_text.startswith("The gradients are right, but the program needs buffers: on gloo")
    sends = [n for n, line in enumerate(start.splitlines(), 1) if line.startswith("        await rank.send(")]
    for line in sends[:2]:  # of the two functions in which neighbours meet
        assert f"({tmp_path / 'rendezvous.py'}:{line})" in result.finding


@pytest.mark.parametrize("entry", all_entries(), ids=lambda entry: entry.name)
def test_an_error_that_is_no_typical_mistake_gets_no_advice_of_one(entry: CourseEntry) -> None:
    for sentence in (
        f"{entry.name}.py:35: rank 0, op 14: the program raised NameError: name 'x' is not defined; fix it there.",
        f"{entry.name}.py:35: rank 0, op 9: weights[77] does not exist; the store has only the key 0. Correct the key.",
        f"{entry.name}.py:35: rank 0, op 14 has not come within 2 s of CPU time; let the loop end.",
        f"{entry.name}.py:35 cannot be run: SyntaxError: expected ':'",
        f"the schedule {entry.name}, rank 0, line 35: TypeError: unsupported operand.",
    ):
        assert refused_grade(entry.exercise, UserError(sentence)).mistake is None, sentence


@pytest.mark.parametrize("entry", KEPT, ids=lambda entry: entry.name)
def test_a_misspelt_verb_gets_no_advice_of_a_mistake(entry: CourseEntry, tmp_path: Path) -> None:
    result = grade_text(entry, entry.solution_text.replace("rank.forward(", "rank.foward("), tmp_path)
    assert "did you mean rank.forward?" in result.finding
    assert not result.advice


def test_a_variable_that_one_rank_sets_gets_advice_on_collectives(tmp_path: Path) -> None:
    text = DDP.solution_text.replace("gradient = await", "if rank.index == 0:\n            gradient = await")
    result = grade_text(DDP, text, tmp_path)
    assert "UnboundLocalError" in result.finding
    assert result.advice.startswith("all ranks run this program, and a collective must be called by each of them.")


def test_a_missing_slice_is_not_taken_for_a_microbatch(tmp_path: Path) -> None:
    """The key is of a layer and a slice, and the layer's gradient of the microbatch with that number was freed."""
    text = find("ring_all_reduce").solution_text.replace("range(n - 1)", "range(n)", 1)
    finding = grade_text(find("ring_all_reduce"), text, tmp_path).finding
    assert "grad_weights[(0, 3)] does not exist; the store has the keys 1, (0, 0). Correct the key" in finding


def test_all_goals_that_are_missed_are_named() -> None:
    missed = grade(bare("ddp", goals=Goals("a test", time=1, memory=1, sent=1)), DDP.solution)
    assert missed.finding.count(";") == 2
    assert "too much is sent: 786,432, goal 1" in missed.finding
    assert repr(missed).count("   missed\n") == 3
    assert [row.name for row in missed.rows() if row.missed] == ["time", "peak memory", "elements sent"]


def test_a_coroutine_that_is_not_awaited_is_named(tmp_path: Path) -> None:
    text = DDP.solution_text.replace(
        "gradient = await rank.all_reduce", "helper(rank)\n        gradient = rank.all_reduce"
    )
    result = grade_text(DDP, text + "\n\nasync def helper(rank):\n    pass\n", tmp_path)
    assert result.stage == "refused"
    assert "helper(...) was called without `await`, so it has not run" in result.finding


def test_a_frozen_layer_is_refused() -> None:
    async def frozen(rank: Rank) -> None:
        for l in rank.layers:
            rank.weights[l] = rank.load_weight(l)
        rank.activations[0] = rank.load_batch(rank.share())
        for l in rank.layers:
            rank.activations[l + 1] = rank.forward(l, rank.activations[l], rank.weights[l])
        rank.loss(rank.activations[len(rank.layers)])

    assert not grade(DDP.exercise, frozen).passed


def test_a_schedule_may_be_a_generator_or_have_a_placement() -> None:
    def one_at_a_time(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> Iterator[Action]:
        for i in range(microbatches):
            yield Forward(rank, i)
            yield Backward(rank, i)

    exercise = bare("one_f_one_b", goals=Goals("a test", time=1e6))
    assert grade(exercise, one_at_a_time).passed
    assert grade(exercise, Schedule("mine", one_at_a_time)).passed


def test_a_schedule_that_never_ends_is_stopped_at_its_line() -> None:
    def endless(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> Iterator[Action]:
        while True:
            yield Forward(rank, 0)

    result = grade(bare("one_f_one_b"), endless)
    assert result.stage == "refused"
    assert "goes on after" in result.finding


def test_something_else_than_a_schedule_or_a_plan_is_refused() -> None:
    assert "is not a schedule; write it as a generator" in grade(bare("one_f_one_b"), print).finding
    assert "the function returned None; return a Plan" in grade(bare("buckets"), lambda: None).finding
    assert "the solution is not a function" in grade(bare("buckets"), 3).finding
    assert "write `def f() -> Plan: ...`" in grade(bare("buckets"), find("ddp").solution).finding
    result = grade(bare("buckets"), lambda: Plan(Mesh(dp_shard=4)))
    assert result.finding == "the plan is for 4 ranks; give one for 64"


def test_a_plan_function_that_fails_or_never_ends_is_stopped_at_its_line(tmp_path: Path) -> None:
    plan = find("buckets")

    def finding(line: str) -> str:
        return grade_text(
            plan, plan.start_text.replace("    return Plan(", f"    {line}\n    return Plan("), tmp_path
        ).finding

    at = 1 + next(n for n, line in enumerate(plan.start_text.splitlines()) if line.startswith("    return Plan("))
    assert f"ZeroDivisionError: division by zero ({tmp_path / 'buckets.py'}:{at}); fix it there" in finding("1 / 0")
    with trace_limits(seconds=0.2):
        assert f"{tmp_path / 'buckets.py'}:{at}: the end of the function has not come" in finding("while True: pass")


def test_a_plan_that_does_not_fit_the_cluster_is_refused() -> None:
    exercise = find("choose_plan").exercise
    result = grade(replace(exercise, mistakes=()), lambda: Plan(Mesh(dp_shard=exercise.mesh.world)))
    assert result.stage == "refused"
    assert "GiB" in result.finding


def test_what_is_sent_is_counted_as_rings_send_it() -> None:
    result = grade(DDP.exercise, DDP.solution)
    assert result.checked is not None
    assert elements_sent(result.checked) == 2 * 3 * 512 * 512 * 2 // 4


def test_a_notebook_shows_verdict_and_goals_as_text_and_the_picture_of_a_right_program() -> None:
    wrong = check("ddp", print)._repr_html_()
    assert "Wrong: &lt;built-in function print&gt; is not a strategy" in wrong
    assert "<img" not in wrong
    text = check("ddp", DDP.solution)._repr_html_()
    assert (
        text.index("Exercise 2: Data parallelism") < text.index("Passed.") < text.index("<table") < text.index("<img")
    )
    assert "missed" not in text
    slow = grade(bare("ddp", goals=Goals("a test", time=1)), DDP.solution)._repr_html_()
    assert "<tr><th>time</th><td>7.72</td><td>1</td><td><b>missed</b></td></tr>" in slow
    assert "<td>786,432</td><td>none</td><td></td>" in slow


def test_the_sentences_of_a_grade_as_plain_text_are_wrapped(tmp_path: Path) -> None:
    result = grade_text(find("one_rank"), find("one_rank").start_text, tmp_path)
    assert max(map(len, result.verdict.splitlines())) > 80
    assert max(map(len, repr(result).splitlines())) <= 80
    assert " ".join(repr(result).split()).endswith(" ".join(result.verdict.split()))
