"""A training run: the same numbers under every strategy, and a folder with everything in it."""

# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false
# safetensors leaves some of its annotations out.

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, Mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from shardlab.execute.executor import Executor
from shardlab.execute.optimizers.settings import OptimizerConfig
from shardlab.execute.recording import step_with_memory
from shardlab.execute.settings import Settings
from shardlab.language import Mesh, OpKind, UserError
from shardlab.language.precision import FP64
from shardlab.language.tape import MemoryRecord
from shardlab.models import GPT, Blocks, Llama, MoE
from shardlab.simulate.timeline.memory import memory_in_bytes
from shardlab.strategies import Plan
from shardlab.train.batches import Batches
from shardlab.train.callbacks import Sampling, Validation, warn_of_threads
from shardlab.train.config import LoggingConfig
from shardlab.train.data import Corpus
from shardlab.train.data.documents import Input
from shardlab.train.data.prepare import prepare
from shardlab.train.data.prepared_folder import find_tokenizer
from shardlab.train.data.stream import SequenceStream, TokenRun
from shardlab.train.data.tokenizers import ByteTokenizer
from shardlab.train.history import free_folder
from shardlab.train.huggingface.convert import convert_weights
from shardlab.train.huggingface.sources import open_source
from shardlab.train.job import Job
from shardlab.train.loop import fit
from shardlab.train.output import OutputFolder
from shardlab.train.run import Summary
from shardlab.train.sample import choose_prompt
from shardlab.train.steps import Callback, StepResult, Training, UserCallback
from shardlab.train.verification import verify
from shardlab.train.verification.cases import Verdict
from shardlab.train.verification.verify import verify_rank
from shardlab.train.world import require_agreement
from tests.support.ranks import Ranks
from tests.support.thorough import sampled
from tests.train import user_programs
from tests.train.jobs import run_of, train_by_ticks, train_plainly

pytestmark = pytest.mark.starts_ranks
World = Callable[[int], Ranks]
MODEL = GPT(layers=4, hidden_size=16, heads=2, seq_len=16)


def run(
    world: World, strategy: str, ranks: int, out: Path, steps: int = 12, train: Callable[..., Any] = train_plainly
) -> Summary:
    job = Job(strategy, ranks, 4, MODEL, 2)
    plan = run_of(job, OptimizerConfig(learning_rate=1e-2, schedule_steps=steps, warmup_steps=2), out)
    summary = world(ranks).call(train, plan)[0]
    assert isinstance(summary, Summary)
    return summary


def test_a_run_of_cut_experts_leaves_all_of_them_and_lowers_the_loss(ranks: World, tmp_path: Path) -> None:
    model = MoE(layers=2, hidden_size=16, heads=2, seq_len=8, auxiliary=0.1)
    job = Job("expert-parallel", 2, 4, model, 2)
    plan = run_of(job, OptimizerConfig(learning_rate=1e-2, schedule_steps=20, warmup_steps=2), tmp_path / "run")
    summary = ranks(2).call(train_plainly, plan)[0]
    assert summary.validation_after < summary.validation_before - 0.3
    weights = load_file(tmp_path / "run" / "weights.safetensors")
    assert sum(tensor.numel() for tensor in weights.values()) == model.parameter_count


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_training_lowers_the_validation_loss_and_leaves_a_whole_folder(ranks: World, tmp_path: Path) -> None:
    summary = run(ranks, "fsdp", 2, tmp_path / "run", train=train_by_ticks)
    assert summary.validation_after < summary.validation_before - 0.3
    assert (summary.steps, summary.interrupted) == (12, False)
    assert summary.prompt.encode() == choose_prompt(Corpus.open((), MODEL.seq_len))
    assert summary.sample.startswith(summary.prompt)
    files = {file.name for file in (tmp_path / "run").iterdir()}
    wanted = "metrics.jsonl strategy.svg weights.safetensors run.json config.toml checkpoints"
    assert files == set(wanted.split())
    first = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert {"step", "loss", "bits_per_byte", "learning_rate", "sps", "sps_per_gpu", "tps", "tps_per_gpu"} <= set(first)
    assert first["tps"] == pytest.approx(4 * 2 * MODEL.seq_len / first["dt"])
    for name in ("dt", "dtf", "dtb", "memory"):
        assert 0 < first[f"{name}_min"] <= first[name] <= first[f"{name}_max"]
    assert first["dtf"] + first["dtb"] < first["dt"]
    assert first["mfu"] is None
    assert first["grad_norm"] > 0
    assert summary.warm_up == 3
    weights = load_file(tmp_path / "run" / "weights.safetensors")
    assert sum(tensor.numel() for tensor in weights.values()) == MODEL.parameter_count
    assert all(torch.isfinite(tensor).all() for tensor in weights.values())


def test_a_run_keeps_the_tokenizer_of_its_data(ranks: World, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("to be or not to be, that is the question\n" * 40)
    prepared = prepare([Input.from_path(tmp_path / "a.txt", None, "text")], tmp_path / "data", "chars")
    job = Job("ddp", 1, 2, replace(MODEL, vocab_size=prepared.manifest.vocab_size), 2)
    plan = run_of(
        job, OptimizerConfig(schedule_steps=1, warmup_steps=0), tmp_path / "run", data=(str(tmp_path / "data"),)
    )
    ranks(1).call(train_plainly, plan)
    shutil.rmtree(tmp_path / "data")
    tokenizer = find_tokenizer(tmp_path / "run")
    assert tokenizer is not None
    assert tokenizer.decode(tokenizer.encode([b"to be"])[0]) == b"to be"


def test_looks_at_intervals_change_no_number_and_records_keep_to_theirs(ranks: World, tmp_path: Path) -> None:
    """The look's loss is that of the weights after that very step: of a run that ends there."""
    job = Job("fsdp", 2, 4, MODEL, 2)
    optimizer = OptimizerConfig(learning_rate=1e-2, schedule_steps=12, warmup_steps=2)
    logging = LoggingConfig(log_every=5, validate_every=4, sample_every=6)
    plan = run_of(job, optimizer, tmp_path / "run")
    plan = replace(plan, config=replace(plan.config, logging=logging))
    ranks(2).call(train_plainly, plan)
    plain = run_of(job, optimizer, tmp_path / "plain")
    ranks(2).call(train_plainly, plain)
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] + 1 for record in records] == [1, 4, 5, 6, 8, 10, 12]
    assert [record["step"] + 1 for record in records if "validation_loss" in record] == [4, 8]
    whole = losses(tmp_path / "plain")
    assert [record["loss"] for record in records] == [whole[record["step"]] for record in records]
    assert (tmp_path / "run" / "weights.safetensors").read_bytes() == (
        tmp_path / "plain" / "weights.safetensors"
    ).read_bytes()
    four = replace(plain, config=replace(plain.config, train=replace(plain.config.train, steps=4)), out=tmp_path / "4")
    summary = ranks(2).call(train_plainly, four)[0]
    assert records[1]["validation_loss"] == summary.validation_after


def test_the_validation_loss_does_not_depend_on_how_a_batch_is_cut(ranks: World, tmp_path: Path) -> None:
    losses: list[float] = []
    for microbatches, size in ((4, 1), (1, 4), (1, 7)):
        job = Job("single", 1, microbatches, MODEL, size)
        plan = run_of(job, OptimizerConfig(schedule_steps=1, warmup_steps=0), tmp_path / f"{size}")
        losses.append(ranks(1).call(train_plainly, plan)[0].validation_before)
    assert losses == [pytest.approx(losses[0], rel=1e-6)] * 3


def test_a_run_resumed_on_another_number_of_threads_says_how_it_is_the_same_to_the_bit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    now = torch.get_num_threads()
    warn_of_threads(now, torch.device("cpu"))
    warn_of_threads(now + 1, torch.device("cuda"))
    assert capsys.readouterr().err == "", "there is nothing to say"
    warn_of_threads(now + 1, torch.device("cpu"))
    said = capsys.readouterr().err
    assert (
        f"before on {now + 1}, so numbers may differ in their last bits; OMP_NUM_THREADS={now + 1} keeps them" in said
    )


@pytest.mark.parametrize(
    ("stopping", "diverged", "looked_at"), [(False, [], True), (True, [], False), (False, [1], False)]
)
def test_nobody_looks_at_a_run_that_is_to_end_before_it_is_saved(
    stopping: bool, diverged: list[int], looked_at: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(Job("ddp", 2, 2, MODEL, 2), OptimizerConfig(), tmp_path)
    run = replace(run, config=replace(run.config, logging=LoggingConfig(validate_every=2, sample_every=2)))
    evaluation, training, sampled = Mock(), Mock(), Mock()
    evaluation.losses.return_value = {"validation_loss": 2.0}
    monkeypatch.setattr("shardlab.train.callbacks.continue_prompt", sampled)
    monkeypatch.setattr("shardlab.train.callbacks.ParallelWriter", Mock())
    monkeypatch.setattr("shardlab.train.callbacks.choose_prompt", Mock(return_value=b"to be"))
    validation = Validation(run, evaluation)
    step = StepResult({"step": 1}, stopping, diverged)
    assert validation.on_metrics(training, step) == ({"validation_loss": 2.0} if looked_at else {})
    Sampling(run, validation).on_metrics(training, step)
    assert sampled.called == looked_at
    assert [validation.needs_weights(number) for number in range(3)] == [False, True, False]


@pytest.fixture(scope="module")
def begun(ranks: World, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Summary]:
    """A folder of a run, and of its weights as Hugging Face has them."""
    folder = tmp_path_factory.mktemp("begun")
    summary = run(ranks, "ddp", 2, folder / "begun", steps=6)
    convert_weights(open_source(folder / "begun"), folder / "hf", "hf")
    return folder, summary


@pytest.mark.parametrize(("strategy", "count"), [("single", 1), ("fsdp", 2), ("tensor-parallel", 2)])
def test_a_run_goes_on_from_another_run_or_from_hugging_face(
    ranks: World, begun: tuple[Path, Summary], tmp_path: Path, strategy: str, count: int
) -> None:
    runs, summary_of_begun = begun
    for folder in ("begun", "hf"):
        job = Job(strategy, count, 4, MODEL, 2)
        plan = run_of(
            job, OptimizerConfig(schedule_steps=1, warmup_steps=0), tmp_path / f"from {folder}", init=runs / folder
        )
        summary = ranks(count).call(train_plainly, plan)[0]
        assert summary.validation_before == pytest.approx(summary_of_begun.validation_after, rel=1e-6)
        assert losses(tmp_path / f"from {folder}")[0] < losses(runs / "begun")[0] - 0.2
    assert losses(tmp_path / "from begun") == losses(tmp_path / "from hf")
    assert json.loads((tmp_path / "from hf" / "run.json").read_text())["init"] == str(runs / "hf")


def test_every_rank_count_sees_the_same_batches_in_the_same_steps(ranks: World, tmp_path: Path) -> None:
    run(ranks, "single", 1, tmp_path / "one", steps=4)
    run(ranks, "ddp", 2, tmp_path / "two", steps=4)
    run(ranks, "pipeline-fsdp", 4, tmp_path / "four", steps=4)
    one = losses(tmp_path / "one")
    assert losses(tmp_path / "two") == pytest.approx(one, rel=1e-5)
    assert losses(tmp_path / "four") == pytest.approx(one, rel=1e-5)


class EqualToAll(Callback):
    """A user's callback that is equal to any other one."""

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return True

    def on_metrics(self, training: Training, step: StepResult) -> dict[str, float]:
        return {"users": 1.0}


class Reporting(Callback):
    """A callback of every training, whose figure is no number."""

    def on_metrics(self, training: Training, step: StepResult) -> Any:
        return {"phase": "warm-up"}


def test_figures_are_a_users_if_the_callback_itself_is_and_not_an_equal_one() -> None:
    users, step = EqualToAll(), StepResult({}, stopping=False, diverged=[])
    training = MagicMock(callbacks=[Reporting(), UserCallback(users)])
    training.__iter__.return_value = [step]
    assert fit(training)
    assert (step.user_figures, step.metrics) == ({"users": 1.0}, {"phase": "warm-up", "users": 1.0})


def text_that_differs(rank: int) -> str:
    checked = Job("ddp", 2, 4, MODEL, 2).checked()
    try:
        require_agreement(checked, "some text" if rank == 0 else "something else")
    except RuntimeError as error:
        return str(error)
    return ""


def program_that_differs(rank: int) -> str:
    try:
        require_agreement(Job("ddp" if rank == 0 else "fsdp", 2, 4, MODEL, 2).checked(), "")
    except RuntimeError as error:
        return str(error)
    return ""


def test_processes_that_would_run_other_tapes_or_texts_stop_before_the_first_step(ranks: World) -> None:
    assert all("rank 1 has other data" in said for said in ranks(2).call(text_that_differs))
    assert all("rank 1 has another program" in said for said in ranks(2).call(program_that_differs))


def test_an_output_folder_that_exists_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "keep").write_text("me")
    with pytest.raises(UserError, match="exists"):
        OutputFolder(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["keep"]


def test_unnamed_runs_are_numbered(tmp_path: Path) -> None:
    assert free_folder(tmp_path, "fsdp") == tmp_path / "fsdp-1"
    (tmp_path / "fsdp-1").mkdir()
    assert free_folder(tmp_path, "fsdp") == tmp_path / "fsdp-2"


def test_metrics_are_on_disk_as_soon_as_a_step_has_ended(tmp_path: Path) -> None:
    folder = OutputFolder(tmp_path / "run")
    folder.write_metrics({"step": 0, "loss": 1.0})
    assert losses(tmp_path / "run") == [1.0]
    folder.close()


# A gradient that is not finite, on one rank alone, leaves out the step on all: the norm carries it to every update.


SMALL = GPT(layers=2, hidden_size=16, heads=2, seq_len=8)


def after_a_gradient_that_is_not_finite(rank: int, job: Job, poison: float) -> tuple[bool, bool, bool]:
    """Whether a step with such a gradient on rank 1 alone changed weights and states, and whether the next step did."""
    checked = job.checked()
    corpus = Corpus.from_text(bytes(range(256)) * 8, job.model.seq_len)
    batches = Batches(corpus, job.model.seq_len, job.micro_batch_size, job.microbatches, 0)
    settings = Settings(0, FP64, optimizer=OptimizerConfig(schedule_steps=3, warmup_steps=1, clip=1.0))
    executor = Executor(checked, rank, job.model, batches, settings)
    state = executor.state

    def everything() -> list[torch.Tensor]:
        tensors = [moment for part in state.opt_states.values() for moment in part.moments]
        return [tensor.clone() for tensor in [*state.kept.values(), *tensors]]

    def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
        return all(torch.equal(one, other) for one, other in zip(a, b, strict=True))

    executor.step()
    before = everything()
    at, op = next((at, op) for at, op in enumerate(state.tape) if op.kind in (OpKind.BACKWARD, OpKind.BACKWARD_WEIGHT))
    healthy = executor.instructions[at]

    def poisoned() -> None:
        healthy()
        state.values[op.outputs[0]][3] = poison

    if rank == 1:
        executor.instructions[at] = poisoned
    executor.step()
    after = everything()
    executor.instructions[at] = healthy
    executor.step()
    return same(before, after), same(after, everything()), all(t.isfinite().all() for t in everything())


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("function", ["zero_1", "split_fsdp", "split_pipeline"])
def test_a_gradient_that_is_not_finite_on_one_rank_leaves_every_rank_as_it_was(
    ranks: World, function: str, poison: float
) -> None:
    job = Job(f"{user_programs.__file__}:{function}", 2, 2, SMALL, 2, "fp64")
    for unchanged, stuck, finite in ranks(2).call(after_a_gradient_that_is_not_finite, job, poison):
        assert unchanged, "the step was left out"
        assert not stuck, "the next one was not"
        assert finite


# Live bytes are what was predicted: by torch's own accounts, under many kinds of plan.


LIVE_MODEL = GPT(layers=2, hidden_size=64, heads=4, seq_len=64)
LLAMA = Llama(layers=2, hidden_size=64, heads=4, kv_heads=2, seq_len=64)
SP = Plan(Mesh(tp=2), sequence_parallel=True)

CASES: list[tuple[str | Plan, int, Blocks]] = [
    ("ddp", 2, LIVE_MODEL),
    ("zero-3", 2, LLAMA),
    ("zb-h1", 2, LIVE_MODEL),
    ("tensor-parallel", 2, LLAMA),
    (SP, 2, LIVE_MODEL),
    (replace(SP, mesh=Mesh(pp=2, tp=2), schedule="zb-h1", recompute="selective"), 4, replace(LLAMA, layers=4)),
    (Plan(Mesh(cp=2)), 2, LLAMA),
    (Plan(Mesh(cp=2), context="all_gather"), 2, LIVE_MODEL),
]


def lived(rank: int, job: Job) -> dict[int, int]:
    """Bytes at the start of each op of a step in which all that is found out is known."""
    corpus = Corpus.from_text(bytes(range(256)) * 64, job.model.seq_len)
    batches = Batches(corpus, job.model.seq_len, job.micro_batch_size, job.microbatches, 0)
    executor = Executor(job.checked(), rank, job.cut, batches, Settings(job.seed, job.numbers))
    executor.step()
    executor.step()
    record = MemoryRecord()
    step_with_memory(executor, record)
    return {at: sum(live.values()) for at, live in record.live.items()}


@pytest.mark.parametrize(
    ("strategy", "ranks_", "model"), sampled(CASES, [CASES[1], CASES[2], CASES[4], CASES[7]].__contains__), ids=str
)
def test_live_bytes_are_as_predicted(ranks: World, strategy: str | Plan, ranks_: int, model: Blocks) -> None:
    """No op finds more, and the most is as much.

    But for the batch, and for moments: what a collective has sent a copy of ends on the tape an op later. Each rank has
    two microbatches, whose gradients are added.
    """
    job = Job(strategy, ranks_, 4 if strategy in ("ddp", "zero-3") else 2, model, 2)
    checked = job.checked()
    measured = ranks(ranks_).call(lived, job)
    for tape, predicted, live in zip(checked.program.tapes, memory_in_bytes(checked), measured, strict=True):
        begins = next(at for at, op in enumerate(tape) if not op.kind.name.startswith("LOAD"))
        ends = next(at for at, op in enumerate(tape) if op.kind is OpKind.UPDATE)
        batch = live[begins] - predicted.before_ops[begins]
        assert 0 <= batch < 20_000
        most = max(predicted.before_ops)
        assert max(live.values()) - batch == pytest.approx(most, rel=0.01)
        for at in range(begins, ends):
            if tape[at].kind not in (OpKind.FREE, OpKind.WAIT):
                assert live[at] - batch <= predicted.before_ops[at] + 0.005 * most, (at, str(tape[at]))
                if strategy is SP:  # whose residual streams are what layers keep of the norms
                    assert predicted.before_ops[at] <= live[at] - batch + 0.001 * most, (at, str(tape[at]))


# Packed documents: the loss is the mean over the targets that count, on any number of ranks.


def packed(job: Job) -> Corpus:
    """Documents of one to thirty tokens: some sequences have many that do not count, others none."""
    random = np.random.default_rng(7)
    tokens = random.integers(0, 256, 2000).astype(np.uint8)
    starts = np.cumsum(random.choice([1, 2, 3, 30], 80))
    stream = SequenceStream((TokenRun(tokens, starts),))
    return Corpus(stream, stream, ByteTokenizer(), ())


def on_a_rank(rank: int, strategy: str | Plan) -> Verdict | None:
    job = Job(strategy, 2, 4, SMALL, 2, "fp64")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "_random_corpus", packed)
        return verify_rank(rank, torch.device("cpu"), job, 3, {})


def test_microbatches_have_unequal_numbers_of_targets_that_count() -> None:
    job = Job("ddp", 2, 4, SMALL, 2)
    batches = Batches(packed(job), SMALL.seq_len, 2, 4, job.seed)
    counts = [int((batches.microbatch(0, m)[1] >= 0).sum()) for m in range(4)]
    assert len({counts[0] + counts[1], counts[2] + counts[3]}) == 2, "ranks of ddp take two each"
    assert batches.counted(0, 4) == sum(counts) < 4 * 2 * SMALL.seq_len


@pytest.mark.parametrize(
    "strategy",
    [
        "ddp",
        "fsdp",
        Plan(Mesh(pp=2), schedule="1f1b"),
        Plan(Mesh(tp=2)),
        Plan(Mesh(cp=2)),
    ],
    ids=str,
)
def test_packed_documents_train_as_on_one_device(ranks: World, strategy: str | Plan) -> None:
    verdict = ranks(2).call(on_a_rank, strategy)[0]
    assert verdict.ok, verdict
