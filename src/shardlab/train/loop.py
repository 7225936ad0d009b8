"""Training: one rank's loop, and what rank 0 makes of the result."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import median

import torch
from rich.console import Console
from torch import Tensor

from shardlab.checkpoint import Checkpoint
from shardlab.exchange import initial_from
from shardlab.execute import Executor, Settings
from shardlab.execute.communicator import Groups
from shardlab.models.tensors import Choice
from shardlab.program import Kind
from shardlab.rules.pieces import counted
from shardlab.train.audit import Audit, AuditedExecutor
from shardlab.train.data import Batches
from shardlab.train.evaluate import Evaluation, InOrder
from shardlab.train.figures import bytes_per_token
from shardlab.train.heartbeat import say
from shardlab.train.interrupt import StopRequest
from shardlab.train.launch import backend_of
from shardlab.train.loggers import loggers_of
from shardlab.train.output import OutputFolder
from shardlab.train.parallel_writer import ParallelWriter
from shardlab.train.printable import printable
from shardlab.train.progress import TrainingProgress
from shardlab.train.ramped import RampedExecutor
from shardlab.train.run import WARM_UP, Summary, TrainingRun
from shardlab.train.sample import continued, opening
from shardlab.train.saved import VALIDATION, VALIDATION_EMA, saved_in
from shardlab.train.saving import Saver
from shardlab.train.steps import StepResult, TrainingSteps, diverged
from shardlab.train.tracing import TracedExecutor
from shardlab.train.weights import save_weights
from shardlab.train.world import RunningWorld, agree


def train_rank(rank: int, device: torch.device, run: TrainingRun) -> Summary | None:
    """Run one rank's part of a training; rank 0 writes the output folder and gives the summary.

    Raises:
        UserError: on rank 0, when a loss is not finite, or the folder cannot be made.
    """
    with StopRequest(partial(saved_in, run.out) if rank == 0 else None) as stop:
        return _train(rank, device, run, stop)


def _train(rank: int, device: torch.device, run: TrainingRun, stop: StopRequest) -> Summary | None:
    job, corpus = run.job, run.corpus()
    ramp = run.config.train.ramp
    batches = Batches(corpus, job.model.seq_len, job.micro_batch_size, job.microbatches, job.seed, ramp)
    checked = job.checked()
    proofs = {count: replace(job, microbatches=count).checked() for count in ramp.counts} | {job.microbatches: checked}
    for proof in proofs.values():
        agree(proof, corpus.identity, str(run.resume))
    world = RunningWorld.gathered(rank, device, checked.program.mesh)
    checkpoint = None if run.resume is None else Checkpoint.open(run.resume)
    initial = blank if checkpoint else run.config.train.init and initial_from(run.config.train.init, job.cut)
    settings = Settings(
        job.seed,
        job.numbers,
        device,
        run.config.optimizer,
        initial,
        compile=run.config.train.compile,
        cuda_graph=run.config.train.cuda_graph,
    )
    groups: Groups = {}
    needed = rank, job.cut, batches, settings, backend_of(device.type)
    executor = Executor(checked, *needed, groups=groups)
    if checkpoint is not None:
        checkpoint.restore(executor.state)
    executors = {
        count: executor if proof is checked else Executor(proof, *needed, groups=groups, of=executor.state)
        for count, proof in proofs.items()
    }
    judged = InOrder(job.micro_batch_size, batches.validation_microbatches, job.microbatches, batches.validation)
    validation = Evaluation(job, checked, rank, device, judged, of=executor.state, groups=groups)
    every = run.config.train.audit_every
    audits = [] if every is None else [Audit(each) for each in executors.values()]
    ramped = RampedExecutor(executors, run, executor.state.step)
    tracer = ramped.tracer
    given = run.config.logging.prompt
    prompt = opening(corpus) if given is None else given.encode(errors="surrogateescape")

    def sample() -> str:
        writer = ParallelWriter(executor.state, job.model, Choice(seed=job.seed), lambda: stop.asked)
        return continued(writer.go_on, prompt, corpus.tokenizer)

    stepping = ramped if every is None else AuditedExecutor(ramped, audits, every, partial(saved_in, run.out))
    saver = Saver(ramped, run, batches)
    training = TrainingSteps(stepping, ramped, run, stop, saver, bytes_per_token(corpus))
    if rank == 0:
        room = job.model.parameter_count * job.numbers.bytes(Kind.WEIGHT)
        folder = OutputFolder(run.out, room, since=executor.state.step if run.again else None)
        world.print(Console(file=sys.stderr))
        with TrainingProgress(run.config.train.steps, run.config.logging.log_every) as progress:
            folder.begin(run.record(corpus, checked, world), run.config.as_toml(), checked, job.title, corpus.tokenizer)
            folder.loggers = loggers_of(run.config.logging, run.out, run.config.as_dict())
            return _first_rank(
                run, batches, executor, validation, tracer, training, saver, folder, progress, prompt, sample
            )
    if checkpoint is None:
        validation.loss()
    for step in training:
        if step.diverged:
            return None
        validates, samples = looks(run, step)
        if validates:
            validation.losses()
        if samples:
            sample()
    save_weights(executor.state, run.out)
    if tracer is not None:
        tracer.finish()
    if math.isfinite(validation.losses()[VALIDATION]):
        sample()
    return None


def _first_rank(
    run: TrainingRun,
    batches: Batches,
    executor: Executor,
    validation: Evaluation,
    tracer: TracedExecutor | None,
    training: TrainingSteps,
    saver: Saver,
    folder: OutputFolder,
    progress: TrainingProgress,
    prompt: bytes,
    sample: Callable[[], str],
) -> Summary:
    """What rank 0 does, from the first validation to the sample."""
    job, state = run.job, executor.state
    began = state.step
    if run.resume is None:
        progress.begin("validation before training")
        before = validation.loss().mean
        progress.validated({VALIDATION: before})
    else:
        before = Checkpoint.open(run.resume).validation_before
    saver.validation_before = before
    ops = sum(map(len, state.checked.program.tapes))
    say(f"{job.title} on {counted(job.ranks, 'rank')}: {ops} ops checked, drawn in {run.out}/strategy.svg")
    if run.resume is not None:
        say(f"resumed after step {began}, from {run.resume}")
        tell_threads(Checkpoint.open(run.resume).threads, state.settings.device)

    progress.begin("first step")
    times: list[float] = []
    for step in training:
        times.append(step.metrics["dt"])
        validates, samples = looks(run, step)
        if validates:
            step.metrics.update(validation.losses())
        folder.write_metrics(step.metrics, pending=not (run.logs(step.metrics["step"]) or step.diverged))
        progress.show(step.metrics)
        if samples:
            progress.say(sample())
        if step.diverged:
            folder.write_plot(before, {VALIDATION: math.nan})
            folder.close()
            raise diverged(run, step.not_finite)
        if step.not_finite:
            say(f"{step.not_finite} is not finite; the step is left out")

    progress.begin("writing the weights")  # first, since a run that is interrupted has little time
    folder.note_unwritten(save_weights(state, run.out))
    if tracer is not None:
        tracer.finish()
    progress.begin("validation after training")
    losses = validation.losses()
    progress.validated(losses)
    after = losses[VALIDATION]  # not a number where weights are not
    folder.write_plot(before, losses)
    folder.close()
    if not math.isfinite(after):
        raise diverged(run, f"the validation loss after step {began + len(times)}")
    progress.begin("sample")
    done = began + len(times)
    times = times or [folder.last_dt]  # all steps had been taken
    since, microbatches = run.config.train.ramp.stage(done - 1)  # speeds are those of one batch, the last
    warm_up = min(max(WARM_UP, since - began), len(times) - 1)
    dt = median(times[warm_up:])
    return Summary(
        steps=done,
        epochs=batches.position(done).epochs,
        interrupted=done < run.config.train.steps,
        warned=training.warned,
        saved=saver.saved,
        validation_before=before,
        validation_after=after,
        validation_after_ema=losses.get(VALIDATION_EMA),
        warm_up=warm_up,
        dt=dt,
        tps=replace(job, microbatches=microbatches).tokens / dt,
        seconds=sum(times),
        prompt=printable(prompt.decode(errors="replace")),
        sample=sample(),
        out=str(run.out),
        unwritten=folder.unwritten,
    )


def looks(run: TrainingRun, step: StepResult) -> tuple[bool, bool]:
    """Whether the weights are validated, and sampled from, after a step: not of a run that has diverged, nor before one
    is saved that was asked to end, and has seconds for it.
    """
    return (False, False) if step.diverged or step.stopping else run.looks(step.metrics["step"])


def tell_threads(before: int, device: torch.device) -> None:
    """Say that a run which is resumed differs in last bits where its ranks compute on another number of threads."""
    now = torch.get_num_threads()
    if device.type == "cpu" and now != before:
        say(
            f"each rank computes on {counted(now, 'thread')}, before on {before}, so numbers may differ in their last "
            f"bits; OMP_NUM_THREADS={before} keeps them"
        )


def blank(layer: int, length: int, ranges: Sequence[tuple[int, int]], dtype: torch.dtype) -> Tensor:
    """Weights that are not there yet: whatever a checkpoint did not fill in would be seen at the first step."""
    return torch.full((sum(stop - start for start, stop in ranges),), math.nan, dtype=dtype)
