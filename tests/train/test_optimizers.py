"""Every optimizer under every sharding steps as on one device, and its state has the bytes that are predicted."""

# pyright: reportUnknownVariableType=false
# safetensors leaves some of its annotations out.

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from shardlab.check import check
from shardlab.cli import main
from shardlab.common.errors import UserError
from shardlab.execute.collect import averaged_weights
from shardlab.execute.executor import Executor
from shardlab.execute.optimizers.settings import OptimizerConfig
from shardlab.execute.settings import Settings
from shardlab.language import Holds, Kind, Mesh, OpKind, trace
from shardlab.language.precision import Optimizer
from shardlab.models import GPT, MLP, Blocks, Llama, MoE
from shardlab.strategies.plan.plan import Plan
from shardlab.strategies.plan.program import program_from_plan
from shardlab.train.batches import Batches
from shardlab.train.config import LoggingConfig
from shardlab.train.data.corpus import Corpus
from shardlab.train.huggingface.convert import convert_weights
from shardlab.train.huggingface.sources import open_source
from shardlab.train.job import Job
from shardlab.train.run import Summary, TrainingRun
from shardlab.train.verification.cases import SHARDINGS
from shardlab.train.verification.verify import verify_rank
from tests.support.ranks import Ranks
from tests.support.stepped import stepped
from tests.support.thorough import examples, sampled
from tests.train.jobs import run_of, train_plainly
from tests.train.verify_cases import ROOTED

pytestmark = pytest.mark.starts_ranks
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
MUON_SAMPLE = [(sharding, "fp64") for sharding in ("1f1b", "ep", "fsdp", "partial")]
"""Slices of `tp` that data axes cut again are those of `test_muon_steps_matrices_whose_pieces_lie_otherwise`."""
LLAMA = Llama(layers=2, hidden_size=16, heads=4, kv_heads=2, seq_len=8)
EXPERTS = MoE(layers=2, hidden_size=16, heads=2, seq_len=8, activation="swiglu")
OPTIMIZERS: tuple[Optimizer, ...] = ("adamw", "sgd", "lion", "muon")


def job_of(plan: Plan, optimizer: Optimizer, precision: str = "fp64") -> Job:
    model = MoE(layers=2, hidden_size=16, heads=2, seq_len=8, bias=False) if plan.mesh.ep > 1 else MODEL
    ranks = plan.mesh.world
    return Job(plan, ranks, 2 * plan.data_ranks, model, 2, precision, optimizer=optimizer)


@pytest.mark.parametrize(
    ("optimizer", "sharding", "precision"),
    sampled(
        [
            *(("lion", sharding, "fp64") for sharding in (*OWNING, "fsdp", "tp+sp+zero-1")),
            *(("lion", sharding, "bf16") for sharding in ("zero-1", "tp")),
            ("sgd", "tp+sp+zero-1", "fp64"),
            ("sgd", "zero-1", "bf16"),
        ],
        lambda case: case[0] == "sgd" or case[1] in ("1f1b", "ep", "fsdp", "tp"),
    ),
)
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
        [op.layer for op in replace(job, optimizer=optimizer).checked().program.tapes[0] if op.kind is OpKind.DIRECTION]
        for optimizer in OPTIMIZERS
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
    batches = Batches(Corpus.from_text(bytes(range(256)) * 8, 8), 8, 2, job.microbatches, 0)
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
    for kept_bytes, predicted in ranks(2).call(kept_and_predicted, job):
        assert kept_bytes == predicted


# Averages of weights: one device's under every sharding, judged beside the weights, and left in a file.


AVERAGED = GPT(layers=2, hidden_size=16, heads=2, seq_len=8, ffn_hidden_size=2048)
PLANS = {name: SHARDINGS[name] for name in ("ddp", "zero-1", "fsdp", "partial", "tp", "tp+sp+zero-1", "cp", "ep")}
PIPED = {"1f1b": Plan(Mesh(pp=2)), "1f1b of zero-1": replace(SHARDINGS["zero-1"], mesh=Mesh(dp_shard=2, pp=2))}


def job_of_of_average(plan: Plan, precision: str = "fp64") -> Job:
    model = MoE(layers=2, hidden_size=16, heads=2, seq_len=8) if plan.mesh.ep > 1 else AVERAGED
    return Job(plan, plan.mesh.world, 2 * plan.data_ranks, model, 2, precision, ema=0.7)


@pytest.mark.parametrize(
    ("name", "precision"),
    sampled(
        [*((name, "fp64") for name in (*PLANS, *PIPED)), *((name, "bf16") for name in ("ddp", "fsdp", "tp", "1f1b"))],
        [("tp", "fp64"), ("ep", "fp64"), ("1f1b of zero-1", "fp64"), ("fsdp", "bf16")].__contains__,
    ),
)
def test_averages_are_one_device_s_under_every_sharding(ranks: World, name: str, precision: str) -> None:
    """In lower precision where they are cut by nobody, by data axes, by `tp` and by stages."""
    job = job_of_of_average((PLANS | PIPED)[name], precision)
    verdict = ranks(job.ranks).call(verify_rank, CPU, job, 3)[0]
    assert verdict.ok, verdict


@pytest.mark.parametrize(
    "program",
    sampled(
        ["offloaded", "state_away", "weights_away", "state_goes_to_weight"], {"state_away", "weights_away"}.__contains__
    ),
)
def test_averages_of_weights_and_states_that_lie_elsewhere_are_one_device_s(ranks: World, program: str) -> None:
    job = Job(f"tests/check/offloading_programs.py:{program}", 2, 4, AVERAGED, 2, "fp64", ema=0.7)
    verdict = ranks(2).call(verify_rank, CPU, job, 3)[0]
    assert verdict.ok, verdict


@pytest.mark.parametrize("program", ["examples/parameter_server.py:parameter_server", f"{ROOTED}:by_root"])
def test_ranks_that_step_nothing_are_given_averages_of_what_they_keep(ranks: World, program: str) -> None:
    job = Job(program, 2, 4, AVERAGED, 2, "fp64", ema=0.7)
    verdict = ranks(2).call(verify_rank, CPU, job, 3)[0]
    assert verdict.ok, verdict


def looked_at(rank: int, job: Job, spoiled: int) -> list[bool]:
    """For three steps, of which the gradient of one is not finite: whether the averages are what they should be."""
    batches = Batches(Corpus.from_text(bytes(range(256)) * 8, 8), 8, 2, job.microbatches, 0)
    optimizer = OptimizerConfig(schedule_steps=3, warmup_steps=1, ema=0.7)
    settings = Settings(0, job.numbers, CPU, optimizer)
    executor = Executor(job.checked(), rank, job.cut, batches, settings)
    state, followed, right = executor.state, list[dict[tuple[int, Holds], torch.Tensor]](), list[bool]()
    for step in range(3):
        before = {key: tensor.clone() for key, tensor in state.kept.items()}
        state.loss_scale.scale = float("nan") if step == spoiled else 1.0
        executor.step()
        after = {key: tensor.clone() for key, tensor in state.kept.items()}
        if step != spoiled:
            followed.append(after)
        else:
            right.append(all(torch.equal(before[key], after[key]) for key in before))
        ages = [0.7**age for age in reversed(range(len(followed)))]
        with averaged_weights(state):
            for key, tensor in state.kept.items():
                mean = sum(age * weights[key] for age, weights in zip(ages, followed, strict=True))
                expected = mean / sum(ages) if followed else before[key]
                right.append(bool(torch.allclose(tensor, torch.as_tensor(expected), rtol=1e-12, atol=1e-14)))
        right.append(all(torch.equal(tensor, after[key]) for key, tensor in state.kept.items()))
    return right


CLIPPED = Job("tests/check/offloading_programs.py:clipped_here", 2, 4, AVERAGED, 2, "fp64", ema=0.7)


@pytest.mark.parametrize("job", [job_of_of_average(SHARDINGS["zero-1"]), CLIPPED], ids=["zero-1", "weights elsewhere"])
@pytest.mark.parametrize("spoiled", [0, 1])
def test_a_step_that_is_left_out_is_not_averaged_and_a_look_leaves_the_weights(
    ranks: World, job: Job, spoiled: int
) -> None:
    for right in ranks(2).call(looked_at, job, spoiled):
        assert all(right)


def trained(world: World, run: TrainingRun) -> Summary:
    summary = world(run.job.ranks).call(train_plainly, run)[0]
    assert isinstance(summary, Summary)
    return summary


@pytest.mark.parametrize("strategy", sampled(["fsdp", "zero-1"], {"fsdp"}.__contains__))
def test_a_run_tells_the_loss_of_averages_and_leaves_a_file_that_goes_where_its_folder_does(
    ranks: World, tmp_path: Path, strategy: str
) -> None:
    optimizer = OptimizerConfig(learning_rate=1e-2, schedule_steps=8, warmup_steps=2, ema=0.8)
    run = run_of(Job(strategy, 2, 4, AVERAGED, 2), optimizer, tmp_path / "run")
    run = replace(run, config=replace(run.config, logging=LoggingConfig(validate_every=4)))
    summary = trained(ranks, run)
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    (look,) = [record for record in records if "validation_loss" in record]
    assert look["validation_loss"] != look["validation_loss_ema"]
    assert summary.validation_after_ema is not None
    assert summary.validation_after < summary.validation_after_ema < summary.validation_before
    file = tmp_path / "run" / "ema.safetensors"
    plain, averages = load_file(file.parent / "weights.safetensors"), load_file(file)
    assert {name: tensor.shape for name, tensor in averages.items()} == {n: t.shape for n, t in plain.items()}

    still = OptimizerConfig(learning_rate=0.0, schedule_steps=1, warmup_steps=0, weight_decay=0.0)
    convert_weights(open_source(file), tmp_path / "hf", "hf")
    for name, init in (("file", file), ("hf", tmp_path / "hf")):
        again = trained(ranks, run_of(Job("single", 1, 4, AVERAGED, 2), still, tmp_path / f"from {name}", init=init))
        assert again.validation_before == pytest.approx(summary.validation_after_ema, rel=1e-6)
        assert again.validation_after_ema is None
        assert not (tmp_path / f"from {name}" / "ema.safetensors").exists()


# Blocks that a plan freezes keep their weights, and have neither gradients nor optimizer states.


FREEZE_MODEL = GPT(layers=4, hidden_size=16, heads=2, seq_len=8, bias=False)


def job_of_of_freeze(plan: Plan, model: Blocks = FREEZE_MODEL, optimizer: Optimizer = "adamw") -> Job:
    if plan.mesh.ep > 1:
        model = MoE(layers=4, hidden_size=16, heads=2, seq_len=8, bias=False)
    return Job(plan, plan.mesh.world, 2 * plan.data_ranks, model, 2, "fp64", optimizer=optimizer)


CASES: dict[str, Job] = {
    **{name: job_of_of_freeze(replace(plan, freeze=(0, 2))) for name, plan in SHARDINGS.items()},
    "a whole stage": job_of_of_freeze(replace(PIPELINE, freeze=(0, 1))),
    "split backward passes": job_of_of_freeze(replace(PIPELINE, schedule="zb-v", freeze=(1, 3))),
    "a tied embedding": job_of_of_freeze(replace(PIPELINE, freeze=(0,)), replace(FREEZE_MODEL, tied=True)),
    "a tied head": job_of_of_freeze(replace(PIPELINE, freeze=(3,)), replace(FREEZE_MODEL, tied=True)),
    "blocks that are recomputed": job_of_of_freeze(replace(PIPELINE, recompute="full", freeze=(2,))),
    "muon": job_of_of_freeze(replace(SHARDINGS["fsdp"], freeze=(1,)), optimizer="muon"),
}
SAMPLE = {"zero-1", "tp+fsdp", "ep", "a whole stage", "split backward passes", "a tied embedding"}


@pytest.mark.starts_ranks
@pytest.mark.parametrize("name", sampled(CASES, SAMPLE.__contains__))
def test_the_numbers_are_those_of_one_device_that_freezes_the_same_blocks(ranks: World, name: str) -> None:
    job = CASES[name]
    verdict = ranks(job.ranks).call(verify_rank, CPU, job, 2, {}, 0.1)[0]
    assert verdict.ok, verdict


@settings(max_examples=examples(15), deadline=None)
@given(st.sampled_from(sorted(CASES)), st.sets(st.integers(0, 3), max_size=3))
def test_frozen_blocks_alone_have_no_gradient_and_no_state(name: str, blocks: set[int]) -> None:
    plan = CASES[name].strategy
    assert isinstance(plan, Plan)
    job = job_of_of_freeze(replace(plan, freeze=tuple(blocks), recompute="none"))
    checked = check(trace(program_from_plan(job.strategy), job.entry.grid(job.ranks), job.sizes, job.microbatches))  # pyright: ignore
    of_blocks = {
        layer for layer, run in enumerate(job.cut.runs) if any(block in blocks for block, _ in run.parameters())
    }
    assert set(checked.frozen) == {layer for layer in of_blocks if job.sizes.weights[layer]}
    of_weights = {OpKind.LOAD_OPT_STATE, OpKind.UPDATE, OpKind.BACKWARD, OpKind.BACKWARD_WEIGHT, OpKind.NORM}
    touched = {op.layer for tape in checked.program.tapes for op in tape if op.kind in of_weights}
    assert not touched & of_blocks


@pytest.mark.parametrize(
    ("freeze", "sentence"),
    [
        ((4,), "freeze names block 4, but the model has blocks 0-3; give numbers of these"),
        ((0, 1, 2, 3), "freeze names all 4 blocks of the model, so nothing is trained; leave some out"),
        ((0, 2), "freeze names block 0 and not block 1, but this plan cuts blocks so that the last biases of a block"),
    ],
)
def test_blocks_that_cannot_be_frozen_are_one_sentence(freeze: tuple[int, ...], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        job_of_of_freeze(Plan(Mesh(tp=2), freeze=freeze), replace(FREEZE_MODEL, bias=True)).checked()


def test_a_run_from_other_weights_leaves_frozen_ones_bitwise_as_they_were_also_when_it_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    small = "--ranks 1 --layers 3 --hidden-size 16 --seq-len 8 --steps 1"
    assert main(["train", *small.split(), "--out", str(first)]) == 0
    words = "--dp-shard 1 --freeze 0 1 --seq-len 8 --ema 0.9 --clip 1"
    assert main(["train", "--init", str(first), *words.split(), "--steps", "1", "--out", str(second)]) == 0
    assert main(["train", "--resume", str(second), "--steps", "2"]) == 0
    before = load_file(first / "weights.safetensors")
    for name in ("weights", "ema"):
        after = load_file(second / f"{name}.safetensors")
        for part, weights in before.items():
            frozen = part.startswith(("layers.0.", "layers.1."))
            assert torch.equal(weights, after[part]) == frozen, part
    capsys.readouterr()
    assert main(["train", "--resume", str(second), "--steps", "3", "--strategy", "zero-1", "--ranks", "1"]) == 2
    assert "--freeze: 0 1 before, none now; a resumed run keeps this setting" in capsys.readouterr().err
