"""Names of a Llama's tensors in torchtitan's checkpoints, which torch.distributed.checkpoint writes.

Source: pytorch/torchtitan at b5bcd76c66d0acb1a08b176d9639425bc55e0b2a. `models/llama3/state_dict_adapter.py` has the
names. Queries and keys are stored as in a run: rotary pairs lie side by side. `ModelWrapper` in
`components/checkpointer/base.py` puts these names at the top level; `optimizer.`, `lr_scheduler.`, `dataloader.` and
`train_state.` begin the names of all other states. A tied head is the embedding under a second name
(`models/common/decoder.py`), so it is stored twice. Older names: the head was `output` until 786e26f8 (2026-04-27), and
`qkv_linear` was missing until ad7a8653 (2026-04-16).
"""

from __future__ import annotations

from collections.abc import Collection

from shardlab.common.errors import UserError
from shardlab.models import GPT
from shardlab.models.named import name_of
from shardlab.train.huggingface.families import LLAMA, Naming, family_of

HEAD, OLD_HEAD = "lm_head", "output"
"""Names of the head, the newest first."""

QKV, OLD_QKV, FUSED = "attention.qkv_linear", "attention", "attention.qkv_linear.wqkv.weight"
"""Names of the module with queries, keys and values, the newest first, and of one tensor with all three."""

OTHER_STATES = ("optimizer.", "lr_scheduler.", "dataloader.", "train_state.")
"""Beginnings of the names of states that are not weights."""


def torchtitan_naming(model: GPT, source: str, names: Collection[str] = ()) -> Naming:
    """Return the names of a model's tensors.

    Args:
        model: the model.
        source: beginning of an error message.
        names: names in the checkpoint. By default, the names are those of the newest version of torchtitan.

    Raises:
        UserError: if torchtitan does not have such a model, or wrote the names in a version that is not read.
    """
    family, _ = family_of(model, source)
    if family is not LLAMA or model.bias:
        kind = f"{name_of(type(model))}{' with biases' if family is LLAMA else ''}"
        raise UserError(
            f"{source}: a {kind} has no like in torchtitan; its checkpoints are exchanged for llama without biases. "
            "--to hf writes Hugging Face's format"
        )
    if fused := next((name for name in names if name.endswith(FUSED)), None):
        raise UserError(
            f"{source} has {fused}, in which some versions of torchtitan mixed queries, keys and values; load and save "
            "it with a newer torchtitan"
        )
    head = OLD_HEAD if f"{OLD_HEAD}.weight" in names else HEAD
    qkv = OLD_QKV if f"layers.0.{OLD_QKV}.wq.weight" in names else QKV
    return Naming(
        {
            "wte": ["tok_embeddings"],
            "ln_f": ["norm"],
            "lm_head": [head],
            "ln_1": ["layers.{block}.attention_norm"],
            "ln_2": ["layers.{block}.ffn_norm"],
            "attn.c_attn": [f"layers.{{block}}.{qkv}.{name}" for name in ("wq", "wk", "wv")],
            "attn.c_proj": ["layers.{block}.attention.wo"],
            "mlp.c_fc": ["layers.{block}.feed_forward.w1", "layers.{block}.feed_forward.w3"],
            "mlp.c_proj": ["layers.{block}.feed_forward.w2"],
        }
    )
