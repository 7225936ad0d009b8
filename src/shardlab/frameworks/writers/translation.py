"""`Translation`: a step as values by meaning (see `frameworks/settings.py`), and helpers of all writers."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, cast

from shardlab.models import GPT, Blocks
from shardlab.planner.problem import plan_layers
from shardlab.simulate.predict.workload import Workload
from shardlab.strategies.plan.plan import Plan
from shardlab.strategies.plan.resolve import with_named_blocks

OF_PYTORCH = frozenset({"attention"})
"""Switches of a recipe that depend on PyTorch's version, and not on a file."""


@dataclass(frozen=True)
class Translation:
    """Step as values by meaning, for the keys of a framework.

    Attributes:
        values: value by meaning. Meanings that are left out have the framework's default.
        unsaid: properties that the framework's file cannot express, besides those that `write.differences` finds.
        says_model: whether the values include the model.
        extra_flags: further flags of the file, which do not change a prediction or which `explain` does not follow.
        uncompared: switches of the recipe and properties of the plan that `explain` does not follow, or that no file of
            the framework says.
    """

    values: Mapping[str, Any]
    unsaid: tuple[str, ...] = ()
    says_model: bool = True
    extra_flags: tuple[str, ...] = ()
    uncompared: frozenset[str] = frozenset()


def plan_of(step: Workload) -> Plan:
    """Return the plan of a step, with the numbers of the blocks that it recomputes."""
    assert isinstance(step.plan, Plan), "programs without a plan are not written"
    return with_named_blocks(step.plan, plan_layers(step.model, step.plan))


def switch_of(step: Workload, name: str) -> str:
    """Return the value of a switch of a step's recipe ("": it has no such switch)."""
    switch = step.recipe.switches.get(name)
    return "" if switch is None else switch.value


def blocks_of_stages(step: Workload) -> list[int] | None:
    """Return the number of blocks of each pipeline stage (None: a stage ends within a block)."""
    plan = plan_of(step)
    layers = plan_layers(step.model, plan)
    counts = [end - begin for begin, end in pairwise(plan.bounds(layers.pipeline_units))]
    extra_units = layers.pipeline_units - step.model.layers
    if extra_units <= 1:
        counts[-1] -= extra_units  # the head is a layer of its own
        return counts if min(counts) >= 0 else None
    counts[-1] -= 1
    if any(count % 2 for count in counts):
        return None
    return [count // 2 for count in counts]


def commented(remarks: Sequence[str]) -> str:
    """Return remarks as lines of comments."""
    lines = [line for remark in remarks for line in textwrap.wrap(remark, 118, subsequent_indent="  ")]
    return "".join(f"# {line}\n" for line in lines)


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested tables from a table with keys such as "optimizer.zero_stage"."""
    document: dict[str, Any] = {}
    for key, value in flat.items():
        *sections, name = key.split(".")
        table = document
        for section in sections:
            table = table.setdefault(section, {})
        table[name] = value
    return document


def as_yaml(table: Mapping[str, Any], indent: str = "") -> str:
    """Return a table of tables and plain values as YAML."""
    lines: list[str] = []
    for key, value in table.items():
        if isinstance(value, Mapping):
            lines.append(f"{indent}{key}:\n{as_yaml(cast(Mapping[str, Any], value), indent + '  ')}")
        else:
            lines.append(f"{indent}{key}: {_yaml_value(value)}\n")
    return "".join(lines)


def _yaml_value(value: Any) -> str:
    if isinstance(value, float) and "e" in (text := repr(value)):
        digits, _, power = text.partition("e")
        return f"{digits}{'' if '.' in digits else '.0'}e{power}"  # without a point, YAML 1.1 reads a text
    return json.dumps(value)


UNPRICED = ("rope_theta", "rope_scaling", "norm_eps", "auxiliary")
"""Fields of a model that change neither the time nor the memory of a step."""


def model_properties(model: Blocks) -> dict[str, Any]:
    """Return the fields of a model that change the time or memory of its step. Defaults replace None."""
    properties = {field.name: getattr(model, field.name) for field in fields(model) if field.name not in UNPRICED}
    heads, hidden = properties.get("heads"), properties.get("hidden_size")
    if heads and hidden:
        properties["kv_heads"] = properties.get("kv_heads") or heads
        properties["head_dim"] = properties.get("head_dim") or hidden // heads
    if hasattr(model, "hidden"):
        properties["ffn_hidden_size"] = cast(GPT, model).hidden
    if not properties.get("dropout"):
        properties.pop("drops_attention", None)
    properties["positions"] = "learned" if getattr(model, "rope_theta", None) is None else "rotary"
    return properties
