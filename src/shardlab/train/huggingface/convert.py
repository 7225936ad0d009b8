"""Conversion of a folder of weights into another format: a run's, Hugging Face's, or that of torchtitan's checkpoints.

`convert_weights` first lists the tensors of the new folder (`_plan`), and then reads and writes them piece by piece.
Memory never holds more than a piece, and the chunk of a tensor that torch.distributed.checkpoint reads or writes at
once. All values stay bitwise equal.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from shardlab.common.errors import UserError
from shardlab.common.files import atomic_folder, write_atomically
from shardlab.models import GPT, MoE, Parameter
from shardlab.models.named import SHARD_BYTES, SINGLE, index_of, index_text, name_of, shards_of
from shardlab.models.tensors.weights import matrix_of
from shardlab.train.checkpoint.contents import OutputTensor, file_chunks
from shardlab.train.checkpoint.read import CONFIG as CHECKPOINT_CONFIG
from shardlab.train.checkpoint.read import STATE
from shardlab.train.checkpoint.write import Disk
from shardlab.train.huggingface.adam import AdamState, torchtitan_state, write_checkpoint
from shardlab.train.huggingface.families import GPT2, Part, family_of, write_config
from shardlab.train.huggingface.sources import (
    CONFIG,
    EMBEDDING,
    HEAD,
    ROUTER,
    RUN,
    WEIGHTS,
    CheckpointSource,
    Form,
    Source,
    parameters_of,
)
from shardlab.train.huggingface.torchtitan import EMBEDDING as TITAN_EMBEDDING
from shardlab.train.huggingface.torchtitan import EXPERT_BIAS, torchtitan_naming

COMPANIONS = (
    *("tokenizer*", "chat_template*", "vocab.json", "merges.txt", "special_tokens_map.json", "added_tokens.json"),
    *("generation_config.json", "vocabulary.json", "vocab.bpe", "encoder.json", "*.tiktoken", "*.model"),
)
"""Files beside the weights that are copied: those of Hugging Face's folders, and the tokenizers of runs."""


@dataclass(frozen=True)
class Converted:
    """Result of a conversion.

    Attributes:
        folder, form: the new folder, and its format.
        model: kind of the model.
        parameters: number of elements of all written tensors. Biases that the model lacks are written as zeros, and
            counted.
        tensors: number of tensors.
        files: names of all files.
        left_out: states in the source that are not weights, such as the optimizer's.
    """

    folder: str
    form: Form
    model: str
    parameters: int
    tensors: int
    files: list[str]
    left_out: list[str]


Track = Callable[[list[Any]], Iterable[Any]]
"""Function that wraps the iterator over the tensors, or over the files, to show progress."""


def convert_weights(
    source: Source,
    out: Path,
    form: Form,
    *,
    shard_bytes: int = SHARD_BYTES,
    extra_files: Mapping[str, bytes] | None = None,
    special: Mapping[str, int] | None = None,
    follow: Track = iter,
    settings: Path | None = None,
) -> Converted:
    """Write the weights of a source into a new folder. If that fails, there is no folder.

    The state of AdamW is converted too, from a run's checkpoint to torchtitan's format, and with `settings` from
    torchtitan's checkpoint to a run.

    Args:
        source: the weights.
        out: the new folder.
        form: format of the new folder.
        shard_bytes: largest size of a file in bytes. If there are several safetensors files, an index is written as
            well.
        extra_files: contents of further files by name, such as a tokenizer's. Files of the source's folder take
            precedence.
        special: special tokens such as eos_token_id, for a config.json that lacks them.
        follow: function that wraps the iterator over the tensors or files, to show progress.
        settings: folder with the settings and progress of a run, such as a checkpoint. The new folder is then a run
            with these settings and one checkpoint, from which it can be resumed.

    Raises:
        UserError: if the format cannot express the model, or the folder cannot be written.
    """
    if settings is not None:
        return _as_run(source, out, settings, shard_bytes, follow)
    state = AdamState.of(source) if form == "dcp" and isinstance(source, CheckpointSource) else None
    left_out, values = [*source.left_out, *([f"optimizer ({state})"] if isinstance(state, str) else [])], None
    if isinstance(state, AdamState):
        moments, values = torchtitan_state(state, _torchtitan_parameters, source.folder)
        outputs = [*_torchtitan_tensors(state.weights), *moments]
    else:
        outputs = _plan(source, form)
    with atomic_folder(out) as part:
        if (free := shutil.disk_usage(part).free) < (needed := sum(tensor.nbytes for tensor in outputs)):
            raise UserError(f"the weights have {needed:,} bytes, but the disk of {out} has {free:,} bytes free")
        if form == "dcp":
            from shardlab.train.checkpoint.distributed import write_distributed  # imports much of torch

            write_distributed(part, outputs, shard_bytes, follow, values)
            for name in (CHECKPOINT_CONFIG, STATE) if values else ():
                shutil.copyfile(source.folder / name, part / name)
        else:
            _write_safetensors(part / (WEIGHTS if form == "shardlab" else SINGLE), outputs, shard_bytes, follow)
        _write_config(source, form, part, {tensor.dtype for tensor in outputs}, special or {})
        for name, content in (extra_files or {}).items():
            (part / name).write_bytes(content)
        for path in sorted({path for pattern in COMPANIONS for path in source.folder.glob(pattern)}):
            if path.is_file():
                shutil.copyfile(path, part / path.name)
    return _result(source, out, form, outputs, left_out)


def _result(source: Source, out: Path, form: Form, outputs: Sequence[OutputTensor], left_out: list[str]) -> Converted:
    """Return the result of a conversion into a folder that is complete."""
    files = sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file())
    count = sum(tensor.numel for tensor in outputs)
    return Converted(str(out), form, name_of(type(source.model)), count, len(outputs), files, left_out)


def _as_run(source: Source, out: Path, settings: Path, shard_bytes: int, follow: Track) -> Converted:
    """Write the weights and the state of AdamW as the only checkpoint of a new run."""
    state = AdamState.of(source)
    if isinstance(state, str):
        raise UserError(f"{source.folder}: to go on, a run needs {state}; leave out --settings to convert the weights")
    with atomic_folder(out) as part:
        outputs = write_checkpoint(state, part, settings, shard_bytes, follow)
        _write_config(source, "shardlab", part, set(), {})
    left_out = [name for name in source.left_out if name not in ("optimizer", "train_state")]
    return _result(source, out, "shardlab", outputs, left_out)


def _write_safetensors(single: Path, outputs: Sequence[OutputTensor], shard_bytes: int, follow: Track) -> None:
    """Write tensors into one file, or into several files and their index."""
    files = shards_of((tensor.nbytes for tensor in outputs), single.name, shard_bytes)
    tensors_and_files = zip(follow(list(outputs)), files, strict=True)
    for name, tensors in groupby(tensors_and_files, lambda pair: pair[1]):
        file_tensors = [tensor for tensor, file in zip(outputs, files, strict=True) if file == name]
        Disk().write(single.with_name(name), file_chunks(file_tensors, (tensor for tensor, _ in tensors)))
    if files[0] != single.name:
        index = dict(zip((tensor.name for tensor in outputs), files, strict=True))
        write_atomically(index_of(single), index_text(index, sum(tensor.nbytes for tensor in outputs)))


def _plan(source: Source, form: Form) -> list[OutputTensor]:
    """List the tensors of the new folder."""
    if form == "shardlab":
        return [
            OutputTensor(
                f"layers.{block}.{p.name}", p.shape, source.dtype(block, p), partial(_read_whole, source, block, p)
            )
            for block, p in parameters_of(source.model)
        ]
    if form == "dcp":
        return _torchtitan_tensors(source)
    family, model = family_of(source.model, str(source.folder))
    existing = {(block, parameter.name) for block, parameter in parameters_of(source.model)}
    default = source.dtype(*next(parameters_of(source.model)))
    outputs: list[OutputTensor] = []
    for block, parameter in parameters_of(replace(model, bias=True) if family is GPT2 else model):
        parts = family.naming.parts(model, block, parameter)
        if (block, parameter.name) in existing:
            outputs += _tensors_of(source, block, parameter, parts)
        else:
            rows = [part for matrix_parts in parts for part in matrix_parts]
            outputs += [OutputTensor(row.name, row.shape, default, partial(_zeros, row.shape[1:])) for row in rows]
    return outputs


def _torchtitan_parameters(source: Source) -> list[OutputTensor]:
    """List the parameters in torchtitan's layout."""
    naming = torchtitan_naming(source.model, str(source.folder))
    return [
        tensor
        for block, parameter in parameters_of(source.model)
        for tensor in _tensors_of(source, block, parameter, naming.parts(cast(GPT, source.model), block, parameter))
    ]


def _torchtitan_tensors(source: Source) -> list[OutputTensor]:
    """List the weights in torchtitan's layout, with a copy of a tied embedding as head, and zero biases of routers."""
    outputs, model = _torchtitan_parameters(source), source.model
    for block, parameter in parameters_of(source.model):
        if model.has_tied_head and parameter.name == EMBEDDING:
            outputs.append(next(tensor for tensor in outputs if tensor.name == TITAN_EMBEDDING)._replace(name=HEAD))
        if isinstance(model, MoE) and parameter.name == ROUTER:
            name = f"layers.{block}.{EXPERT_BIAS}"
            outputs.append(OutputTensor(name, (model.experts,), torch.float32, partial(_zeros, ())))
    return outputs


def _tensors_of(
    source: Source, block: int, parameter: Parameter, parts: Sequence[Sequence[Part]]
) -> list[OutputTensor]:
    """List the tensors that store a parameter. One tensor may store several parts of the parameter, or all experts."""
    by_tensor: dict[str, list[tuple[int, Part]]] = {}
    for matrix, matrix_parts in enumerate(parts):
        for part in matrix_parts:
            by_tensor.setdefault(part.name, []).append((matrix, part))
    outputs: list[OutputTensor] = []
    for name, numbered_parts in by_tensor.items():
        (matrix, part), several = numbered_parts[0], numbered_parts[0][1].expert is not None
        shape = (len(numbered_parts), *part.shape) if several else part.shape
        if several:
            read_part = partial(_read_experts, source, block, parameter, numbered_parts)
        else:
            read_part = partial(_read_parts, source, block, parameter, matrix, [part for _, part in numbered_parts])
        unit = 1 if several or part.heads is None else part.heads.stride or part.heads.size
        outputs.append(OutputTensor(name, shape, source.dtype(block, parameter), read_part, unit))
    return outputs


def _read_whole(source: Source, block: int, parameter: Parameter, start: int, stop: int) -> Tensor:
    """Read some rows of a parameter as a run stores it. If it has three dims, each row is a matrix."""
    _, rows, columns = matrix_of(parameter)
    all_rows, all_columns = torch.arange(rows), torch.arange(columns)
    if len(parameter.shape) < 3:
        return source.read(block, parameter, 0, all_rows[start:stop], all_columns).view(-1, *parameter.shape[1:])
    return torch.stack([source.read(block, parameter, matrix, all_rows, all_columns) for matrix in range(start, stop)])


def _read_experts(
    source: Source, block: int, parameter: Parameter, parts: Sequence[tuple[int, Part]], start: int, stop: int
) -> Tensor:
    """Read the matrices of some experts as the new file stores them."""
    return torch.stack(
        [_read_parts(source, block, parameter, matrix, [part], 0, part.shape[0]) for matrix, part in parts[start:stop]]
    )


def _read_parts(
    source: Source, block: int, parameter: Parameter, matrix: int, parts: Sequence[Part], start: int, stop: int
) -> Tensor:
    """Read rows `start` to `stop` of the new file's tensor that consists of the parts `parts` of a parameter."""
    part = parts[0]
    columns = torch.arange(part.columns)
    if part.transposed:
        return source.read(block, parameter, matrix, part.start + torch.arange(part.rows), columns[start:stop]).t()
    result = torch.empty(stop - start, part.columns, dtype=source.dtype(block, parameter))
    for part in parts:
        places = part.theirs(torch.arange(part.rows))
        indices = ((places >= start) & (places < stop)).nonzero()[:, 0]
        rows = source.read(block, parameter, matrix, part.start + indices, columns).to(result.dtype)
        result[places[indices] - start] = rows
        if part.heads is not None and not part.heads.stride and not torch.equal(result[places[indices] - start], rows):
            raise UserError(
                f"{source.folder}: each head of block {block} has another {parameter.name}, and torchtitan has one "
                "weight for all heads; --to shardlab keeps them"
            )
    return result[:, 0] if part.vector else result


def _zeros(rest: tuple[int, ...], start: int, stop: int) -> Tensor:
    return torch.zeros(stop - start, *rest)


def _write_config(
    source: Source, form: Form, folder: Path, dtypes: set[torch.dtype], special: Mapping[str, int]
) -> None:
    """Write the description of the model. Fields of config.json that have no equivalent in a run are kept.

    For a checkpoint of torchtitan whose model transformers does not have, the description is that of a run.
    """
    if form == "shardlab" or (form == "dcp" and not _has_family(source)):
        model = source.model
        record = {"model": {"kind": name_of(type(model)), **asdict(model)}, "converted_from": str(source.folder)}
        write_atomically(folder / RUN, _json(record | ({"huggingface": dict(source.config)} if source.config else {})))
        return
    family, model = family_of(source.model, str(source.folder))
    fields: dict[str, Any] = dict(source.config) if source.config.get("model_type") == family.model_type else {}
    config = write_config(family, model)
    # These fields are written below, or are no longer valid.
    for name in ("rope_parameters", "dtype", "transformers_version", "head_dim"):
        fields.pop(name, None)
    for name in ("bos_token_id", "eos_token_id", "architectures"):
        config[name] = fields.get(name, config[name])
    config |= {name: token for name, token in special.items() if config[name] is None}
    (dtype,) = dtypes if len(dtypes) == 1 else (torch.float32,)
    write_atomically(folder / CONFIG, _json(fields | config | {"torch_dtype": str(dtype).removeprefix("torch.")}))


def _has_family(source: Source) -> bool:
    with suppress(UserError):
        family_of(source.model, "")
        return True
    return False


def _json(data: dict[str, Any]) -> str:
    return json.dumps(data, indent=2) + "\n"
