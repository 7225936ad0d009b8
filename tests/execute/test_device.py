"""A step on another device than the host's mixes no tensors of both, and waits for none.

The device is torch's `meta`, whose tensors have no elements: what would be read of them raises, and messages are fake.
"""

# pyright: reportUnknownMemberType=false, reportMissingTypeStubs=false, reportUnknownVariableType=false
# torch leaves some of its annotations out.

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardlab.execute.executor import Executor
from shardlab.execute.optimizers.flat_slice import torch_optimizers
from shardlab.execute.optimizers.settings import OptimizerConfig
from shardlab.execute.settings import Settings
from shardlab.execute.state import State
from shardlab.language import Mesh
from shardlab.language.precision import Optimizer
from shardlab.models import GPT, Blocks, Llama, Mixtral
from shardlab.strategies.plan.plan import Plan
from shardlab.train.batches import Batches
from shardlab.train.data.corpus import Corpus
from shardlab.train.job import Job

SHARD = ("dp_shard",)
GPT_2 = GPT(layers=2, hidden_size=16, heads=2, vocab_size=256, seq_len=8, dropout=0.1)
LLAMA = Llama(layers=2, hidden_size=16, heads=2, vocab_size=256, seq_len=8)
MIXTRAL = Mixtral(layers=2, hidden_size=16, heads=2, vocab_size=256, seq_len=8, experts=4)

CASES: dict[str, tuple[Plan, Blocks]] = {
    "single": (Plan(Mesh()), GPT_2),
    "fsdp": (Plan(Mesh(dp_shard=2), shard_parameters=SHARD, shard_gradients=SHARD, shard_optimizer=SHARD), LLAMA),
    "tp": (Plan(Mesh(tp=2), sequence_parallel=True), GPT_2),
    "cp": (Plan(Mesh(cp=2)), LLAMA),
    "ep": (Plan(Mesh(ep=2)), MIXTRAL),
    "pp": (Plan(Mesh(pp=2), "1f1b", recompute="full"), GPT_2),
    "halves": (Plan(Mesh(pp=2), "zb-h1"), MIXTRAL),
}


@pytest.fixture(autouse=True)
def fake_ranks() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", CASES)
def test_nothing_of_the_host_meets_what_is_on_the_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step_on_meta(*CASES[name], "lion", monkeypatch)


@pytest.mark.parametrize("name", ["fsdp", "tp"])
def test_directions_of_cut_matrices_stay_on_the_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = partial(torch_optimizers, fused=False)  # torch has no fused kernels of its device `meta`
    monkeypatch.setattr("shardlab.execute.optimizers.flat_slice.torch_optimizers", plain)
    step_on_meta(*CASES[name], "muon", monkeypatch)


def step_on_meta(plan: Plan, model: Blocks, optimizer: Optimizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """One step of which nothing is read back but the gradient's norm."""
    read_scalars: list[int] = []

    def number(state: State, scalar: int) -> float:
        read_scalars.append(scalar)
        return 1.0

    def one_by_one(messages: list[dist.P2POp]) -> list[dist.Work | None]:
        return [message.op(message.tensor, message.peer) for message in messages]

    monkeypatch.setattr(State, "number", number)
    monkeypatch.setattr(dist, "batch_isend_irecv", one_by_one)  # torch asks the device's backend what it can
    job = Job(plan, plan.mesh.world, 4, model, 2, optimizer=optimizer)
    batches = Batches(Corpus.from_text(bytes(range(256)) * 8, 8), 8, 2, 4, 0)
    settings = Settings(device=torch.device("meta"), optimizer=OptimizerConfig(optimizer=optimizer))
    loss: Tensor = Executor(job.checked(), 0, job.cut, batches, settings, "gloo").step()
    assert loss.device.type == "meta"
    assert len(set(read_scalars)) == 1, "the norm alone is read"
