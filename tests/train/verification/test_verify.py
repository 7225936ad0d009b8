"""Every strategy on real processes gives one device's numbers; and what does not is noticed."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from shardlab.execute.executor import Executor
from shardlab.execute.optimizers import flat_slice
from shardlab.execute.optimizers.flat_slice import Slice
from shardlab.execute.optimizers.settings import OptimizerConfig
from shardlab.language import Mesh, UserError
from shardlab.models import GPT, MLP, Llama, Mixtral, MoE
from shardlab.strategies import STRATEGIES, Plan
from shardlab.strategies.plan.plan import DATA_AXES, Context, Recompute, ReduceAt, Reshard
from shardlab.strategies.schedules import SCHEDULES
from shardlab.strategies.schedules.pytorch_csv import CsvFormat
from shardlab.train.batches import Batches
from shardlab.train.job import Job
from shardlab.train.verification import verify
from shardlab.train.verification.cases import ALONE, CASES, PIPELINES, SHARDINGS, TOLERANCE, Case, Verdict
from shardlab.train.verification.verify import CaseProgress, CaseResult, verify_all, verify_cases, verify_rank
from tests.strategies.csv_files import csv_of
from tests.support.ranks import Ranks
from tests.support.thorough import sampled
from tests.train.verify_cases import BY_HAND, SAMPLE, TABLE, Verified, sharded_pipelines

World = Callable[[int], Ranks]
CPU = torch.device("cpu")
on_ranks = pytest.mark.starts_ranks


def on_a_rank(rank: int, job: Job, steps: int, clip: float | None, uneven: bool) -> Verdict | None:
    with pytest.MonkeyPatch.context() as patch:
        if uneven:
            patch.setattr(verify, "Batches", Uneven)
        return verify_rank(rank, CPU, job, steps, {}, clip)


class Uneven(Batches):
    """Microbatch m has so many targets fewer that none has as many as another."""

    def microbatch(self, step: int, microbatch: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, targets = super().microbatch(step, microbatch)
        targets = targets.clone()
        targets.view(-1)[: microbatch + microbatch // 2] = -1
        return tokens, targets

    def counted(self, step: int, microbatches: int) -> int:
        return sum(int((self.microbatch(step, m)[1] >= 0).sum()) for m in range(microbatches))


@on_ranks
@pytest.mark.parametrize("case", sampled(TABLE, SAMPLE.__contains__), ids=[case.shows for case in TABLE])
def test_the_numbers_are_those_of_one_device(ranks: World, tmp_path: Path, case: Verified) -> None:
    if case.exported:
        case = through_a_file(case, case.exported, tmp_path / "schedule.csv")
    verdict = ranks(case.world).call(on_a_rank, case.job(), case.steps, case.clip, case.uneven)[0]
    assert verdict.ok, verdict


def through_a_file(case: Verified, form: CsvFormat, file: Path) -> Verified:
    """Have a case take its plan's schedule from a file, to which it was written."""
    plan = case.strategy
    assert isinstance(plan, Plan)
    assert isinstance(plan.schedule, str)
    schedule = SCHEDULES[plan.schedule]
    file.write_text(
        csv_of(schedule, plan.mesh.pp, case.microbatches // plan.data_ranks, schedule.stages_per_rank or 1, form=form)
    )
    return replace(case, strategy=replace(plan, schedule=str(file)))


PLANS = [case.strategy for case in TABLE if isinstance(case.strategy, Plan)]


def test_the_table_has_every_strategy_schedule_and_sharding() -> None:
    assert {case.strategy for case in TABLE if isinstance(case.strategy, str)} >= set(STRATEGIES)
    assert {plan.schedule for plan in PLANS} >= set(SCHEDULES)
    assert {case.column for case in sharded_pipelines()} == set(SHARDINGS)


def test_the_table_has_every_axis_with_every_other_that_it_goes_with() -> None:
    axes = {frozenset(axis for axis, size in plan.mesh.sizes().items() if size > 1) for plan in PLANS}
    pairs = {frozenset(pair) for mesh in axes for pair in combinations(mesh, 2)}
    never = {frozenset(pair) for pair in (("ep", "tp"), ("ep", "cp"))}  # `Plan` refuses them
    assert pairs | never == {frozenset(pair) for pair in combinations(PLANS[0].mesh.sizes(), 2)}


def test_the_table_has_every_value_of_every_option() -> None:
    """For options that shard, these are all mappings: none, ZeRO-1 to 3, over both data axes, over `cp`."""
    for option, words in {
        "context": Context,
        "recompute": Recompute,
        "reshard_after": Reshard,
        "reduce_at": ReduceAt,
    }.items():
        run = set(get_args(words)) - {"per-op"}  # which is for predictions alone
        assert {getattr(plan, option) for plan in PLANS} >= run, option
    assert any(isinstance(plan.recompute, tuple) for plan in PLANS)
    assert {plan.sequence_parallel for plan in PLANS} == {True, False}
    assert any(plan.layers_per_stage for plan in PLANS)
    assert any(plan.stages_per_rank for plan in PLANS)
    assert {plan.reduce_every_microbatch for plan in PLANS} >= {None, (), ("dp_shard",), ("ep",)}
    cuts = {tuple(map(len, (p.shard_parameters, p.shard_gradients, p.shard_optimizer))) for p in PLANS}
    assert cuts >= {(0, 0, 0), (0, 0, 1), (0, 1, 1), (1, 1, 1), (1, 1, 2), (2, 2, 2)}
    assert {axis for plan in PLANS for axis in plan.shard_optimizer} == {*DATA_AXES, "cp"}


def test_the_table_has_every_family_of_models_and_what_they_can_do() -> None:
    models = [case.model for case in TABLE]
    assert {type(model) for model in models} == {GPT, MLP, Llama, MoE, Mixtral}
    gpts = [model for model in models if isinstance(model, GPT)]
    for option in ("tied", "bias", "dropout", "rope_theta"):
        assert {bool(getattr(model, option)) for model in gpts} == {True, False}, option
    assert {model.activation for model in gpts} == {"gelu", "squared_relu", "swiglu"}
    assert {model.kv_heads == model.heads for model in gpts if model.kv_heads} == {True, False}
    mixtures = [model for model in models if isinstance(model, MoE)]
    assert {model.capacity_factor is None for model in mixtures} == {True, False}
    assert {model.top_k for model in mixtures} >= {1, 2}


def test_the_table_has_large_products_under_every_schedule_and_sharding() -> None:
    """Large products have gradients beside autograd, and recomputed activations."""
    large = [case for case in sharded_pipelines() if any(run.made_again for run in case.job().cut.runs)]
    assert {case.row for case in large} == {*PIPELINES}
    assert {case.column for case in large} >= {name for name, plan in SHARDINGS.items() if plan.mesh.world == 2}
    assert {type(case.model) for case in TABLE if any(run.made_again for run in case.job().cut.runs)} >= {GPT, MoE}


def test_every_case_shows_something_of_its_own() -> None:
    assert len({case.shows for case in TABLE}) == len(TABLE)
    assert len({str(replace(case, shows="")) for case in TABLE}) == len(TABLE)


# Faults are noticed.


def refused(rank: int, job: Job) -> str:
    with pytest.raises(UserError) as error:
        verify_rank(rank, CPU, job, 1)
    return str(error.value)


@on_ranks
def test_sequences_that_do_not_divide_are_refused(ranks: World) -> None:
    job = Job(Plan(Mesh(cp=2)), 2, 1, GPT(layers=1, seq_len=10), 2)
    said = ranks(2).call(refused, job)
    sentence = "10 tokens do not divide into 4 slices (remainder 2); choose a seq_len that is a multiple of 4"
    assert all(sentence in line for line in said), said


small = partial(GPT, hidden_size=16, heads=2, seq_len=8)


@on_ranks
def test_adamw_does_not_amplify_the_rounding_of_a_gradient(ranks: World) -> None:
    """With AdamW's usual eps, weights of this model are 7.8e-13 apart, since some of its gradients are nearly zero."""
    model = small(layers=1, dropout=0.1, ffn_hidden_size=4096)
    verdict = ranks(4).call(verify_rank, CPU, Job(SHARDINGS["cp+tp+sp"], 4, 1, model, 2, "fp64"), 1)[0]
    assert max(verdict.all) < 1e-14, verdict


def without_clipping(rank: int, job: Job) -> Verdict | None:
    """Verify a job on one rank, whose updates do nothing with the norm."""

    def take(self: Slice, gradient: torch.Tensor, step: int, squared_norm: float | None = None, **others: Any) -> bool:
        return plain(self, gradient, step, **others)

    plain = Slice.take
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Slice, "take", take)
        return verify_rank(rank, CPU, job, 3)


@on_ranks
def test_clipping_left_out_is_noticed(ranks: World) -> None:
    """Adam divides a gradient's scale out, but not where it differs from step to step."""
    job = Job(f"{BY_HAND}:zero_1", 2, 4, small(layers=2), 2, "fp64")
    verdict = ranks(2).call(without_clipping, job)[0]
    assert verdict.gradient_error > TOLERANCE
    assert verdict.weight_error > 1e-8


def with_faults(rank: int, job: Job) -> dict[str, Verdict]:
    """Verify a job on one rank several times, each time with another small fault of one rank's updates."""

    def take(self: Slice, gradient: torch.Tensor, *arguments: Any, **others: Any) -> bool:
        """Take a gradient whose largest element is wrong."""
        gradient = gradient.clone()
        gradient[gradient.abs().argmax()] *= 1 + 1e-6
        return plain(self, gradient, *arguments, **others)

    def configured(change: dict[str, Any], config: OptimizerConfig, *tensors: list[torch.Tensor]) -> Any:
        return optimizers(replace(config, **change), *tensors)

    plain, optimizers, verdicts = Slice.take, flat_slice.torch_optimizers, dict[str, Verdict]()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(Slice, "take", take)
        verdicts["gradient"] = verify_rank(rank, CPU, job, 1)
    changes: dict[str, dict[str, Any]] = {
        "first moment": {"betas": (0.90001, 0.95)},
        "second moment": {"betas": (0.9, 0.95001)},
        "weight decay": {"weight_decay": 0.0999},
    }
    for name, change in changes.items():
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(flat_slice, "torch_optimizers", partial(configured, change))
            verdicts[name] = verify_rank(rank, CPU, job, 3)
    return verdicts


@on_ranks
def test_small_faults_of_an_update_are_noticed(ranks: World) -> None:
    """The large eps of `verify` hides none of them. With the usual one, that of the gradient does not show."""
    verdicts = ranks(2).call(with_faults, Job("zero-3", 2, 2, small(layers=2), 2, "fp64"))[0]
    assert verdicts["gradient"].gradient_error <= TOLERANCE
    assert {name: verdict.weight_error > 10 * TOLERANCE for name, verdict in verdicts.items()} == {
        "gradient": True,
        "first moment": True,
        "second moment": True,
        "weight decay": True,
    }


def wrong_on_one_replica(rank: int, job: Job) -> Verdict | None:
    """Verify a job on one rank; one rank's weights move by themselves before they are compared."""

    class Disturbed(Executor):
        def step(self) -> torch.Tensor:
            loss = super().step()
            if rank == 1:
                next(iter(self.state.kept.values()))[0] += 1e-6
            return loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "Executor", Disturbed)
        return verify_rank(rank, CPU, job, 1)


@on_ranks
def test_a_replica_that_drifts_is_noticed(ranks: World) -> None:
    job = Job("ddp", 2, 2, small(layers=2), 2, "fp64")
    verdict = ranks(2).call(wrong_on_one_replica, job)[0]
    assert not verdict.ok
    assert verdict.weight_error > 1e-8
    assert verdict.gradient_error <= TOLERANCE


def test_a_wrong_number_is_not_ok() -> None:
    assert not Verdict(0.0, 2e-12, 0, 0.0, 0).ok
    assert not Verdict(0.0, float("inf"), 0, 0.0, 0).ok


# `shardlab verify --all`: its table is complete, and what cannot run is in it as well.


def test_the_table_has_every_strategy_and_every_sharding_on_every_pipeline() -> None:
    places: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
    for case in CASES:
        data_ranks = case.strategy.data_ranks if isinstance(case.strategy, Plan) else 1
        places[case.row, case.column].add(case.microbatches // data_ranks)
    assert {row for row, column in places if column == ALONE} == set(STRATEGIES)
    assert set(PIPELINES) == {"none", *SCHEDULES}
    for row in PIPELINES:
        for column in SHARDINGS:
            assert places[row, column] == {2, 3, 4}


def results_of(rank: int, cases: list[Case]) -> list[CaseResult]:
    results: list[CaseResult] = []
    verify_cases(rank, CPU, cases, 1, results.append)
    return results


@on_ranks
def test_a_case_that_cannot_run_is_a_result_too(ranks: World) -> None:
    good = Case("none", "ddp", "ddp", 2, 2, 2)
    results, others = ranks(2).call(results_of, [replace(good, microbatches=3), good])
    assert [result.ok for result in results] == [False, True]
    assert "3 microbatches do not divide among 2 ranks" in results[0].refused
    assert results[0].error == math.inf
    assert others == []


RIGHT, WRONG = CaseResult(CASES[0], 1e-15), CaseResult(CASES[1], 2e-12)


def test_cases_that_are_interrupted_leave_the_results_of_those_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(ranks: int, function: object, cases: list[Case], steps: int, send: Callable[..., None]) -> None:
        for result in (RIGHT, WRONG):
            send(result)
        raise KeyboardInterrupt

    monkeypatch.setattr(verify, "run_ranks", interrupted)
    results: list[CaseResult] = []
    with pytest.raises(KeyboardInterrupt):
        verify_all(CASES, 1, results)
    assert results == [RIGHT, WRONG]


def test_progress_says_at_once_which_case_is_wrong(capfd: pytest.CaptureFixture[str]) -> None:
    for result in (RIGHT, WRONG):
        CaseProgress(CASES).show(result)
    assert capfd.readouterr().err.splitlines() == [
        "1 ranks  single, alone, 4 microbatches: 1.0e-15",
        "1 ranks  WRONG  grad-accum, alone, 4 microbatches: 2.0e-12, more than 1e-12",
    ]


def test_an_error_above_the_tolerance_is_not_ok() -> None:
    assert not CaseResult(CASES[0], 2e-12).ok
    assert not CaseResult(CASES[0], math.nan).ok
    assert CaseResult(CASES[0], 1e-15).ok
