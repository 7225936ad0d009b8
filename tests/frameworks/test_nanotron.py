"""nanotron's files."""

from __future__ import annotations

import pytest

from shardlab.common.errors import UserError
from shardlab.frameworks import nanotron
from shardlab.frameworks.settings import Setting
from shardlab.simulate.hardware import find_cluster

TEXT = """
general: {project: debug, seed: 42}
parallelism:
  dp: 4
  pp: 2
  tp: 2
  pp_engine: 1f1b
  tp_mode: REDUCE_SCATTER
  tp_linear_async_communication: true
model:
  dtype: bfloat16
  model_config: &llama
    hidden_act: silu
    hidden_size: 1024
    intermediate_size: 4096
    num_attention_heads: 16
    num_hidden_layers: 16
    num_key_value_heads: 4
    tie_word_embeddings: false
    vocab_size: 32000
optimizer:
  accumulate_grad_in_fp32: true
  zero_stage: 1
  optimizer_factory: {name: adamW}
tokens:
  sequence_length: 2048
  micro_batch_size: 2
  batch_accumulation_per_replica: 4
  train_steps: 100
surprise: 3
"""


def test_the_axes_say_on_how_many_devices_it_runs() -> None:
    config = nanotron.config_of(TEXT, "a.yaml")
    assert config.devices == 16
    assert config.unknown == [Setting("surprise", 3, 30)]
    step = nanotron.run(config, find_cluster("h100x16"))
    assert (step.plan.mesh.dp_shard, step.plan.mesh.pp, step.plan.mesh.tp) == (4, 2, 2)
    assert (step.micro_batch_size, step.microbatches, step.recipe.name) == (2, 16, "nanotron")
    assert step.plan.sequence_parallel
    assert (step.plan.zero_stage, step.plan.reduce_at) == (1, "step")
    assert sum(step.plan.layers_per_stage) == 2 * 16 + 1


def test_arguments_replace_keys() -> None:
    config = nanotron.config_of(TEXT, "a.yaml", [Setting("parallelism.dp", "2")])
    assert config.devices == 8


def test_too_few_devices_are_refused() -> None:
    with pytest.raises(UserError, match="need 16 devices"):
        nanotron.run(nanotron.config_of(TEXT, "a.yaml"), find_cluster("h100x8"))


def test_a_missing_batch_is_asked_for_and_mamba_is_refused() -> None:
    without_batch = TEXT.replace("  micro_batch_size: 2\n", "")
    with pytest.raises(UserError, match="micro_batch_size"):
        nanotron.run(nanotron.config_of(without_batch, "a.yaml"), find_cluster("h100x16"))
    mamba = TEXT.replace("hidden_size: 1024", "d_model: 1024")
    with pytest.raises(UserError, match="Mamba"):
        nanotron.run(nanotron.config_of(mamba, "a.yaml"), find_cluster("h100x16"))


def test_changes_keep_the_devices_and_the_batch() -> None:
    config = nanotron.config_of(TEXT, "a.yaml")
    step = nanotron.run(config, find_cluster("h100x16"))
    changes = list(nanotron.changes(config, step))
    assert {"recompute": True} in changes
    for change in changes:
        other = nanotron.run(config.with_meanings(change), find_cluster("h100x16"))
        assert other.plan.mesh.world == 16
        assert other.sequences == step.sequences
