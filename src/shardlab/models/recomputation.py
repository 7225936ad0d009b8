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
    steps_by_module = {module: frozenset(_steps_of(block, module)) for module in modules}
    recomputed = frozenset[int]().union(*steps_by_module.values())
    freed = frozenset[int]().union(*(steps_by_module[module] for module in modules if module in DISCARDED))
    readers: dict[Made, set[int]] = {}
    for step, primitive in enumerate(block):
        tensors = needed(block, step)
        if step in recomputed:  # its inputs
            tensors = (
                read_tensor
                for read_tensor in (source(block, name, step) for name in primitive.reads)
                if read_tensor.step not in recomputed
            )
        for tensor in tensors:
            if tensor.step != INPUT and tensor.step not in freed:
                readers.setdefault(tensor, set()).add(step)
    return Recomputation(recomputed, {tensor: frozenset(steps) for tensor, steps in readers.items()})


def _by_policy(block: Block, names: frozenset[str]) -> Recomputation:
    recomputed, readers = set[int](), dict[Made, set[int]]()
    saved_tensors = {tensor for name in names for tensor in _results(block, name)}
    queue = [(tensor, step) for step in range(len(block)) for tensor in needed(block, step)]
    while queue:
        tensor, reader = queue.pop()
        if tensor in saved_tensors:
            readers.setdefault(tensor, set()).add(reader)
        elif tensor.step != INPUT and tensor.step not in recomputed:
            recomputed.add(tensor.step)
            queue += [(source(block, name, tensor.step), tensor.step) for name in block[tensor.step].reads]
    return Recomputation(frozenset(recomputed), {tensor: frozenset(steps) for tensor, steps in readers.items()})


def _steps_of(block: Block, module: str) -> Iterator[int]:
    """Yield the primitives of a module.

    Transformer Engine's norms are part of the next product (megatron/core/models/gpt/gpt_layer_specs.py). Only the
    norms before latent attention and before experts are modules, and are recomputed as `layernorm`.
    """
    mixture = any(isinstance(primitive, Route) for primitive in block)
    latent = any(isinstance(primitive, Latents) for primitive in block)
    for step, primitive in enumerate(block):
        routed = isinstance(primitive, Routing)
        shared = (isinstance(primitive, Linear) and ".shared." in primitive.name) or (
            isinstance(primitive, Activate) and primitive.index == "shared"
        )
        dense = not mixture and (
            (isinstance(primitive, Linear) and primitive.name.startswith("mlp.")) or isinstance(primitive, Activate)
        )
        is_of_module = {
            "core_attn": isinstance(primitive, Attend),
            "layernorm": isinstance(primitive, Norm) and (latent if primitive.name == "ln_1" else mixture),
            "mla_up_proj": isinstance(primitive, LatentProjection),
            "moe_act": isinstance(primitive, ExpertActivate),
            "mlp": dense,
            "moe": routed or shared,
            "shared_experts": shared,
        }
        if is_of_module[module]:
            yield step


def _results(block: Block, name: str) -> Iterator[Made]:
    """Yield a block's tensors that MaxText calls `name` (src/maxtext/layers/attentions.py, linears.py and moe.py)."""
    for step, primitive in enumerate(block):
        linear = primitive.name if isinstance(primitive, Linear | ExpertLinear) else ""
        if name == "qkv_proj" and isinstance(primitive, Attend):
            yield from (source(block, read, step) for read in primitive.reads)
        elif (
            (name == "context" and isinstance(primitive, Attend))
            or (name == "out_proj" and linear == "attn.c_proj")
            or (name == "mlpwi" and linear.startswith("mlp.") and linear.endswith(".c_fc"))
            or (name == "mlpwo" and linear.startswith("mlp.") and linear.endswith(".c_proj"))
        ):
            yield from (Made(tensor, step) for tensor in primitive.makes)


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
    recomputed, inside_steps, kept_tensors = set[int](), set[int](), set[Made]()
    keeps_input = False
    for block in dict.fromkeys(step.block for step in run.steps):
        steps = places.get(block, ())
        primitives = tuple(runs[index].all_steps[number].primitive for index, number in steps)
        block_recomputation = recomputation(primitives, word)
        layer_steps = {place: number for place, (index, number) in enumerate(steps) if index == layer}
        recomputed |= {layer_steps[block_step] for block_step in block_recomputation.again if block_step in layer_steps}
        inside_steps |= {number for number in layer_steps.values() if number < last}
        for tensor, readers in block_recomputation.kept.items():
            reading_steps = [
                layer_steps[block_step] for block_step in readers if layer_steps.get(block_step, last) < last
            ]
            reading = [number for number in reading_steps if tensor.name in run.primitives[number].reads]
            keeps_input |= any(run.read(tensor.name, number) == entering for number in reading)
            if reading_steps and layer_steps.get(tensor.step, last) < last:
                kept_tensors.add(Made(tensor.name, layer_steps[tensor.step]))
        for place, number in layer_steps.items():  # the input of the block, which this layer may compute
            primitive = primitives[place]
            names = primitive.reads if place in block_recomputation.again else primitive.keeps()
            for name in names:
                if number < last and name in primitive.reads and source(primitives, name, place).step == INPUT:
                    tensor_read = run.read(name, number)
                    keeps_input |= tensor_read == entering
                    kept_tensors |= {tensor_read} if tensor_read.step != INPUT else set()
    outside_steps = (number for number in range(last) if number not in inside_steps)
    keeps_input |= any(entering in needed(run.primitives, number) for number in outside_steps)
    return LayerRecomputation(
        frozenset(recomputed - {last}),
        frozenset(inside_steps),
        frozenset(kept_tensors),
        keeps_input,
        last in recomputed and run.attend is not None,
    )
