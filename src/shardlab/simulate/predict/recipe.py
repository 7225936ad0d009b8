"""Recipes: the properties of a training framework on which the time and memory of a step depend.

A framework may run an operation as several kernels, each of which reads and writes memory; save more, or less, for the
backward pass than Shardlab's executor; hold memory beyond tensors; or overlap communication for which the program
waits. Every recipe is a TOML file in `predict/recipes`, or a user's file:

    base = "megatron-core"        # supplies all other values (default: fused kernels, and memory of tensors only)
    source = "description of its choices"

    [kernels]
    attention = "cudnn"           # a choice, described by the recipe's source

    [memory.reserved]             # a figure with its own source, or fitted to runs
    value = 1.24
    fitted_to = "bigscience's memory by nvidia-smi"
    runs = ["bloom-prequel-*"]       # their ids in a file of published runs

    [switches.attention]          # an option of the framework: its default, and a partial recipe for each value
    default = "cudnn"
    about = "its effect, in a few words"
    values.cudnn = { source = "...", kernels = { attention = "cudnn" } }
    values.flash2 = { source = "...", kernels = { attention = "flash2" } }
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, cast

from shardlab.common.errors import UserError, suggest_name, unknown_name
from shardlab.common.fields import Amount, Natural, field_hints, pair, read_fields, read_settings
from shardlab.common.files import load_table, read_file
from shardlab.language import Kind, Mesh, OpKind, Sizes
from shardlab.language.precision import WIDE, Precision, find_precision
from shardlab.language.rules.kinds import bytes_of
from shardlab.models import GPT, Blocks, CutModel, MoE
from shardlab.models.layout import Kernel, Matmul, Pointwise
from shardlab.models.matrices import (
    AUTOGRAD,
    EXECUTOR,
    SavedActivations,
    kept_activations,
    kept_elements,
    saves_residual,
)
from shardlab.models.model import Model
from shardlab.simulate.hardware.device import Figure
from shardlab.simulate.predict.capabilities import CanRun
from shardlab.strategies.plan.plan import Plan, Recompute


def _ratios(value: Any) -> Any:
    """Return the numbers of a list such as `[1, "3.5/4"]`, or another value unchanged."""
    try:
        return tuple(map(_ratio, cast(list[Any], value))) if isinstance(value, list) else value
    except (ValueError, ZeroDivisionError):
        return cast(Any, value)


def _ratio(text: str | float) -> float:
    numerator, _, denominator = str(text).partition("/")
    return float(numerator) / float(denominator or 1)


RATIOS = replace(
    pair('two numbers or ratios, such as [1, "3.5/4"]', lambda value: 0 <= value < math.inf), of_file=_ratios
)
"""Field with two numbers, each given as a number or as a ratio."""


# The four groups of a recipe: kernels, memory, overlap, and defaults for what a run does not state.


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """Kernels that a framework runs, relative to the model's kernels, which are fused (`shardlab.models.layout`).

    Attributes:
        attention: generation of fused attention kernels (see `Efficiency.attention`); PyTorch's own is "flash2".
        fused_dropout: dropout of attention's weights is part of the fused kernel. Its backward pass draws the mask
            again from the seed, so no matrix of scores is kept (Dao et al. 2022, arXiv 2205.14135, appendix B.4).
        memory_traffic: by a pointwise kernel's name, bytes moved relative to one fused kernel: forward, backward.
        expert_load: with expert parallelism, rows of the most loaded rank's experts relative to the mean; the other
            ranks wait for that rank.
        dropless_slots: slots of an expert relative to an equal share of the tokens, if the model has no capacity factor
            (None: one slot for each token).
        padded_slots: slots of an expert relative to an equal share of the tokens, whatever the model's capacity factor,
            because all experts are padded to the fullest one (None: they are not padded).
        expert_loop: experts are computed one after the other, each with separate products.
        fused_accumulation: the product that computes a weight's gradient adds it to the older ones.
        update_bytes: bytes that the optimizer moves for each parameter (None: those of the precision).
        cp_imbalance: 0 if the ranks along `cp` have equal work in attention; 1 if each has one contiguous part of a
            causal sequence, so that the last rank has (2 cp - 1) / cp times the mean work.
        host_seconds: seconds in which a rank's host launches a product of matrices and the other kernels around it. If
            the kernels themselves take less time, the rank is as slow as its host.
        piped_host_seconds: seconds that are added to `host_seconds` for each rank along `tp`, if there are several and
            the pipeline spans several nodes.
        step_seconds: seconds of each step, independent of its size: data, logs, and the optimizer's work for each
            parameter.
        whole_embedding: every tensor-parallel rank has the whole embedding, and gathers and updates all of it.
        whole_piped_head: in a pipeline every tensor-parallel rank has the whole head, and computes all logits.
        gathered_copy_seconds: seconds in which a rank's host copies one rank's slice of one parameter, if parameters
            are gathered after the optimizer's step.
    """

    attention: Literal["flash1", "flash2", "cudnn"] = "flash2"
    fused_dropout: bool = False
    memory_traffic: Mapping[str, Annotated[tuple[float, float], RATIOS]] = field(
        default_factory=dict[str, tuple[float, float]]
    )
    expert_load: Amount = 1.0
    dropless_slots: Amount | None = None
    padded_slots: Amount | None = None
    expert_loop: bool = False
    fused_accumulation: bool = False
    update_bytes: Amount | None = None
    cp_imbalance: Amount = 0.0
    host_seconds: Amount = 0.0
    piped_host_seconds: Amount = 0.0
    step_seconds: Amount = 0.0
    gathered_copy_seconds: Amount = 0.0
    whole_embedding: bool = False
    whole_piped_head: bool = False

    def whole_layers(self, mesh: Mesh, layers: int) -> tuple[int, ...]:
        """Return the layers of a cut model of which every tensor-parallel rank has a whole copy: embedding, head."""
        if mesh.tp == 1:
            return ()
        return (0,) * self.whole_embedding + (layers - 1,) * (self.whole_piped_head and mesh.pp > 1)

    def run(self, kernels: Iterable[Kernel]) -> list[Kernel]:
        """Return a model's kernels as this framework runs them."""
        return [run for kernel in kernels for run in self._run(kernel)]

    def _run(self, kernel: Kernel) -> list[Kernel]:
        if isinstance(kernel, Matmul) and kernel.learned and kernel.batch > 1:  # products of experts
            busiest = kernel._replace(m=math.ceil(kernel.m * self.expert_load))
            return [busiest._replace(batch=1)] * busiest.batch if self.expert_loop else [busiest]
        if not isinstance(kernel, Pointwise):
            return [kernel]
        forward, backward = self.memory_traffic.get(kernel.name, (1.0, 1.0))
        return [Pointwise(kernel.name, kernel.elements * forward, kernel.back * backward)]


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Activations and other memory that a framework needs (see `shardlab.simulate.predict.memory`).

    Attributes:
        saved: the activations that stay for the backward pass.
        logit_bytes: bytes that the loss needs for each logit at its peak, logits and gradients included (None: two
            activations).
        sliced_logit_bytes: `logit_bytes` if each tensor-parallel rank has a slice of the logits (None: `logit_bytes`).
        gathers_logits: every tensor-parallel rank gathers all logits, and computes the whole loss.
        half_gradients: gradients that are summed in float32 are computed in half precision, and stay in memory beside
            their sum.
        shards_in_copy: sharded parameters are slices of the optimizer's float32 copy, as in PyTorch's FSDP: gathers
            round them (see `state_precision`).
        gradient_buffer: gradients have a buffer that persists between steps.
        stream_memory: gathers and reductions allocate on separate streams.
        reserved: bytes that the allocator reserves for each byte that is allocated at its peak, if memory suffices.
        kept_when_full: share of the reserved bytes beyond the allocated ones that the allocator cannot free if memory
            is short: before it fails, it frees all empty blocks (`c10/cuda/CUDACachingAllocator.cpp`,
            `release_cached_blocks`).
        context_bytes: bytes of a GPU outside the allocator, as shown by nvidia-smi (CUDA's context, NCCL).
        tp_context_bytes: further bytes that nvidia-smi shows with tensor parallelism. If memory is short, the share
            `kept_when_full` of them remains.
        gathers_held_back: number of gathered inputs of sliced matrices, for each block and each microbatch in flight,
            that the allocator keeps for the stream that gathered them. It frees them if memory is short.
        router_graph_bytes: in a mixture of experts, bytes for each element of a block's input that stay allocated after
            the block is recomputed, until the next step.
        margin_bytes: bytes of a device that must stay free for a plan to be chosen: near full memory the allocator
            frees and allocates blocks again, and steps take several times as long.
        logs_first_rank: the framework logs the memory of its first rank, not of the fullest.
    """

    saved: SavedActivations = AUTOGRAD
    logit_bytes: Amount | None = None
    sliced_logit_bytes: Amount | None = None
    gathers_logits: bool = False
    half_gradients: bool = False
    shards_in_copy: bool = False
    gradient_buffer: bool = False
    stream_memory: bool = False
    reserved: Amount = 1.0
    kept_when_full: Amount = 1.0
    context_bytes: Amount = 0.0
    tp_context_bytes: Amount = 0.0
    gathers_held_back: Amount = 0.0
    router_graph_bytes: Amount = 0.0
    margin_bytes: Amount = 0.0
    logs_first_rank: bool = False

    def state_precision(self, precision: Precision, plan: Plan | Mesh) -> Precision:
        """Return a precision with the bytes of parameters and optimizer state in this framework.

        FSDP's sharded parameters are float32, and the optimizer updates them in place. A gather rounds each slice to
        half precision in a separate buffer (`_get_param_all_gather_inputs` in `torch/distributed/fsdp/_fully_shard`;
        `_mp_shard` in `_flat_param.py`, which is freed after the gather). So with AdamW a sharded parameter takes 12
        bytes beside its gradient. torchtitan does so with `training.dtype` float32 and `mixed_precision_param` bfloat16
        (`torchtitan/config/configs.py`). Parameters that are kept whole in half precision take 2 bytes more. Programs
        without a plan are counted with both the float32 copy and half-precision parameters.
        """
        if self.shards_in_copy and isinstance(plan, Plan) and plan.shard_parameters:
            return precision.parameters_in_copy
        return precision

    def kept_sizes(self, model: Model, sizes: Sizes, micro_batch_size: int, slices: int) -> Sizes:
        """Return a model's sizes in memory: the values that this framework saves, and those of its loss.

        Args:
            slices: number of slices into which sequence parallelism cuts a sequence.
        """
        plain = self.logit_bytes is None and not self.half_gradients
        if plain and self.saved == EXECUTOR:
            return sizes
        width = sizes.element_bytes[Kind.SAVED]
        saved_elements = tuple(
            kept_elements(model, layer, micro_batch_size, self.saved, width) for layer in range(model.layers)
        )
        if plain and self.saved == AUTOGRAD:
            return replace(sizes, saved=saved_elements)
        saves = tuple(saves_residual(model, layer, self.saved) for layer in range(model.layers))
        activations = kept_activations(model, micro_batch_size, self.saved, slices)
        if self.logit_bytes is not None:  # for logits and their gradient, which have the same size
            pieces = model.vocab_slices if isinstance(model, CutModel) else 1
            sliced = pieces > 1 and not self.gathers_logits and self.sliced_logit_bytes is not None
            bytes_per_logit = self.sliced_logit_bytes if sliced else self.logit_bytes
            bytes_per_logit = (bytes_per_logit or 0.0) * (pieces if self.gathers_logits else 1)
            activations = (*activations[:-1], int(activations[-1] * bytes_per_logit / (2 * width)))
        bytes = dict(sizes.element_bytes)
        bytes[Kind.GRAD_WEIGHT] = self.held_gradient_bytes(bytes[Kind.GRAD_WEIGHT])
        kept_sizes = replace(sizes, saved=saved_elements, saves_residual=saves, activations=activations, keeps_input=())
        return replace(kept_sizes, element_bytes=bytes)

    def held_gradient_bytes(self, bytes: int) -> int:
        """Return the bytes that one element of a gradient takes in memory if its sum takes `bytes` bytes."""
        return bytes + 2 * (self.half_gradients and bytes == 4)


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Communication of a framework, and its overlap with compute.

    Attributes:
        share: by axis of the mesh, the share of each collective's time that runs beside compute.
        sharded_share: as `share`, for steps whose gradients are sharded. An axis that is not named here has its value
            in `share`.
        blocking_p2p: share of a message's time in which its sender does nothing else.
        scatter_gather_p2p: tensor-parallel ranks each send a slice, which the receivers gather (Narayanan et al. 2021,
            arXiv 2104.04473, section 4.1).
        sends_residual_only: a pipeline's message is only the residual stream, with the branch already added.
        allreduce_sharded_gradients: gradients are all-reduced instead of reduce-scattered, although ZeRO shards the
            optimizer's state, as long as it does not shard gradients too.
        single_nic: collectives leave a node through only one of its NICs.
        contention: seconds that compute loses for each second in which a communication is in flight beside it.
        bucket_bytes: bytes of gradients or parameters that are communicated together, so that small ones share one
            start.
        gathered_bytes: bytes of parameters that are gathered together over data- and context-parallel ranks (0:
            `bucket_bytes`).
        tp_traffic: bytes that collectives along `tp` move, relative to one gather or reduction for each half of a
            block. It is above 1 if each product gathers its input.
        tp_seconds: seconds of each collective along `tp` in addition to the time of its bytes and hops: its ranks wait
            until the hosts of all of them have reached it.
    """

    share: Mapping[str, Amount] = field(default_factory=dict[str, float])
    sharded_share: Mapping[str, Amount] = field(default_factory=dict[str, float])
    blocking_p2p: Amount = 0.0
    scatter_gather_p2p: bool = False
    sends_residual_only: bool = False
    allreduce_sharded_gradients: bool = False
    single_nic: bool = False
    contention: Amount = 0.0
    bucket_bytes: Amount = 0.0
    gathered_bytes: Amount = 0.0
    tp_traffic: Amount = 1.0
    tp_seconds: Amount = 0.0

    def at_once(self, kind: OpKind) -> float:
        """Return the bytes that are communicated together: of parameters in an all-gather, otherwise of gradients."""
        return (kind is OpKind.ALL_GATHER and self.gathered_bytes) or self.bucket_bytes


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """Values that a framework uses if a run does not set them.

    Attributes:
        vocab_size: number of tokens in the vocabulary.
        pads_vocab: vocabularies are padded to a multiple of 128 on every tensor-parallel rank, also if tp is 1.
        bias: linear maps of its GPTs have biases.
        dropout: dropout probability of its GPTs.
        gradient_bytes: bytes of a gradient's element in reductions.
        bf16_gradient_bytes: bytes of a bfloat16 gradient's element in reductions (None: `gradient_bytes`).
        gradient_sync: when sharded gradients are reduced: after each microbatch, or only after the last one. Until then
            they are kept whole.
        reduce_at: time at which gradients are reduced (see `Plan.reduce_at`).
        sharded_reduce_at: value of `reduce_at` if the optimizer's state is sharded ("": `reduce_at`).
        zero_stage: the ZeRO stage.
        recompute: recomputation in the backward pass (see `Plan.recompute`).
        stages: distribution of blocks over pipeline stages: even, or by cost (see `shardlab.simulate.predict.stages`).
    """

    vocab_size: Natural = 50257
    pads_vocab: bool = False
    bias: bool = True
    dropout: Amount = 0.0
    gradient_bytes: Natural = 2
    bf16_gradient_bytes: Natural | None = None
    gradient_sync: Literal["each", "last"] = "each"
    reduce_at: Literal["layer", "step"] = "layer"
    sharded_reduce_at: Literal["", "layer", "step"] = ""
    zero_stage: Natural = 0
    recompute: Recompute = "none"
    stages: Literal["even", "cost"] = "even"

    def precision_called(self, name: str) -> Precision:
        """Return the precision with a name.

        fp8 and mxfp8 only name the dtype of matrix products. Gradients then have the dtype in which this framework
        reduces them.

        Raises:
            UserError: for an unknown name.
        """
        precision = find_precision(name)
        follows = bytes_of(precision.compute) < 2 and not name.endswith(WIDE)
        return self.with_gradients(precision) if follows else precision

    def with_gradients(self, precision: Precision) -> Precision:
        """Return a precision with gradients as the framework reduces them, if the optimizer has a float32 copy."""
        if not precision.copy:
            return precision
        wide = self.bf16_gradient_bytes if precision.parameters == "bfloat16" else None
        return precision.with_gradients_of(wide or self.gradient_bytes)

    def reduction(self, zero: int) -> Literal["layer", "step"]:
        """Return the time at which gradients are reduced with a stage of ZeRO.

        Every framework reduces sharded gradients in each backward pass, and over replicas in the last one: Megatron-LM
        at d98e8a64, megatron_fsdp.py, `_process_post_backward_gradients`; DeepSpeed at edaa7221, runtime/zero/mics.py,
        `partition_grads`; PyTorch's `fully_shard`.
        """
        if zero > 1:
            return "layer"
        return (zero and self.sharded_reduce_at) or self.reduce_at


FOLDER = "simulate/predict/recipes"


@dataclass(frozen=True)
class Switch:
    """Option of a framework that changes how it runs a step.

    Attributes:
        default: value if the user sets none.
        about: its effect, in a few words.
        values: source of each value.
        value: value in the current recipe.
    """

    default: str
    about: str
    values: Mapping[str, str]
    value: str


Switches = Mapping[str, str]
"""Values of switches by name, as given by a user."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Recipe: how a framework runs a step.

    Attributes:
        name: name in options.
        source: description of its choices.
        bases: the recipe on which it builds, the recipe on which that builds, and so on.
        kernels, memory, overlap, defaults: the four groups of its figures.
        can_run: limits of the steps that it runs (see `shardlab.simulate.predict.capabilities`).
        figures: each figure in its files, by group and field, such as "memory.reserved".
        switches: its options by name, each with the value to which the figures belong.
        file: its built-in name, or the path of its file.
    """

    name: str = ""
    source: str = ""
    bases: tuple[str, ...] = field(default=(), compare=False)
    kernels: Kernels = field(default_factory=Kernels)
    memory: MemoryUse = field(default_factory=MemoryUse)
    overlap: Overlap = field(default_factory=Overlap)
    defaults: Defaults = field(default_factory=Defaults)
    can_run: CanRun = field(default_factory=CanRun)
    figures: Mapping[str, Figure] = field(default_factory=dict[str, Figure], compare=False)
    switches: Mapping[str, Switch] = field(default_factory=dict[str, Switch], compare=False)
    file: str = field(default="", compare=False)

    def model_as_run(self, model: Blocks) -> Blocks:
        """Return a model with the number of slots of each expert in this framework.

        If dropout is part of the framework's fused attention (`fused_dropout`), the returned model does not drop
        attention's weights, because dropout then takes no additional time or memory.
        """
        if self.kernels.fused_dropout and isinstance(model, GPT):
            model = replace(model, drops_attention=False)
        if not isinstance(model, MoE):
            return model
        kernels = self.kernels
        if kernels.padded_slots is not None:
            return replace(model, capacity_factor=kernels.padded_slots)
        if model.capacity_factor is None and kernels.dropless_slots is not None:
            return replace(model, capacity_factor=kernels.dropless_slots)
        return model

    @property
    def changed_switches(self) -> Switches:
        """Values of the switches that differ from their defaults."""
        return {name: switch.value for name, switch in self.switches.items() if switch.value != switch.default}

    @property
    def title(self) -> str:
        """The name, with the switches that differ from their defaults."""
        changed = [f"{name}={value}" for name, value in self.changed_switches.items()]
        return f"{self.name} with {' '.join(changed)}" if changed else self.name


GROUPS = {"kernels": Kernels, "memory": MemoryUse, "overlap": Overlap, "defaults": Defaults, "can_run": CanRun}
_GROUP_TABLES: dict[str, Any] = dict.fromkeys(GROUPS, Mapping[str, Any])


@cache
def recipes() -> Mapping[str, Recipe]:
    """Return every built-in recipe by name, Shardlab's own first, and each after its base."""
    by_name = {name: find_recipe(name) for name in _names()}
    return dict(sorted(by_name.items(), key=lambda item: item[0] != "shardlab"))


RENAMED = {
    "torchtitan-async-tp": "torchtitan with --switch attention=flash2 loss=float32 async_tp=on",
    "torchtitan-2025": "torchtitan with --switch attention=flash2 loss=compiled",
    "torchtitan-2025-async-tp": "torchtitan with --switch attention=flash2 loss=compiled async_tp=on",
}
"""Names of recipes in earlier versions, and their replacements."""


def find_recipe(name: str, switches: Switches = MappingProxyType({})) -> Recipe:
    """Return the built-in recipe with a name, ignoring case, or the recipe in a TOML file.

    Args:
        name: the name, or the path of the file.
        switches: values of its switches; others have their defaults.

    Raises:
        UserError: if there is no such recipe (the message suggests the nearest name), if the file is invalid, or if the
            recipe has no such switch or value.
    """
    recipe = _find_recipe(name, switches)
    for switch, value in switches.items():
        _require_switch(recipe, switch, value)
    return recipe


def variants(recipe: Recipe) -> Iterator[tuple[str, str, Recipe]]:
    """Yield (switch, value, recipe with this value) for each other value of each switch of a recipe."""
    current = {name: switch.value for name, switch in recipe.switches.items()}
    for name, switch in recipe.switches.items():
        for value in switch.values:
            if value != switch.value:
                yield name, value, find_recipe(recipe.file, current | {name: value})


def _require_switch(recipe: Recipe, switch: str, value: str) -> None:
    switches = recipe.switches
    if not switches:
        raise UserError(f"recipe {recipe.name} has no switches; leave out {switch}={value}")
    if switch not in switches:
        listed = "; ".join(f"{name}: {', '.join(values.values)}" for name, values in switches.items())
        raise UserError(
            f"recipe {recipe.name} has no switch {switch!r}; {suggest_name(switch, switches)} "
            f"(its switches are {listed})"
        )
    if value not in switches[switch].values:
        raise UserError(
            f"switch {switch} of recipe {recipe.name} is {value!r}; give one of {', '.join(switches[switch].values)}"
        )


def _find_recipe(name: str, switches: Switches, including_files: tuple[Path, ...] = ()) -> Recipe:
    """Return the recipe with a name, for `find_recipe` or as the base of a file.

    Args:
        name, switches: as in `find_recipe`; a switch may also belong to a recipe that builds on this one.
        including_files: files that are being read, each the base of the one before. The base named in the last file is
            relative to that file, unless its path is absolute.
    """
    if name.endswith(".toml"):
        path = including_files[-1].parent / name if including_files else Path(name)
        files = (*including_files, path)
        if path.resolve() in {file.resolve() for file in including_files}:
            raise UserError(f"{' builds on '.join(map(str, files))}, which is being read; give another base")
        return replace(_recipe_of(path.stem, str(path), read_file(path, "TOML"), switches, files), file=str(path))
    return _packaged(name.strip().lower(), tuple(sorted(switches.items())))


def _names() -> list[str]:
    files = (resources.files("shardlab") / FOLDER).iterdir()
    return sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))


@cache
def _packaged(name: str, switches: tuple[tuple[str, str], ...]) -> Recipe:
    if name in RENAMED:
        raise UserError(f"recipe {name} is now a switch; write {RENAMED[name]}")
    if name not in _names():
        raise unknown_name("recipe", name, _names(), " and files that end in .toml")
    return replace(_recipe_of(name, name, load_table(f"{FOLDER}/{name}.toml"), dict(switches)), file=name)


@dataclass(frozen=True, kw_only=True)
class _SwitchTable:
    """Switch as written in a file. If it has no default here, or not all values, the base recipe has the others."""

    default: str = ""
    about: str = ""
    values: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])


def _recipe_of(name: str, location: str, document: Any, switches: Switches, files: tuple[Path, ...] = ()) -> Recipe:
    """Return the recipe of a file, with its base for all values that the file does not set.

    The base is built with the given values of switches, or with the defaults of this file. Then the figures of the file
    replace those of the base. Last come the figures of the chosen value of each switch in the file.
    """
    tables = {"base": Any, "source": Any, "switches": Mapping[str, _SwitchTable]} | _GROUP_TABLES
    fields = read_fields(tables, document, location)
    source = _require_source(fields, location)
    switch_tables: Mapping[str, _SwitchTable] = fields.get("switches", {})
    values_by_switch = {switch: table.default for switch, table in switch_tables.items() if table.default} | dict(
        switches
    )
    base = _find_recipe(str(fields["base"]), values_by_switch, files) if "base" in fields else Recipe()
    bases = (base.name, *base.bases) if base.name else ()
    recipe = _with_figures(replace(base, name=name, source=source, bases=bases), fields, source, location)
    merged = dict(base.switches)
    for switch, table in switch_tables.items():
        inherited, switch_location = merged.get(switch), f"{location}: switches.{switch}"
        partial = {
            value: _partial(figures, f"{switch_location}.values.{value}") for value, figures in table.values.items()
        }
        values = {
            **(inherited.values if inherited else {}),
            **{value: figures["source"] for value, figures in partial.items()},
        }
        default = table.default or (inherited.default if inherited else "")
        if default not in values:
            raise UserError(
                f"{switch_location}.default is {default!r}; give one of {', '.join(values) or 'its values'}"
            )
        value = values_by_switch.get(switch, default)
        merged[switch] = Switch(default, table.about or (inherited.about if inherited else ""), values, value)
        if value in partial:
            recipe = _with_figures(
                recipe, partial[value], partial[value]["source"], f"{switch_location}.values.{value}"
            )
    return replace(recipe, switches=merged)


def _partial(figures: Mapping[str, Any], location: str) -> dict[str, Any]:
    """Return the partial recipe of a switch's value: its groups of figures, and its source."""
    table = read_fields({"source": str} | _GROUP_TABLES, figures, location)
    _require_source(table, location)
    return table


def _require_source(table: Mapping[str, Any], location: str) -> str:
    """Return the source that a table of a file gives, or raise an error if it gives none."""
    source = table.get("source")
    if not isinstance(source, str) or not source:
        raise UserError(f"{location} gives no source; say in quotes where the framework's behaviour is described")
    return source


def _with_figures(recipe: Recipe, table: Mapping[str, Any], source: str, location: str) -> Recipe:
    """Return a recipe with the figures of a table of groups; `source` applies to figures without one."""
    figures, groups = dict(recipe.figures), dict[str, Any]()
    for group, kind in GROUPS.items():
        table_of_group = dict(table.get(group, {}))
        own_source = table_of_group.pop("source", source)
        sourced = {key: _with_source(value, own_source) for key, value in table_of_group.items()}
        values = {key: figure["value"] for key, figure in sourced.items()}
        parsed = read_fields(field_hints(kind), values, location, group, getattr(recipe, group))
        for key, figure in sourced.items():
            full = f"{group}.{key}"
            figures[full] = read_settings(Figure, figure | {"value": parsed[key]}, location, full)
        groups[group] = replace(getattr(recipe, group), **parsed)
    return replace(recipe, figures=figures, **groups)


def _with_source(value: Any, source: str) -> dict[str, Any]:
    """Return a figure as a table with a value and a source. A file may give the value alone."""
    is_figure = isinstance(value, dict) and "value" in value
    return {"source": source, **(cast(dict[str, Any], value) if is_figure else {"value": value})}


OWN = find_recipe("shardlab")
"""Recipe of Shardlab's executor."""
