"""The program of plans: any schedule, also of users and of files, with any sharding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlab.check import check
from shardlab.language import Mesh, OpKind, Program, Sizes, UserError, trace
from shardlab.strategies import STRATEGIES, Plan
from shardlab.strategies.plan.program import program_from_plan
from shardlab.strategies.schedules import SCHEDULES, Action, Backward, Forward, Schedule
from shardlab.strategies.schedules.pytorch_csv import CsvFormat
from shardlab.train.verification.cases import SHARDINGS
from tests.strategies.csv_files import csv_of
from tests.support.thorough import examples

FORMS: list[CsvFormat] = ["compute_only", "compute_comms"]


def traced(plan: Plan, layers: Sizes | int, microbatches: int) -> Program:
    return trace(program_from_plan(plan), plan.mesh, layers, microbatches)


@st.composite
def plans(draw: st.DrawFn) -> tuple[Plan, int, int]:
    """Any sharding on any pipeline, with layers and microbatches that fit."""
    shape = SHARDINGS[draw(st.sampled_from(list(SHARDINGS)))]
    sizes = st.integers(1, 3)
    mesh = Mesh(pp=draw(sizes), dp_shard=draw(sizes), dp_replicate=draw(st.integers(1, 2)), tp=shape.mesh.tp)
    plan = replace(
        shape,
        mesh=mesh,
        schedule=draw(st.sampled_from(list(SCHEDULES))),
        reshard_after=draw(st.sampled_from(["layer", "forward", "stage", "step"])),
        recompute=draw(st.sampled_from(["none", "full"])),
    )
    return plan, plan.natural_layers() + draw(st.integers(0, 3)), plan.data_ranks * draw(st.integers(1, 4))


@settings(max_examples=examples(100))
@given(plans())
def test_every_sharding_on_every_pipeline_passes_all_channel_models(case: tuple[Plan, int, int]) -> None:
    plan, layers, microbatches = case
    assert check(traced(plan, layers, microbatches)).backends() == ["gloo", "nccl"]


@settings(max_examples=examples(40))
@given(plans(), st.sampled_from(["dp_shard", "dp_replicate"]))
def test_an_axis_that_is_reduced_once_is_reduced_once_however_many_microbatches(
    case: tuple[Plan, int, int], axis: str
) -> None:
    plan, layers, microbatches = case
    if axis in plan.axes_of_every_microbatch:
        return
    counts = [
        sum(
            op.kind in (OpKind.ALL_REDUCE, OpKind.REDUCE_SCATTER) and op.group is not None and op.group.axis == axis
            for op in traced(plan, layers, m).tapes[0]
        )
        for m in (microbatches, 2 * microbatches)
    ]
    assert counts[0] == counts[1]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sharding", ["ddp", "fsdp", "zero-2"])
@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "zb-v"])
def test_an_imported_schedule_is_followed_as_the_one_it_was_made_of(
    name: str, sharding: str, form: CsvFormat, tmp_path: Path
) -> None:
    file = tmp_path / "schedule.csv"
    schedule = SCHEDULES[name]
    file.write_text(csv_of(schedule, 2, 3, schedule.stages_per_rank or 2, form=form))
    built_in = replace(SHARDINGS[sharding], mesh=Mesh(pp=2, dp_shard=2), schedule=name)
    imported = replace(built_in, schedule=str(file))
    layers = built_in.natural_layers() + 1
    programs = [traced(plan, layers, 6) for plan in (built_in, imported)]
    for program in programs:
        assert check(program).backends() == ["gloo", "nccl"]
    computed = [
        [[op[:2] for op in tape if op.kind in (OpKind.FORWARD, OpKind.BACKWARD, OpKind.SEND)] for tape in p.tapes]
        for p in programs
    ]
    assert computed[0] == computed[1]


def test_an_imported_schedule_says_for_which_sizes_it_is(tmp_path: Path) -> None:
    file = tmp_path / "schedule.csv"
    file.write_text(csv_of(SCHEDULES["1f1b"], 2, 3, form="compute_only"))
    with pytest.raises(UserError, match=r"is for 2 pipeline ranks and 3 .* give --pp 2 --microbatches 3"):
        Plan(Mesh(pp=2), str(file)).steps(2, 4)
    with pytest.raises(UserError, match="has 2 stages on 2 ranks, but stages_per_rank is 2; leave it out"):
        Plan(Mesh(pp=2), str(file), 2).natural_layers()


def test_a_plan_runs_on_its_own_mesh_alone() -> None:
    with pytest.raises(UserError, match="the plan is for the mesh"):
        trace(program_from_plan(Plan(Mesh(pp=2))), Mesh(dp_shard=2), 2, 2)


def failing(kind: str) -> Schedule:
    """A user's schedule that is wrong in some way."""

    def actions(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> Iterator[Action]:
        if kind == "raises":
            raise ZeroDivisionError("no")
        if kind == "gives nonsense":
            yield "forward"  # pyright: ignore[reportReturnType]
        if kind == "another's stage":
            yield Forward(1 - rank, 0)
        if kind == "no such microbatch":
            yield Forward(rank, microbatches)
        if kind == "too many microbatches":
            yield from (Forward(rank, i) for i in range(10 * microbatches))
        if kind == "another's of two stages":
            yield Forward(1 - rank, 0)
        if kind == "too few arguments":
            yield Forward(rank)  # pyright: ignore[reportCallIssue]
        while kind == "repeats":
            yield Forward(rank, 0)
        for i in range(microbatches):
            if kind == "waits":
                yield Backward(rank, i)
            yield Forward(rank, i)
            if kind == "waits":
                continue
            if kind != "forgets" or i:
                yield Backward(rank, i)

    return Schedule(kind, actions, stages_per_rank=2 if "of two stages" in kind else 1)


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("raises", r"the schedule raises, rank 0, line \d+: ZeroDivisionError: no"),
        ("gives nonsense", "gave rank 0 'forward'; yield Forward, Backward"),
        ("another's stage", r"gave rank 0 Forward\(stage=1, microbatch=0\), but that rank has stage 0"),
        ("no such microbatch", "but microbatches are numbered 0 to 1"),
        ("too many microbatches", r"Forward\(stage=0, microbatch=2\), but microbatches are numbered 0 to 1"),
        ("another's of two stages", r"Forward\(stage=1, microbatch=0\), but that rank has stages 0, 2"),
        ("repeats", r"rank 0, line \d+, goes on after 6 actions, .*; Forward\(stage=0, microbatch=0\) came twice;"),
        ("too few arguments", r"line \d+: TypeError: Forward\.__init__\(\) missing 1 required .*'microbatch'"),
        ("waits", r"the schedule waits cannot go on: rank 0 at .*, each waiting for a pass that comes later"),
    ],
)
def test_a_wrong_schedule_is_one_sentence(kind: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        traced(Plan(Mesh(pp=2), failing(kind)), 4, 2)


def test_a_schedule_with_other_arguments_is_refused_with_those_that_it_gets() -> None:
    def actions(rank: int) -> Iterator[Action]:
        yield Forward(rank, 0)

    with pytest.raises(UserError, match=r"mine, rank 0, called with \(rank, ranks, microbatches, stages_per_rank\): "):
        traced(Plan(Mesh(pp=2), Schedule("mine", actions)), 2, 2)  # pyright: ignore[reportArgumentType]


def test_a_schedule_that_forgets_a_backward_pass_is_refused() -> None:
    with pytest.raises(UserError, match="gave rank 0 no Backward or BackwardInput of stage 0 and microbatch 0"):
        traced(Plan(Mesh(pp=2), failing("forgets")), 2, 2)


def test_layers_to_recompute_must_exist() -> None:
    with pytest.raises(UserError, match="recompute names block 9, but the model has blocks 0-3"):
        traced(Plan(recompute=(1, 9)), 4, 1)


def test_of_a_mixture_the_experts_of_blocks_that_are_named_are_recomputed() -> None:
    program = traced(Plan(Mesh(ep=2), recompute=(1,)), 2, 2)
    assert {op.layer for op in program.tapes[0] if op.kind is OpKind.RECOMPUTE} == {3}


def test_plans_by_name_are_the_plans_of_the_table() -> None:
    for name, entry in STRATEGIES.items():
        if entry.plan is not None:
            plan = entry.plan(entry.ranks)
            layers = entry.puzzle(entry.ranks)
            tapes = trace(entry.program, plan.mesh, layers, 4).tapes
            assert tapes == traced(plan, layers, 4).tapes, name
