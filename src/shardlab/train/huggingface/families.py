"""Families of models that Hugging Face's transformers also has: GPT-2, Llama and Mixtral.

A `Family` lists the fields of config.json and the names of tensors. `read_model` reads a config.json, and
`write_config` writes one. A model that the other format cannot express is refused, with every field that differs.
`Naming.parts` returns the tensors of a file in which the rows of a parameter lie: a parameter is a matrix (rows,
columns), a vector has one column, and each expert of a mixture has a matrix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, cast

from torch import Tensor

from shardlab.common.errors import UserError
from shardlab.models import GPT, Blocks, Llama, Mixtral, MoE, Parameter
from shardlab.models.attention import RopeScaling
from shardlab.models.named import name_of, with_written
from shardlab.models.tensors.weights import matrix_of

SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
"""Fields of Llama 3.1's rotary positions, in the order of `RopeScaling`."""


def read_model(config: Mapping[str, Any], source: str) -> tuple[Family, GPT]:
    """Return the family and the model that a config.json describes.

    Raises:
        UserError: if Shardlab has no such model, with every field that differs.
    """
    kind = config.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise UserError(f"{source}: model_type is {kind!r}, but {_listed(FAMILIES)} are the models that are exchanged")
    written: dict[str, Any] = {}
    wrong: list[str] = []
    for field in family.fields:
        value = config.get(field.theirs, field.default)
        if value is REQUIRED:
            wrong.append(f"{field.theirs} is missing")
            continue
        if field.words and not (isinstance(value, str) and value in field.words):
            wrong.append(f"{field.theirs} is {value!r}, not {_listed(field.words, 'or')}")
            continue
        wrong += [
            f"{other} is {config.get(other, field.default)!r}, not {value!r} like {field.theirs}"
            for other in field.like
            if config.get(other, field.default) != value
        ]
        if value is not None:
            written[field.ours] = field.words.get(value, value) if field.words else value
    wrong += [
        f"{name} is {config[name]!r}, not {value!r}"
        for name, value in family.fixed.items()
        if config.get(name, value) != value
    ]
    if family.rope_theta is not None:
        written |= _rope(config, family.rope_theta, wrong)
        wrong += _check_window(config)
    if wrong:
        raise UserError(
            f"{source} is of another architecture than Shardlab's {type(family.base).__name__}: {'; '.join(wrong)}"
        )
    if written.get("head_dim", 0) * written.get("heads", 0) == written.get("hidden_size"):
        del written["head_dim"]
    model = with_written(family.base, written, source)
    assert isinstance(model, GPT)
    _check_experts(model, source)
    return family, model


def family_of(model: Blocks, source: str) -> tuple[Family, GPT]:
    """Return the family of a model, and the model.

    Raises:
        UserError: if it belongs to none, with what differs.
    """
    if type(model) not in (GPT, MoE, Llama, Mixtral):
        raise UserError(
            f"{source}: a model of the kind {name_of(type(model))} has no like in Hugging Face's transformers"
        )
    assert isinstance(model, GPT)
    family = MIXTRAL if isinstance(model, MoE) else GPT2 if model.rope_theta is None else LLAMA
    wrong = [
        f"{name} is {getattr(model, name)!r}, not {value!r}"
        for name, value in family.wants.items()
        if getattr(model, name) != value
    ]
    if family is GPT2 and (model.kv_heads or model.heads) != model.heads:
        wrong.append(f"kv_heads is {model.kv_heads}, not {model.heads} like heads")
    if family is GPT2 and model.head_size * model.heads != model.hidden_size:
        wrong.append(f"head_dim is {model.head_dim}, not hidden_size / heads = {model.hidden_size / model.heads:g}")
    if family is GPT2 and model.activation not in NAMES_OF_GELUS:
        wrong.append(f"activation is {model.activation!r}, not {_listed(NAMES_OF_GELUS, 'or')}")
    if family is not GPT2 and model.rope_theta is None:
        wrong.append("positions are learned (rope_theta is None), not rotary")
    if wrong:
        raise UserError(f"{source}: Hugging Face's {family.model_type} cannot say this model: {'; '.join(wrong)}")
    _check_experts(model, source)
    return family, model


def write_config(family: Family, model: GPT) -> dict[str, Any]:
    """Return the config.json of a model of this family."""
    config: dict[str, Any] = {"architectures": [family.architecture], "model_type": family.model_type}
    for field in family.fields:
        value: Any = getattr(model, field.ours)
        if field.words:
            value = NAMES_OF_GELUS[value]
        if field.ours == "kv_heads":
            value = model.kv_heads or model.heads
        if field.ours == "ffn_hidden_size" and field.default is REQUIRED:
            value = model.hidden
        if (field.theirs == "bias" and value) or (field.theirs == "head_dim" and value is None):
            continue  # transformers does not know the one, and derives the other
        config |= dict.fromkeys((field.theirs, *field.like), value)
    if family.rope_theta is not None:
        config |= {"rope_theta": model.rope_theta, "rope_scaling": _scaling(model.rope_scaling)}
    return config | dict(family.fixed) | {"bos_token_id": None, "eos_token_id": None}


class Part(NamedTuple):
    """Rows `start` to `start + rows` of a parameter's matrix, as one tensor of a file stores them.

    Attributes:
        name: name of the tensor.
        start, rows: range of rows of our matrix.
        columns: columns of our matrix.
        expert: index of the matrix in a tensor of several (None: the tensor is this matrix alone).
        vector: whether the tensor has one dimension.
        transposed: whether the tensor is (columns, rows).
        head_size: features of a head whose rotary pairs (2i, 2i + 1) the tensor stores as (i, i + head_size / 2); 0: no
            rotary features, or stored as ours.
    """

    name: str
    start: int
    rows: int
    columns: int
    expert: int | None = None
    vector: bool = False
    transposed: bool = False
    head_size: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix in the file."""
        if self.vector:
            return (self.rows,)
        return (self.columns, self.rows) if self.transposed else (self.rows, self.columns)

    def theirs(self, rows: Tensor) -> Tensor:
        """Return the rows of the tensor for some rows of ours, both counted from the part's first row.

        >>> import torch
        >>> Part("q", 0, 8, 4, head_size=4).theirs(torch.arange(8)).tolist()
        [0, 2, 1, 3, 4, 6, 5, 7]
        """
        if not self.head_size:
            return rows
        feature = rows % self.head_size
        return rows - feature + feature // 2 + feature % 2 * (self.head_size // 2)


@dataclass(frozen=True)
class Naming:
    """Names and layouts of a family's tensors.

    Attributes:
        tensors: for each parameter of ours, without "weight" or "bias", the tensors with its sections, in order;
            {block} and {expert} stand for numbers.
        transposed: parameters of ours whose tensors are (inputs, outputs), as in GPT-2's Conv1D.
        rotary: parts of tensors' names whose heads store their rotary pairs in two halves.
    """

    tensors: Mapping[str, Sequence[str]]
    transposed: frozenset[str] = frozenset()
    rotary: frozenset[str] = frozenset()

    def parts(self, model: GPT, block: int, parameter: Parameter) -> list[list[Part]]:
        """Return the parts in which each matrix of a parameter lies."""
        stem, _, end = parameter.name.rpartition(".")
        names, (experts, rows, columns) = self.tensors[stem], matrix_of(parameter)
        lengths = parameter.sections if len(names) > 1 else (rows,)
        starts = accumulate((0, *lengths[:-1]))
        placed = list(zip(names, starts, lengths, strict=True))
        vector = len(parameter.shape) == 1
        return [
            [
                Part(
                    f"{name.format(block=block, expert=expert)}.{end}", start, length, columns,
                    vector=vector,
                    transposed=stem in self.transposed and not vector,
                    head_size=model.head_size if name.rpartition(".")[2] in self.rotary else 0,
                )
                for name, start, length in placed
            ]
            for expert in range(experts)
        ]  # fmt: skip


def run_parts(block: int, parameter: Parameter) -> list[list[Part]]:
    """Return the parts of each matrix of a parameter in the weights of a run."""
    name, (experts, rows, columns) = f"layers.{block}.{parameter.name}", matrix_of(parameter)
    several = len(parameter.shape) == 3
    return [
        [Part(name, 0, rows, columns, expert if several else None, vector=len(parameter.shape) == 1)]
        for expert in range(experts)
    ]


REQUIRED = object()
"""Default of a field that a configuration must have."""

GELUS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu2": "squared_relu"}
"""Activations by their names in transformers. If one has two names, the first is written."""

NAMES_OF_GELUS = {ours: theirs for theirs, ours in reversed(GELUS.items())}
"""Names of activations in transformers, by ours."""


class ConfigField(NamedTuple):
    """Field of a config.json, with the equivalent field of a model.

    Attributes:
        theirs, ours: names of the two fields.
        default: value if config.json lacks the field.
        like: other fields of config.json that must have the same value.
        words: our values by theirs.
    """

    theirs: str
    ours: str
    default: Any = REQUIRED
    like: tuple[str, ...] = ()
    words: Mapping[str, str] = {}


@dataclass(frozen=True)
class Family:
    """Family of models.

    Attributes:
        model_type, architecture: names of the family in config.json.
        base: model of ours whose fields a config.json replaces.
        prefix: prefix of the names of tensors, which is missing if they were saved without the head.
        fields: fields of config.json.
        fixed: fields of config.json that must have one value, which is their default as well.
        wants: fields of our model that must have one value, and that config.json does not have.
        naming: names of the tensors.
        rope_theta: default base of rotary positions (None: positions are learned).
        ignored: endings of the names of tensors that are not read.
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
    {"norm": "layer", "rope_theta": None, "qk_norm": False, "qkv_bias": False},
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
    ConfigField("head_dim", "head_dim", None),
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

_ROTARY = frozenset({"q_proj", "k_proj"})

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
    {"norm": "rms", "activation": "swiglu", "qk_norm": False, "qkv_bias": False},
    Naming(
        _ATTENTION
        | {
            "mlp.c_fc": ["model.layers.{block}.mlp.gate_proj", "model.layers.{block}.mlp.up_proj"],
            "mlp.c_proj": ["model.layers.{block}.mlp.down_proj"],
        },
        rotary=_ROTARY,
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
    {
        **{"norm": "rms", "activation": "swiglu", "bias": False, "qk_norm": False, "qkv_bias": False},
        **{"capacity_factor": None, "shared_experts": 0, "dense_layers": 0},
    },
    Naming(
        _ATTENTION
        | {
            "mlp.router": ["model.layers.{block}.block_sparse_moe.gate"],
            "mlp.experts.c_fc": [f"{_EXPERT}.w1", f"{_EXPERT}.w3"],
            "mlp.experts.c_proj": [f"{_EXPERT}.w2"],
        },
        rotary=_ROTARY,
    ),
    1_000_000.0,
    (".rotary_emb.inv_freq",),
)

FAMILIES = {family.model_type: family for family in (GPT2, LLAMA, MIXTRAL)}
"""Families by their names in config.json."""


def _rope(config: Mapping[str, Any], theta: float, wrong: list[str]) -> dict[str, Any]:
    """Return our fields of rotary positions. Newer files have all of theirs in one table, older ones the base apart."""
    rope: Any = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        wrong.append(f"rope_scaling is {rope!r}, not a table")
        return {}
    rope = cast(dict[str, Any], rope)
    found: dict[str, Any] = {"rope_theta": rope.get("rope_theta", config.get("rope_theta", theta))}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "llama3" and all(name in rope for name in SCALING):
        found["rope_scaling"] = tuple(rope[name] for name in SCALING)
    elif kind != "default":
        wrong.append(f"rope_type is {kind!r}, not 'default' or 'llama3' with {_listed(SCALING)}")
    if (part := rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))) != 1.0:
        wrong.append(f"partial_rotary_factor is {part!r}, not 1.0")
    return found


def _check_window(config: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with a sliding window, which must not be shorter than the context."""
    window, length = config.get("sliding_window"), config.get("max_position_embeddings")
    if window is None or (isinstance(window, int) and isinstance(length, int) and window >= length):
        return []
    return [f"sliding_window is {window!r}, not null"]


def _check_experts(model: GPT, source: str) -> None:
    if isinstance(model, MoE) and model.top_k == 1:
        raise UserError(
            f"{source}: with one expert for a token (num_experts_per_tok, our top_k), Mixtral takes its result as it "
            "is, but Shardlab weights it by the router's probability; 2 or more are exchanged"
        )


def _scaling(scaling: RopeScaling | None) -> dict[str, Any] | None:
    return None if scaling is None else {"rope_type": "llama3", **dict(zip(SCALING, scaling, strict=True))}


def _listed(names: Any, last: str = "and") -> str:
    *most, end = names
    return f"{', '.join(most)} {last} {end}" if most else str(end)
