"""Rewritten programs train as those that were written: one device's numbers, and the very same bits."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import gc
import json
import re
import resource
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardlab.check import Checked, check_forward, forward_only
from shardlab.cli.train.before_ranks import line_lookup
from shardlab.execute.executor import Executor
from shardlab.execute.optimizers.settings import OptimizerConfig
from shardlab.execute.recording import step_with_memory
from shardlab.execute.settings import Settings
from shardlab.execute.state import State
from shardlab.language import Op, OpKind, UserError
from shardlab.language.mesh import Mesh
from shardlab.language.pass_names import with_offload
from shardlab.language.tape import MemoryRecord
from shardlab.models import GPT, Blocks, Llama
from shardlab.simulate.passes import PASSES, find_passes, run_passes
from shardlab.simulate.timeline.memory import memory_in_bytes
from shardlab.strategies import Plan, ddp
from shardlab.strategies.load import load
from shardlab.train import job as jobs
from shardlab.train.batches import Batches
from shardlab.train.checkpoint.contents import Snapshot, kept_ranges
from shardlab.train.data import Corpus
from shardlab.train.job import Job, job_as_dict, job_from_dict
from shardlab.train.launch.ranks import is_out_of_memory, out_of_memory, run_ranks, set_heap
from shardlab.train.verification.cases import ALONE, CASES, Case, Verdict
from shardlab.train.verification.verify import verify_rank
from tests.support.ranks import Ranks
from tests.support.thorough import sampled

World = Callable[[int], Ranks]
CPU = torch.device("cpu")
MODEL = GPT(layers=4, hidden_size=16, heads=2, seq_len=8)


def forced(checked: Checked, names: str) -> Checked:
    """Return the program after passes, whether or not it is faster."""
    return run_passes(checked, [replace(candidate, is_forced=True) for candidate in find_passes(names)])[-1].checked


def trained(rank: int, job: Job) -> tuple[Verdict, list[torch.Tensor]]:
    """One rank's verdict and its weights after three steps."""
    weights: list[torch.Tensor] = []

    def keep(state: State) -> None:
        weights.extend(weight.clone() for weight in state.kept.values())

    return verify_rank(rank, CPU, job, 3, {}, trained=keep), weights


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


@pytest.mark.starts_ranks
@pytest.mark.parametrize(
    "strategy", sampled(FORCED, lambda name: name != "tensor-parallel"), ids=lambda name: name.rpartition(":")[2]
)
def test_passes_change_no_bit(ranks: World, strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks add in one order only, so that even buckets do not round otherwise. All passes are forced."""
    monkeypatch.setattr(jobs, "apply_passes", forced)  # jobs are checked here, for all ranks
    written = job_for(strategy)
    rewritten = replace(written, passes=FORCED[strategy])
    before, after = (ranks(2).call(trained, job) for job in (written, rewritten))
    for (_, expected), (verdict, weights) in zip(before, after, strict=True):
        assert verdict.ok, verdict
        assert len(weights) == len(expected)
        assert all(map(torch.equal, weights, expected))


@pytest.mark.parametrize("strategy", FORCED, ids=lambda name: name.rpartition(":")[2])
def test_the_passes_of_that_test_move_something(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "apply_passes", forced)
    written = job_for(strategy)
    assert replace(written, passes=FORCED[strategy]).checked().program.tapes != written.checked().program.tapes


FORWARD_SAMPLE = {"ddp", "wsdp", "fsdp", "zero-1", "zero-3", "tensor-parallel", "expert-parallel"} | {
    "pipeline-fsdp", "1f1b", "zb-v"
}  # fmt: skip
"""Strategies in which passes find something to move, each for another reason."""


@pytest.mark.parametrize(
    "case",
    sampled(
        [case for case in CASES if case.column == ALONE],
        lambda case: case.strategy in FORWARD_SAMPLE,
    ),
    ids=str,
)
def test_the_forward_half_of_what_passes_make_computes_every_loss(case: Case) -> None:
    """Evaluation runs the forward half of the trained program, on every backend of the whole one."""
    checked = case.job().checked()
    for candidate in PASSES.values():
        for number in {*candidate.settings[:1], *candidate.settings[-1:]}:
            (_, result) = run_passes(checked, [replace(candidate, settings=(number,), is_forced=True)])
            half = check_forward(forward_only(result.checked))
            assert set(result.checked.backends()) <= set(half.backends())


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
    """A report about hanging ranks names this line."""
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
    line_of = line_lookup(job.entry, job)
    for at, op in enumerate(job.checked().program.tapes[1]):
        yield op, line_of(1, at)


def test_a_job_is_described_with_its_passes() -> None:
    job = Job("fsdp", 2, 4, MODEL, 2, passes="prefetch=1")
    words = job_as_dict(job)
    assert job_from_dict(words) == job
    of_an_older_version = {name: value for name, value in words.items() if name != "passes"}
    assert job_from_dict(of_an_older_version) == replace(job, passes=None)


def test_a_pass_that_cannot_apply_is_refused_before_anything_is_trained() -> None:
    with pytest.raises(UserError, match="the pass prefetch has nothing to do: no weights are gathered"):
        Job("ddp", 2, 4, MODEL, 2, passes="prefetch").checked()


# What lies elsewhere, and collectives that run as one, give one device's numbers on real processes.


pytestmark = pytest.mark.starts_ranks
OFFLOADED = GPT(layers=3, hidden_size=32, heads=4, seq_len=16)


DISK = "parameters=disk", "optimizer=disk", "activations=disk"
HOST = "parameters=host", "optimizer=host", "gradients=host"


@pytest.mark.parametrize(
    ("strategy", "words"),
    sampled(
        product(("fsdp", "zero-1", "1f1b"), (DISK, HOST)),
        [("fsdp", DISK), ("zero-1", HOST), ("1f1b", HOST)].__contains__,
    ),
)
def test_offloaded_states_train_like_one_device(ranks: World, strategy: str, words: tuple[str, ...]) -> None:
    job = Job(strategy, 2, 4, OFFLOADED, 2, "fp64", passes=with_offload(None, words))
    kinds = {op.kind for tape in job.checked().program.tapes for op in tape}
    assert OpKind.RELOAD in kinds
    verdict = ranks(2).call(verify_rank, CPU, job, 2)[0]
    assert verdict.ok, verdict


@pytest.mark.parametrize(
    "passes",
    sampled(
        ["fuse-steps=1", "fuse-steps=2", "bucket=2,fuse-steps=8", "update-early,fuse-steps=1"],
        lambda passes: passes != "fuse-steps=1",
    ),
)
def test_weights_carried_from_step_to_step_give_one_devices_numbers(ranks: World, passes: str) -> None:
    for strategy in ("fsdp", "zero-3")[: 1 if "update" in passes else 2]:
        verdict = ranks(2).call(verify_rank, CPU, Job(strategy, 2, 4, OFFLOADED, 2, "fp64", passes=passes), 3)[0]
        assert verdict.ok, verdict


@pytest.mark.parametrize("strategy", sampled(["ddp", "fsdp", "zero-1", "zero-3"], {"ddp", "zero-3"}.__contains__))
def test_buckets_give_one_devices_numbers(ranks: World, strategy: str) -> None:
    job = Job(strategy, 2, 4, OFFLOADED, 2, "fp64", passes="bucket=1")
    assert any(op.batch >= 0 for tape in job.checked().program.tapes for op in tape)
    verdict = ranks(2).call(verify_rank, CPU, job, 2)[0]
    assert verdict.ok, verdict


PROGRAMS = Path(__file__).with_name("bucketed_programs.py")


def test_a_gradient_that_is_read_again_is_not_written_over(ranks: World) -> None:
    """Its first sum is only looked at."""
    job = Job(f"{PROGRAMS}:twice", 2, 4, OFFLOADED, 2, "fp64", passes="bucket=2")
    assert any(op.batch >= 0 for tape in job.checked().program.tapes for op in tape)
    verdict = ranks(2).call(verify_rank, CPU, job, 2)[0]
    assert verdict.ok, verdict


def test_weights_of_slices_that_lie_apart_are_handed_on_when_they_are_stepped(ranks: World) -> None:
    verdict = ranks(2).call(verify_rank, CPU, Job(f"{PROGRAMS}:apart", 2, 4, OFFLOADED, 2, "fp64"), 3)[0]
    assert verdict.ok, verdict


def memory(rank: int, job: Job) -> tuple[int, int]:
    """The most bytes of a rank as an op starts: those predicted, and those live in the quietest of some steps.

    Gloo's threads let go of a tensor a little after it has been sent, so a step may have more.
    """
    gc.collect()  # what an earlier executor has left is not this one's
    checked = job.checked()
    batches = Batches(
        Corpus.from_text(bytes(range(256)) * 8, OFFLOADED.seq_len), OFFLOADED.seq_len, 2, job.microbatches, 0
    )
    executor = Executor(checked, rank, job.cut, batches, Settings(0, job.numbers, CPU, OptimizerConfig()))
    executor.step()
    live: list[int] = []
    for _ in range(2):
        record = MemoryRecord()
        step_with_memory(executor, record)
        live.append(max(sum(live_bytes.values()) for live_bytes in record.live.values()))
    return max(memory_in_bytes(checked)[rank].before_ops), min(live)


@pytest.mark.parametrize(
    ("strategy", "passes"),
    sampled(
        [
            ("ddp", "bucket=1"),
            ("fsdp", "none"),
            ("fsdp", "bucket=1"),
            ("zero-1", "bucket=1"),
            ("zero-3", "fuse-steps=2"),
        ],
        [("ddp", "bucket=1"), ("fsdp", "bucket=1"), ("zero-3", "fuse-steps=2")].__contains__,
    ),
)
def test_passes_take_the_memory_that_is_predicted(ranks: World, strategy: str, passes: str) -> None:
    for predicted, live in ranks(2).call(memory, Job(strategy, 2, 2, OFFLOADED, 2, "fp32", passes=passes)):
        assert live == pytest.approx(predicted, rel=0.02)


# Layers that are computed in tiles give one device's numbers, take the memory that is predicted, and go on.


SHARD = ("dp_shard",)
gpt = partial(GPT, layers=2, hidden_size=32, heads=4, seq_len=16)
llama = partial(Llama, layers=2, hidden_size=32, heads=4, seq_len=16)
SPLIT = Plan(Mesh(dp_shard=2), "zb-h1", shard_parameters=SHARD, shard_gradients=SHARD, shard_optimizer=SHARD)
AGAIN = Plan(Mesh(dp_shard=2), shard_parameters=SHARD, shard_optimizer=SHARD, recompute="full")
SLICED = Plan(Mesh(dp_shard=2, tp=2), shard_parameters=SHARD, shard_optimizer=SHARD, sequence_parallel=True)
TILED = [
    ("GPT with dropout", "zero-3", gpt(vocab_size=51, dropout=0.2), "tile=2"),
    ("Llama with shared heads", "zero-3", llama(kv_heads=2, vocab_size=40), "tile=2"),
    ("a tied head, and gathers ahead", "zero-3", gpt(tied=True), "tile=4,prefetch=2,defer=2"),
    ("replicas of shards", "hsdp", gpt(), "tile=2"),
    ("a backward pass in halves", SPLIT, gpt(), "tile=4"),
    ("recomputation", AGAIN, gpt(dropout=0.1), "tile=2,arena"),
    ("tiles of tensor-parallel slices", SLICED, gpt(vocab_size=50), "tile=2"),
    ("a pipeline", "pipeline-fsdp", gpt(), "tile=2"),
    ("weights on the disk", "zero-3", gpt(), "tile=2,offload=parameters:disk+optimizer:disk"),
]


@pytest.mark.parametrize(
    ("strategy", "model", "passes"),
    sampled([case[1:] for case in TILED], lambda case: case[0] not in ("hsdp", "pipeline-fsdp")),
    ids=[case[0] for case in TILED],
)
def test_tiles_give_one_devices_numbers(ranks: World, strategy: str | Plan, model: Blocks, passes: str) -> None:
    count = strategy.mesh.world if isinstance(strategy, Plan) else 4 if strategy != "zero-3" else 2
    job = Job(strategy, count, 4, model, 2, "fp64", passes=passes)
    tape = job.checked().program.tapes[0]
    tiles = int(passes[len("tile=")])
    assert len([op for op in tape if op.kind is OpKind.FORWARD and op.layer == 0]) % tiles == 0
    assert len([op for op in tape if op.kind is OpKind.LOAD_WEIGHT and op.layer == 0]) == tiles
    verdict = ranks(count).call(verify_rank, CPU, job, 3)[0]
    assert verdict.ok, verdict


def test_the_directions_of_tiles_make_those_of_whole_matrices(ranks: World) -> None:
    for strategy in ("zero-3", Plan(Mesh(dp_shard=2), shard_parameters=SHARD, shard_optimizer=SHARD)):
        job = Job(strategy, 2, 2, gpt(), 2, "fp64", optimizer="muon", passes="tile=2")
        verdict = ranks(2).call(verify_rank, CPU, job, 2)[0]
        assert verdict.ok, verdict


def test_a_step_takes_as_much_less_memory_as_is_predicted(ranks: World) -> None:
    """The head is as large as all other layers. The whole head and its whole gradient are saved."""
    wide = gpt(layers=1, hidden_size=64, heads=8, vocab_size=2048)
    whole, tiled = (
        ranks(2).call(memory, Job("zero-3", 2, 2, wide, 1, "fp32", passes=passes)) for passes in ("none", "tile=4")
    )
    for (_, live), (predicted, live_in_tiles) in zip(whole, tiled, strict=True):
        assert live_in_tiles == pytest.approx(predicted, rel=0.02)
        assert live - live_in_tiles > 1.3 * 4 * 2048 * 64


# A model whose state is larger than the memory that its ranks may take is trained within it, from files.


ROOM = 52 * 2**20
JOB = Job("fsdp", 2, 2, GPT(layers=24, hidden_size=224, heads=4, seq_len=16), 1, passes="none")


def limit(more: int) -> None:
    """Let this process take so much more private memory than it has."""
    taken = 1024 * int(re.findall(r"VmData:\s+(\d+)", Path("/proc/self/status").read_text())[0])
    resource.setrlimit(resource.RLIMIT_DATA, (taken + more, resource.RLIM_INFINITY))


def losses(rank: int, job: Job) -> list[float]:
    """Return the losses of two steps. Between them all kept values are copied and restored, as for a checkpoint."""
    corpus = Corpus.from_text(bytes(range(256)) * 8, job.model.seq_len)
    batches = Batches(corpus, job.model.seq_len, 1, job.microbatches, 0)
    executor = Executor(job.checked(), rank, job.cut, batches, Settings(0, job.numbers, CPU, OptimizerConfig()))
    step_losses = [float(executor.step()[0]) for _ in range(2)]
    before = {name: tensor.clone() for name, tensor in list(Snapshot(executor.state).take().items())[:2]}
    for key in executor.state.opt_states:
        executor.state.make_moments(key, 2)
    assert all(piece.place == "disk" for piece in kept_ranges(executor.state)) == (job.passes != "none")
    assert before
    return step_losses


def train(rank: int, device: torch.device, jobs: tuple[Job, Job], out: Path) -> None:
    """Without a limit; within it; and within it from memory, which rank 0 finds out while the other waits for it."""
    limit(2**40)
    set_heap()
    whole = losses(rank, jobs[0])
    limit(ROOM)
    within = losses(rank, jobs[1])
    out.with_suffix(f".{rank}").write_text(json.dumps([whole, within]))
    if rank == 0:
        losses(0, jobs[0])
    dist.barrier()


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="other systems do not limit what files take no part in"
)
def test_a_model_beyond_memory_trains_from_the_disk_with_the_same_losses(tmp_path: Path) -> None:
    away = Job(
        "fsdp",
        2,
        2,
        JOB.model,
        1,
        passes=with_offload("update-early,copy-early=2", ["parameters=disk", "optimizer=disk"]),
    )
    assert 12 * JOB.model.parameter_count / JOB.ranks > 1.5 * ROOM
    with pytest.raises(UserError) as refused:
        run_ranks(2, train, (JOB, away), tmp_path / "losses")
    assert re.match(
        r"rank 0 is out of memory: it asked for [\d.]+ .iB, more than the process may take", str(refused.value)
    )
    assert "--offload parameters=disk optimizer=disk" in str(refused.value)
    for rank in range(2):
        whole, within = json.loads((tmp_path / f"losses.{rank}").read_text())
        assert whole == within


def test_a_gpu_out_of_memory_is_reported_with_its_host() -> None:
    error = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79 GiB"
    )
    assert is_out_of_memory(error)
    assert not is_out_of_memory(RuntimeError("Connection closed by peer"))
    said = str(out_of_memory(3, torch.device("cuda"), error))
    assert said.startswith("rank 3 is out of memory: it asked for 20.00 GiB, more than its GPU has free; keep less")
    assert "optimizer=host" in said
