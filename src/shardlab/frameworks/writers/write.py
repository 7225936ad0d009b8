"""Write a step as the configuration of its recipe's framework. Comments list properties that the file cannot express.

`write_step` translates the step, reads the translation back as `explain` reads a file, and compares the two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

from shardlab.common.errors import Refused, UserError
from shardlab.common.fields import as_text
from shardlab.frameworks.find import FRAMEWORKS
from shardlab.frameworks.settings import Config, key_table
from shardlab.frameworks.writers import deepspeed, megatron, nanotron, torchtitan
from shardlab.frameworks.writers.translation import Translation, model_properties
from shardlab.planner.problem import plan_layers
from shardlab.simulate.predict.recipe import Recipe
from shardlab.simulate.predict.workload import Workload
from shardlab.strategies.plan.plan import BATCH_AXES, Plan
from shardlab.strategies.plan.resolve import with_named_blocks


class Writer(NamedTuple):
    """Module that writes the configurations of a framework.

    Attributes:
        files: names of the files. `explain` reads the first one.
        translate: function from a step to values of the framework's keys, by meaning.
        render: function from a translation to the text of each file.
    """

    files: tuple[str, ...]

    translate: Callable[[Workload], Translation]
    render: Callable[[Translation, Workload, Sequence[str]], tuple[str, ...]]


WRITERS: dict[str, tuple[Writer, ...]] = {
    "torchtitan": (
        Writer((torchtitan.PYTHON_FILE,), torchtitan.translate_python, torchtitan.render_python),
        Writer((torchtitan.TOML_FILE,), torchtitan.translate_toml, torchtitan.render_toml),
    ),
    "megatron": (Writer((megatron.FILE,), megatron.translate, megatron.render),),
    "nanotron": (Writer((nanotron.FILE,), nanotron.translate, nanotron.render),),
    "deepspeed": (Writer(deepspeed.FILES, deepspeed.translate, deepspeed.render),),
    "accelerate": (Writer(deepspeed.ACCELERATE_FILES, deepspeed.translate_accelerate, deepspeed.render_accelerate),),
}
"""Every framework that is written, with a writer for each of its versions, the newest first."""

FRAMEWORK_OF_RECIPE = {
    "torchtitan": "torchtitan",
    "fsdp2": "torchtitan",
    "megatron-core": "megatron",
    "megatron-2022": "megatron",
    "nanotron": "nanotron",
    "deepspeed": "deepspeed",
    "fsdp1": "accelerate",
}
"""Framework by recipe. Recipes that build on one of these have the same framework."""


class Written(NamedTuple):
    """Files of a framework.

    Attributes:
        framework: name of the framework.
        texts: text of each file by name. `explain` reads the first one.
        unsaid: properties of the step that the files of the newest version cannot express.
        arguments: words after `--` with which `explain` reads the first file.
    """

    framework: str
    texts: Mapping[str, str]
    unsaid: tuple[str, ...]
    arguments: tuple[str, ...] = ()


def framework_of(recipe: Recipe) -> str:
    """Return the framework that a recipe describes.

    Raises:
        UserError: if files of no framework are written for the recipe.
    """
    for name in (recipe.name, *recipe.bases):
        if name in FRAMEWORK_OF_RECIPE:
            return FRAMEWORK_OF_RECIPE[name]
    recipes = ", ".join(FRAMEWORK_OF_RECIPE)
    raise UserError(f"no framework's files are written for recipe {recipe.name}; give a recipe such as {recipes}")


def write_step(step: Workload, model: str) -> Written:
    """Return a step as files of the framework that its recipe describes.

    Args:
        step: the step.
        model: name of its model.

    Raises:
        UserError: if no files are written for its recipe.
    """
    name = framework_of(step.recipe)
    newest, *older = (_write(writer, step, name, model) for writer in WRITERS[name])
    return newest._replace(
        texts={**newest.texts, **{file: text for version in older for file, text in version.texts.items()}}
    )


def _write(writer: Writer, step: Workload, name: str, model: str) -> Written:
    """Return the files of one version."""
    translation = writer.translate(step)
    unsaid = [*translation.unsaid, *differences(step, translation, name, model)]
    head = f"written by shardlab plan: {model} on {step.cluster}, recipe {step.recipe.title}"
    remarks = [head, *(f"cannot be said here: {subject}" for subject in unsaid)]
    texts = zip(writer.files, writer.render(translation, step, remarks), strict=True)
    words = deepspeed.arguments(translation, name) if name in ("deepspeed", "accelerate") else ()
    return Written(name, dict(texts), tuple(unsaid), words)


def differences(step: Workload, translation: Translation, framework: str, model: str) -> list[str]:
    """Return the differences between a step and its translation, which is read back as `explain` reads a file."""
    table = key_table(framework)
    settings = tuple(table.write(meaning, value)._replace(line=1) for meaning, value in translation.values.items())
    config = Config(table, "the file", settings, model="" if translation.says_model else model)
    try:
        translated = FRAMEWORKS[framework].run(config, step.cluster).workload
        rows = list(_compared(step, translated, translation))
    except (UserError, Refused) as error:
        return [f"what {framework} makes of it is not known, since {error}"]
    return [f"{subject} {original} ({framework}: {result})" for subject, original, result in rows]


def _compared(step: Workload, translated: Workload, translation: Translation) -> Iterator[tuple[str, str, str]]:
    """Yield the name of each property that differs, with its values in both steps."""
    assert isinstance(step.plan, Plan)
    assert isinstance(translated.plan, Plan)
    original, result = plan_properties(step, step.plan), plan_properties(translated, translated.plan)
    for properties in (original, result):
        properties |= {} if translation.says_model else {"model": "", "stages": properties["stages"]}
    original |= _other_properties(step)
    result |= _other_properties(translated)
    for name in (step.recipe.switches.keys() & translated.recipe.switches.keys()) - translation.uncompared:
        original[f"recipe's {name}"] = step.recipe.switches[name].value
        result[f"recipe's {name}"] = translated.recipe.switches[name].value
    if translation.says_model:
        original |= model_properties(step.model)
        result |= model_properties(translated.model)
    for name in {**original, **result}:
        if name not in translation.uncompared and original.get(name) != result.get(name):
            yield name.replace("_", " "), _text(original.get(name)), _text(result.get(name))


MOST_LISTED = 8
"""Largest number of blocks that are listed in a comment; more are counted."""


def _text(value: Any) -> str:
    if isinstance(value, tuple) and (count := len(cast(tuple[Any, ...], value))) > MOST_LISTED:
        return f"{count} blocks"
    return (value if isinstance(value, str) else as_text(value)) or "none"


def _other_properties(step: Workload) -> dict[str, Any]:
    return {
        "micro_batch_size": step.micro_batch_size,
        "microbatches": step.microbatches,
        "precision": step.precision.name,
        "optimizer": step.optimizer,
    }


def plan_properties(step: Workload, plan: Plan) -> dict[str, Any]:
    """Return the properties of a plan that change its step. Plans with equal steps have equal properties."""
    mesh, sizes = plan.mesh, plan.mesh.sizes()
    later = {*BATCH_AXES, "cp"}.difference(plan.axes_of_every_microbatch)
    shared = any(sizes[axis] > 1 for axis in later)
    stages: list[int] = []
    if mesh.pp > 1:
        stages = plan.bounds(plan_layers(step.model, plan).pipeline_units)
    recompute = with_named_blocks(plan, plan_layers(step.model, plan)).recompute
    recompute = tuple(sorted(recompute)) if isinstance(recompute, tuple) else recompute
    return {
        "mesh": dict(mesh.used),
        "schedule": plan.schedule_name if mesh.pp > 1 else "",
        "stages": stages,
        "shard_parameters": plan.shard_parameters,
        "shard_gradients": plan.shard_gradients,
        "shard_optimizer": plan.shard_optimizer,
        "reduce_at": plan.reduce_at if shared else "",
        "reshard_after": plan.reshard_after if plan.shard_parameters else "",
        "sequence_parallel": plan.sequence_parallel and mesh.tp > 1,
        "recompute": recompute,
        "context": plan.context if mesh.cp > 1 else "",
        "passes": step.pass_names.replace("none", ""),
    }
