"""Families of models that Hugging Face's transformers also has: GPT-2, Llama, Mistral, Qwen2 and Mixtral.

A `Family` has the names of tensors; `shardlab.models.from_config` has the fields of config.json. `read_model` reads a
config.json, and `write_config` writes one. A model that the other format cannot express is refused, with every field
that differs. `Naming.parts` returns the tensors of a file in which the rows of a parameter lie: a parameter is a matrix
(rows, columns), a vector has one column, and each expert of a mixture has a matrix. "Our" parameters and matrices are
those of Shardlab's models, in contrast to the tensors of a file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple

from torch import Tensor

from shardlab.common.errors import UserError
from shardlab.models import GPT, Blocks, Llama, Mixtral, MoE, Parameter
from shardlab.models.attention import RopeScaling
from shardlab.models.from_config import (
    GELUS,
    GPT2_CONFIG,
    LLAMA_CONFIG,
    MISTRAL_CONFIG,
    MIXTRAL_CONFIG,
    QWEN2_CONFIG,
    REQUIRED,
    SCALING,
    ConfigFamily,
    listed,
    read_config,
)
from shardlab.models.named import name_of
from shardlab.models.tensors.weights import matrix_of


def read_model(config: Mapping[str, Any], source: str) -> tuple[Family, GPT]:
    """Return the family and the model that a config.json describes.

    Raises:
        UserError: if Shardlab has no such model. The message lists every field that differs.
    """
    kind = config.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise UserError(f"{source}: model_type is {kind!r}, but {listed(FAMILIES)} are the models that are exchanged")
    result = read_config(config, source)
    if result.differences:
        raise UserError(
            f"{source} is of another architecture than Shardlab's {type(result.model).__name__}: "
            f"{'; '.join(result.differences)}"
        )
    _check_experts(result.model, source)
    return family, result.model


def family_of(model: Blocks, source: str) -> tuple[Family, GPT]:
    """Return the family to which a model belongs, and the model itself.

    Raises:
        UserError: if it belongs to none. The message lists every field that differs.
    """
    if type(model) not in (GPT, MoE, Llama, Mixtral):
        raise UserError(f"{source}: Hugging Face's transformers has no model of the kind {name_of(type(model))}")
    assert isinstance(model, GPT)
    dense = QWEN2 if model.qkv_bias and not model.bias else LLAMA
    family = MIXTRAL if isinstance(model, MoE) else GPT2 if model.rope_theta is None else dense
    wrong = [
        f"{name} is {getattr(model, name)!r}, not {value!r}"
        for name, value in family.wants.items()
        if getattr(model, name) != value
    ]
    if family is GPT2 and (model.kv_heads or model.heads) != model.heads:
        wrong.append(f"kv_heads is {model.kv_heads}, not {model.heads} like heads")
    if family is GPT2 and model.head_size * model.heads != model.hidden_size:
        wrong.append(f"head_dim is {model.head_dim}, not hidden_size / heads = {model.hidden_size / model.heads:g}")
    if family is GPT2 and model.activation not in GELUS.values():
        wrong.append(f"activation is {model.activation!r}, not {listed(dict.fromkeys(reversed(GELUS.values())), 'or')}")
    if family is not GPT2 and model.rope_theta is None:
        wrong.append("positions are learned (rope_theta is None), not rotary")
    if wrong:
        raise UserError(f"{source}: Hugging Face's {family.model_type} cannot express this model: {'; '.join(wrong)}")
    _check_experts(model, source)
    return family, model


def write_config(family: Family, model: GPT) -> dict[str, Any]:
    """Return the config.json of a model of this family."""
    config: dict[str, Any] = {"architectures": [family.architecture], "model_type": family.model_type}
    for entry in family.config.fields:
        value: Any = getattr(model, entry.ours)
        if entry.words:
            value = next(theirs for theirs, ours in entry.words.items() if ours == value)
        if entry.ours == "kv_heads":
            value = model.kv_heads or model.heads
        if entry.ours == "ffn_hidden_size" and entry.default is REQUIRED:
            value = model.hidden
        if (entry.theirs == "bias" and value) or (entry.theirs == "head_dim" and value is None):
            continue  # transformers has no field `bias`, and derives `head_dim`
        config |= dict.fromkeys((entry.theirs, *entry.like), value)
    if family.config.rope_theta is not None:
        config |= {"rope_theta": model.rope_theta, "rope_scaling": _scaling(model.rope_scaling)}
    return config | dict(family.config.fixed) | {"bos_token_id": None, "eos_token_id": None}


class HeadOrder(NamedTuple):
    """Order of the rows of heads in a tensor of a file, if it differs from the order in our matrix.

    Attributes:
        size: rows of a head in our matrix.
        stride: rows of a head in the tensor, which include our rows (0: all our heads are the same rows).
        offset: index of our first row among the rows of a head in the tensor.
        shift: number of rows by which our rows are rotated within the head.
        halves: whether the tensor stores the rotary pairs (2i, 2i + 1) of a head as (i, i + size / 2).

    >>> import torch
    >>> HeadOrder(4, 4, halves=True).places(torch.arange(8)).tolist()
    [0, 2, 1, 3, 4, 6, 5, 7]
    >>> HeadOrder(2, 5, offset=3).places(torch.arange(4)).tolist()
    [3, 4, 8, 9]
    >>> HeadOrder(3, 3, shift=1).places(torch.arange(3)).tolist()
    [1, 2, 0]
    """

    size: int
    stride: int
    offset: int = 0
    shift: int = 0
    halves: bool = False

    def places(self, rows: Tensor) -> Tensor:
        """Return the indices that the rows `rows` of our matrix have in the tensor."""
        head, feature = rows // self.size, (rows % self.size + self.shift) % self.size
        if self.halves:
            feature = feature // 2 + feature % 2 * (self.size // 2)
        return head * self.stride + self.offset + feature


class Part(NamedTuple):
    """Rows `start` to `start + rows` of a parameter's matrix, as one tensor of a file stores them.

    Attributes:
        name: name of the tensor.
        start, rows: range of rows of our matrix.
        columns: columns of our matrix.
        expert: index of the matrix in a tensor of several (None: the tensor is this matrix alone).
        vector: whether the tensor has one dimension.
        transposed: whether the tensor is (columns, rows).
        heads: order of the rows in the tensor (None: that of our matrix).
    """

    name: str
    start: int
    rows: int
    columns: int
    expert: int | None = None
    vector: bool = False
    transposed: bool = False
    heads: HeadOrder | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor, without the dim of experts."""
        rows = self.rows if self.heads is None else self.rows // self.heads.size * self.heads.stride or self.heads.size
        if self.vector:
            return (rows,)
        return (self.columns, rows) if self.transposed else (rows, self.columns)

    def theirs(self, rows: Tensor) -> Tensor:
        """Return the indices in the tensor of the rows `rows` of our matrix, counted from the part's first row."""
        return rows if self.heads is None else self.heads.places(rows)


QKV = "attn.c_attn"
"""Name of our parameter with queries, keys and values."""


@dataclass(frozen=True)
class Naming:
    """Names and layouts of a family's tensors.

    Attributes:
        tensors: for each of our parameters, the names of the tensors that store its sections, in order. The names of
            parameters and tensors lack the ending "weight" or "bias". {block} and {expert} are replaced by numbers.
        transposed: names of our parameters whose tensors are (inputs, outputs), as in GPT-2's Conv1D.
        rotary: whether queries and keys store the rotary pairs of a head in two halves.
        heads: order of heads by the name of our parameter and the number of its section.
        stacked: names of our parameters for which one tensor stores all experts. The tensor's name has no ending.
    """

    tensors: Mapping[str, Sequence[str]]
    transposed: frozenset[str] = frozenset()
    rotary: bool = False
    heads: Mapping[tuple[str, int], HeadOrder] = field(default_factory=dict[tuple[str, int], HeadOrder])
    stacked: frozenset[str] = frozenset()

    def parts(self, model: GPT, block: int, parameter: Parameter) -> list[list[Part]]:
        """Return the parts of each matrix of a parameter."""
        stem, _, end = parameter.name.rpartition(".")
        names, (experts, rows, columns) = self.tensors[stem], matrix_of(parameter)
        lengths = parameter.sections if len(names) > 1 else (rows,)
        starts = accumulate((0, *lengths[:-1]))
        spans = list(zip(names, starts, lengths, strict=True))
        vector, several = len(parameter.shape) == 1, stem in self.stacked
        orders = dict(self.heads)
        if self.rotary:
            orders |= dict.fromkeys([(QKV, 0), (QKV, 1)], HeadOrder(model.head_size, model.head_size, halves=True))
        return [
            [
                Part(
                    name.format(block=block, expert=expert) + ("" if several else f".{end}"), start, length, columns,
                    expert=expert if several else None,
                    vector=vector,
                    transposed=stem in self.transposed and not vector,
                    heads=orders.get((stem, section)),
                )
                for section, (name, start, length) in enumerate(spans)
            ]
            for expert in range(experts)
        ]  # fmt: skip


def run_parts(block: int, parameter: Parameter) -> list[list[Part]]:
    """Return where the weight files of a run store each matrix of a parameter, as a list of parts.

    There is always one part: a whole tensor, or one expert's matrix of a tensor.
    """
    name, (experts, rows, columns) = f"layers.{block}.{parameter.name}", matrix_of(parameter)
    several = len(parameter.shape) == 3
    return [
        [Part(name, 0, rows, columns, expert if several else None, vector=len(parameter.shape) == 1)]
        for expert in range(experts)
    ]


@dataclass(frozen=True)
class Family:
    """Family of models.

    Attributes:
        config: the family's fields in config.json.
        architecture: name of the family's class in config.json.
        prefix: beginning of the names of tensors. It is missing if the model was saved without the head.
        wants: fields of our model that config.json does not have, with the only value that is accepted.
        naming: names of the tensors.
        ignored: endings of the names of tensors that are not read.
    """

    config: ConfigFamily
    architecture: str
    prefix: str
    wants: Mapping[str, Any]
    naming: Naming
    ignored: tuple[str, ...] = ()

    @property
    def model_type(self) -> str:
        """Name of the family in config.json."""
        return self.config.model_type


GPT2 = Family(
    GPT2_CONFIG,
    "GPT2LMHeadModel",
    "transformer.",
    {"norm": "layer", "rope_theta": None, "qk_norm": False, "qkv_bias": False, "kv_rank": None},
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

_ATTENTION = {
    "wte": ["model.embed_tokens"],
    "ln_f": ["model.norm"],
    "lm_head": ["lm_head"],
    "ln_1": ["model.layers.{block}.input_layernorm"],
    "ln_2": ["model.layers.{block}.post_attention_layernorm"],
    "attn.c_attn": [f"model.layers.{{block}}.self_attn.{name}_proj" for name in "qkv"],
    "attn.c_proj": ["model.layers.{block}.self_attn.o_proj"],
}

LLAMA = Family(
    LLAMA_CONFIG,
    "LlamaForCausalLM",
    "model.",
    {"norm": "rms", "activation": "swiglu", "qk_norm": False, "qkv_bias": False, "kv_rank": None},
    Naming(
        _ATTENTION
        | {
            "mlp.c_fc": ["model.layers.{block}.mlp.gate_proj", "model.layers.{block}.mlp.up_proj"],
            "mlp.c_proj": ["model.layers.{block}.mlp.down_proj"],
        },
        rotary=True,
    ),
    (".rotary_emb.inv_freq",),
)

QWEN2 = replace(LLAMA, config=QWEN2_CONFIG, architecture="Qwen2ForCausalLM", wants={**LLAMA.wants, "qkv_bias": True})

MISTRAL = replace(LLAMA, config=MISTRAL_CONFIG, architecture="MistralForCausalLM")
"""Family that is only read. Its models become `Llama` models, and are written as such."""

_EXPERT = "model.layers.{block}.block_sparse_moe.experts.{expert}"

MIXTRAL = Family(
    MIXTRAL_CONFIG,
    "MixtralForCausalLM",
    "model.",
    {
        **{"norm": "rms", "activation": "swiglu", "bias": False, "qk_norm": False, "qkv_bias": False, "kv_rank": None},
        **{"capacity_factor": None, "shared_experts": 0, "dense_layers": 0},
    },
    Naming(
        _ATTENTION
        | {
            "mlp.router": ["model.layers.{block}.block_sparse_moe.gate"],
            "mlp.experts.c_fc": [f"{_EXPERT}.w1", f"{_EXPERT}.w3"],
            "mlp.experts.c_proj": [f"{_EXPERT}.w2"],
        },
        rotary=True,
    ),
    (".rotary_emb.inv_freq",),
)

FAMILIES = {family.model_type: family for family in (GPT2, LLAMA, MISTRAL, QWEN2, MIXTRAL)}
"""Families by their names in config.json."""


def _check_experts(model: GPT, source: str) -> None:
    if isinstance(model, MoE) and model.top_k == 1:
        raise UserError(
            f"{source}: with one expert for a token (num_experts_per_tok, our top_k), Mixtral takes its result as it "
            "is, but Shardlab weights it by the router's probability; 2 or more are exchanged"
        )


def _scaling(scaling: RopeScaling | None) -> dict[str, Any] | None:
    return None if scaling is None else {"rope_type": "llama3", **dict(zip(SCALING, scaling, strict=True))}
