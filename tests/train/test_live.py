"""Live bytes are what was predicted: by torch's own accounts, under many kinds of plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from shardlab.execute import Executor, Settings
from shardlab.execute.collect import step_with_memory
from shardlab.language import Mesh, OpKind
from shardlab.language.tape import MemoryRecord
from shardlab.models import GPT, Blocks, Llama
from shardlab.simulate.timeline.memory import memory_in_bytes
from shardlab.strategies import Plan
from shardlab.train.batches import Batches
from shardlab.train.data import Corpus
from shardlab.train.job import Job
from tests.support.ranks import Ranks

pytestmark = pytest.mark.xdist_group("ranks")
World = Callable[[int], Ranks]

MODEL = GPT(layers=2, hidden_size=64, heads=4, seq_len=64)
LLAMA = Llama(layers=2, hidden_size=64, heads=4, kv_heads=2, seq_len=64)
SP = Plan(Mesh(tp=2), sequence_parallel=True)

CASES: list[tuple[str | Plan, int, Blocks]] = [
    ("ddp", 2, MODEL),
    ("zero-3", 2, LLAMA),
    ("zb-h1", 2, MODEL),
    ("tensor-parallel", 2, LLAMA),
    (SP, 2, MODEL),
    (replace(SP, mesh=Mesh(pp=2, tp=2), schedule="zb-h1", recompute="selective"), 4, replace(LLAMA, layers=4)),
    (Plan(Mesh(cp=2)), 2, LLAMA),
    (Plan(Mesh(cp=2), context="all_gather"), 2, MODEL),
]


def lived(rank: int, job: Job) -> dict[int, int]:
    """Bytes at the start of each op of a step in which all that is found out is known."""
    corpus = Corpus.split(bytes(range(256)) * 64, job.model.seq_len)
    batches = Batches(corpus, job.model.seq_len, job.micro_batch_size, job.microbatches, 0)
    executor = Executor(job.checked(), rank, job.cut, batches, Settings(job.seed, job.numbers))
    executor.step()
    executor.step()
    record = MemoryRecord()
    step_with_memory(executor, record)
    return {at: sum(live.values()) for at, live in record.live.items()}


@pytest.mark.parametrize(("strategy", "ranks_", "model"), CASES, ids=str)
def test_live_bytes_are_as_predicted(ranks: World, strategy: str | Plan, ranks_: int, model: Blocks) -> None:
    """No op finds more, and the most is as much.

    But for the batch, and for moments: what a collective has sent a copy of ends on the tape an op later.
    """
    job = Job(strategy, ranks_, 4, model, 2)
    checked = job.checked()
    measured = ranks(ranks_).call(lived, job)
    for tape, predicted, live in zip(checked.program.tapes, memory_in_bytes(checked), measured, strict=True):
        begins = next(at for at, op in enumerate(tape) if not op.kind.name.startswith("LOAD"))
        ends = next(at for at, op in enumerate(tape) if op.kind is OpKind.UPDATE)
        batch = live[begins] - predicted.before[begins]
        assert 0 <= batch < 20_000
        most = max(predicted.before)
        assert max(live.values()) - batch == pytest.approx(most, rel=0.01)
        for at in range(begins, ends):
            if tape[at].kind not in (OpKind.FREE, OpKind.WAIT):
                assert live[at] - batch <= predicted.before[at] + 0.005 * most, (at, str(tape[at]))
                if strategy is SP:  # whose residual streams are what layers keep of the norms
                    assert predicted.before[at] <= live[at] - batch + 0.001 * most, (at, str(tape[at]))
