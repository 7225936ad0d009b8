"""NeMo's files and Megatron-Bridge's overrides."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardlab.frameworks import nemo
from shardlab.frameworks.find import read_config
from shardlab.frameworks.settings import Setting
from shardlab.models import Llama
from shardlab.simulate.hardware import find_cluster

TEXT = """
trainer:
  devices: 8
  num_nodes: 2
  precision: bf16
model:
  micro_batch_size: 1
  global_batch_size: 64
  tensor_model_parallel_size: 4
  pipeline_model_parallel_size: 2
  virtual_pipeline_model_parallel_size: null
  sequence_parallel: true
  encoder_seq_length: 4096
  max_position_embeddings: ${.encoder_seq_length}
  num_layers: 32
  hidden_size: 4096
  ffn_hidden_size: ${multiply:3, ${.hidden_size}}
  num_attention_heads: 32
  num_query_groups: 8
  activation: fast-swiglu
  normalization: rmsnorm
  bias: false
  position_embedding_type: rope
  share_embeddings_and_output_weights: false
  hidden_dropout: 0.0
  attention_dropout: 0.0
  override_vocab_size: 32000
  optim: {name: distributed_fused_adam, lr: 2e-4, overlap_grad_sync: true}
"""


def test_words_of_nemo_mean_those_of_megatron() -> None:
    config = nemo.config_of(TEXT, "a.yaml")
    assert config.devices == 16
    assert config.unknown == []
    step = nemo.run(config, find_cluster("h100x16"))
    model = step.model
    assert isinstance(model, Llama)
    assert (model.hidden, model.kv_heads, model.seq_len) == (12288, 8, 4096)
    assert (step.plan.zero_stage, step.plan.reduce_at, step.precision.name) == (1, "layer", "bf16-fp32-grads")


@pytest.mark.parametrize(("method", "recompute"), [("block", "first-3"), ("uniform", "uniform-3")])
def test_recomputed_blocks_are_those_of_megatron(method: str, recompute: str) -> None:
    keys = {"granularity": "full", "method": method, "num_layers": 3}
    lines = "".join(f"  activations_checkpoint_{key}: {value}\n" for key, value in keys.items())
    config = nemo.config_of(TEXT + lines, "a.yaml")
    assert nemo.run(config, find_cluster("h100x16")).plan.recompute == recompute


def test_overrides_of_hydra_change_it(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(TEXT)
    config = read_config(str(path), ["model.micro_batch_size=2", "++model.num_layers=16"])
    assert nemo.run(config, find_cluster("h100x16")).micro_batch_size == 2
    assert config.by_meaning["layers"] == Setting("model.num_layers", "16", 0)


def test_changes_are_keys_of_nemo() -> None:
    config = nemo.config_of(TEXT, "a.yaml")
    step = nemo.run(config, find_cluster("h100x16"))
    keys = {
        config.edit(meaning, value).key for change in nemo.changes(config, step) for meaning, value in change.items()
    }
    assert "model.activations_checkpoint_granularity" in keys
    assert all(key.startswith(("model.", "trainer.", "ddp.")) for key in keys)
