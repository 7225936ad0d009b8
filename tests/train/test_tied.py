"""A model whose head is tied to its embedding: its copies, its norm, and what is left of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import chain, product, repeat
from pathlib import Path
from unittest.mock import DEFAULT, patch

import pytest
import torch
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]

from shardlab.cli import main
from shardlab.execute import compute_ops
from shardlab.execute.state import State
from shardlab.language import Mesh, Op, OpKind, Rank, Refused, UserError, trace
from shardlab.language.precision import Optimizer
from shardlab.models import GPT, MoE
from shardlab.models.tensors import TextGenerator, TokenSampling, named_views
from shardlab.strategies.plan.plan import Plan
from shardlab.strategies.single import single
from shardlab.train.job import Job
from shardlab.train.verification.cases import SHARD, Verdict
from shardlab.train.verification.verify import verify_rank
from tests.support.ranks import Ranks
from tests.support.thorough import sampled
from tests.train.tied_plans import CPU, trained, verdict

pytestmark = pytest.mark.starts_ranks
World = Callable[[int], Ranks]
ENDS, HALVES, FOUR = Plan(Mesh(pp=2)), Plan(Mesh(pp=2), "zb-h1"), Plan(Mesh(pp=4))
"""The embedding's copy is on the first stage and the head's on the last."""


def model() -> GPT:
    return GPT(layers=3, hidden_size=16, heads=2, seq_len=8, vocab_size=51, tied=True)


def doubled(state: State, at: int, op: Op) -> Callable[[], None]:
    """NORM that counts the shared matrix for the head as well."""
    run, output = compute_ops.norm(state, at, op), op.outputs[0]

    def run_twice() -> None:
        run()
        if op.layer == 0:
            state.values[output] *= 2

    return run_twice


def verdict_with_a_norm_that_counts_twice(rank: int, plan: Plan, microbatches: int) -> Verdict | None:
    with patch.dict(compute_ops.COMPUTE, {OpKind.NORM: doubled}):
        return verdict(rank, plan, microbatches, model())


def test_a_norm_that_counts_the_shared_matrix_twice_is_noticed(ranks: World) -> None:
    said = ranks(2).call(verdict_with_a_norm_that_counts_twice, ENDS, 2)[0]
    assert said.gradient_error > 1e-6


@pytest.mark.parametrize("plan", [ENDS, HALVES], ids=["1f1b", "zb-h1"])
def test_both_copies_of_the_weight_stay_equal_to_the_last_bit(ranks: World, plan: Plan) -> None:
    (first, _), (last, _) = ranks(2).call(trained, plan, 2, model())
    assert torch.equal(first, last)


def test_stages_without_embedding_and_head_keep_no_copy(ranks: World) -> None:
    copies = [copy for copy, _ in ranks(4).call(trained, FOUR, 2, model())]
    assert [copy is not None for copy in copies] == [True, False, False, True]
    assert torch.equal(copies[0], copies[3])


def test_the_trained_blocks_are_put_together_evaluated_and_sampled(ranks: World) -> None:
    whole = model()
    (embedding, blocks), _ = ranks(2).call(trained, ENDS, 2, whole)
    matrix = named_views(whole.layout(0), blocks[0])["wte.weight"]
    assert torch.equal(matrix.flatten(), embedding[: matrix.numel()])
    assert len(list(TextGenerator(whole, blocks, TokenSampling()).generate([1, 2], 5))) == 5


PAGES = {"single": 1, "grad-accum": 1, "ddp": 2, "wsdp": 2, "fsdp": 2, "tensor-parallel": 2, "expert-parallel": 2}
OPTIMIZERS: tuple[Optimizer, ...] = ("adamw", "muon")


@pytest.mark.parametrize(
    ("name", "optimizer"),
    sampled(product(PAGES, OPTIMIZERS), lambda case: case[1] == "muon" or case[0] in ("fsdp", "tensor-parallel")),
)
def test_built_in_programs_compute_the_head_with_the_embedding_s_weight(
    ranks: World, name: str, optimizer: Optimizer
) -> None:
    """With Muon, AdamW steps the shared weight just the same."""
    count, whole = PAGES[name], replace(model(), dropout=0.1)
    if name == "expert-parallel":
        whole = MoE(layers=2, hidden_size=16, heads=2, seq_len=8, vocab_size=51, tied=True)
    job = Job(name, count, 4, whole, 2, "fp64", optimizer=optimizer)
    said = ranks(count).call(verify_rank, CPU, job, 2)[0]
    assert said.ok, said


def test_whole_blocks_between_embedding_and_head_are_layers_with_one_activation_between_any_two() -> None:
    cut = Job("ddp", 2, 2, model(), 2).cut
    assert [cut.place(layer) for layer in range(cut.layers)] == ["embedding", "block 0", "block 1", "block 2", "head"]
    assert all(len(run.inputs) == len(run.outputs) == 1 for run in cut.runs)


WHOLE = ["embedding", "block 0", "block 1", "block 2", "head"]
SHARDED = Plan(Mesh(dp_shard=2), shard_parameters=SHARD, shard_gradients=SHARD, shard_optimizer=SHARD)


@pytest.mark.parametrize("plan", [Plan(), Plan(Mesh(dp_replicate=2)), SHARDED, replace(SHARDED, recompute="full")])
def test_a_plan_cuts_whole_blocks_unless_a_pipeline_or_slices_want_finer_layers(plan: Plan) -> None:
    def places(plan: Plan) -> list[str]:
        cut = Job(plan, plan.mesh.world, 4, model(), 2).cut
        return [cut.place(layer) for layer in range(cut.layers)]

    assert places(plan) == WHOLE
    for finer in ({"pp": 2}, {"tp": 2}, {"cp": 2}):
        assert len(places(replace(plan, mesh=replace(plan.mesh, **finer)))) > len(WHOLE)
    assert len(places(replace(plan, recompute="selective"))) > len(WHOLE)


@pytest.mark.parametrize(
    ("freeze", "optimizer"),
    sampled(product([(), (0,), (2,)], OPTIMIZERS), [((), "muon"), ((0,), "adamw"), ((2,), "muon")].__contains__),
    ids=lambda value: value if isinstance(value, str) else f"frozen {value}",
)
def test_a_plan_of_whole_blocks_computes_the_numbers_of_one_device(
    ranks: World, freeze: tuple[int, ...], optimizer: Optimizer
) -> None:
    plan = replace(SHARDED, recompute="full", freeze=freeze)
    job = Job(plan, 2, 4, replace(model(), dropout=0.1), 2, "fp64", optimizer=optimizer)
    said = ranks(2).call(verify_rank, CPU, job, 2, {}, 0.1)[0]
    assert said.ok, said


def test_stages_beyond_the_whole_blocks_are_refused_in_layers() -> None:
    with pytest.raises(UserError, match="layers_per_stage is 1, 2, but 5 layers are to be cut into 2"):
        Job(Plan(stages_per_rank=2, schedule="interleaved-1f1b", layers_per_stage=(1, 2)), 1, 2, model(), 2).checked()


def test_a_run_in_half_blocks_continues_in_whole_blocks(tmp_path: Path) -> None:
    words = ["--dp-shard", "1", "--tied", "--layers", "3", "--hidden-size", "16", "--seq-len", "8", "--steps"]
    weights: list[dict[str, torch.Tensor]] = []
    for name, finer in (("whole", []), ("halves", ["--recompute", "selective"])):
        folder = str(tmp_path / name)
        assert main(["train", *words, "2", *finer, "--save-every", "2", "--out", folder]) == 0
        assert main(["train", "--resume", folder, "--dp-shard", "1", "--steps", "4"]) == 0
        weights.append(load_file(tmp_path / name / "weights.safetensors"))
    whole, halves = weights
    for part, expected in whole.items():
        torch.testing.assert_close(halves[part], expected, rtol=1e-4, atol=1e-6)


def test_a_pipeline_of_whole_blocks_refuses_it_and_names_the_remedy() -> None:
    with pytest.raises(UserError, match=r"run it by a plan, such as zero-3 or --pp 2, or by a program whose ranks"):
        Job("pipeline", 2, 2, model(), 2).checked()


def test_a_program_that_loads_a_weight_for_a_tied_head_is_refused_with_the_remedy() -> None:
    with pytest.raises(Refused, match=r"the head is tied .*; it computes with weights\[0\], load layer 0"):
        Job("examples/my_strategy.py:my_ddp", 2, 2, model(), 2).checked()


def test_a_tied_model_of_one_block_still_runs_whole() -> None:
    Job("ddp", 2, 2, GPT(layers=1, tied=True), 2).checked()


async def forgets_the_head(rank: Rank) -> None:
    """Whole layers on one rank, without the gradient that the head has of the embedding's weight: the first one."""
    with patch.object(rank, "accumulate", side_effect=chain([None], repeat(DEFAULT)), wraps=rank.accumulate):
        await single(rank)


def test_a_gradient_without_the_heads_part_is_refused_also_where_layers_are_whole() -> None:
    job = Job("single", 1, 4, model(), 2)
    with pytest.raises(Refused, match="microbatches 0-3 as the head are missing from grad_weights"):
        trace(forgets_the_head, Mesh(), job.sizes, 4)
