"""Rewritten programs train as those that were written: one device's numbers, and the very same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shardlab.check import Checked, check_forward, forward_only
from shardlab.cli.train.before_ranks import lines_of
from shardlab.execute.state import State
from shardlab.language import Op, UserError
from shardlab.language.mesh import Mesh
from shardlab.models import GPT
from shardlab.simulate.passes import PASSES, find_passes, run_passes
from shardlab.strategies import Plan, ddp
from shardlab.strategies.load import load
from shardlab.train import job as jobs
from shardlab.train.job import Job, described, job_of
from shardlab.train.verification.cases import ALONE, CASES, Case, Verdict
from shardlab.train.verification.verify import verify_rank
from tests.support.ranks import Ranks
from tests.support.thorough import sampled

World = Callable[[int], Ranks]
CPU = torch.device("cpu")
MODEL = GPT(layers=4, hidden_size=16, heads=2, seq_len=8)


def forced(checked: Checked, names: str) -> Checked:
    """What passes make of a program, whether it is faster or not."""
    return run_passes(checked, [replace(each, chosen=True) for each in find_passes(names)])[-1].checked


def trained(rank: int, job: Job) -> tuple[Verdict, list[torch.Tensor]]:
    """One rank's verdict and its weights after three steps."""
    kept: list[torch.Tensor] = []

    def keep(state: State) -> None:
        kept.extend(weight.clone() for weight in state.kept.values())

    return verify_rank(rank, CPU, job, 3, {}, trained=keep), kept


LATE = Path(__file__).parents[1] / "simulate" / "passes" / "late_programs.py"

FORCED = {
    "fsdp": "prefetch=2,defer=2",
    "ddp": "bucket=2,defer=2",
    "zero-1": "bucket=1,defer=4",
    "pipeline": "update-early",
    "tensor-parallel": "update-early",
    f"{LATE}:received_late": "receive-early=2",
}


def job_for(strategy: str) -> Job:
    """A step of one layer for each rank of a program that has no more, else of four."""
    layers = 2 if strategy.startswith(str(LATE)) else 4
    return Job(load(strategy).for_job(2), 2, 4, replace(MODEL, layers=layers), 2, "fp64", passes="none")


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("strategy", FORCED, ids=lambda name: name.rpartition(":")[2])
def test_passes_change_no_bit(ranks: World, strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks add in one order only, so that even buckets do not round otherwise. All passes are forced."""
    monkeypatch.setattr(jobs, "passed", forced)  # jobs are checked here, for all ranks
    written = job_for(strategy)
    rewritten = replace(written, passes=FORCED[strategy])
    before, after = (ranks(2).call(trained, job) for job in (written, rewritten))
    for (_, expected), (verdict, kept) in zip(before, after, strict=True):
        assert verdict.ok, verdict
        assert len(kept) == len(expected)
        assert all(map(torch.equal, kept, expected))


@pytest.mark.parametrize("strategy", FORCED, ids=lambda name: name.rpartition(":")[2])
def test_the_passes_of_that_test_move_something(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "passed", forced)
    written = job_for(strategy)
    assert replace(written, passes=FORCED[strategy]).checked().program.tapes != written.checked().program.tapes


@pytest.mark.parametrize(
    "case",
    sampled(
        [case for case in CASES if case.column == ALONE],
        lambda case: case.strategy not in ("context-parallel", "4d", "3d"),
    ),
    ids=str,
)
def test_the_forward_half_of_what_passes_make_computes_every_loss(case: Case) -> None:
    """What is evaluated is the half of what is trained; it runs wherever all of it does."""
    checked = case.job().checked()
    for each in PASSES.values():
        for number in {*each.tried[:1], *each.tried[-1:]}:
            (_, made) = run_passes(checked, [replace(each, tried=(number,), chosen=True)])
            half = check_forward(forward_only(made.checked))
            assert set(made.checked.backends()) <= set(half.backends())


def test_a_job_runs_the_passes_of_its_plan_or_its_own() -> None:
    own = Job("fsdp", 2, 4, MODEL, 2, passes="prefetch=1")
    plain = replace(own, passes=None)
    assert own.checked().program != plain.checked().program
    assert replace(own, passes="none").checked().program == plain.checked().program
    plan = Plan(Mesh(dp_shard=2), shard_optimizer=("dp_shard",), passes="defer=2")
    of_plan, instead = Job(plan, 2, 4, MODEL, 2), Job(replace(plan, passes="none"), 2, 4, MODEL, 2, passes="defer=2")
    assert of_plan.checked().program != replace(of_plan, passes="none").checked().program
    assert of_plan.checked().program == instead.checked().program


def test_an_op_that_a_pass_has_moved_is_still_of_the_line_that_wrote_it() -> None:
    """As a report of ranks that hang says it."""
    written = job_for(f"{LATE}:received_late")
    rewritten = replace(written, passes="receive-early=2")
    before, after = (dict(lines_by_op(job)) for job in (written, rewritten))
    assert list(before) != list(after)
    assert before == after
    assert all(str(LATE) in line for line in before.values())


@pytest.mark.parametrize("passes", ["bucket=2", "arena", "bucket=2,arena"])
def test_an_op_of_a_bucket_or_in_an_arena_is_still_of_the_line_that_wrote_it(passes: str) -> None:
    file = Path(ddp.__file__)  # as if it were a user's
    lines = file.read_text().splitlines()
    job = Job(f"{file}:ddp", 2, 4, GPT(layers=4, hidden_size=64, heads=2, vocab_size=32, seq_len=4), 2, passes=passes)
    changed = [(op, line) for op, line in lines_by_op(job) if op.batch >= 0 or op.offset >= 0]
    assert changed
    for op, line in changed:
        number = int(line.removeprefix(f" ({file}:").removesuffix(")"))
        assert f"rank.{op.kind.value}(" in lines[number - 1]


def lines_by_op(job: Job) -> Iterator[tuple[Op, str]]:
    line_of = lines_of(job.entry, job)
    for at, op in enumerate(job.checked().program.tapes[1]):
        yield op, line_of(1, at)


def test_a_job_is_described_with_its_passes() -> None:
    job = Job("fsdp", 2, 4, MODEL, 2, passes="prefetch=1")
    words = described(job)
    assert job_of(words) == job
    of_an_older_version = {name: value for name, value in words.items() if name != "passes"}
    assert job_of(of_an_older_version) == replace(job, passes=None)


def test_a_pass_that_cannot_apply_is_refused_before_anything_is_trained() -> None:
    with pytest.raises(UserError, match="the pass prefetch has nothing to do: no weights are gathered"):
        Job("ddp", 2, 4, MODEL, 2, passes="prefetch").checked()
