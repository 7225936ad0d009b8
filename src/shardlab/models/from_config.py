"""Models from the config.json of Hugging Face's transformers.

`model_from_config` returns the model of a file or folder, and `config_notes` the fields that the model leaves out.
`read_config` reads the fields with the `ConfigFamily` of the model's type, which lists the fields and, for some fields,
the only value that Shardlab's models support. Every field that a model cannot express exactly becomes a difference.
`shardlab.train.huggingface` exchanges weights of such models, and refuses differences.

Sources of the fields and their defaults: huggingface/transformers, src/transformers/models/*/configuration_*.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

from shardlab.common.errors import UserError, naming
from shardlab.common.fields import field_hints, read_fields, read_table
from shardlab.common.files import read_file
from shardlab.models.architectures import GPT, Llama, Mixtral, MoE

CONFIG = "config.json"

REQUIRED = object()
"""Default of a field that is required in a configuration."""

SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
"""Fields of Llama 3.1's rotary positions, in the order of `RopeScaling`."""

GELUS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu2": "squared_relu"}
"""Activations by their names in transformers. If an activation has several names, config.json is written with the
first one."""

GATES = {"silu": "swiglu", "swish": "swiglu", "gelu_pytorch_tanh": "geglu", "gelu": "geglu", "gelu_new": "geglu"}
"""Activations of gated feed-forward networks by their names in transformers."""

HARMLESS = {
    "the weights' first values, of which training makes its own": ("initializer_range", "initializer_factor"),
    "text, its tokens and its generation": (
        *("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "use_cache", "max_length"),
        *("task_specific_params", "is_decoder", "is_encoder_decoder", "chat_template", "forced_eos_token_id"),
    ),
    "the software that wrote or reads the file": (
        *("_name_or_path", "_commit_hash", "architectures", "auto_map", "model_type", "transformers_version", "dtype"),
        *("torch_dtype", "_attn_implementation", "attn_implementation", "use_flash_attn", "is_llama_config"),
        *("unsloth_version", "unsloth_fixed", "gradient_checkpointing", "pretraining_tp", "output_router_logits"),
        *("ep_size", "use_mlp"),
    ),
    "other heads than that of a language model": (
        *("summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "id2label"),
        *("summary_use_proj", "classifier_dropout", "problem_type", "label2id", "finetuning_task"),
    ),
    "what follows from fields that are read": ("n_ctx", "max_window_layers", "rope_interleaved", "layer_types"),
    "outputs of transformers beside the logits": (
        *("output_attentions", "output_hidden_states", "return_dict", "torchscript", "use_return_dict"),
        *("return_dict_in_generate", "remove_invalid_values", "chunk_size_feed_forward"),
    ),
    "arithmetic of inference": ("scale_attn_weights", "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn"),
}
"""Fields that change neither size nor time of a training step, by reason."""

_HARMLESS = {name for names in HARMLESS.values() for name in names}


class ConfigField(NamedTuple):
    """Field of a config.json, with the equivalent field of a model.

    Attributes:
        theirs, ours: names of the field in config.json and in the model.
        default: value if config.json lacks the field.
        like: other fields of config.json that must have the same value.
        words: values of the model's field, by the values in config.json (empty: both are equal).
    """

    theirs: str
    ours: str
    default: Any = REQUIRED
    like: tuple[str, ...] = ()
    words: Mapping[str, str] = {}


_NO_DROPOUT = {"attention_dropout": 0.0}

Adjust = Callable[[Mapping[str, Any], dict[str, Any]], Iterable[str]]
"""Function that reads further fields of a config.json into the fields of a model, and returns the differences."""


@dataclass(frozen=True)
class ConfigFamily:
    """Family of models in transformers.

    Attributes:
        model_type: name of the family in config.json.
        base: Shardlab's model whose fields a config.json replaces.
        fields: fields of config.json that are read.
        fixed: map from a field of config.json of which Shardlab's models support only one value to this value, which is
            also the field's default. In most families, the only such field is the dropout of attention.
        rope_theta: default base of rotary positions (None: positions are learned).
        rope_names: name of the field in config.json with the base of rotary positions.
        adjust: function that reads fields that depend on each other.
        known: further fields that `adjust` reads.
        always: differences from transformers that every model of the family has.
    """

    model_type: str
    base: GPT
    fields: Sequence[ConfigField]
    fixed: Mapping[str, Any] = field(default_factory=lambda: _NO_DROPOUT)
    rope_theta: float | None = 10_000.0
    rope_names: str = "rope_theta"
    adjust: Adjust | None = None
    known: tuple[str, ...] = ()
    always: tuple[str, ...] = ()


class ConfigReading(NamedTuple):
    """Model of a config.json.

    Attributes:
        family: family of the model.
        model: the model.
        differences: differences between the model's arithmetic and that of transformers.
        unread: names of fields that Shardlab does not know.
    """

    family: ConfigFamily
    model: GPT
    differences: tuple[str, ...]
    unread: tuple[str, ...]


def is_config(name: str) -> bool:
    """Return whether the name of a model is the path of a config.json, or of a folder that has one."""
    return name.endswith(".json") or (Path(name) / CONFIG).is_file()


def model_from_config(path: Path) -> GPT:
    """Return the model of a config.json, or of a folder of transformers.

    The experts of a mixture have as many slots as evenly distributed tokens need (capacity factor 1).

    Raises:
        UserError: if there is no such file, or Shardlab has no such model.
    """
    return _reading(path).model


def config_notes(path: Path) -> list[str]:
    """Return one sentence about the fields that the model simplifies, and one about unknown fields."""
    reading = _reading(path)
    notes: list[str] = []
    if reading.differences:
        notes.append(f"{path}: simplified, since shardlab's models cannot express: {'; '.join(reading.differences)}")
    if reading.unread:
        notes.append(f"{path}: fields that shardlab does not know, and leaves out: {', '.join(reading.unread)}")
    return notes


def _reading(path: Path) -> ConfigReading:
    file = path / CONFIG if path.is_dir() else path
    reading = read_config(read_table(read_file(file, "JSON"), str(file)), str(file))
    if not isinstance(reading.model, MoE):
        return reading
    spread = "capacity_factor is 1.0, as if tokens were spread evenly over experts"
    return reading._replace(
        model=replace(reading.model, capacity_factor=1.0), differences=(*reading.differences, spread)
    )


def read_config(config: Mapping[str, Any], source: str) -> ConfigReading:
    """Return the model that a config.json describes.

    Raises:
        UserError: if Shardlab has no such model; the message names every wrong field.
    """
    config = cast(dict[str, Any], config.get("text_config") or config)
    kind = config.get("model_type")
    family = CONFIG_FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        model_types = listed(CONFIG_FAMILIES)
        raise UserError(f"{source}: model_type is {kind!r}; shardlab has models of {model_types}")
    values: dict[str, Any] = {}
    missing: list[str] = []
    differences = list(family.always)
    for config_name, field_name, default, like, words in family.fields:
        value = config.get(config_name, default)
        if value is REQUIRED:
            missing.append(f"{config_name} is missing")
            continue
        if words and not (isinstance(value, str) and value in words):
            differences.append(f"{config_name} is {value!r}, not {listed(words, 'or')}")
            continue
        differences += [
            f"{other} is {config.get(other, default)!r}, not {value!r} like {config_name}"
            for other in like
            if config.get(other, default) != value
        ]
        if value is not None:
            values[field_name] = words.get(value, value) if words else value
    if missing:
        raise UserError(f"{source} is not a whole configuration of {family.model_type}: {'; '.join(missing)}")
    differences += [
        f"{name} is {config[name]!r}, not {value!r}"
        for name, value in family.fixed.items()
        if config.get(name, value) != value
    ]
    if family.rope_theta is not None:
        values |= _rope(config, family, differences)
        differences += _window(config)
    if family.adjust is not None:
        with naming(Path(source)):
            differences += family.adjust(config, values)
    if values.get("head_dim", 0) * values.get("heads", 0) == values.get("hidden_size"):
        values.pop("head_dim", None)
    with naming(Path(source)):
        fields = read_fields(field_hints(type(family.base)), values, source)
        model = replace(family.base, **fields)
    return ConfigReading(family, model, tuple(differences), _unread(config, family))


def listed(names: Any, last: str = "and") -> str:
    """Return names as text: `a, b and c`."""
    *others, end = names
    return f"{', '.join(others)} {last} {end}" if others else str(end)


_ROPE = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "rope_type", "sliding_window")


def _unread(config: Mapping[str, Any], family: ConfigFamily) -> tuple[str, ...]:
    read = {name for field in family.fields for name in (field.theirs, *field.like)}
    understood = {*read, *family.fixed, *family.known, family.rope_names, "use_sliding_window", *_ROPE, *_HARMLESS}
    return tuple(
        sorted(name for name, value in config.items() if name not in understood and value not in (None, False))
    )


def _rope(config: Mapping[str, Any], family: ConfigFamily, differences: list[str]) -> dict[str, Any]:
    """Return the model's fields of rotary positions. Newer files have one table, older files the base outside of it."""
    rope: Any = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        differences.append(f"rope_scaling is {rope!r}, not a table")
        return {}
    rope = cast(dict[str, Any], rope)
    base = config.get(family.rope_names, family.rope_theta)
    values: dict[str, Any] = {"rope_theta": rope.get("rope_theta", base)}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "llama3" and all(name in rope for name in SCALING):
        values["rope_scaling"] = tuple(rope[name] for name in SCALING)
    elif kind != "default":
        differences.append(f"rope_type is {kind!r}, not 'default' or 'llama3' with {listed(SCALING)}")
    for name in ("partial_rotary_factor", "rotary_pct"):
        if (part := rope.get(name, config.get(name, 1.0))) != 1.0:
            differences.append(f"{name} is {part!r}, not 1.0")
    return values


def _window(config: Mapping[str, Any]) -> list[str]:
    """Return the sliding window as a difference if it is shorter than the context (empty: it is not)."""
    window, length = config.get("sliding_window"), config.get("max_position_embeddings")
    used = config.get("use_sliding_window", True)
    if not used or window is None or (isinstance(window, int) and isinstance(length, int) and window >= length):
        return []
    return [f"sliding_window is {window!r}, not null"]


def _dense_first(config: Mapping[str, Any], values: dict[str, Any]) -> Iterable[str]:
    """Read which layers of a Qwen mixture are dense. Only layers at the start may be dense."""
    sparse, only = config.get("decoder_sparse_step", 1), cast(list[int], config.get("mlp_only_layers") or [])
    if sparse != 1:
        raise UserError(f"decoder_sparse_step is {sparse!r}, but all layers after the first are of one kind; give 1")
    if only != list(range(len(only))):
        raise UserError(f"mlp_only_layers is {only!r}, but only the first layers may be dense; give [0, 1, ...]")
    if only:
        values |= {"dense_layers": len(only), "dense_ffn_hidden_size": config.get("intermediate_size")}
    if config.get("shared_expert_intermediate_size"):
        values |= {"shared_experts": 1, "shared_ffn_hidden_size": config["shared_expert_intermediate_size"]}
        yield "the shared expert has a gate, of one feature a token"
    if not config.get("norm_topk_prob", False):
        yield "norm_topk_prob is False, not True"


_QWEN_MIXTURE = ("decoder_sparse_step", "mlp_only_layers", "intermediate_size", "shared_expert_intermediate_size")


def _deepseek(config: Mapping[str, Any], values: dict[str, Any]) -> Iterable[str]:
    """Read DeepSeek's mixture: dense layers first, then experts in every layer."""
    first, interval = config.get("first_k_dense_replace", 0), config.get("moe_layer_freq", 1)
    if interval != 1:
        raise UserError(f"moe_layer_freq is {interval!r}, but all layers after the first are of one kind; give 1")
    values["shared_experts"] = config.get("n_shared_experts") or 0
    if first:
        values |= {"dense_layers": first, "dense_ffn_hidden_size": config.get("intermediate_size")}
    for name, value in (("scoring_func", "softmax"), ("topk_method", "greedy"), ("routed_scaling_factor", 1.0)):
        if (other := config.get(name, value)) != value:
            yield f"{name} is {other!r}, not {value!r}"
    if not config.get("norm_topk_prob", False):
        yield "norm_topk_prob is False, not True"
    if extra_layers := config.get("num_nextn_predict_layers"):
        yield f"num_nextn_predict_layers is {extra_layers!r}, not 0: these layers are left out"


def _latent(config: Mapping[str, Any], values: dict[str, Any]) -> Iterable[str]:
    """Read DeepSeek's mixture and latent attention."""
    if (value_width := config.get("v_head_dim", 128)) != values["head_dim"]:
        raise UserError(f"v_head_dim is {value_width!r}, not {values['head_dim']!r} like qk_nope_head_dim")
    yield from _deepseek(config, values)


_DEEPSEEK = (
    *("first_k_dense_replace", "moe_layer_freq", "n_shared_experts", "intermediate_size", "norm_topk_prob", "n_group"),
    *("scoring_func", "topk_method", "routed_scaling_factor", "num_nextn_predict_layers", "topk_group", "seq_aux"),
)

GPT2_CONFIG = ConfigFamily(
    "gpt2",
    GPT(),
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
    rope_theta=None,
)

_ATTENTION = (
    ConfigField("num_hidden_layers", "layers"),
    ConfigField("hidden_size", "hidden_size"),
    ConfigField("num_attention_heads", "heads"),
    ConfigField("max_position_embeddings", "seq_len"),
    ConfigField("vocab_size", "vocab_size"),
)
_GROUPED = (
    *_ATTENTION,
    ConfigField("num_key_value_heads", "kv_heads", None),
    ConfigField("head_dim", "head_dim", None),
)
_UNTIED, _TIED = (ConfigField("tie_word_embeddings", "tied", tied) for tied in (False, True))
_DENSE = ConfigField("intermediate_size", "ffn_hidden_size")
_EXPERT = ConfigField("moe_intermediate_size", "ffn_hidden_size")
_GATE = ConfigField("hidden_act", "activation", "silu", words=GATES)
_RMS = ConfigField("rms_norm_eps", "norm_eps", 1e-6)
_PROJECTIONS = ConfigField("attention_bias", "qkv_bias", False)
_AUXILIARY = ConfigField("router_aux_loss_coef", "auxiliary", 0.001)

LLAMA_CONFIG = ConfigFamily(
    "llama",
    Llama(),
    (*_GROUPED, _DENSE, _UNTIED, _RMS, ConfigField("attention_bias", "bias", False, like=("mlp_bias",))),
    {"hidden_act": "silu", **_NO_DROPOUT},
)

MISTRAL_CONFIG = ConfigFamily(
    "mistral", Llama(), (*_GROUPED, _DENSE, _UNTIED, _RMS), {"hidden_act": "silu", **_NO_DROPOUT}
)

MIXTRAL_CONFIG = ConfigFamily(
    "mixtral",
    Mixtral(capacity_factor=None),
    (
        *(*_GROUPED, _DENSE, _UNTIED, _AUXILIARY),
        ConfigField("rms_norm_eps", "norm_eps", 1e-5),
        ConfigField("num_local_experts", "experts", 8),
        ConfigField("num_experts_per_tok", "top_k", 2),
    ),
    {"hidden_act": "silu", "attention_dropout": 0.0, "router_jitter_noise": 0.0},
    rope_theta=1_000_000.0,
)

QWEN2_CONFIG = ConfigFamily("qwen2", Llama(qkv_bias=True), (*_GROUPED, _DENSE, _UNTIED, _RMS, _GATE))

_SHARED_NORM = "all heads of a layer share one weight of q_norm and one of k_norm; here, each head has its own"

QWEN3_CONFIG = ConfigFamily(
    "qwen3",
    Llama(qk_norm=True, head_dim=128),
    (*_GROUPED, _DENSE, _UNTIED, _RMS, _GATE, _PROJECTIONS),
    always=(_SHARED_NORM,),
)

QWEN2_MOE_CONFIG = ConfigFamily(
    "qwen2_moe",
    Mixtral(capacity_factor=None, qkv_bias=True),
    (
        *(*_GROUPED, _EXPERT, _UNTIED, _RMS, _GATE, _AUXILIARY),
        ConfigField("num_experts", "experts", 60),
        ConfigField("num_experts_per_tok", "top_k", 4),
    ),
    adjust=_dense_first,
    known=(*_QWEN_MIXTURE, "norm_topk_prob", "qkv_bias"),
)

QWEN3_MOE_CONFIG = ConfigFamily(
    "qwen3_moe",
    Mixtral(capacity_factor=None, qk_norm=True, head_dim=128),
    (
        *(*_GROUPED, _EXPERT, _UNTIED, _RMS, _GATE, _PROJECTIONS, _AUXILIARY),
        ConfigField("num_experts", "experts", 128),
        ConfigField("num_experts_per_tok", "top_k", 8),
    ),
    adjust=_dense_first,
    known=(*_QWEN_MIXTURE, "norm_topk_prob"),
    always=(_SHARED_NORM,),
)

GEMMA_CONFIG = ConfigFamily(
    "gemma",
    Llama(activation="geglu"),
    (
        *(*_GROUPED, _DENSE, _TIED, _RMS, _PROJECTIONS),
        ConfigField("hidden_activation", "activation", "gelu_pytorch_tanh", words=GATES),
    ),
    known=("hidden_act",),
    always=("embeddings are scaled and norms multiply by 1 + weight, which takes no more parameters",),
)

GEMMA2_CONFIG = replace(
    GEMMA_CONFIG,
    model_type="gemma2",
    fixed={**_NO_DROPOUT, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    known=("hidden_act", "query_pre_attn_scalar", "sliding_window_pattern", "cache_implementation"),
    always=(*GEMMA_CONFIG.always, "a block has two further norms, after attention and feed-forward"),
)

GEMMA3_CONFIG = replace(
    GEMMA2_CONFIG,
    model_type="gemma3_text",
    base=Llama(activation="geglu", qk_norm=True, head_dim=256),
    known=(*GEMMA2_CONFIG.known, "rope_local_base_freq"),
    always=(*GEMMA2_CONFIG.always, _SHARED_NORM),
)

_PARALLEL = "attention and feed-forward of a block read one norm, side by side; here, one after the other"

PHI_CONFIG = ConfigFamily(
    "phi",
    GPT(rope_theta=10_000.0),
    (
        *(*_GROUPED, _DENSE, _UNTIED),
        ConfigField("layer_norm_eps", "norm_eps", 1e-5),
        ConfigField("hidden_act", "activation", "gelu_new", words=GELUS),
    ),
    {**_NO_DROPOUT, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "qk_layernorm": False},
    always=(_PARALLEL, "the head has a bias, and a block has one norm"),
)

PHI3_CONFIG = replace(
    MISTRAL_CONFIG,
    model_type="phi3",
    fixed={**MISTRAL_CONFIG.fixed, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    known=("original_max_position_embeddings",),
)


def _neox(config: Mapping[str, Any], values: dict[str, Any]) -> Iterable[str]:
    if config.get("use_parallel_residual", True):
        yield _PARALLEL
    if "rotary_pct" not in config:
        yield "rotary_pct is 0.25, not 1.0"


GPT_NEOX_CONFIG = ConfigFamily(
    "gpt_neox",
    GPT(rope_theta=10_000.0),
    (
        *(*_ATTENTION, _DENSE, _UNTIED),
        ConfigField("layer_norm_eps", "norm_eps", 1e-5),
        ConfigField("hidden_act", "activation", "gelu", words=GELUS | {"gelu_fast": "gelu_tanh"}),
        ConfigField("hidden_dropout", "dropout", 0.0, like=("attention_dropout",)),
        ConfigField("attention_bias", "bias", True),
    ),
    {},
    rope_names="rotary_emb_base",
    adjust=_neox,
    known=("use_parallel_residual", "rotary_pct"),
)

GPT_OSS_CONFIG = ConfigFamily(
    "gpt_oss",
    Mixtral(capacity_factor=None, bias=True, head_dim=64),
    (
        *(*_GROUPED, _DENSE, _UNTIED, _RMS),
        ConfigField("num_local_experts", "experts", 128),
        ConfigField("num_experts_per_tok", "top_k", 4, like=("experts_per_token",)),
        ConfigField("router_aux_loss_coef", "auxiliary", 0.9),
    ),
    {"hidden_act": "silu", "attention_bias": True, **_NO_DROPOUT},
    rope_theta=150_000.0,
    known=("initial_context_length", "swiglu_limit"),
    always=("attention has a learned sink for each head, and the router has a bias",),
)

DEEPSEEK_CONFIG = ConfigFamily(
    "deepseek",
    Mixtral(capacity_factor=None),
    (
        *(*_GROUPED, _EXPERT, _UNTIED, _RMS, _GATE, _PROJECTIONS),
        ConfigField("n_routed_experts", "experts"),
        ConfigField("num_experts_per_tok", "top_k"),
        ConfigField("aux_loss_alpha", "auxiliary", 0.001),
    ),
    adjust=_deepseek,
    known=_DEEPSEEK,
)

DEEPSEEK_V3_CONFIG = replace(
    DEEPSEEK_CONFIG,
    model_type="deepseek_v3",
    base=Mixtral(capacity_factor=None, kv_rank=512),
    fields=(
        *(*_ATTENTION, _EXPERT, _UNTIED, _RMS, _GATE),
        ConfigField("n_routed_experts", "experts"),
        ConfigField("num_experts_per_tok", "top_k"),
        ConfigField("aux_loss_alpha", "auxiliary", 0.001),
        ConfigField("kv_lora_rank", "kv_rank", 512),
        ConfigField("q_lora_rank", "q_rank", None),
        ConfigField("qk_nope_head_dim", "head_dim", 128),
        ConfigField("qk_rope_head_dim", "rope_dim", 64),
    ),
    fixed={**_NO_DROPOUT, "attention_bias": False},
    adjust=_latent,
    known=(*_DEEPSEEK, "v_head_dim", "num_key_value_heads", "head_dim", "qk_head_dim"),
)

DEEPSEEK_V2_CONFIG = replace(DEEPSEEK_V3_CONFIG, model_type="deepseek_v2")

CONFIG_FAMILIES = {
    family.model_type: family
    for family in (
        *(GPT2_CONFIG, LLAMA_CONFIG, MISTRAL_CONFIG, MIXTRAL_CONFIG, QWEN2_CONFIG, QWEN3_CONFIG, QWEN2_MOE_CONFIG),
        *(QWEN3_MOE_CONFIG, GEMMA_CONFIG, GEMMA2_CONFIG, GEMMA3_CONFIG, PHI_CONFIG, PHI3_CONFIG, GPT_NEOX_CONFIG),
        *(GPT_OSS_CONFIG, DEEPSEEK_CONFIG, DEEPSEEK_V2_CONFIG, DEEPSEEK_V3_CONFIG),
    )
}
"""Families by their names in config.json."""
