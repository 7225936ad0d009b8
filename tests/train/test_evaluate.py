"""The loss of weights is one device's, whatever lays the model over ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from shardlab.execute.executor import Executor
from shardlab.execute.settings import Settings
from shardlab.execute.transport.collectives import Groups
from shardlab.language import Mesh
from shardlab.models.tensors import add_borrowed, cross_entropy, initial_weights, make_layers, parameter_views
from shardlab.strategies import STRATEGIES, Plan
from shardlab.train.evaluate import Evaluation, OrderedBatches
from shardlab.train.job import Job
from shardlab.train.verification.cases import ALONE, CASES, FSDP
from tests.support.ranks import Ranks
from tests.support.thorough import sampled
from tests.train.verify_cases import DROPPING, DROPS, TIED

pytestmark = pytest.mark.starts_ranks
World = Callable[[int], Ranks]
CPU = torch.device("cpu")
COUNT = 5
"""Microbatches: the last step has some that do not count."""

SAMPLE = {
    "ddp",
    "fsdp",
    "wsdp",
    "1f1b",
    "zb-v",
    "tensor-parallel",
    "column-parallel",
    "expert-parallel",
    "pipeline-fsdp",
}
"""Strategies that lay a model over ranks each in its own way. Plans of two ranks stand for those of other axes."""

JOBS = {
    **{case.row: case.job() for case in CASES if case.column == ALONE},
    "pp of dropout": Job(Plan(Mesh(pp=2), "1f1b"), 2, 4, DROPS, 2),
    "tp of a tied head": Job(Plan(Mesh(tp=2), sequence_parallel=True), 2, 4, TIED, 2),
    "cp": Job(Plan(Mesh(cp=2)), 2, 4, DROPS, 2),
    "cp, gathered": Job(Plan(Mesh(cp=2), context="all_gather"), 2, 4, DROPS, 2),
    "ep of experts that drop": Job(Plan(Mesh(ep=2)), 2, 4, DROPPING, 2),
    "all weights cut": Job(FSDP, 2, 4, DROPS, 2),
    "fp16": Job(FSDP, 2, 4, DROPS, 2, "fp16"),
    "fsdp after passes": Job("fsdp", 2, 4, DROPS, 2, passes="prefetch=2,bucket=2,defer=2"),
}


def is_in_sample(name: str) -> bool:
    """Whether the suite runs a job: one of a built-in strategy stands for all that lay the model out alike."""
    return name in SAMPLE or name not in STRATEGIES


def cut(job: Job, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A microbatch of random tokens."""
    shape = (job.micro_batch_size, job.model.seq_len + 1)
    tokens = torch.randint(job.model.vocab_size, shape, generator=torch.Generator().manual_seed(number))
    return tokens[:, :-1], tokens[:, 1:]


def batches_of(job: Job) -> OrderedBatches:
    return OrderedBatches(job.micro_batch_size, COUNT, job.microbatches, partial(cut, job))


def evaluated(rank: int, job: Job) -> tuple[float, int]:
    loss = Evaluation(job, job.checked(), rank, CPU, batches_of(job)).loss()
    return loss.mean, loss.tokens


@torch.no_grad()
def alone(job: Job) -> float:
    """The mean loss of all microbatches, layer by layer."""
    model = job.model
    flats = [initial_weights(model, layer, job.seed, torch.float64) for layer in range(model.layers)]
    parameters = add_borrowed(model, [parameter_views(model.layout(layer), flat) for layer, flat in enumerate(flats)])
    total, tokens = 0.0, 0
    for number in range(COUNT):
        x, targets = cut(job, number)
        for layer, weights in zip(make_layers(model), parameters, strict=True):
            x = layer(weights, x)
        total += float(cross_entropy(x, targets))
        tokens += targets.numel()
    return total / tokens


@pytest.mark.parametrize("name", sampled(JOBS, is_in_sample))
def test_the_loss_is_that_of_one_device(ranks: World, name: str) -> None:
    job = JOBS[name]
    results = ranks(job.ranks).call(evaluated, job)
    tokens = COUNT * job.micro_batch_size * job.model.seq_len
    exact = {"fp64": 1e-12, "fp32": 1e-6, "fp16": 1e-3}[job.precision]
    assert results == [(pytest.approx(alone(job), rel=exact), tokens)] * job.ranks


def trained(rank: int, job: Job) -> tuple[float, float]:
    """The loss before and after two steps, of the weights that a training keeps."""
    groups: Groups = {}
    checked, batches = job.checked(), batches_of(job)
    executor = Executor(checked, rank, job.cut, batches, Settings(job.seed, job.numbers, CPU), groups=groups)
    evaluation = Evaluation(job, checked, rank, CPU, batches, weights_of=executor.state, groups=groups)
    before = evaluation.loss().mean
    for _ in range(2):
        executor.step()
    return before, evaluation.loss().mean


@pytest.mark.parametrize("name", ["fsdp", "zero-1", "tp of a tied head", "pp of dropout"])
def test_a_training_is_evaluated_by_the_weights_that_it_has(ranks: World, name: str) -> None:
    job = JOBS[name]
    before, after = ranks(job.ranks).call(trained, job)[0]
    assert before == pytest.approx(alone(job), rel=1e-6)
    assert after != before
