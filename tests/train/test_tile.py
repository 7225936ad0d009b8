"""Layers that are computed in tiles give one device's numbers, take the memory that is predicted, and go on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from shardlab.language import Mesh, OpKind
from shardlab.models import GPT, Blocks, Llama
from shardlab.strategies import Plan
from shardlab.train.job import Job
from shardlab.train.verification.verify import verify_rank
from tests.support.ranks import Ranks
from tests.train.test_offload import memory

pytestmark = pytest.mark.xdist_group("ranks")
World = Callable[[int], Ranks]
CPU = torch.device("cpu")
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


@pytest.mark.parametrize(("strategy", "model", "passes"), [each[1:] for each in TILED], ids=[each[0] for each in TILED])
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
    """Of a head as large as all else, a whole one and its whole gradient are left out."""
    wide = gpt(layers=1, hidden_size=64, heads=8, vocab_size=2048)
    whole, tiled = (
        ranks(2).call(memory, Job("zero-3", 2, 2, wide, 1, "fp32", passes=passes)) for passes in ("none", "tile=8")
    )
    for (_, live), (predicted, live_in_tiles) in zip(whole, tiled, strict=True):
        assert live_in_tiles == pytest.approx(predicted, rel=0.02)
        assert live - live_in_tiles > 1.5 * 4 * 2048 * 64
