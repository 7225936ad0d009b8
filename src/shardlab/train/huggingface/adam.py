"""State of AdamW, converted with the weights: from a run's checkpoint to torchtitan's, and back.

`AdamState.of` finds the state in a source. `torchtitan_state` lists it under the names of torchtitan's checkpoints, and
`write_checkpoint` writes it, with the weights, as a checkpoint of a run. Weights and moments are read and written in
pieces.

Source of the names: pytorch/torchtitan at b5bcd76c66d0acb1a08b176d9639425bc55e0b2a, components/optimizer/utils.py
(`state.FQN.exp_avg`, `param_groups.FQN.lr`) and trainer.py (`train_state.step`).
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import torch

from shardlab.common.errors import UserError
from shardlab.common.fields import read_table
from shardlab.common.files import read_file
from shardlab.execute.optimizers.settings import OptimizerConfig
from shardlab.models import GPT, Blocks
from shardlab.models.named import name_of, shards_of
from shardlab.models.tensors.weights import read_range
from shardlab.train.checkpoint.contents import EXACT, WEIGHTS, OutputTensor, describe_layers, file_chunks
from shardlab.train.checkpoint.read import CONFIG, STATE
from shardlab.train.checkpoint.write import Disk, commit, folder_of, write_shard
from shardlab.train.huggingface.sources import CheckpointSource, Source, WeightSource

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of AdamW's moments, in torch and so in all checkpoints."""

OPTIMIZER = "optimizer."


@dataclass(frozen=True)
class AdamState:
    """Weights, and the state of AdamW that belongs to them.

    Attributes:
        weights: the weights, from their exact copies if there are any.
        moments: the moments by name.
        step: optimizer steps of the run.
        updates: updates of the optimizer. Skipped steps do not count.
    """

    weights: Source
    moments: Mapping[str, Source]
    step: int
    updates: int

    @classmethod
    def of(cls, source: Source) -> AdamState | str:
        """Return the state in a source. If it cannot be converted, return a phrase that says what prevents this."""
        model = source.model
        if isinstance(model, GPT) and model.qk_norm:
            return "each head's norm has its own moments here, and torchtitan has one norm for all heads"
        return _in_run(source) if isinstance(source, CheckpointSource) else _in_torchtitan(source)


def _in_run(source: CheckpointSource) -> AdamState | str:
    checkpoint = source.checkpoint
    if others := checkpoint.kinds - {WEIGHTS, EXACT, *MOMENTS}:
        return f"{', '.join(sorted(others))} beside AdamW's moments, which torchtitan does not have"
    layers = [{layer for kind, layer in checkpoint.ranges if kind == state_kind} for state_kind in (WEIGHTS, *MOMENTS)]
    if not layers[1] or layers[1:] != layers[:1] * 2:
        return "moments of AdamW for all weights, which the checkpoint does not have"
    kind = EXACT if EXACT in checkpoint.kinds else WEIGHTS
    moments = {name: replace(source, kind=name) for name in MOMENTS}
    return AdamState(replace(source, kind=kind), moments, checkpoint.step, checkpoint.updates)


def _in_torchtitan(source: WeightSource) -> AdamState | str:
    from shardlab.train.checkpoint.distributed import DistributedFiles  # imports much of torch

    files = source.tensors
    if not isinstance(files, DistributedFiles):
        return "the state of an optimizer, which only checkpoints have"
    names = list(dict.fromkeys(part.name for _, part in source.every_part()))
    required = [f"{OPTIMIZER}state.{name}.{moment}" for name in names for moment in MOMENTS]
    if missing := [name for name in required if name not in files.all_names]:
        return f"{missing[0]}, which the checkpoint does not have"
    files.require_files(required)
    counts = {int(files.value(f"{OPTIMIZER}state.{name}.step")) for name in names}
    if len(counts) != 1:
        return f"one number of updates for all parameters; there are {', '.join(map(str, sorted(counts)))}"
    (updates,) = counts
    step = int(files.value("train_state.step")) if "train_state.step" in files.all_names else updates
    return AdamState(source, {name: _moment_source(source, name) for name in MOMENTS}, step, updates)


def _moment_source(source: WeightSource, moment: str) -> WeightSource:
    """Return a source whose weights are one of the moments."""

    def parts(block: int, parameter: Any) -> Any:
        lists = source.parts(block, parameter)
        return [[part._replace(name=f"{OPTIMIZER}state.{part.name}.{moment}") for part in group] for group in lists]

    return replace(source, parts=parts)


Tensors = Callable[[Source], list[OutputTensor]]
"""Function that lists the parameters of a source in torchtitan's layout."""


def torchtitan_state(state: AdamState, tensors: Tensors, folder: Path) -> tuple[list[OutputTensor], dict[str, Any]]:
    """Return the moments in torchtitan's layout, and all small values by name.

    Args:
        state: the state.
        tensors: function that lists the parameters of a source.
        folder: folder of the checkpoint, which has the settings of the optimizer.
    """
    moments = [
        tensor._replace(name=f"{OPTIMIZER}state.{tensor.name}.{name}")
        for name, source in state.moments.items()
        for tensor in tensors(source)
    ]
    from shardlab.train.config_sources import file_source, saved_optimizer  # imports this package

    config = saved_optimizer(file_source(folder / CONFIG))
    values: dict[str, Any] = {}
    for parameter in tensors(state.weights):
        name = parameter.name
        values[f"{OPTIMIZER}state.{name}.step"] = torch.tensor(float(state.updates))
        decays = len(parameter.shape) > 1
        values |= {
            f"{OPTIMIZER}param_groups.{name}.{key}": value for key, value in _group(config, state, decays).items()
        }
    run = read_table(read_file(folder / STATE, "JSON"), str(folder / STATE))
    tokens = int(run["data"]["sequence"]) * state.weights.model.seq_len
    return moments, values | {"train_state.step": state.step, "train_state.ntokens_seen": tokens}


def _group(config: OptimizerConfig, state: AdamState, decays: bool) -> dict[str, Any]:
    """Return the options that torchtitan saves for a parameter: those of torch's AdamW, and `initial_lr`.

    Args:
        config: settings of the optimizer.
        state: the state, whose step determines the learning rate.
        decays: whether weight decay applies to the parameter.
    """
    optimizer = torch.optim.AdamW(
        [torch.zeros(1)],
        lr=config.rate(state.step),
        betas=(config.betas[0], config.betas[1]),
        eps=config.eps,
        weight_decay=config.weight_decay if decays else 0.0,
        foreach=False,
        fused=True,
    )
    (group,) = optimizer.state_dict()["param_groups"]
    return {name: value for name, value in group.items() if name != "params"} | {"initial_lr": config.learning_rate}


def write_checkpoint(
    state: AdamState, out: Path, settings: Path, shard_bytes: int, follow: Callable[[list[Any]], Iterable[Any]]
) -> list[OutputTensor]:
    """Write a checkpoint from which a run can go on with the data, learning rate and plan of earlier settings.

    Args:
        state: weights and moments.
        out: folder of the run.
        settings: folder with a run's config.toml and state.json: a checkpoint, or the torchtitan checkpoint that was
            converted from one.
        shard_bytes: largest size of a file in bytes.
        follow: function that wraps the iterator over the tensors, to show progress.

    Returns:
        The tensors.

    Raises:
        UserError: if the settings have another optimizer, or if the batch size changes between the step of `settings`
            and that of the weights.
    """
    model, config = state.weights.model, read_table(read_file(settings / CONFIG, "TOML"), str(settings / CONFIG))
    if (name := cast(dict[str, Any], config.get("optimizer", {})).get("optimizer", "adamw")) != "adamw":
        raise UserError(f"{settings}: the optimizer is {name}, but these are moments of adamw; name other settings")
    lengths = [model.layout(block).numel for block in range(model.layers)]
    outputs = [
        _flat_tensor(source, kind, block, length)
        for block, length in enumerate(lengths)
        for kind, source in ((WEIGHTS, state.weights), *state.moments.items())
    ]
    files = shards_of((tensor.nbytes for tensor in outputs), "rank.safetensors", shard_bytes)
    disk, folder = Disk(), folder_of(out / "checkpoints", state.step)
    tensors_and_files = zip(follow(outputs), files, strict=True)
    for rank, (_, pairs) in enumerate(groupby(tensors_and_files, lambda pair: pair[1])):
        tensors = [tensor for tensor, _ in pairs]
        note = {"tensors": {tensor.name: tensor.numel for tensor in tensors}, "updates": state.updates}
        write_shard(disk, folder, rank, file_chunks(tensors, tensors), note)
    documents = {
        STATE: json.dumps(_run_state(state, model, lengths, settings, config)),
        CONFIG: (settings / CONFIG).read_text(encoding="utf-8"),
    }
    commit(disk, folder, len(set(files)), documents, 1)
    return outputs


def _flat_tensor(source: Source, kind: str, block: int, length: int) -> OutputTensor:
    """Return a block's flat buffer as a tensor."""
    model = source.model
    dtype = source.dtype(block, model.layout(block).parameters[0])
    read_part = partial(read_range, source, model, block, length, dtype=dtype)
    return OutputTensor(f"{kind}.{block}.0", (length,), dtype, read_part)


def _run_state(
    state: AdamState, model: Blocks, lengths: Sequence[int], settings: Path, config: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the state of a run besides tensors: the state in `settings`, at the step of the weights."""
    base = read_table(read_file(settings / STATE, "JSON"), str(settings / STATE))
    base_step, sequences = int(base["step"]), int(base["data"]["sequence"])
    if base_step != state.step and (config.get("train", {}).get("batch_ramp") or sequences % max(1, base_step)):
        raise UserError(
            f"the weights are from step {state.step}, {settings} is from step {base_step}, and the batch changes "
            "between these steps; name the settings of a run without batch_ramp"
        )
    sequence = sequences if base_step == state.step else sequences // base_step * state.step
    return base | {
        "step": state.step,
        "data": base["data"] | {"sequence": sequence},
        "plan": "converted",
        "model": {"kind": name_of(type(model)), **asdict(model)},
        "layers": describe_layers(model, lengths),
    }
