"""Megatron-LM: the arguments of `pretrain_gpt.py`, alone or in the shell script that holds them.

Defaults are those of `megatron/training/arguments.py`; `megatron.toml` lists the arguments, with the commits. NeMo's
YAML files have the same settings, so their steps come from `step_of` too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from shardlab.common.errors import UserError
from shardlab.frameworks.run import FrameworkRun, Layout, cut_batch, data_ranks, known_optimizer, make_plan, model_words
from shardlab.frameworks.settings import Config
from shardlab.language import Mesh
from shardlab.language.precision import Precision, find_precision
from shardlab.language.recompute_names import MODULES
from shardlab.models import GPT, Blocks, Llama
from shardlab.models.architectures import Mixtral, MoE
from shardlab.models.layout import aligned
from shardlab.models.named import find_model, with_written
from shardlab.simulate.hardware import Cluster
from shardlab.simulate.predict.recipe import Recipe, find_recipe
from shardlab.strategies.plan.plan import Context

NAME = "megatron"

CONTEXTS: dict[str, Context] = {"p2p": "ring", "all_gather": "all_gather", "a2a": "ulysses"}
"""Forms of context parallelism by value of --cp-comm-type."""

VOCABULARIES = {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000, "Llama3Tokenizer": 128256}
"""Sizes of vocabularies by value of --tokenizer-type."""

HUGGING_FACE = {
    "llama-3": 128256,
    "llama3": 128256,
    "llama-2": 32000,
    "llama2": 32000,
    "mistral": 32000,
    "mixtral": 32000,
    "qwen3": 151936,
    "qwen2": 151936,
    "qwen1": 151936,
    "deepseek-v3": 129280,
    "deepseek-v2": 102400,
    "gpt2": 50257,
}
"""Sizes of vocabularies by a part of the value of --tokenizer-model."""


def run(config: Config, cluster: Cluster) -> FrameworkRun:
    """Return the step of a configuration.

    Raises:
        UserError: if sizes are missing, or do not fit together.
    """
    return step_of(config, config.values, cluster)


def step_of(config: Config, values: Mapping[str, Any], cluster: Cluster) -> FrameworkRun:
    """Return the step of a configuration of Megatron-LM or NeMo.

    Args:
        config: the configuration.
        values: its values by Megatron-LM's meanings.
        cluster: the devices.

    Raises:
        UserError: if sizes are missing, or do not fit together.
    """
    notes = list[str]()
    mesh = _mesh(config, values, cluster.size)
    if config.model:
        model = with_written(find_model(config.model), _length(values), config.model)
    else:
        model = _model(config, values, mesh, notes)
    stages, blocks = _stages(config, values, model, mesh)
    zero = _zero(values)
    recipe = _recipe(config, values, notes)
    layout = Layout(
        mesh,
        zero=zero,
        schedule="interleaved-1f1b" if stages > 1 else "1f1b",
        stages=stages,
        blocks_of_stages=blocks,
        sequence_parallel=values["sequence_parallel"],
        recompute=_recompute(config, values, model, notes),
        reduce_at="layer" if values["overlap_grad_reduce"] or zero > 1 else "step",
        context=CONTEXTS.get(str(values["context"][0]), "ring"),
    )
    plan = make_plan(layout, model)
    size = _number(config, values, "micro_batch_size")
    sequences = values["global_batch"] or size * plan.data_ranks
    microbatches = cut_batch(config.file, sequences, size, plan.data_ranks)
    name, optimizer = config.model or model_words(model), known_optimizer(values["optimizer"], notes)
    return FrameworkRun(
        config, name, model, plan, cluster, size, microbatches, _precision(values), recipe, optimizer, tuple(notes)
    )


def _length(values: Mapping[str, Any]) -> dict[str, int]:
    return {} if values["seq_len"] is None else {"seq_len": values["seq_len"]}


def _mesh(config: Config, values: Mapping[str, Any], devices: int) -> Mesh:
    tp, pp, cp, ep = (values[axis] for axis in ("tp", "pp", "cp", "ep"))
    ranks = data_ranks(devices, tp * pp * cp, config.file, f"tp {tp}, pp {pp} and cp {cp}")
    if ranks % ep:
        raise UserError(
            f"{config.file}: {config.table.keys['ep'].name} is {ep}, which does not divide the {ranks} data-parallel "
            "ranks; experts over other axes are not predicted"
        )
    instances = values["optimizer_instances"] if _zero(values) else 1
    if instances > 1 and ranks % (ep * instances):
        raise UserError(
            f"{config.file}: {config.table.keys['optimizer_instances'].name} is {instances}, which does not divide the "
            f"{ranks // ep} data-parallel ranks"
        )
    return Mesh(pp=pp, dp_replicate=instances, dp_shard=ranks // ep // instances, cp=cp, tp=tp, ep=ep)


def _number(config: Config, values: Mapping[str, Any], meaning: str) -> int:
    value = values[meaning]
    if value is None:
        raise UserError(f"{config.file} gives no {config.table.keys[meaning].name}; give it after --")
    return value


def _model(config: Config, values: Mapping[str, Any], mesh: Mesh, notes: list[str]) -> Blocks:
    layers, hidden, heads, seq_len = (
        _number(config, values, meaning) for meaning in ("layers", "hidden_size", "heads", "seq_len")
    )
    gated = values["swiglu"] or values["geglu"]
    ffn = values["ffn_hidden_size"] or (int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden)
    kv_heads = values["kv_heads"] if values["grouped"] else 1 if values["one_kv_head"] else heads
    rotary = values["positions"] in ("rope", "yarn", "mrope") or values["rotary"]
    common: dict[str, Any] = {
        "layers": layers,
        "hidden_size": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "ffn_hidden_size": ffn,
        "vocab_size": _vocabulary(values, mesh.tp, notes),
        "seq_len": seq_len,
        "tied": not values["untied"],
        "norm": "rms" if values["norm"] == "RMSNorm" else "layer",
        "bias": values["bias"],
        "activation": "swiglu" if gated else "squared_relu" if values["squared_relu"] else "gelu",
        "rope_theta": 10000.0 if rotary or values["positions"] == "none" else None,
        "dropout": max(values["hidden_dropout"], values["attention_dropout"]),
    }
    head = values["head_dim"]
    if head is not None and head * heads != hidden:
        common["head_dim"] = head
    common |= {"qk_norm": values["qk_norm"], "qkv_bias": values["qkv_bias"] and not values["bias"]}
    if values["latent_attention"]:  # latents always have norms
        common |= {"kv_heads": None, "head_dim": values["latent_head_dim"], "kv_rank": values["kv_rank"]}
        common |= {"q_rank": values["q_rank"], "rope_dim": values["rope_dim"], "qk_norm": False, "qkv_bias": False}
        if values["value_dim"] != values["latent_head_dim"]:
            notes.append(f"values are predicted {values['latent_head_dim']} wide, not {values['value_dim']}")
    if not values["attention_dropout"] and common["dropout"]:
        common["drops_attention"] = False
    if values["experts"] is None:
        kind = Llama if gated and common["norm"] == "rms" and not values["bias"] else GPT
        return kind(**common)
    return _mixture(values, common, notes)


def _mixture(values: Mapping[str, Any], common: dict[str, Any], notes: list[str]) -> Blocks:
    expert = values["expert_ffn"] or common["ffn_hidden_size"]
    dense = re.fullmatch(r"\(?\[0\]\*(\d+)\+\[1\]\*\d+\)?", str(values["moe_layers"]).replace(" ", ""))
    if dense is None and str(values["moe_layers"]) not in ("1", "[1]"):
        notes.append(f"every block is predicted as a mixture; {values['moe_layers']} says which are")
    capacity = 1.0 if values["capacity"] is None else values["capacity"]
    mixture: dict[str, Any] = {
        "experts": values["experts"],
        "top_k": values["top_k"],
        "shared_experts": int(bool(values["shared_ffn"])),
        "shared_ffn_hidden_size": values["shared_ffn"],
        "dense_layers": int(dense[1]) if dense else 0,
        "dense_ffn_hidden_size": common["ffn_hidden_size"] if dense else None,
        "capacity_factor": capacity,
    }
    fields: dict[str, Any] = {**common, "ffn_hidden_size": expert, **mixture}
    return Mixtral(**fields) if common["activation"] == "swiglu" else MoE(**fields)


def _vocabulary(values: Mapping[str, Any], tp: int, notes: list[str]) -> int:
    """Return the padded size of the vocabulary (`_vocab_size_with_padding`)."""
    if values["padded_vocab"]:
        return values["padded_vocab"]
    size = values["vocab_size"]
    if size is None:
        path = str(values["tokenizer_model"]).lower()
        size = VOCABULARIES.get(values["tokenizer"])
        size = size or next((count for part, count in HUGGING_FACE.items() if part in path), None)
        if size is None:
            size = 50257
            notes.append("the size of the vocabulary is not given; GPT-2's 50,257 is assumed (give --vocab-size)")
        else:
            notes.append(f"a vocabulary of {size:,}, as the tokenizer's name says")
    return aligned(int(size), values["vocab_multiple"] * tp)


def _stages(config: Config, values: Mapping[str, Any], model: Blocks, mesh: Mesh) -> tuple[int, tuple[int, ...]]:
    """Return the number of stages on each pipeline rank, and the blocks of each stage (empty without a pipeline)."""
    if mesh.pp == 1:
        return 1, ()
    virtual = 1
    if values["virtual_stages"]:
        virtual = values["virtual_stages"]
    elif values["virtual_layers"]:
        virtual = max(1, model.layers // mesh.pp // values["virtual_layers"])
    stages, layers = mesh.pp * virtual, model.layers
    first, last = values["first_stage_layers"], values["last_stage_layers"]
    if virtual == 1 and (first or last):
        middle = mesh.pp - bool(first) - bool(last)
        count, rest = divmod(layers - int(first or 0) - int(last or 0), max(1, middle))
        if not rest and middle:
            blocks = [count] * mesh.pp
            blocks[0], blocks[-1] = int(first or count), int(last or count)
            return 1, tuple(blocks)
    ends = values["embedding_in_split"] + values["loss_in_split"]
    count, rest = divmod(layers + ends, stages)
    if rest:
        raise UserError(
            f"{config.file}: {layers} layers do not divide among {stages} pipeline stages; Megatron-LM refuses that"
        )
    blocks = [count] * stages
    blocks[0] -= values["embedding_in_split"]
    blocks[-1] -= values["loss_in_split"]
    return virtual, tuple(blocks)


def _zero(values: Mapping[str, Any]) -> int:
    if values["torch_fsdp"]:
        return 3
    if values["megatron_fsdp"]:
        strategies = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
        return strategies.get(values["sharding"], 3)
    return int(values["distributed_optimizer"])


def _recompute(config: Config, values: Mapping[str, Any], model: Blocks, notes: list[str]) -> Any:
    """Return what is recomputed (`megatron/core/recompute.py` at d98e8a64).

    The arguments of 2021 and 2022 recompute whole blocks. With the method uniform, all blocks are recomputed, and each
    group of consecutive blocks keeps one input. With the method block, only the first blocks of each stage are
    recomputed.
    """
    mode = "selective" if values["recompute_activations"] and not values["recompute"] else values["recompute"]
    method, count = values["recompute_method"], values["recompute_layers"]
    if values["recompute_2021"] or values["recompute_2022"]:
        mode, method = "full", values["recompute_2022"] or "uniform"
    if mode == "full":
        return _recomputed_blocks(str(method), 1 if count is None else count, model, notes)
    if values["moe_recompute"] and mode is None:
        return "moe"
    return _recomputed_modules(config, values, notes) if mode == "selective" else "none"


def _recomputed_modules(config: Config, values: Mapping[str, Any], notes: list[str]) -> str:
    """Return the modules that are recomputed (`megatron/core/transformer/transformer_config.py` at d98e8a64).

    Fused attention keeps no scores in any case, but the module core_attn still computes the attention again. Before
    Megatron-Core, attention was not fused.
    """
    if _is_old(config):
        return "selective"
    modules = [*values["recompute_modules"], *(["moe"] if values["moe_recompute"] else [])]
    if others := [module for module in modules if module not in MODULES]:
        notes.append(f"the recomputation of {', '.join(others)} is not predicted; memory will be smaller")
    return "+".join(module for module in MODULES if module in modules) or "none"


def _recomputed_blocks(method: str, count: int, model: Blocks, notes: list[str]) -> str:
    if count < 1:
        return "none"
    if method == "block":
        return f"first-{count}"
    if count > 1 and isinstance(model, MoE):
        notes.append(f"{count} blocks that keep one input are predicted as single ones, which keep more")
        return "full"
    return f"uniform-{count}" if count > 1 else "full"


def _recipe(config: Config, values: Mapping[str, Any], notes: list[str]) -> Recipe:
    if _is_old(config):
        return find_recipe("megatron-2022" if values["sequence_parallel"] else "megatron-2021")
    if values["implementation"] == "local" and not values["flash_attention"]:
        notes.append("--transformer-impl local is predicted with fused attention")
    switches = {
        "attention": "flash2" if values["attention_dropout"] or values["flash_attention"] else "cudnn",
        "tp_overlap": "on" if values["tp_overlap"] else "off",
        "dp_overlap": "on" if values["overlap_grad_reduce"] else "off",
        "gradients": "bf16" if values["bf16_gradients"] else "fp32",
    }
    return find_recipe("megatron-core", switches)


def _is_old(config: Config) -> bool:
    """Return whether the arguments are of a version before Megatron-Core."""
    return config.version.startswith(("2020", "2021"))


def _precision(values: Mapping[str, Any]) -> Precision:
    if values["fp8"] or values["fp8_2023"]:
        name = "mxfp8" if values["fp8_recipe"] == "mxfp8" else "fp8"
        return find_precision(name if values["bf16_gradients"] else f"{name}-fp32-grads")
    if values["fp16"]:
        return find_precision("fp16")
    if not values["bf16"]:
        return find_precision("fp32")
    return find_precision("bf16" if values["bf16_gradients"] else "bf16-fp32-grads")


def changes(config: Config, step: FrameworkRun, values: Mapping[str, Any] | None = None) -> Iterator[dict[str, Any]]:
    """Yield changes that may save time or memory, as values by meaning: an argument with those that it needs.

    Args:
        config, step: the configuration and its step.
        values: values by Megatron-LM's meanings (None: the configuration's).
    """
    values, mesh, layers = values or config.values, step.plan.mesh, step.model.layers
    stage_layers = max(1, layers // mesh.pp // (step.plan.stages_per_rank or 1))
    others = {"recompute_method": None, "recompute_layers": None, "recompute_activations": None}
    if step.plan.recompute != "none":
        yield {"recompute": None, "recompute_modules": None, **others}
    mixture, latent = isinstance(step.model, MoE), bool(values["latent_attention"])
    modules = ["mla_up_proj"] * latent, ["layernorm"] * (mixture or latent), ["moe" if mixture else "mlp"]
    yield from ({"recompute": "selective", "recompute_modules": names, **others} for names in modules if names)
    for count in sorted({1, 2, 4, stage_layers // 4, stage_layers // 2, stage_layers * 3 // 4} - {0}):
        if count < stage_layers:
            yield {"recompute": "full", "recompute_method": "block", "recompute_layers": count}
    yield {"recompute": "full", "recompute_method": "uniform", "recompute_layers": 1}
    for meaning in ("distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather", "tp_overlap"):
        needs = {"distributed_optimizer": True} if meaning == "overlap_param_gather" else {}
        if not values[meaning] and (meaning != "tp_overlap" or mesh.tp > 1):
            yield {meaning: True, **needs}
    if mesh.tp > 1 and not values["sequence_parallel"]:
        yield {"sequence_parallel": True}
    size = step.micro_batch_size
    yield from ({"micro_batch_size": other} for other in (size // 2, size * 2, 1) if other and other != size)
    for tp in (mesh.tp // 2, mesh.tp * 2):
        if 1 <= tp <= step.cluster.per_node:
            yield {"tp": tp, **({"sequence_parallel": True} if tp > 1 else {"sequence_parallel": None})}
    yield from ({"pp": pp} for pp in (mesh.pp // 2, mesh.pp * 2) if pp >= 1)
    if mesh.pp > 1:
        for virtual in (2, 3, 4, 5, 6):
            count, rest = divmod(layers, mesh.pp * virtual)
            if not rest and count:
                yield {"virtual_layers": count, "virtual_stages": None}
    yield from ({"cp": cp} for cp in (mesh.cp // 2, mesh.cp * 2) if cp >= 1 and step.model.seq_len >= 8192)
