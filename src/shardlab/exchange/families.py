"""The families of models that Hugging Face's transformers has as well: their fields and the names of their tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from shardlab.exchange.parts import Naming
from shardlab.models import GPT, Llama, Mixtral

WANTED = object()
"""In place of a default: a configuration must have the field."""

GELUS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu2": "squared_relu"}
"""Activations by their names in transformers; of two names for one, the first is written."""

NAMES_OF_GELUS = {ours: theirs for theirs, ours in reversed(GELUS.items())}
"""Names of activations in transformers, by ours."""


class ConfigField(NamedTuple):
    """A field of a config.json, and the field of a model that says the same.

    Attributes:
        theirs, ours: its names.
        default: what holds where config.json leaves it out.
        like: other fields that must say the same.
        words: their words for our values.
    """

    theirs: str
    ours: str
    default: Any = WANTED
    like: tuple[str, ...] = ()
    words: Mapping[str, str] = {}


@dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
        model_type, architecture: its names in config.json.
        base: our model, whose fields config.json's change.
        prefix: what the names of tensors begin with, unless the head was left out when they were saved.
        fields: of config.json.
        fixed: fields that must have one value, which is the default as well.
        wants: fields of our models that must have one value, and that config.json does not say.
        naming: of the tensors.
        rope_theta: the default base of rotary positions (None: positions are learned).
        ignored: ends of the names of tensors that are not read.
    """

    model_type: str
    architecture: str
    base: GPT
    prefix: str
    fields: Sequence[ConfigField]
    fixed: Mapping[str, Any]
    wants: Mapping[str, Any]
    naming: Naming
    rope_theta: float | None = None
    ignored: tuple[str, ...] = ()


GPT2 = Family(
    "gpt2",
    "GPT2LMHeadModel",
    GPT(),
    "transformer.",
    (
        ConfigField("n_layer", "layers"),
        ConfigField("n_embd", "hidden_size"),
        ConfigField("n_head", "heads"),
        ConfigField("n_inner", "ffn_hidden_size", None),
        ConfigField("n_positions", "seq_len"),
        ConfigField("vocab_size", "vocab_size"),
        ConfigField("layer_norm_epsilon", "norm_eps", 1e-5),
        ConfigField("activation_function", "activation", "gelu_new", words=GELUS),
        ConfigField("tie_word_embeddings", "tied", True),
        ConfigField("resid_pdrop", "dropout", 0.1, like=("embd_pdrop", "attn_pdrop")),
        ConfigField("bias", "bias", True),  # nanoGPT's word; transformers always has biases, which are zero then
    ),
    {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    {"norm": "layer", "rope_theta": None},
    Naming(
        {
            "wte": ["transformer.wte"],
            "wpe": ["transformer.wpe"],
            "ln_f": ["transformer.ln_f"],
            "lm_head": ["lm_head"],
            **{
                name: [f"transformer.h.{{block}}.{name}"]
                for name in ("ln_1", "ln_2", "attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
            },
        },
        transposed=frozenset({"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}),
    ),
    ignored=(".attn.bias", ".attn.masked_bias"),  # masks, in older files
)

_SIZES = (
    ConfigField("num_hidden_layers", "layers"),
    ConfigField("hidden_size", "hidden_size"),
    ConfigField("num_attention_heads", "heads"),
    ConfigField("num_key_value_heads", "kv_heads", None),
    ConfigField("intermediate_size", "ffn_hidden_size"),
    ConfigField("max_position_embeddings", "seq_len"),
    ConfigField("vocab_size", "vocab_size"),
    ConfigField("tie_word_embeddings", "tied", False),
)

_ATTENTION = {
    "wte": ["model.embed_tokens"],
    "ln_f": ["model.norm"],
    "lm_head": ["lm_head"],
    "ln_1": ["model.layers.{block}.input_layernorm"],
    "ln_2": ["model.layers.{block}.post_attention_layernorm"],
    "attn.c_attn": [f"model.layers.{{block}}.self_attn.{name}_proj" for name in "qkv"],
    "attn.c_proj": ["model.layers.{block}.self_attn.o_proj"],
}

_TURNED = frozenset({"q_proj", "k_proj"})

LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    Llama(),
    "model.",
    (
        *_SIZES,
        ConfigField("rms_norm_eps", "norm_eps", 1e-6),
        ConfigField("attention_bias", "bias", False, like=("mlp_bias",)),
    ),
    {"hidden_act": "silu", "attention_dropout": 0.0},
    {"norm": "rms", "activation": "swiglu"},
    Naming(
        _ATTENTION
        | {
            "mlp.c_fc": ["model.layers.{block}.mlp.gate_proj", "model.layers.{block}.mlp.up_proj"],
            "mlp.c_proj": ["model.layers.{block}.mlp.down_proj"],
        },
        rotary=_TURNED,
    ),
    10_000.0,
    (".rotary_emb.inv_freq",),
)

_EXPERT = "model.layers.{block}.block_sparse_moe.experts.{expert}"

MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    Mixtral(capacity_factor=None),
    "model.",
    (
        *_SIZES,
        ConfigField("rms_norm_eps", "norm_eps", 1e-5),
        ConfigField("num_local_experts", "experts", 8),
        ConfigField("num_experts_per_tok", "top_k", 2),
        ConfigField("router_aux_loss_coef", "auxiliary", 0.001),
    ),
    {"hidden_act": "silu", "attention_dropout": 0.0, "router_jitter_noise": 0.0},
    {"norm": "rms", "activation": "swiglu", "bias": False, "capacity_factor": None},
    Naming(
        _ATTENTION
        | {
            "mlp.router": ["model.layers.{block}.block_sparse_moe.gate"],
            "mlp.experts.c_fc": [f"{_EXPERT}.w1", f"{_EXPERT}.w3"],
            "mlp.experts.c_proj": [f"{_EXPERT}.w2"],
        },
        rotary=_TURNED,
    ),
    1_000_000.0,
    (".rotary_emb.inv_freq",),
)

FAMILIES = {family.model_type: family for family in (GPT2, LLAMA, MIXTRAL)}
"""By the name in config.json."""
