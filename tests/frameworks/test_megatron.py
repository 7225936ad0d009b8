"""Megatron-LM's arguments."""

from __future__ import annotations

import pytest

from shardlab.common.errors import UserError
from shardlab.frameworks import megatron
from shardlab.frameworks.find import read_config
from shardlab.frameworks.run import FrameworkRun
from shardlab.models import GPT, Llama
from shardlab.simulate.hardware import find_cluster

SMALL = "--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --micro-batch-size 2 --bf16"


def step_of(arguments: str, cluster: str = "h100x16") -> FrameworkRun:
    config = read_config("megatron", [*SMALL.split(), *arguments.split()])
    return megatron.run(config, find_cluster(cluster))


def test_defaults_are_those_of_megatron() -> None:
    step = step_of("")
    model = step.model
    assert (step.plan.mesh.dp_shard, step.microbatches, step.plan.shard_optimizer) == (16, 16, ())
    assert isinstance(model, GPT)
    assert (model.hidden, model.dropout, model.vocab_size) == (8192, 0.1, 50304)
    assert step.precision.name == "bf16-fp32-grads"
    assert step.plan.reduce_at == "step"


def test_a_gated_width_is_two_thirds_of_four_times() -> None:
    arguments = "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope"
    model = step_of(arguments + " --group-query-attention --num-query-groups 4").model
    assert isinstance(model, Llama)
    assert (model.hidden, model.kv_heads) == (5440, 4)


def test_a_later_argument_replaces_an_earlier_one() -> None:
    assert step_of("--num-layers 12").model.layers == 12


def test_virtual_stages_make_an_interleaved_pipeline() -> None:
    step = step_of("--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2 --global-batch-size 64")
    assert (step.plan.schedule, step.plan.stages_per_rank) == ("interleaved-1f1b", 3)
    with pytest.raises(UserError, match="24 layers do not divide among 5 pipeline stages"):
        step_of("--pipeline-model-parallel-size 5 --global-batch-size 64", "h100x40")


LATENT = "--multi-latent-attention --position-embedding-type rope --disable-bias-linear"


@pytest.mark.parametrize(
    ("arguments", "recompute"),
    [
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 2", "first-2"),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 0", "none"),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 3", "uniform-3"),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", "full"),
        ("--activations-checkpoint-method block --activations-checkpoint-num-layers 4", "first-4"),
        ("--activations-checkpoint-method uniform --activations-checkpoint-num-layers 2", "uniform-2"),
        ("--activations-checkpoint-method uniform", "full"),
        ("--checkpoint-activations --checkpoint-num-layers 6", "uniform-6"),
        ("--checkpoint-activations", "full"),
        ("--recompute-activations", "core_attn"),
        ("--recompute-activations --attention-dropout 0 --hidden-dropout 0", "core_attn"),
        ("--recompute-activations --DDP-impl local", "selective"),
        ("--recompute-granularity selective --recompute-modules mlp layernorm", "layernorm+mlp"),
        ("--recompute-granularity selective --recompute-modules mlp mhc", "mlp"),
        ("--recompute-modules mlp", "none"),
        ("--moe-layer-recompute", "moe"),
        (LATENT + " --recompute-granularity selective --recompute-modules mla_up_proj", "mla_up_proj"),
    ],
)
def test_blocks_are_recomputed_as_the_arguments_of_each_year_say(arguments: str, recompute: str) -> None:
    step = step_of(arguments + " --pipeline-model-parallel-size 4 --global-batch-size 32")
    assert step.plan.recompute == recompute
    assert step.config.unknown == []


def test_modules_that_are_not_predicted_are_named() -> None:
    step = step_of("--recompute-granularity selective --recompute-modules mlp mhc gdn_norm_out")
    assert "the recomputation of mhc, gdn_norm_out is not predicted; memory will be smaller" in step.notes


def test_attention_of_megatron_core_drops_scores_in_its_fused_kernel() -> None:
    with_dropout, without_dropout = step_of("").workload, step_of("--attention-dropout 0").workload
    assert with_dropout.model.dropout == without_dropout.model.dropout == 0.1
    assert sum(with_dropout.kept_sizes.saved) == sum(without_dropout.kept_sizes.saved)


def test_blocks_of_mixtures_that_share_an_input_are_predicted_as_single_ones() -> None:
    step = step_of("--num-experts 8 --recompute-granularity full --recompute-method uniform --recompute-num-layers 2")
    assert step.plan.recompute == "full"
    assert "2 blocks that keep one input are predicted as single ones, which keep more" in step.notes


@pytest.mark.parametrize(
    ("strategy", "stage"), [("no_shard", 0), ("optim", 1), ("optim_grads", 2), ("optim_grads_params", 3)]
)
def test_megatron_fsdp_has_stages_of_zero(strategy: str, stage: int) -> None:
    step = step_of(f"--use-megatron-fsdp --data-parallel-sharding-strategy {strategy}")
    assert step.plan.zero_stage == stage


def test_instances_of_the_optimizer_are_replicas_of_its_shards() -> None:
    step = step_of("--use-distributed-optimizer --num-distributed-optimizer-instances 4")
    assert (step.plan.mesh.dp_replicate, step.plan.mesh.dp_shard, step.plan.zero_stage) == (4, 4, 1)
    assert step_of("--num-distributed-optimizer-instances 4").plan.mesh.dp_replicate == 1, "without shards"
    with pytest.raises(UserError, match="instances is 3, which does not divide the 16 data-parallel ranks"):
        step_of("--use-distributed-optimizer --num-distributed-optimizer-instances 3")


def test_sharded_gradients_are_reduced_in_each_backward_pass_whatever_the_arguments_say() -> None:
    assert step_of("--use-megatron-fsdp --data-parallel-sharding-strategy optim").plan.reduce_at == "step"
    for strategy in ("optim_grads", "optim_grads_params"):
        assert step_of(f"--use-megatron-fsdp --data-parallel-sharding-strategy {strategy}").plan.reduce_at == "layer"


def test_a_missing_size_is_asked_for() -> None:
    config = read_config("megatron", ["--num-layers", "24"])
    with pytest.raises(UserError, match="gives no --hidden-size; give it after --"):
        megatron.run(config, find_cluster("h100x8"))


def test_what_is_not_predicted_is_named_and_false_is_not() -> None:
    config = read_config("megatron", ["--optimizer-cpu-offload", "--num-layers", "2", "--magic", "3"])
    assert [option.setting.key for option in config.unpredicted] == ["--optimizer-cpu-offload"]
    assert [setting.key for setting in config.unknown] == ["--magic"]


def test_every_change_is_an_argument_of_megatron() -> None:
    config = read_config("megatron", [*SMALL.split(), "--tensor-model-parallel-size", "2", "--global-batch-size", "64"])
    step = megatron.run(config, find_cluster("h100x16"))
    changes = list(megatron.changes(config, step))
    assert {"sequence_parallel": True} in changes
    assert ["mlp"] in [change.get("recompute_modules") for change in changes]
    assert all(meaning in config.table.keys for change in changes for meaning in change)
