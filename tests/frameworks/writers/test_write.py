"""Plans that are written as files of a framework, and read again as `explain` reads them."""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from shardlab.common.errors import UserError
from shardlab.frameworks.deepspeed import INPUTS_ON_HOST
from shardlab.frameworks.find import read_config, read_run
from shardlab.frameworks.writers.translation import model_properties
from shardlab.frameworks.writers.write import (
    FRAMEWORK_OF_RECIPE,
    WRITERS,
    Written,
    framework_of,
    plan_properties,
    write_step,
)
from shardlab.frameworks.yaml_file import read_yaml
from shardlab.language import Mesh
from shardlab.language.precision import find_precision
from shardlab.language.recompute_names import MODULES
from shardlab.models import Blocks
from shardlab.models.named import find_model
from shardlab.simulate.hardware import find_cluster
from shardlab.simulate.predict.recipe import find_recipe, recipes
from shardlab.simulate.predict.stages import stages_by_cost
from shardlab.simulate.predict.workload import Workload
from shardlab.strategies.plan.plan import Plan
from tests.support.thorough import examples

EVERYTHING = ("shard_parameters", "shard_gradients", "shard_optimizer")


COMPILED = {"attention": "flash2", "loss": "compiled"}
"""Switches of torchtitan as its TOML files say them."""


def step_of(
    plan: Plan, recipe: str, model: str = "llama3-8b", precision: str = "bf16-fp32-grads", **switches: str
) -> Workload:
    cluster, numbers = find_cluster(f"h100x{plan.mesh.world}"), find_precision(precision)
    microbatches = 2 * plan.data_ranks * plan.mesh.pp
    return Workload(plan, find_model(model), cluster, microbatches, 1, numbers, recipe=find_recipe(recipe, switches))


def sharded(stage: int, **axes: int) -> dict[str, Any]:
    shard_axes = tuple(axis for axis in ("dp_shard", "cp") if axes.get(axis, 1) > 1)
    return dict.fromkeys(EVERYTHING[3 - stage :], shard_axes)


def write(folder: Path, files: Written) -> Path:
    for name, text in files.texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder / next(iter(files.texts))


def unsaid_of(text: str) -> list[str]:
    """What the comments of a file say that it cannot say."""
    lines = text.replace("\n#   ", " ").splitlines()
    return [line.partition("cannot be said here: ")[2] for line in lines if "cannot be said here: " in line]


def require_same(step: Workload, file: Path, files: Written, model: str | Blocks) -> None:
    """The file has no key that is unknown, and means the step but for what is not said."""
    config = read_config(str(file), files.arguments)
    assert config.unknown == []
    commented = [text for name, text in files.texts.items() if not name.endswith(".json")]
    assert all(f"cannot be said here: {unsaid}"[:60] in text for unsaid in files.unsaid for text in commented)
    if files.unsaid:
        return
    says_model = not file.name.startswith(("ds_config", "accelerate"))
    complete = config if says_model else replace(config, model=str(model))
    back = read_run(complete, step.cluster).workload
    assert isinstance(step.plan, Plan)
    assert isinstance(back.plan, Plan)
    properties, written_as = plan_properties(back, back.plan), plan_properties(step, step.plan)
    assert properties == written_as
    assert (back.micro_batch_size, back.microbatches) == (step.micro_batch_size, step.microbatches)
    assert back.precision.name == step.precision.name
    whole = find_model(model) if isinstance(model, str) else model
    assert model_properties(back.model) == model_properties(whole)


axes = {
    "dp_shard": st.sampled_from([1, 2, 4, 8]),
    "tp": st.sampled_from([1, 2, 4]),
    "cp": st.sampled_from([1, 2]),
    "pp": st.sampled_from([1, 2, 4]),
}


@st.composite
def torchtitan_plans(draw: st.DrawFn) -> Plan:
    """Plans that torchtitan can run: FSDP over dp_shard and cp, and pipelines that keep gathered weights."""
    mesh = {name: draw(sizes) for name, sizes in axes.items()}
    assume(mesh["dp_shard"] * mesh["cp"] > 1)
    piped, looped = mesh["pp"] > 1, draw(st.booleans())
    keeps = piped or draw(st.booleans())
    fields = sharded(3, **mesh)
    if keeps:
        fields.pop("shard_gradients")
    interval = draw(st.sampled_from([2, 4]))
    return Plan(
        Mesh(**mesh, dp_replicate=1 if piped else draw(st.sampled_from([1, 2]))),
        "interleaved-1f1b" if piped and looped else "1f1b",
        stages_per_rank=draw(st.sampled_from([2, 4])) if piped and looped else None,
        reshard_after="step" if keeps else "layer",
        sequence_parallel=mesh["tp"] > 1,
        recompute=draw(st.sampled_from(["none", "full", "per-op", f"every-{interval}"])),
        context=draw(st.sampled_from(["all_gather", "ring"])),
        **fields,
    )


@st.composite
def megatron_plans(draw: st.DrawFn) -> Plan:
    """Plans that Megatron-LM can run: Megatron-FSDP, its distributed optimizer, and pipelines of equal stages."""
    mesh = {name: draw(sizes) for name, sizes in axes.items()}
    piped, looped = mesh["pp"] > 1, draw(st.booleans())
    stages_of_zero = [0, 1] if piped else [0, 1, 2, 3]
    stage = draw(st.sampled_from(stages_of_zero)) if mesh["dp_shard"] * mesh["cp"] > 1 else 0
    if stage in (1, 3):
        mesh["dp_replicate"] = draw(st.sampled_from([1, 2]))
    stages = mesh["pp"] * (virtual := 2 if piped and looped else 1)
    count = draw(st.integers(1, 32 // stages - 1)) if 32 // stages > 1 else 0
    blocks = tuple(block for block in range(32) if block % (32 // stages) < count)
    names = [module for module in MODULES if module != "mla_up_proj"]
    modules = "+".join(sorted(draw(st.sets(st.sampled_from(names), min_size=1)), key=MODULES.index))
    return Plan(
        Mesh(**mesh),
        "interleaved-1f1b" if virtual > 1 else "1f1b",
        stages_per_rank=virtual if virtual > 1 else None,
        reduce_at="layer" if stage > 1 else draw(st.sampled_from(["layer", "step"])),
        sequence_parallel=mesh["tp"] > 1 and draw(st.booleans()),
        recompute=draw(
            st.sampled_from(["none", "full", "first-1", "uniform-2", *([blocks] if blocks else []), modules])
        ),
        context=draw(st.sampled_from(["all_gather", "ring", "ulysses"])),
        **sharded(stage, **mesh),
    )


SUPPRESSED = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]


@st.composite
def nanotron_plans(draw: st.DrawFn) -> tuple[Plan, int]:
    """Plans that nanotron can run, and the number of blocks: its stages have equal costs."""
    mesh, layers = Mesh(**{name: draw(sizes) for name, sizes in axes.items()}), draw(st.sampled_from([16, 32]))
    recipe = find_recipe("nanotron")
    halves = mesh.tp > 1 or mesh.cp > 1
    stages = stages_by_cost(replace(find_model("llama3-8b"), layers=layers), mesh.pp, halves=halves)
    assume(mesh.pp == 1 or stages)
    zero = draw(st.sampled_from([0, 1])) if mesh.dp_shard * mesh.cp > 1 else 0
    return Plan(
        mesh,
        draw(st.sampled_from(["1f1b", "gpipe"])) if mesh.pp > 1 else "1f1b",
        layers_per_stage=stages if mesh.pp > 1 else (),
        reduce_at=recipe.defaults.reduction(zero),
        sequence_parallel=mesh.tp > 1 and draw(st.booleans()),
        recompute=draw(st.sampled_from(["none", "full"])),
        **sharded(zero, dp_shard=mesh.dp_shard, cp=mesh.cp),
    ), layers


slow = settings(deadline=None, max_examples=examples(120), suppress_health_check=SUPPRESSED)


@slow
@given(torchtitan_plans(), st.sampled_from(["chunked", "compiled", "float32"]), st.sampled_from(["on", "off"]))
def test_a_plan_of_torchtitan_is_read_as_it_was_written(tmp_path: Path, plan: Plan, loss: str, tp: str) -> None:
    """In Python and in TOML, but for what only one of them can say."""
    step = step_of(plan, "torchtitan", attention="flash2", loss=loss, async_tp=tp if plan.mesh.tp > 1 else "off")
    files = write_step(step, "llama3-8b")
    old = [str(plan.recompute).startswith("every-"), plan.mesh.cp > 1 and plan.context == "ring"]
    assert len(files.unsaid) == sum(old) * 2, "what is left out, and how the steps differ then"
    code = write(tmp_path, files)
    newest = files._replace(texts={code.name: files.texts[code.name]})
    require_same(step, code, newest, "llama3-8b")
    toml = files.texts["train.toml"]
    assert len(unsaid_of(toml)) == (loss == "chunked")
    only = files._replace(texts={"train.toml": toml}, unsaid=tuple(unsaid_of(toml)))
    require_same(step, code.with_name("train.toml"), only, "llama3-8b")


@slow
@given(megatron_plans(), st.sampled_from(["llama3-8b", "mixtral-8x7b"]), st.sampled_from(["bf16", "bf16-fp32-grads"]))
def test_a_plan_of_megatron_is_read_as_it_was_written(tmp_path: Path, plan: Plan, model: str, precision: str) -> None:
    gradients = "bf16" if precision == "bf16" else "fp32"
    early = "on" if plan.reduce_at == "layer" else "off"
    assume(model == "llama3-8b" or plan.recompute != "uniform-2")  # of mixtures, experts alone are recomputed
    step = step_of(plan, "megatron-core", model, precision, gradients=gradients, dp_overlap=early, experts="grouped")
    files = write_step(step, model)
    assert files.unsaid == ()
    require_same(step, write(tmp_path, files), files, model)


@slow
@given(nanotron_plans(), st.sampled_from(["bf16", "bf16-fp32-grads", "fp16"]))
def test_a_plan_of_nanotron_is_read_as_it_was_written(tmp_path: Path, case: tuple[Plan, int], precision: str) -> None:
    plan, layers = case
    step = step_of(plan, "nanotron", precision=precision)
    step = replace(step, model=replace(step.model, layers=layers))
    files = write_step(step, "llama3-8b")
    assert files.unsaid == ()
    require_same(step, write(tmp_path, files), files, step.model)


REPLICAS = Plan(Mesh(dp_shard=8, dp_replicate=2), recompute="full", **sharded(3, dp_shard=8))


@pytest.mark.parametrize(
    ("recipe", "plan"),
    [
        *(("deepspeed", Plan(Mesh(dp_shard=8), **sharded(stage, dp_shard=8))) for stage in range(4)),
        ("deepspeed", Plan(Mesh(dp_shard=8), recompute="full", reduce_at="step", **sharded(1, dp_shard=8))),
        ("deepspeed", REPLICAS),
        ("deepspeed", Plan(Mesh(dp_shard=8), passes=INPUTS_ON_HOST, **sharded(2, dp_shard=8))),
        ("deepspeed", replace(REPLICAS, **dict.fromkeys(EVERYTHING[1:], ("dp_shard", "dp_replicate")))),
        *(("fsdp1", Plan(Mesh(dp_shard=8), **sharded(stage, dp_shard=8))) for stage in (0, 2, 3)),
        ("fsdp1", REPLICAS),
    ],
)
def test_a_plan_of_the_trainer_is_read_as_it_was_written(tmp_path: Path, recipe: str, plan: Plan) -> None:
    step = step_of(plan, recipe, precision="bf16")
    files = write_step(step, "llama3-8b")
    assert files.unsaid == ()
    file = write(tmp_path, files)
    require_same(step, file, files, "llama3-8b")
    assert "--model_name_or_path" in (tmp_path / "train.sh").read_text()


@pytest.mark.parametrize("name", [name for name in recipes() if name in FRAMEWORK_OF_RECIPE])
def test_what_cannot_be_said_stands_in_a_comment_of_every_file(name: str, tmp_path: Path) -> None:
    plan = Plan(Mesh(dp_shard=4, pp=4), "zb-h2", shard_optimizer=("dp_shard",), recompute="selective")
    step = step_of(plan, name)
    files = write_step(step, "llama3-8b")
    assert any("schedule" in unsaid for unsaid in files.unsaid)
    require_same(step, write(tmp_path, files), files, "llama3-8b")


def test_a_model_that_is_no_flavor_is_left_to_the_user(tmp_path: Path) -> None:
    step = step_of(Plan(Mesh(dp_shard=8), **sharded(3, dp_shard=8)), "torchtitan", "gpt2")
    files = write_step(step, "gpt2")
    assert files.unsaid[0].startswith("the model, which is none of torchtitan's flavors")
    write(tmp_path, files)
    assert "flavor =" not in (tmp_path / "train.toml").read_text()


def test_a_recipe_of_a_users_file_is_written_as_its_base(tmp_path: Path) -> None:
    (tmp_path / "ours.toml").write_text('base = "megatron-core"\nsource = "our branch"\n')
    assert framework_of(find_recipe(str(tmp_path / "ours.toml"))) == "megatron"
    with pytest.raises(UserError, match="no framework's files are written for recipe shardlab; give a recipe such as"):
        framework_of(find_recipe("shardlab"))


def test_uneven_stages_are_said_where_a_framework_has_words_for_them(tmp_path: Path) -> None:
    common: dict[str, Any] = {"shard_optimizer": ("dp_shard",), "reduce_at": "step"}
    plan = Plan(Mesh(dp_shard=2, pp=4), layers_per_stage=(7, 9, 9, 7), **common)
    files = write_step(step_of(plan, "megatron-core"), "llama3-8b")
    assert files.unsaid == ()
    assert "--decoder-first-pipeline-num-layers 7" in files.texts["train.sh"]
    plan = replace(plan, mesh=Mesh(dp_shard=2, pp=2), layers_per_stage=(20, 12))
    files = write_step(step_of(plan, "megatron-core"), "llama3-8b")
    assert files.unsaid == ()
    keeps: dict[str, Any] = {
        "shard_parameters": ("dp_shard",),
        "shard_optimizer": ("dp_shard",),
        "reshard_after": "step",
    }
    plan = Plan(Mesh(dp_shard=2, pp=2), layers_per_stage=(20, 12), **keeps)
    files = write_step(step_of(plan, "torchtitan", **COMPILED), "llama3-8b")
    assert files.unsaid == ()
    assert '["layers.31", "norm", "output"]' not in files.texts["train.toml"]
    assert '"layers.31", "norm", "output"]]' in files.texts["train.toml"]
    assert '["tok_embeddings", "layers.0", ' in files.texts["train_config.py"]
    assert '"layers.31", "norm", "lm_head"]]' in files.texts["train_config.py"]


def test_every_writer_has_a_recipe() -> None:
    assert set(FRAMEWORK_OF_RECIPE.values()) == set(WRITERS)
    assert set(FRAMEWORK_OF_RECIPE) <= set(recipes())


# Schemas, with their sources, of files that need too much to be parsed by the framework itself.

NANOTRON: dict[str, tuple[set[str], set[str]]] = {
    "general": ({"project"}, {"run", "seed", "step", "consumed_train_samples", "ignore_sanity_checks"}),
    "checkpoints": ({"checkpoints_path", "checkpoint_interval"}, {"save_initial_state", "resume_checkpoint_path"}),
    "parallelism": (
        {"dp", "pp", "tp"},
        {
            *("pp_engine", "tp_mode", "tp_linear_async_communication", "recompute_layer", "moe_layer_recompute"),
            *("tp_recompute_allgather", "expert_parallel_size", "context_parallel_size"),
        },
    ),
    "model": ({"model_config", "init_method"}, {"dtype", "make_vocab_size_divisible_by", "ddp_bucket_cap_mb"}),
    "model.init_method": ({"std"}, set()),
    "model.model_config": (
        set(),
        {
            *("hidden_act", "hidden_size", "intermediate_size", "is_llama_config", "max_position_embeddings"),
            *("num_attention_heads", "num_hidden_layers", "num_key_value_heads", "rms_norm_eps", "rope_scaling"),
            *("rope_theta", "rope_interleaved", "tie_word_embeddings", "vocab_size"),
        },
    ),
    "optimizer": (
        *({"optimizer_factory", "zero_stage", "weight_decay", "clip_grad", "accumulate_grad_in_fp32"},),
        {"learning_rate_scheduler", "weight_decay_exclude_named_params"},
    ),
    "optimizer.optimizer_factory": ({"adam_eps", "adam_beta1", "adam_beta2", "torch_adam_is_fused"}, {"name"}),
    "optimizer.learning_rate_scheduler": (
        {"learning_rate", "lr_warmup_style", "lr_decay_style"},
        {"lr_warmup_steps", "lr_decay_steps", "lr_decay_starting_step", "min_decay_lr"},
    ),
    "tokens": (
        {"sequence_length", "train_steps", "micro_batch_size", "batch_accumulation_per_replica"},
        {"val_check_interval", "limit_val_batches", "limit_test_batches"},
    ),
}
"""Fields without defaults, and others, of the dataclasses that dacite reads strictly: huggingface/nanotron
src/nanotron/config/config.py at 00708b80, parallelism_config.py at 19f88fbe and models_config.py at 025f3141."""


@slow
@given(nanotron_plans())
def test_nanotrons_file_has_the_fields_that_it_asks_for_and_no_others(tmp_path: Path, case: tuple[Plan, int]) -> None:
    plan, layers = case
    step = step_of(plan, "nanotron")
    files = write_step(replace(step, model=replace(step.model, layers=layers)), "llama3-8b")
    document, _ = read_yaml(next(iter(files.texts.values())), "train.yaml")
    assert {name for name in NANOTRON if "." not in name} == document.keys()
    for place, (required, optional) in NANOTRON.items():
        section: Any = document
        for name in place.split("."):
            section = section[name]
        assert required <= section.keys() <= required | optional, place


MEGATRON_FLAGS = {
    *("sequence-parallel", "account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split"),
    *("use-distributed-optimizer", "use-megatron-fsdp", "overlap-grad-reduce", "overlap-param-gather", "bf16", "fp16"),
    *("tp-comm-overlap", "use-flash-attn", "group-query-attention", "swiglu", "squared-relu", "disable-bias-linear"),
    *("untie-embeddings-and-output-weights", "accumulate-allreduce-grads-in-fp32", "grad-reduce-in-bf16"),
    *("use-rope-scaling", "cross-entropy-loss-fusion", "moe-grouped-gemm", "moe-permute-fusion"),
}
MEGATRON_INTS = {
    *("tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size", "seq-length"),
    *("expert-model-parallel-size", "num-virtual-stages-per-pipeline-rank", "decoder-first-pipeline-num-layers"),
    *(
        "decoder-last-pipeline-num-layers",
        "micro-batch-size",
        "global-batch-size",
        "recompute-num-layers",
        "num-layers",
    ),
    *("hidden-size", "ffn-hidden-size", "num-attention-heads", "kv-channels", "num-query-groups", "vocab-size"),
    *("make-vocab-size-divisible-by", "num-experts", "moe-router-topk", "moe-ffn-hidden-size", "rotary-base"),
    *("moe-shared-expert-intermediate-size", "max-position-embeddings", "num-distributed-optimizer-instances"),
}
MEGATRON_FLOATS = {"attention-dropout", "hidden-dropout", "moe-expert-capacity-factor", "norm-epsilon"}
MEGATRON_LISTS = ("cp-comm-type", "recompute-modules")
MEGATRON_WORDS = {
    "data-parallel-sharding-strategy": ("no_shard", "optim", "optim_grads", "optim_grads_params"),
    "recompute-granularity": ("full", "selective"),
    "recompute-method": ("uniform", "block"),
    "position-embedding-type": ("learned_absolute", "rope", "yarn", "mrope", "relative", "none"),
    "normalization": ("LayerNorm", "RMSNorm"),
    "fp8-format": ("e4m3", "hybrid"),
    "fp8-recipe": ("tensorwise", "delayed", "mxfp8", "blockwise", "custom"),
    "optimizer": ("adam", "sgd", "muon", "dist_muon", "lion", "soap", "adaptive_muon"),
    "cp-comm-type": ("p2p", "all_gather", "a2a", "a2a+p2p"),
    "recompute-modules": ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts"),
}
"""Arguments that may be written, with their types and words, as the parser has them that NVIDIA/Megatron-LM
megatron/training/arguments.py makes at d98e8a64ddf34856e74b24714e3bedb2f5a39553. It has 878 names. The words
of lists are those of megatron/core/transformer/transformer_config.py."""


def megatron_parser() -> argparse.ArgumentParser:
    """A parser of the arguments that may be written."""
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    for name in MEGATRON_FLAGS:
        parser.add_argument(f"--{name}", action="store_true")
    for kind, names in ((int, MEGATRON_INTS), (float, MEGATRON_FLOATS)):
        for name in names:
            parser.add_argument(f"--{name}", type=kind)
    for name, words in MEGATRON_WORDS.items():
        parser.add_argument(f"--{name}", choices=words, nargs="+" if name in MEGATRON_LISTS else None)
    return parser


OTHER_PLANS: list[tuple[Plan, str, str, str, dict[str, str]]] = [
    (Plan(Mesh(dp_shard=8), **sharded(3, dp_shard=8)), "megatron-core", "llama3-8b", "bf16", {}),
    (Plan(Mesh(tp=8), sequence_parallel=True), "megatron-core-tuned", "llama3-70b", "fp8", {}),
    (Plan(Mesh(dp_shard=2, pp=4), layers_per_stage=(7, 9, 9, 7)), "megatron-core", "llama3-8b", "mxfp8", {}),
    (Plan(Mesh(dp_shard=4, ep=2)), "megatron-core", "deepseek-moe-16b", "bf16", {"experts": "fused"}),
    (Plan(Mesh(dp_shard=2, tp=4), recompute="selective"), "megatron-2022", "gpt3-175b", "fp16", {}),
]


def require_arguments(script: str) -> argparse.Namespace:
    """The arguments of a script, none of which Megatron-LM lacks."""
    arrays = re.findall(r"^\w+=\(\n(.*?)^\)", script, re.DOTALL | re.MULTILINE)
    parsed, rest = megatron_parser().parse_known_args([word for array in arrays for word in array.split()])
    assert rest == [], rest
    return parsed


@slow
@given(megatron_plans(), st.sampled_from(["llama3-8b", "mixtral-8x7b"]))
def test_megatrons_parser_has_every_argument(plan: Plan, model: str) -> None:
    early = "on" if plan.reduce_at == "layer" else "off"
    (script,) = write_step(step_of(plan, "megatron-core", model, dp_overlap=early), model).texts.values()
    parsed = require_arguments(script)
    assert (parsed.tensor_model_parallel_size, parsed.pipeline_model_parallel_size) == (plan.mesh.tp, plan.mesh.pp)


@pytest.mark.parametrize(("plan", "recipe", "model", "precision", "switches"), OTHER_PLANS)
def test_megatrons_parser_has_the_arguments_of_other_models_and_precisions(
    plan: Plan, recipe: str, model: str, precision: str, switches: dict[str, str]
) -> None:
    (script,) = write_step(step_of(plan, recipe, model, precision, **switches), model).texts.values()
    assert require_arguments(script).num_layers == find_model(model).layers


def test_an_argument_that_megatron_lacks_is_seen() -> None:
    with pytest.raises(AssertionError):
        require_arguments("PARALLEL=(\n    --tensor-parallel-size 2\n)\n")
    with pytest.raises(argparse.ArgumentError, match="invalid choice"):
        require_arguments("PARALLEL=(\n    --recompute-method every\n)\n")
