"""A model from Hugging Face's config.json, and a config.json from a model; what one of them cannot say is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from shardlab.errors import UserError
from shardlab.exchange.families import FAMILIES, GPT2, LLAMA, MIXTRAL, NAMES_OF_GELUS, WANTED, Family
from shardlab.models import GPT, Blocks, Llama, Mixtral, MoE
from shardlab.models.attention import RopeScaling
from shardlab.models.named import name_of, with_written

SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
"""Fields of Llama 3.1's rotary positions, in the order of `RopeScaling`."""


def model_of(config: Mapping[str, Any], source: str) -> tuple[Family, GPT]:
    """The model that a config.json describes.

    Raises:
        UserError: when Shardlab has no such model: every field that differs is named.
    """
    kind = config.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise UserError(f"{source}: model_type is {kind!r}, but {_listed(FAMILIES)} are the models that are exchanged")
    written: dict[str, Any] = {}
    wrong: list[str] = []
    for field in family.fields:
        value = config.get(field.theirs, field.default)
        if value is WANTED:
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
        wrong += _of_attention(config)
    if wrong:
        raise UserError(
            f"{source} is of another architecture than Shardlab's {type(family.base).__name__}: {'; '.join(wrong)}"
        )
    model = with_written(family.base, written, source)
    assert isinstance(model, GPT)
    _want_weighted(model, source)
    return family, model


def _rope(config: Mapping[str, Any], theta: float, wrong: list[str]) -> dict[str, Any]:
    """Our fields of rotary positions; newer files have all theirs together, older ones the base apart."""
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


def _of_attention(config: Mapping[str, Any]) -> list[str]:
    """What differs in fields whose only value follows from others."""
    wrong: list[str] = []
    width, heads, window = (config.get(name) for name in ("hidden_size", "num_attention_heads", "sliding_window"))
    if isinstance(width, int) and isinstance(heads, int) and heads > 0:
        size = config.get("head_dim")
        if size is not None and not (isinstance(size, int) and size * heads == width):
            wrong.append(f"head_dim is {size!r}, not hidden_size / num_attention_heads = {width / heads:g}")
    length = config.get("max_position_embeddings")
    if window is not None and not (isinstance(window, int) and isinstance(length, int) and window >= length):
        wrong.append(f"sliding_window is {window!r}, not null")
    return wrong


def _want_weighted(model: GPT, source: str) -> None:
    if isinstance(model, MoE) and model.top_k == 1:
        raise UserError(
            f"{source}: with one expert for a token (num_experts_per_tok, our top_k), Mixtral takes its result as it "
            "is, but Shardlab weights it by the router's probability; 2 or more are exchanged"
        )


def family_of(model: Blocks, source: str) -> tuple[Family, GPT]:
    """The family that a model belongs to, and the model.

    Raises:
        UserError: when it belongs to none: what differs is named.
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
    if family is GPT2 and model.activation not in NAMES_OF_GELUS:
        wrong.append(f"activation is {model.activation!r}, not {_listed(NAMES_OF_GELUS, 'or')}")
    if family is not GPT2 and model.rope_theta is None:
        wrong.append("positions are learned (rope_theta is None), not rotary")
    if wrong:
        raise UserError(f"{source}: Hugging Face's {family.model_type} cannot say this model: {'; '.join(wrong)}")
    _want_weighted(model, source)
    return family, model


def config_of(family: Family, model: GPT) -> dict[str, Any]:
    """The config.json of a model of this family; dropout is written where the family has it in every place."""
    config: dict[str, Any] = {"architectures": [family.architecture], "model_type": family.model_type}
    for field in family.fields:
        value: Any = getattr(model, field.ours)
        if field.words:
            value = NAMES_OF_GELUS[value]
        if field.ours == "kv_heads":
            value = model.kv_heads or model.heads
        if field.ours == "ffn_hidden_size" and field.default is WANTED:
            value = model.hidden
        if field.theirs == "bias" and value:  # which transformers does not know
            continue
        config |= dict.fromkeys((field.theirs, *field.like), value)
    if family.rope_theta is not None:
        config |= {"rope_theta": model.rope_theta, "rope_scaling": _scaling(model.rope_scaling)}
    return config | dict(family.fixed) | {"bos_token_id": None, "eos_token_id": None}


def _scaling(scaling: RopeScaling | None) -> dict[str, Any] | None:
    return None if scaling is None else {"rope_type": "llama3", **dict(zip(SCALING, scaling, strict=True))}


def _listed(names: Any, last: str = "and") -> str:
    *most, end = names
    return f"{', '.join(most)} {last} {end}" if most else str(end)
