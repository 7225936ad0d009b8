"""Packed documents: the loss is the mean over the targets that count, on any number of ranks."""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from shardlab.execute.transport.collectives import Groups
from shardlab.language import Mesh
from shardlab.models import GPT
from shardlab.strategies import Plan
from shardlab.train.batches import Batches
from shardlab.train.data import Corpus
from shardlab.train.data.stream import SequenceStream, TokenRun
from shardlab.train.data.tokenizers import ByteTokenizer
from shardlab.train.job import Job
from shardlab.train.verification import verify
from shardlab.train.verification.cases import Verdict
from shardlab.train.verification.verify import verify_rank
from tests.support.ranks import Ranks

pytestmark = pytest.mark.xdist_group("ranks")
World = Callable[[int], Ranks]
GROUPS: Groups = {}
MODEL = GPT(layers=2, hidden_size=16, heads=2, seq_len=8)


def packed(job: Job) -> Corpus:
    """Documents of one to thirty tokens: some sequences have many that do not count, others none."""
    random = np.random.default_rng(7)
    tokens = random.integers(0, 256, 2000).astype(np.uint8)
    starts = np.cumsum(random.choice([1, 2, 3, 30], 80))
    stream = SequenceStream((TokenRun(tokens, starts),))
    return Corpus(stream, stream, ByteTokenizer(), ())


def on_a_rank(rank: int, strategy: str | Plan) -> Verdict | None:
    job = Job(strategy, 2, 4, MODEL, 2, "fp64")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "_random_corpus", packed)
        return verify_rank(rank, torch.device("cpu"), job, 3, GROUPS)


def test_microbatches_have_unequal_numbers_of_targets_that_count() -> None:
    job = Job("ddp", 2, 4, MODEL, 2)
    batches = Batches(packed(job), MODEL.seq_len, 2, 4, job.seed)
    counts = [int((batches.microbatch(0, m)[1] >= 0).sum()) for m in range(4)]
    assert len({counts[0] + counts[1], counts[2] + counts[3]}) == 2, "ranks of ddp take two each"
    assert batches.counted(0, 4) == sum(counts) < 4 * 2 * MODEL.seq_len


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
