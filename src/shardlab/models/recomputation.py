"""Recomputation inside blocks: the primitives that a backward pass runs again, and the tensors that are kept for it.

`recomputation` analyses the primitives of one block, for the names in `shardlab.language.recompute_names`:

- A module of Megatron-LM is recomputed as a whole. Its inputs are kept; results inside it are not. Its output is kept
  too, unless the module is one of `DISCARDED`: such an output is freed, and computed again before its reader's backward
  pass (megatron/core/tensor_parallel/random.py, `CheckpointFunction` and `CheckpointWithoutOutput`, at d98e8a64).
- A policy of MaxText keeps the results that it names, if the backward pass needs them or values computed from them. All
  other needed values are recomputed from these and from the block's input, as JAX derives it (`jax.checkpoint` with
  `save_only_these_names`; dead code is eliminated).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from shardlab.language.recompute_names import POLICIES, modules_of
from shardlab.models.attention import Attend, LatentProjection, Latents
from shardlab.models.layer import INPUT, Made, Run, needed, source
from shardlab.models.mixture import ExpertActivate, ExpertLinear, Route, Routing
from shardlab.models.primitives import Activate, Linear, Norm, Primitive

Block = tuple[Primitive, ...]
"""Primitives of a block, from its first norm to its last sum with the residual stream."""

Place = tuple[int, int]
"""(layer, number in the layer) of a primitive. Attention as a separate op comes last in its layer."""

DISCARDED = ("layernorm", "mla_up_proj", "moe_act")
"""Modules whose output is not kept."""


@dataclass(frozen=True)
class Recomputation:
    """Recomputation of a block.

    Attributes:
        again: numbers of the primitives that the backward pass runs again.
        kept: tensors that the block computes and keeps from the forward pass, each with the numbers of the primitives
            that need it. Inputs of the block are not among them.
    """

    again: frozenset[int]
    kept: Mapping[Made, frozenset[int]]


@lru_cache(maxsize=256)
def recomputation(block: Block, word: str) -> Recomputation:
    """Return the recomputed primitives and the kept tensors of a block.

    Args:
        block: the block.
        word: modules joined by +, or a policy.
    """
    return _by_policy(block, POLICIES[word]) if word in POLICIES else _by_modules(block, modules_of(word))


def _by_modules(block: Block, modules: tuple[str, ...]) -> Recomputation:
    inside = {module: frozenset(_steps_of(block, module)) for module in modules}
    again = frozenset[int]().union(*inside.values())
    freed = frozenset[int]().union(*(inside[module] for module in modules if module in DISCARDED))
    kept: dict[Made, set[int]] = {}
    for step, primitive in enumerate(block):
        tensors = needed(block, step)
        if step in again:  # its inputs
            tensors = (
                each for each in (source(block, name, step) for name in primitive.reads) if each.step not in again
            )
        for tensor in tensors:
            if tensor.step != INPUT and tensor.step not in freed:
                kept.setdefault(tensor, set()).add(step)
    return Recomputation(again, {tensor: frozenset(steps) for tensor, steps in kept.items()})


def _by_policy(block: Block, names: frozenset[str]) -> Recomputation:
    again, kept = set[int](), dict[Made, set[int]]()
    saved = {tensor for name in names for tensor in _results(block, name)}
    waiting = [(tensor, step) for step in range(len(block)) for tensor in needed(block, step)]
    while waiting:
        tensor, reader = waiting.pop()
        if tensor in saved:
            kept.setdefault(tensor, set()).add(reader)
        elif tensor.step != INPUT and tensor.step not in again:
            again.add(tensor.step)
            waiting += [(source(block, name, tensor.step), tensor.step) for name in block[tensor.step].reads]
    return Recomputation(frozenset(again), {tensor: frozenset(steps) for tensor, steps in kept.items()})


def _steps_of(block: Block, module: str) -> Iterator[int]:
    """Yield the primitives of a module.

    Transformer Engine's norms are part of the next product (megatron/core/models/gpt/gpt_layer_specs.py). Only the
    norms before latent attention and before experts are modules, and are recomputed as `layernorm`.
    """
    mixture = any(isinstance(each, Route) for each in block)
    latent = any(isinstance(each, Latents) for each in block)
    for step, each in enumerate(block):
        routed = isinstance(each, Routing)
        shared = (isinstance(each, Linear) and ".shared." in each.name) or (
            isinstance(each, Activate) and each.index == "shared"
        )
        dense = not mixture and (
            (isinstance(each, Linear) and each.name.startswith("mlp.")) or isinstance(each, Activate)
        )
        found = {
            "core_attn": isinstance(each, Attend),
            "layernorm": isinstance(each, Norm) and (latent if each.name == "ln_1" else mixture),
            "mla_up_proj": isinstance(each, LatentProjection),
            "moe_act": isinstance(each, ExpertActivate),
            "mlp": dense,
            "moe": routed or shared,
            "shared_experts": shared,
        }
        if found[module]:
            yield step


def _results(block: Block, name: str) -> Iterator[Made]:
    """Yield a block's tensors that MaxText calls `name` (src/maxtext/layers/attentions.py, linears.py and moe.py)."""
    for step, each in enumerate(block):
        linear = each.name if isinstance(each, Linear | ExpertLinear) else ""
        if name == "qkv_proj" and isinstance(each, Attend):
            yield from (source(block, read, step) for read in each.reads)
        elif (
            (name == "context" and isinstance(each, Attend))
            or (name == "out_proj" and linear == "attn.c_proj")
            or (name == "mlpwi" and linear.startswith("mlp.") and linear.endswith(".c_fc"))
            or (name == "mlpwo" and linear.startswith("mlp.") and linear.endswith(".c_proj"))
        ):
            yield from (Made(made, step) for made in each.makes)


@dataclass(frozen=True)
class LayerRecomputation:
    """Recomputation of one layer of a program, which may have parts of two blocks.

    Attributes:
        again: numbers of the layer's primitives that the backward pass runs again.
        inside: numbers of the layer's primitives that belong to blocks.
        kept: tensors that are computed in the layer, and kept for the layer's primitives.
        keeps_input: whether a backward pass or a recomputation in this layer needs the activation that enters the
            layer.
        attends_again: whether attention as a separate op is recomputed.
    """

    again: frozenset[int]
    inside: frozenset[int]
    kept: frozenset[Made]
    keeps_input: bool
    attends_again: bool


def recomputed_in(
    runs: Sequence[Run], places: Mapping[int, tuple[Place, ...]], layer: int, word: str
) -> LayerRecomputation:
    """Return the recomputed primitives and the kept tensors of a layer.

    Args:
        runs: the model's layers.
        places: positions of each block's primitives.
        layer: number of the layer.
        word: modules joined by +, or a policy.
    """
    run, last = runs[layer], len(runs[layer].steps)
    entering = Made(run.inputs[0], INPUT)
    again, inside, kept = set[int](), set[int](), set[Made]()
    keeps_input = False
    for block in dict.fromkeys(step.block for step in run.steps):
        steps = places.get(block, ())
        primitives = tuple(runs[at].all_steps[number].primitive for at, number in steps)
        found = recomputation(primitives, word)
        own = {place: number for place, (at, number) in enumerate(steps) if at == layer}
        again |= {own[each] for each in found.again if each in own}
        inside |= {number for number in own.values() if number < last}
        for tensor, readers in found.kept.items():
            here = [own[each] for each in readers if own.get(each, last) < last]
            reading = [number for number in here if tensor.name in run.primitives[number].reads]
            keeps_input |= any(run.read(tensor.name, number) == entering for number in reading)
            if here and own.get(tensor.step, last) < last:
                kept.add(Made(tensor.name, own[tensor.step]))
        for place, number in own.items():  # the input of the block, which this layer may compute
            primitive = primitives[place]
            names = primitive.reads if place in found.again else primitive.keeps()
            for name in names:
                if number < last and name in primitive.reads and source(primitives, name, place).step == INPUT:
                    made = run.read(name, number)
                    keeps_input |= made == entering
                    kept |= {made} if made.step != INPUT else set()
    outside = (number for number in range(last) if number not in inside)
    keeps_input |= any(entering in needed(run.primitives, number) for number in outside)
    return LayerRecomputation(
        frozenset(again - {last}),
        frozenset(inside),
        frozenset(kept),
        keeps_input,
        last in again and run.attend is not None,
    )
