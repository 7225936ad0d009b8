"""Names of tensors in torchtitan's checkpoints, which torch.distributed.checkpoint writes.

Source: pytorch/torchtitan at b5bcd76c66d0acb1a08b176d9639425bc55e0b2a. `models/llama3/state_dict_adapter.py`, and those
of qwen3 and deepseek_v3, have the names. The models of torchtitan that can read ours:

- llama3 reads a Llama; both rotate neighbouring features (`ComplexRoPE`);
- qwen3 reads a Llama whose queries and keys are normalised, and a mixture without latent attention. It rotates a
  feature with the one half a head away (`CosSinRoPE`). It has one norm weight for all heads and we have one for each
  head, so only equal weights are written;
- deepseek_v3 reads a mixture with latent attention, and has the heads in another order (`models/deepseek_v3/model.py`).

`ModelWrapper` in `components/checkpointer/base.py` puts these names at the top level; `optimizer.`, `lr_scheduler.`,
`dataloader.` and `train_state.` begin the names of all other states. A tied head is the embedding under a second name
(`models/common/decoder.py`), so it is stored twice. Older names: the head was `output` until 786e26f8 (2026-04-27),
`qkv_linear` was missing until ad7a8653 (2026-04-16), and release 0.2.2 has `moe.experts` and `moe.expert_bias`.
"""

from __future__ import annotations

from collections.abc import Collection

from shardlab.common.errors import UserError
from shardlab.models import GPT, Blocks, MoE
from shardlab.models.named import name_of
from shardlab.train.huggingface.families import QKV, HeadOrder, Naming

EMBEDDING = "tok_embeddings.weight"
"""Name of the token embedding, which is also a tied head."""

HEAD, OLD_HEAD = "lm_head", "output"
"""Names of the head, the newest first."""

QKV_MODULE, OLD_QKV, FUSED = "attention.qkv_linear", "attention", "attention.qkv_linear.wqkv.weight"
"""Names of the module with queries, keys and values: today's, the older one, and a tensor with all three."""

EXPERTS = ("moe.routed_experts.inner_experts.w1_EFD", "moe.routed_experts.inner_experts.w3_EFD")
EXPERTS_OUT = "moe.routed_experts.inner_experts.w2_EDF"
OLD_EXPERTS, OLD_EXPERTS_OUT = ("moe.experts.w1", "moe.experts.w3"), "moe.experts.w2"
"""Names of tensors that stack the matrices of all experts, as in release 0.2.2."""

EXPERT_BIAS = "moe.expert_bias_E"
EXPERT_BIASES = (f".{EXPERT_BIAS}", ".moe.expert_bias")
"""Name endings of the bias that routers add to their scores, the newest first. It is zero in our models."""

OTHER_STATES = ("optimizer.", "lr_scheduler.", "dataloader.", "train_state.")
"""Beginnings of the names of states that are not weights."""

WANTED = {"norm": "rms", "activation": "swiglu", "bias": False, "qkv_bias": False}
"""Fields of our models, with the only value that the models of torchtitan have."""


def torchtitan_naming(model: Blocks, source: str, names: Collection[str] = ()) -> Naming:
    """Return the names of a model's tensors.

    Args:
        model: the model.
        source: name of the checkpoint, with which error messages begin.
        names: names of the tensors in the checkpoint, from which the version of torchtitan is recognized (empty: the
            newest version).

    Raises:
        UserError: if torchtitan does not have such a model, or wrote the names in a version that is not read.
    """
    model = _require_known(model, source)
    if fused := next((name for name in names if name.endswith(FUSED)), None):
        raise UserError(
            f"{source} has {fused}, in which some versions of torchtitan mixed queries, keys and values; load and save "
            "it with a newer torchtitan"
        )
    head = OLD_HEAD if f"{OLD_HEAD}.weight" in names else HEAD
    old = any(name.endswith(OLD_EXPERTS) for name in names)
    experts, out = (OLD_EXPERTS, OLD_EXPERTS_OUT) if old else (EXPERTS, EXPERTS_OUT)
    prefix = "layers.{block}."
    tensors = {
        "wte": ["tok_embeddings"],
        "ln_f": ["norm"],
        "lm_head": [head],
        "ln_1": [f"{prefix}attention_norm"],
        "ln_2": [f"{prefix}ffn_norm"],
        "attn.c_proj": [f"{prefix}attention.wo"],
        "mlp.c_fc": [f"{prefix}feed_forward.w1", f"{prefix}feed_forward.w3"],
        "mlp.c_proj": [f"{prefix}feed_forward.w2"],
        "mlp.router": [f"{prefix}moe.router.gate"],
        "mlp.experts.c_fc": [prefix + name for name in experts],
        "mlp.experts.c_proj": [prefix + out],
        "mlp.shared.c_fc": [f"{prefix}moe.shared_experts.w1", f"{prefix}moe.shared_experts.w3"],
        "mlp.shared.c_proj": [f"{prefix}moe.shared_experts.w2"],
    }
    stacked, size = frozenset({"mlp.experts.c_fc", "mlp.experts.c_proj"}), model.head_size
    if model.kv_rank is not None:
        return Naming(tensors | _latent_names(model), heads=_latent_heads(model), stacked=stacked)
    module = OLD_QKV if f"layers.0.{OLD_QKV}.wq.weight" in names else QKV_MODULE
    tensors |= {QKV: [f"{prefix}{module}.{name}" for name in ("wq", "wk", "wv")]}
    tensors |= {f"attn.{name}_norm": [f"{prefix}attention.{name}_norm"] for name in "qk"}
    shared = HeadOrder(size, 0, halves=True)
    norms = {(f"attn.{name}_norm", 0): shared for name in "qk"}
    return Naming(tensors, rotary=model.qk_norm or isinstance(model, MoE), heads=norms, stacked=stacked)


def _require_known(model: Blocks, source: str) -> GPT:
    kind = f"a {name_of(type(model))}"
    if isinstance(model, GPT):
        different = [
            f"{name} {getattr(model, name)}" for name, value in WANTED.items() if getattr(model, name) != value
        ]
        different += ["learned positions"] if model.rope_theta is None else []
        if not different:
            return model
        kind += f" with {', '.join(different)}"
    raise UserError(
        f"{source}: torchtitan has no model like {kind}; its checkpoints are exchanged for models such as llama3, "
        "qwen3 and deepseek_v3; name another --model, or give --to hf for Hugging Face's format"
    )


def _latent_names(model: GPT) -> dict[str, list[str]]:
    prefix = "layers.{block}.attention."
    keys = f"{prefix}wkv_a"
    return {
        "attn.latents": [keys] if model.q_rank is None else [f"{prefix}wq_a", keys],
        "attn.q_latent_norm": [f"{prefix}q_norm"],
        "attn.kv_latent_norm": [f"{prefix}kv_norm"],
        "attn.latent_q": [f"{prefix}wq" if model.q_rank is None else f"{prefix}wq_b"],
        "attn.latent_kv": [f"{prefix}wkv_b"] * 2,
    }


def _latent_heads(model: GPT) -> dict[tuple[str, int], HeadOrder]:
    """Return the orders of heads of latent attention.

    In our queries, the rotated features come first; in torchtitan's, last. We store all keys and then all values;
    torchtitan stores the key and the value of each head together.
    """
    plain, rotary_size = model.head_size, model.rope_dim
    return {
        ("attn.latent_q", 0): HeadOrder(plain + rotary_size, plain + rotary_size, shift=plain),
        ("attn.latent_kv", 0): HeadOrder(plain, 2 * plain),
        ("attn.latent_kv", 1): HeadOrder(plain, 2 * plain, offset=plain),
    }
