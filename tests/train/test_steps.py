"""All ranks stop at the first loss that is not finite, and agree on whose it was."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from shardlab.execute.executor import Executor
from shardlab.execute.optimizers.settings import OptimizerConfig
from shardlab.execute.settings import Settings
from shardlab.language import OpKind, UserError
from shardlab.language.precision import FP32
from shardlab.models import GPT
from shardlab.train.batches import Batches
from shardlab.train.checkpoints import Saver
from shardlab.train.config import NonFinite
from shardlab.train.data import Corpus
from shardlab.train.job import Job
from shardlab.train.launch.interrupt import StopRequest
from shardlab.train.loop import train_rank
from shardlab.train.run import TrainingRun
from shardlab.train.steps import Callback, StepResult, Training, UserCallback
from shardlab.train.tracing import RampedExecutor
from shardlab.train.verification.cases import SHARDINGS
from tests.support.ranks import Ranks
from tests.train.jobs import run_of

pytestmark = pytest.mark.starts_ranks
World = Callable[[int], Ranks]
JOB = Job("ddp", 2, 4, GPT(layers=2, hidden_size=16, heads=2, seq_len=8), 2)


def steps_taken(executor: Executor, run: TrainingRun, batches: Batches) -> list[StepResult]:
    """Train, and save the run where it has an end."""
    ramped = RampedExecutor({run.job.microbatches: executor}, run)
    saver = Saver(ramped, run, batches)
    training = Training(ramped, run, StopRequest(None), batches, [saver])
    results: list[StepResult] = []
    for step in training:
        results.append(step)
        saver.on_metrics(training, step)
    if not results[-1].diverged:
        saver.on_end(training)
    return results


def steps_of(rank: int, out: Path, poisoned: int, poison: float) -> list[StepResult]:
    """The steps of a run in which rank 1 alone loses its loss at step `poisoned`."""
    batches = Batches(
        Corpus.from_text(bytes(range(256)) * 8, JOB.model.seq_len),
        JOB.model.seq_len,
        JOB.micro_batch_size,
        JOB.microbatches,
        0,
    )

    class Poisoned(Executor):
        def step(self) -> Tensor:
            step, loss = self.state.step, super().step()
            if rank == 1 and step == poisoned:
                loss[0] = poison
            return loss

    optimizer = OptimizerConfig(schedule_steps=6, warmup_steps=1)
    executor = Poisoned(JOB.checked(), rank, JOB.cut, batches, Settings(0, FP32, optimizer=optimizer))
    run = run_of(JOB, optimizer, out)
    return steps_taken(executor, run, batches)


def steps_while_the_clock_stands_still(rank: int, out: Path) -> list[StepResult]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardlab.train.steps.time.perf_counter", lambda: 7.0)
        return steps_of(rank, out, -1, 0.0)


def test_a_clock_that_stands_still_ends_no_run(ranks: World, tmp_path: Path) -> None:
    for results in ranks(2).call(steps_while_the_clock_stands_still, tmp_path):
        assert len(results) == 6
        assert all(step.metrics["dt"] > 0 for step in results)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_every_rank_stops_at_the_same_step_and_knows_whose_loss_it_was(
    ranks: World, tmp_path: Path, poison: float
) -> None:
    for results in ranks(2).call(steps_of, tmp_path, 3, poison):
        assert [step.metrics["step"] for step in results] == [0, 1, 2, 3]
        assert [step.diverged for step in results] == [[], [], [], [1]]


def test_the_last_step_can_diverge_too(ranks: World, tmp_path: Path) -> None:
    for results in ranks(2).call(steps_of, tmp_path, 5, float("nan")):
        assert [step.diverged for step in results] == [[], [], [], [], [], [1]]


def steps_with_a_gradient(rank: int, out: Path, policy: NonFinite, poison: float) -> tuple[list[StepResult], bool]:
    """Steps of a plan in the second of which rank 1 spoils its gradient of layer 1; whether weights are finite then."""
    job = replace(JOB, strategy=SHARDINGS["zero-2"])
    corpus = Corpus.from_text(bytes(range(256)) * 8, job.model.seq_len)
    batches = Batches(corpus, job.model.seq_len, job.micro_batch_size, job.microbatches, 0)
    optimizer = OptimizerConfig(schedule_steps=4, warmup_steps=1)

    class Poisoned(Executor):
        def step(self) -> Tensor:
            at = next(at for at, op in enumerate(self.state.tape) if op.kind is OpKind.BACKWARD and op.layer == 1)
            healthy, op = self.instructions[at], self.state.tape[at]

            def poisoned() -> None:
                healthy()
                self.state.values[op.outputs[0]][:] = poison

            if rank == 1 and self.state.step == 1:
                self.instructions[at] = poisoned
            loss = super().step()
            self.instructions[at] = healthy
            return loss

    executor = Poisoned(job.checked(), rank, job.cut, batches, Settings(0, FP32, optimizer=optimizer))
    run = run_of(job, optimizer, out)
    run = replace(run, config=replace(run.config, train=replace(run.config.train, non_finite=policy)))
    results = steps_taken(executor, run, batches)
    return results, all(bool(weights.isfinite().all()) for weights in executor.state.kept.values())


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_a_gradient_that_is_not_finite_is_named_and_stops_the_run_or_is_skipped(
    ranks: World, tmp_path: Path, policy: NonFinite, poison: float
) -> None:
    for results, healthy in ranks(2).call(steps_with_a_gradient, tmp_path, policy, poison):
        assert healthy
        assert [step.metrics["step"] for step in results] == ([0, 1] if policy == "stop" else [0, 1, 2, 3])
        assert [step.diverged for step in results[:2]] == [[], [0, 1] if policy == "stop" else []]
        assert [bool(step.not_finite) for step in results] == [number == 1 for number in range(len(results))]
        assert results[1].not_finite == "the gradient of layer 1 of step 2 on ranks 0-1"


def outcome(rank: int, run: TrainingRun) -> str | None:
    try:
        summary = train_rank(rank, torch.device("cpu"), run)
    except UserError as error:
        return str(error)
    return None if summary is None else "a summary"


def test_a_run_that_diverges_keeps_its_steps_and_no_weights(ranks: World, tmp_path: Path) -> None:
    run = run_of(JOB, OptimizerConfig(learning_rate=1e6, schedule_steps=50, warmup_steps=1), tmp_path / "run")
    sentence, other = ranks(2).call(outcome, run)
    assert sentence.startswith(
        "the loss of step 2 on ranks 0-1 is not finite, so training has stopped; "
        f"there are no weights in {run.out}, only the figures of 2 steps"
    )
    assert other is None
    assert {file.name for file in run.out.iterdir()} == {
        "config.toml",
        "run.json",
        "metrics.jsonl",
        "strategy.svg",
    }
    lines = [json.loads(line) for line in (run.out / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] is None for line in lines] == [False, True]
    assert "NaN" not in (run.out / "metrics.jsonl").read_text()


def test_weights_that_diverge_in_the_last_update_are_not_passed_off_as_a_result(ranks: World, tmp_path: Path) -> None:
    run = run_of(JOB, OptimizerConfig(learning_rate=1e30, schedule_steps=1, warmup_steps=1), tmp_path / "run")
    sentence, _ = ranks(2).call(outcome, run)
    saved = (run.out / "weights.safetensors").exists()
    assert sentence.startswith("the validation loss after step 1 is not finite")
    assert ("the weights after 1 step are in" if saved else "there are no weights in") in sentence


def test_figures_of_a_users_callback_are_numbers_under_names_of_their_own() -> None:
    step = StepResult({"step": 0, "loss": 2.0}, False, [])
    assert step.check_user_figures({"norm": torch.tensor(1.5), "count": 3}, "Mine") == {"norm": 1.5, "count": 3.0}
    with pytest.raises(UserError, match="the callback Mine returned 'loss', which is already a figure of every step;"):
        step.check_user_figures({"loss": 1.0}, "Mine")
    with pytest.raises(UserError, match=r"returned 'loss'; return a dictionary with a number for each name, or None"):
        step.check_user_figures(cast(Any, "loss"), "Mine")
    assert step.check_user_figures(None, "Mine") == {}
    with pytest.raises(UserError, match=r"returned 'words' with \['a'\], which is no number; return a number for each"):
        step.check_user_figures({"words": ["a"]}, "Mine")


class Mistaken(Callback):
    """Callback whose methods raise."""

    def on_metrics(self, training: Training, step: StepResult) -> dict[str, float]:
        return {"x": step.metrics["los"]}

    def on_begin(self, training: Training) -> None:
        raise RuntimeError(self.reason)

    def message(self) -> float:
        return cast(Any, "much")

    reason = "no such file"


def test_an_error_in_a_users_callback_is_a_sentence_with_its_line() -> None:
    callback, training, mistaken = UserCallback(Mistaken()), cast(Any, None), Mistaken()
    place = r"\(tests/train/test_steps\.py:\d+\)"
    with pytest.raises(
        UserError, match=rf"callback Mistaken failed in on_metrics {place}: KeyError: 'los'; did you mean"
    ):
        callback.on_metrics(training, StepResult({"step": 0, "loss": 2.0}, False, []))
    with pytest.raises(UserError, match=rf"callback Mistaken failed in on_begin {place}: RuntimeError: no such file$"):
        callback.on_begin(training)
    with pytest.raises(UserError, match="message of the callback Mistaken returned 'much'; return a number"):
        callback.message()
    mistaken.reason = "Connection closed by peer"
    with pytest.raises(RuntimeError, match="Connection closed"):
        UserCallback(mistaken).on_begin(training)
