"""Plans on real processes give one device's numbers: tensor and sequence parallelism, alone and with the rest."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from shardlab.models import GPT, MLP
from shardlab.program import Mesh
from shardlab.strategies.plan import Plan
from shardlab.train import verify
from shardlab.train.data import Batches
from shardlab.train.job import Job
from shardlab.train.verify import Verdict, verify_rank
from tests.support.ranks import Ranks

pytestmark = pytest.mark.xdist_group("ranks")
World = Callable[[int], Ranks]
CPU = torch.device("cpu")

SHARD, BOTH = ("dp_shard",), ("dp_shard", "dp_replicate")
TENSOR = Mesh(tp=2)
ODD = GPT(layers=2, width=16, heads=4, kv_heads=2, block=8, vocabulary=51)
"""A vocabulary that does not divide, and two heads for each key and value."""

CASES: dict[str, tuple[Plan, GPT | MLP, int]] = {  # with microbatches
    "tensor": (Plan(TENSOR), GPT(layers=2, width=16, heads=4, block=8), 2),
    "sequence": (Plan(TENSOR, sequence_parallel=True), GPT(layers=2, width=16, heads=4, block=8, dropout=0.2), 2),
    "vocabulary and grouped queries": (Plan(TENSOR, sequence_parallel=True), ODD, 1),
    "tensor, no biases": (Plan(TENSOR), GPT(layers=1, width=16, heads=2, block=8, bias=False), 1),
    "mlp": (Plan(TENSOR, recompute="full"), MLP(layers=2, width=16, block=8), 2),
    "tensor and zero-1": (Plan(Mesh(dp_shard=2, tp=2), shard_optimizer=SHARD, sequence_parallel=True), ODD, 4),
    "tensor and fsdp": (Plan(Mesh(dp_shard=2, tp=2), "gpipe", None, (), SHARD, SHARD, SHARD), ODD, 4),
    "tensor and a pipeline": (
        Plan(Mesh(pp=2, tp=2), "zb-h1", sequence_parallel=True),
        GPT(layers=3, width=16, heads=4, block=8, dropout=0.2),
        3,
    ),
    "all three": (
        Plan(Mesh(pp=2, dp_shard=2, tp=2), "1f1b", None, (), SHARD, SHARD, SHARD, sequence_parallel=True),
        GPT(layers=2, width=16, heads=4, block=8, vocabulary=51, dropout=0.2),
        4,
    ),
    "reduced when all is over": (
        Plan(Mesh(pp=2, dp_shard=2), "1f1b", shard_optimizer=SHARD, reduce_each=(), reduce_at="step"),
        ODD,
        8,
    ),
    "hsdp": (Plan(Mesh(dp_replicate=2, dp_shard=2), "1f1b", None, (), SHARD, SHARD, SHARD), ODD, 8),
    "partially sharded": (
        Plan(Mesh(dp_replicate=2, dp_shard=2), "1f1b", None, (), SHARD, SHARD, BOTH),
        ODD,
        8,
    ),
    "reduced at once, kept whole": (
        Plan(Mesh(dp_replicate=2, dp_shard=2), shard_parameters=SHARD, shard_optimizer=BOTH, reduce_each=SHARD),
        ODD,
        8,
    ),
}


def on_a_rank(rank: int, name: str, left_out: bool = False) -> Verdict | None:
    """The verdict of a plan; with `left_out`, some tokens of most microbatches have no target."""
    plan, model, microbatches = CASES[name]
    job = Job(plan, plan.mesh.world, microbatches, model, 2, torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        if left_out:
            patch.setattr(verify, "Batches", Uneven)
        return verify_rank(rank, CPU, job, 2)


@pytest.mark.parametrize("name", CASES)
def test_plans_give_the_numbers_of_one_device(ranks: World, name: str) -> None:
    verdict = ranks(CASES[name][0].mesh.world).call(on_a_rank, name)[0]
    assert verdict.ok, verdict


class Uneven(Batches):
    """Microbatch m has so many targets fewer that none has as many as another."""

    def microbatch(self, step: int, microbatch: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, targets = super().microbatch(step, microbatch)
        targets = targets.clone()
        targets.view(-1)[: microbatch + microbatch // 2] = -1
        return tokens, targets

    def counted(self, step: int, microbatches: int) -> int:
        return sum(int((self.microbatch(step, m)[1] >= 0).sum()) for m in range(microbatches))


@pytest.mark.parametrize("name", ["hsdp", "partially sharded", "reduced at once, kept whole", "sequence"])
def test_uneven_numbers_of_targets_among_microbatches_give_the_exact_mean(ranks: World, name: str) -> None:
    verdict = ranks(CASES[name][0].mesh.world).call(on_a_rank, name, True)[0]
    assert verdict.ok, verdict
