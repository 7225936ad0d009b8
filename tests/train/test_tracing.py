"""A traced run: every op of every rank has its time, memory is real, and training is none the wiser."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from shardlab.check import Checked
from shardlab.cli import main
from shardlab.execute.collect import gather_layer
from shardlab.execute.executor import Executor
from shardlab.execute.optimizers.settings import OptimizerConfig
from shardlab.execute.settings import Settings
from shardlab.language import Mesh, OpKind, UserError
from shardlab.language.ops import COLLECTIVES, COMMUNICATION
from shardlab.language.tape import queue_key
from shardlab.models import GPT, CutModel
from shardlab.models.tensors import to_blocks
from shardlab.simulate.timeline import Event, live_memory
from shardlab.simulate.timeline.measured import Measured, read_trace
from shardlab.simulate.timeline.timeline import is_event
from shardlab.strategies.plan.plan import Plan
from shardlab.train.batches import Batches
from shardlab.train.config import BatchRamp
from shardlab.train.data import Corpus
from shardlab.train.faults import RankFailed
from shardlab.train.job import Job, Tracing, job_from_dict
from shardlab.train.launch.ranks import run_ranks
from shardlab.train.loop import train_rank
from shardlab.train.run import TrainingRun
from shardlab.train.tracing import RampedExecutor, TracedExecutor, require_same_slices
from shardlab.train.verification.cases import SHARDINGS
from shardlab.train.verification.reference import train_reference
from tests.draw.trace_format import require_readable
from tests.support.ranks import Ranks
from tests.support.thorough import sampled
from tests.train import jobs
from tests.train.jobs import run_of, train_plainly

pytestmark = pytest.mark.starts_ranks
World = Callable[[int], Ranks]
MODEL = GPT(layers=2, hidden_size=32, heads=2, seq_len=16)
TRACING = Tracing(warm_up=1, timed_steps=3, measured_steps=1)
STRATEGIES = ["fsdp", "1f1b", "zb-h1"]


def train(rank: int, plan: TrainingRun) -> None:
    train_rank(rank, torch.device("cpu"), plan)


@pytest.fixture(scope="module")
def traced(ranks: World, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Checked, Measured, Path]]:
    """A traced run of two ranks by strategy, each run once."""
    runs: dict[str, tuple[Checked, Measured, Path]] = {}

    def run(strategy: str) -> tuple[Checked, Measured, Path]:
        if strategy not in runs:
            out = tmp_path_factory.mktemp(strategy) / "run"
            job = Job(strategy, 2, 4, MODEL, 2)
            ranks(2).call(train, run_of(job, OptimizerConfig(schedule_steps=6, warmup_steps=2), out, tracing=TRACING))
            trace = read_trace(out)
            checked = job_from_dict(trace.job).checked()
            runs[strategy] = checked, trace.measured(checked), out
        return runs[strategy]

    return run


Traced = Callable[[str], tuple[Checked, Measured, Path]]


def overlapping(events: list[Event]) -> list[tuple[Event, Event]]:
    ordered = sorted(events, key=lambda event: (event.start, event.end))
    return [(a, b) for a, b in pairwise(ordered) if b.start < a.end]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_op_of_every_tape_has_its_event(traced: Traced, strategy: str) -> None:
    checked, measured, _ = traced(strategy)
    assert measured.missing == []
    assert len(measured.steps) == TRACING.timed_steps
    for tape, events, seconds in zip(checked.program.tapes, measured.timeline.events, measured.seconds, strict=True):
        assert [event.op for event in events] == [at for at, op in enumerate(tape) if is_event(op.kind)]
        assert set(seconds) == set(range(len(tape))), "waits and frees are timed as well"
        assert all(0 <= event.start <= event.end for event in events)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_recorded_step_has_its_seconds_forward_and_backward(traced: Traced, strategy: str) -> None:
    """Also where layers compute together in steps that nobody records: in 1f1b."""
    *_, out = traced(strategy)
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert len(metrics) > TRACING.steps
    assert all(step["dtf"] > 0 and step["dtb"] > 0 for step in metrics)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_rank_computes_one_op_after_the_other_in_tape_order(traced: Traced, strategy: str) -> None:
    _, measured, _ = traced(strategy)
    for events in measured.timeline.events:
        compute = [event for event in events if event.kind not in COMMUNICATION]
        assert [event.op for event in sorted(compute, key=lambda e: (e.start, e.op))] == [e.op for e in compute]
        assert not overlapping(compute)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_communicator_does_one_communication_at_a_time(traced: Traced, strategy: str) -> None:
    checked, measured, _ = traced(strategy)
    for rank, events in enumerate(measured.timeline.events):
        streams: dict[object, list[Event]] = {}
        for event in events:
            if event.kind in COMMUNICATION:
                handle = checked.program.tapes[rank][event.op].handle
                communication = checked.communications[checked.communication_of[rank][handle]]
                streams.setdefault(queue_key(checked.program, communication), []).append(event)
        assert streams
        assert not [pair for stream in streams.values() for pair in overlapping(stream)]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_members_of_a_collective_are_in_it_at_the_same_time(traced: Traced, strategy: str) -> None:
    checked, measured, _ = traced(strategy)
    events = {(event.rank, event.op): event for rank_events in measured.timeline.events for event in rank_events}
    for communication in checked.communications:
        parts = [events[rank, op] for rank, _, op in communication.participants]
        if parts[0].kind in COLLECTIVES:
            assert max(part.start for part in parts) <= min(part.end for part in parts)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_step_takes_longer_than_any_rank_computes_in_it(traced: Traced, strategy: str) -> None:
    _, measured, _ = traced(strategy)
    assert all(0 < times.computing < max(measured.steps) for times in measured.ranks)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_memory_is_what_the_simulator_says_and_more_than_the_parameters(traced: Traced, strategy: str) -> None:
    checked, measured, _ = traced(strategy)
    for rank, (live, peak, predicted) in enumerate(
        zip(measured.live, measured.peaks, live_memory(checked), strict=True)
    ):
        loaded = [op for op in checked.program.tapes[rank] if op.kind is OpKind.LOAD_WEIGHT]
        weights = [checked.specs[rank][op.outputs[0]] for op in loaded]
        assert live["parameters"] == 4 * sum(checked.program.sizes.elements(spec) for spec in weights)
        assert live["optimizer"] == pytest.approx(2 * live["parameters"], rel=0.01)  # two moments and a counter
        assert sum(live.values()) == pytest.approx(4 * max(predicted), rel=0.03)
        assert peak >= sum(live.values())


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("strategy", sampled(STRATEGIES, {"zb-h1"}.__contains__))
def test_tracing_changes_no_number_of_the_training(ranks: World, traced: Traced, strategy: str, tmp_path: Path) -> None:
    _, _, out = traced(strategy)
    plain = run_of(Job(strategy, 2, 4, MODEL, 2), OptimizerConfig(schedule_steps=6, warmup_steps=2), tmp_path / "plain")
    ranks(2).call(train, plain)
    assert losses(out) == losses(tmp_path / "plain")
    assert (out / "weights.safetensors").read_bytes() == (tmp_path / "plain" / "weights.safetensors").read_bytes()


def test_the_ranks_own_files_have_gone_into_one(traced: Traced) -> None:
    _, _, out = traced("fsdp")
    assert [path.name for path in out.glob("*measured*")] == ["measured.jsonl"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_trace_viewer_can_read_what_was_measured(traced: Traced, strategy: str) -> None:
    _, measured, out = traced(strategy)
    events = json.loads((out / "trace.json").read_text())["traceEvents"]
    require_readable(events)
    assert sum(event["ph"] == "X" for event in events) == sum(map(len, measured.timeline.events))
    assert {event["cat"] for event in events if event["ph"] == "s"} <= {"message", "join"}
    for rank, peak in enumerate(sum(live.values()) for live in measured.live):
        counted = [sum(e["args"].values()) for e in events if e["ph"] == "C" and e["pid"] == rank]
        assert max(counted) == peak


def interrupted(rank: int, job: Job, folder: Path, steps: int) -> None:
    tracer = tracer_of(rank, job, folder)
    for _ in range(steps):
        tracer.step()
    tracer.finish()
    tracer.finish()


def tracer_of(rank: int, job: Job, folder: Path) -> TracedExecutor:
    batches = Batches(
        Corpus.from_text(bytes(range(256)) * 8, job.model.seq_len),
        job.model.seq_len,
        job.micro_batch_size,
        job.microbatches,
        0,
    )
    executor = Executor(job.checked(), rank, job.cut, batches, Settings(job.seed, job.numbers))
    return TracedExecutor(executor, job, folder, TRACING)


def test_a_run_that_is_interrupted_leaves_the_steps_that_it_had(ranks: World, tmp_path: Path) -> None:
    job = Job("fsdp", 2, 2, MODEL, 2)
    ranks(2).call(interrupted, job, tmp_path, 3)
    measured = read_trace(tmp_path).measured(job.checked())
    assert len(measured.steps) == 2
    assert measured.missing == ["memory was not measured on rank 0, 1"]


def crashed(rank: int, job: Job, folder: Path, step: int, at: int) -> None:
    """Op `at` of a step raises, and the run is over."""
    tracer = tracer_of(rank, job, folder)
    executor = tracer._executor  # pyright: ignore[reportPrivateUsage]
    for _ in range(step):
        tracer.step()

    def fail() -> None:
        raise ValueError("the batch is a fish")

    executor.instructions[at] = fail
    recorder = tracer._recorder  # pyright: ignore[reportPrivateUsage]
    recorder._timed_instructions[at] = recorder._around(at, executor.state.tape[at], fail)  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(ValueError, match="fish"):
        tracer.step()


def test_a_run_that_crashes_leaves_what_there_is(ranks: World, tmp_path: Path) -> None:
    job = Job("single", 1, 2, MODEL, 2)
    checked = job.checked()
    at = next(at for at, op in enumerate(checked.program.tapes[0]) if op.kind is OpKind.BACKWARD)
    ranks(1).call(crashed, job, tmp_path / "timed", 1, at)
    measured = read_trace(tmp_path / "timed").measured(checked)
    assert measured.steps == []
    assert measured.timeline.events[0][-1].op < at, "the op that failed has no end"
    assert measured.missing == [
        "no step was recorded to its end on all ranks",
        f"rank 0 came no further than op {at} backward(layer 1) of recorded step 0",
        "memory was not measured on rank 0",
    ]
    ranks(1).call(crashed, job, tmp_path / "measured", 4, at)
    measured = read_trace(tmp_path / "measured").measured(checked)
    assert len(measured.steps) == 3
    assert measured.missing == [f"rank 0 measured memory no further than op {at} backward(layer 1)"]
    assert sum(measured.live[0].values()) > measured.live[0]["parameters"] > 0


def test_of_a_run_whose_rank_was_killed_what_there_is_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # where no profile is
    job = Job("fsdp", 2, 2, MODEL, 2)
    with pytest.raises(RankFailed, match=r"\b1\b.*(killed|SIGKILL)"):
        run_ranks(2, jobs.die_while_traced, job, tmp_path)
    measured = read_trace(tmp_path).measured(job.checked())
    assert len(measured.steps) == 1, "the step before was recorded on both ranks"
    assert "memory was not measured on rank 0, 1" in measured.missing
    assert main(["compare", str(tmp_path), "--svg", str(tmp_path / "c.svg")]) == 0
    output = capsys.readouterr().out
    assert "incomplete: memory was not measured on rank 0, 1" in output
    assert "1     backward        2" in output
    assert "measured" in (tmp_path / "c.svg").read_text()


def test_a_run_shorter_than_its_warm_up_leaves_no_trace(ranks: World, tmp_path: Path) -> None:
    ranks(2).call(interrupted, replace(Job("ddp", 2, 2, MODEL, 2), name="short"), tmp_path, 1)
    assert not list(tmp_path.iterdir())


def test_a_run_that_is_not_traced_does_without_what_measures_memory() -> None:
    code = "import sys, shardlab.train.loop; sys.exit('torch._dynamo' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


# A batch that grows: numbers of one device under every strategy, and figures of each step's own batch.


CPU = torch.device("cpu")
MODEL_of_ramped = GPT(layers=2, hidden_size=16, heads=2, seq_len=8, dropout=0.1)
WORDS, STEPS = "0:2,2:6,3:4", 5
RAMP = BatchRamp.parse(WORDS)
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, schedule_steps=STEPS, warmup_steps=1)
PLANS = {
    "fsdp": SHARDINGS["fsdp"],
    "tp": SHARDINGS["tp"],
    "1f1b": Plan(Mesh(pp=2), "1f1b"),
    "zb-v in an arena": Plan(Mesh(pp=2), "zb-v", passes="arena"),
}


def run_with(job: Job, out: Path) -> TrainingRun:
    run = run_of(job, OPTIMIZER, out)
    return replace(run, config=replace(run.config, train=replace(run.config.train, batch_ramp=WORDS)))


def batches_of(job: Job) -> Batches:
    return Batches(Corpus.from_text(bytes(range(256)) * 8, 8), 8, 2, job.microbatches, 0, RAMP)


def ramped(rank: int, job: Job) -> tuple[list[list[float]], list[torch.Tensor]]:
    """Each step's loss, as this rank sums it, with the tokens; and on rank 0 the weights in the end."""
    model, settings, batches = job.cut, Settings(0, job.numbers, CPU, OPTIMIZER), batches_of(job)
    proofs = {count: replace(job, microbatches=count).checked() for count in RAMP.counts}
    require_same_slices(proofs, job.cut)
    first = Executor(proofs[job.microbatches], rank, job.cut, batches, settings)
    executors = {
        count: first
        if count == job.microbatches
        else Executor(proof, rank, job.cut, batches, settings, weights_of=first.state)
        for count, proof in proofs.items()
    }
    (arena,) = {rank_executor.state.arena.whole for rank_executor in executors.values()}  # one for all
    assert bool(arena.nbytes) == ("arena" in str(job.entry.passes_on(job.ranks)))
    executor = RampedExecutor(executors, run_with(job, Path("nowhere")))
    losses = [[float(figure) for figure in executor.step()] for _ in range(STEPS)]
    assert executor.state.step == STEPS
    layers = (gather_layer(first.state, first.state.kept, layer, 0) for layer in range(model.layers))
    flats = [flat for flat in layers if flat is not None]
    return losses, to_blocks(model, flats) if flats and isinstance(model, CutModel) else flats


@pytest.mark.parametrize("name", sampled(PLANS, lambda name: name != "1f1b"))
def test_a_batch_that_grows_is_one_device_s_under_every_plan(ranks: World, name: str) -> None:
    plan = PLANS[name]
    job = Job(plan, plan.mesh.world, 4, replace(MODEL_of_ramped, layers=max(2, plan.natural_layers())), 2, "fp64")
    counts = [RAMP.microbatches(step) for step in range(STEPS)]
    assert counts == [2, 2, 6, 4, 4]
    alone = train_reference(job.model, batches_of(job), counts, 0, job.numbers, OPTIMIZER)
    results = ranks(job.ranks).call(ramped, job)
    losses = [
        [sum(part) for part in zip(*step, strict=True)]
        for step in zip(*(rank_losses for rank_losses, _ in results), strict=True)
    ]
    assert [tokens for _, tokens in losses] == [count * 2 * 8 for count in counts]
    assert [total / tokens for total, tokens in losses] == pytest.approx(alone.losses, rel=1e-12)
    for ours, theirs in zip(results[0][1], alone.weights, strict=True):
        assert torch.allclose(ours[: len(theirs)], theirs, rtol=0, atol=1e-12 * float(theirs.abs().max()))


def test_figures_of_a_step_are_of_its_own_batch(ranks: World, tmp_path: Path) -> None:
    job = Job("fsdp", 2, 4, MODEL_of_ramped, 2)
    ranks(2).call(train_plainly, run_with(job, tmp_path / "run"))
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for record, count in zip(records, [2, 2, 6, 4, 4], strict=True):
        assert record["sps"] == pytest.approx(2 * count / record["dt"])
        assert record["tps"] == pytest.approx(8 * record["sps"])
        assert 0 < record["dtf"] + record["dtb"] < record["dt"]


@pytest.mark.parametrize("other", ["fsdp", "tests/check/offloading_programs.py:offloaded"])
def test_a_strategy_that_cuts_or_offloads_weights_by_the_number_of_microbatches_is_refused(other: str) -> None:
    whole, different = (Job(strategy, 2, 4, MODEL_of_ramped, 2).checked() for strategy in ("ddp", other))
    with pytest.raises(UserError, match="with 4 microbatches the strategy keeps other slices of weights than with 2"):
        require_same_slices({2: whole, 4: different}, MODEL_of_ramped)


def test_a_strategy_that_carries_other_weights_by_the_number_of_microbatches_is_refused() -> None:
    """The pass `fuse-steps` makes such strategies if the first gathers of programs differ."""
    one, two = (Job("fsdp", 2, 4, MODEL_of_ramped, 2, passes=f"fuse-steps={count}").checked() for count in (1, 2))
    with pytest.raises(
        UserError, match=r"with 4 microbatches, other gathered weights are carried .* than with 2, .*fuse-steps"
    ):
        require_same_slices({2: one, 4: two}, MODEL_of_ramped)
