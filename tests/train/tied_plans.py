"""Plans that the tests of tied models run on every rank."""

from __future__ import annotations

import torch

from shardlab.execute.collect import gather_layer
from shardlab.execute.executor import Executor
from shardlab.execute.optimizers.settings import OptimizerConfig
from shardlab.execute.settings import Settings
from shardlab.language.precision import FP64
from shardlab.models import Blocks, CutModel
from shardlab.models.tensors import to_blocks
from shardlab.strategies.plan.plan import Plan
from shardlab.train.batches import Batches
from shardlab.train.data import Corpus
from shardlab.train.job import Job
from shardlab.train.verification.cases import Verdict
from shardlab.train.verification.verify import verify_rank

CPU = torch.device("cpu")


def verdict(rank: int, plan: Plan, microbatches: int, model: Blocks, steps: int = 2) -> Verdict | None:
    """A plan on a model against one device, in float64."""
    return verify_rank(rank, CPU, Job(plan, plan.mesh.world, microbatches, model, 2, "fp64"), steps)


def batches_of(model: Blocks, microbatches: int) -> Batches:
    """Some text in two parts."""
    text = bytes(i * i % model.vocab_size for i in range(4096))
    return Batches(Corpus.from_text(text, model.seq_len), model.seq_len, 2, microbatches, 0)


def trained(
    rank: int, plan: Plan, microbatches: int, model: Blocks
) -> tuple[torch.Tensor | None, list[torch.Tensor] | None]:
    """After three steps that clip: this rank's copy of the embedding, and on rank 0 the model's blocks."""
    job = Job(plan, plan.mesh.world, microbatches, model, 2, "fp64")
    checked, cut = job.checked(), job.cut
    assert isinstance(cut, CutModel)
    settings = Settings(0, FP64, CPU, OptimizerConfig(clip=0.1))
    executor = Executor(checked, rank, cut, batches_of(model, microbatches), settings)
    for _ in range(3):
        executor.step()
    state = executor.state
    layers = (gather_layer(state, state.kept, layer, 0) for layer in range(cut.layers))
    flats = [flat for flat in layers if flat is not None]
    copies = [tensor.clone() for (layer, _), tensor in state.kept.items() if layer == 0]
    return copies[0] if copies else None, to_blocks(cut, flats) if flats else None
