"""Every optimizer under every sharding steps as on one device, and its state has the bytes that are predicted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from shardlab.execute import Executor, OptimizerConfig, Settings
from shardlab.language import Kind, Mesh, OpKind
from shardlab.language.precision import Optimizer
from shardlab.models import GPT, MLP, Blocks, Llama, MoE
from shardlab.strategies.plan.plan import Plan
from shardlab.train.batches import Batches
from shardlab.train.data.corpus import Corpus
from shardlab.train.job import Job
from shardlab.train.verification.cases import SHARDINGS
from shardlab.train.verification.verify import verify_rank
from tests.support.ranks import Ranks
from tests.support.stepped import stepped
from tests.support.thorough import sampled

pytestmark = pytest.mark.xdist_group("ranks")
World = Callable[[int], Ranks]
CPU = torch.device("cpu")
MODEL = GPT(layers=2, hidden_size=16, heads=2, seq_len=8, bias=False, ffn_hidden_size=2048)
"""A key's bias has a gradient of nothing but rounding, and Lion steps by its sign."""

PIPELINE = Plan(Mesh(pp=2))
OWNING = {"ddp": SHARDINGS["ddp"], "1f1b": PIPELINE, "ep": SHARDINGS["ep"], "cp": SHARDINGS["cp"]}
CUTTING = {
    name: SHARDINGS[name]
    for name in ("zero-1", "zero-2", "fsdp", "hsdp", "partial", "tp", "tp+sp+zero-1", "tp+fsdp", "cp+zero-2", "ep+fsdp")
}
MUON_SAMPLE = [(sharding, "fp64") for sharding in ("1f1b", "ep", "fsdp", "partial", "tp+sp+zero-1", "cp+zero-2")]
LLAMA = Llama(layers=2, hidden_size=16, heads=4, kv_heads=2, seq_len=8)
EXPERTS = MoE(layers=2, hidden_size=16, heads=2, seq_len=8, activation="swiglu")
OPTIMIZERS: tuple[Optimizer, ...] = ("adamw", "sgd", "lion", "muon")


def job_of(plan: Plan, optimizer: Optimizer, precision: str = "fp64") -> Job:
    model = MoE(layers=2, hidden_size=16, heads=2, seq_len=8, bias=False) if plan.mesh.ep > 1 else MODEL
    ranks = plan.mesh.world
    return Job(plan, ranks, 2 * plan.data_ranks, model, 2, precision, optimizer=optimizer)


@pytest.mark.parametrize(
    ("sharding", "precision"),
    [
        *((sharding, "fp64") for sharding in (*OWNING, "fsdp", "tp+sp+zero-1")),
        *((sharding, "bf16") for sharding in ("zero-1", "tp")),
    ],
)
@pytest.mark.parametrize("optimizer", ["sgd", "lion"])
def test_an_elementwise_optimizer_is_one_device_s_under_every_sharding(
    ranks: World, optimizer: Optimizer, sharding: str, precision: str
) -> None:
    """In lower precision, whose exact copies it steps, where states are whole, cut by data axes, and cut by `tp`."""
    job = job_of((OWNING | CUTTING)[sharding], optimizer, precision)
    verdict = ranks(job.ranks).call(verify_rank, CPU, job, 2)[0]
    assert verdict.ok, verdict


@pytest.mark.parametrize(
    ("sharding", "precision"),
    [
        *sampled([(sharding, "fp64") for sharding in (*OWNING, *CUTTING)], MUON_SAMPLE.__contains__),
        *((sharding, "bf16") for sharding in ("zero-1", "tp")),
    ],
)
def test_muon_is_one_device_s_under_every_sharding(ranks: World, sharding: str, precision: str) -> None:
    """In lower precision where directions are whole, and where each kind of slice is gathered for them."""
    job = job_of((OWNING | CUTTING)[sharding], "muon", precision)
    verdict = ranks(job.ranks).call(verify_rank, CPU, replace(job, model=replace(job.model, layers=3)), 2)[0]
    assert verdict.ok, verdict


@pytest.mark.parametrize("model", [LLAMA, EXPERTS], ids=["queries share keys", "experts in slices"])
def test_muon_steps_matrices_whose_pieces_lie_otherwise(ranks: World, model: Blocks) -> None:
    plan = Plan(Mesh(dp_shard=2, tp=2), shard_optimizer=("dp_shard",), sequence_parallel=True)
    plan = Plan(Mesh(tp=2, ep=2)) if isinstance(model, MoE) else plan
    verdict = ranks(4).call(verify_rank, CPU, replace(job_of(plan, "muon"), model=model), 3)[0]
    assert verdict.ok, verdict


def test_fsdp_s_page_gathers_directions_for_muon_alone(ranks: World) -> None:
    job = Job("fsdp", 2, 2, MODEL, 2, "fp64", optimizer="muon")
    verdict = ranks(2).call(verify_rank, CPU, job, 3)[0]
    assert verdict.ok, verdict
    directions = [
        [op.layer for op in replace(job, optimizer=each).checked().program.tapes[0] if op.kind is OpKind.DIRECTION]
        for each in OPTIMIZERS
    ]
    assert directions == [[], [], [], [0, 1]]


@pytest.mark.parametrize("name", ["wsdp", "tensor-parallel", "column-parallel"])
def test_pages_that_cut_matrices_gather_directions_for_muon_alone(ranks: World, name: str) -> None:
    model = MLP(layers=2, hidden_size=16, seq_len=8) if name == "column-parallel" else MODEL
    job = Job(name, 2, 2, model, 2, "fp64", optimizer="muon")
    verdict = ranks(2).call(verify_rank, CPU, job, 3)[0]
    assert verdict.ok, verdict
    tapes = replace(job, optimizer="adamw").checked().program.tapes
    assert not any(op.kind is OpKind.DIRECTION for tape in tapes for op in tape)


def kept_and_predicted(rank: int, job: Job) -> tuple[int, int]:
    """Bytes of a rank's optimizer states, and those that the program counts."""
    batches = Batches(Corpus.split(bytes(range(256)) * 8, 8), 8, 2, job.microbatches, 0)
    optimizer = OptimizerConfig(optimizer=job.optimizer, schedule_steps=1, warmup_steps=1, ema=job.ema)
    state = Executor(job.checked(), rank, job.cut, batches, Settings(0, job.numbers, CPU, optimizer)).state
    for (layer, holds), part in state.opt_states.items():
        length = sum(map(len, part.weights))
        assert length == sum(stop - start for start, stop in state.shapes.ranges(layer, holds))
        stepped(part, torch.zeros(length), 0)
    moments = [moment for part in state.opt_states.values() for moment in part.moments if moment.dim()]
    copies = [copy for part in state.opt_states.values() for copy in part.exact]
    states = [spec for spec in state.specs.values() if spec.kind is Kind.OPT_STATE and spec.step == 0]
    predicted = sum(state.checked.program.sizes.bytes(spec) for spec in states)
    return sum(tensor.nbytes for tensor in [*moments, *copies]), predicted


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("ema", [None, 0.9])
def test_an_optimizer_s_state_has_the_bytes_that_are_predicted(
    ranks: World, optimizer: Optimizer, precision: str, ema: float | None
) -> None:
    model = replace(MODEL, layers=1)
    job = replace(job_of(SHARDINGS["ddp"], optimizer, precision), model=model, ema=ema)
    for kept, predicted in ranks(2).call(kept_and_predicted, job):
        assert kept == predicted
