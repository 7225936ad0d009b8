"""Weights of one folder written into another, in a run's form or Hugging Face's."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# safetensors leaves its annotations out.

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from shardlab.common.errors import UserError
from shardlab.common.files import whole_folder, write_whole
from shardlab.models import Parameter
from shardlab.models.named import SHARD_BYTES, SINGLE, index_of, index_text, name_of, shards_of
from shardlab.models.tensors.weights import reason
from shardlab.train.huggingface.families import GPT2, Part, config_of, family_of, own_parts
from shardlab.train.huggingface.sources import CONFIG, RUN, WEIGHTS, Form, Source, parameters_of

BESIDE = (
    *("tokenizer*", "chat_template*", "vocab.json", "merges.txt", "special_tokens_map.json", "added_tokens.json"),
    *("generation_config.json", "vocabulary.json", "vocab.bpe", "encoder.json", "*.tiktoken", "*.model"),
)
"""Files beside the weights that are copied as they are: of Hugging Face's folders, and a run's own tokenizers."""


class Planned(NamedTuple):
    """A tensor that will be written.

    Attributes:
        name: in the new file.
        numel: its elements.
        dtype: its numbers.
        make: reads it from the source.
    """

    name: str
    numel: int
    dtype: torch.dtype
    make: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Converted:
    """What was written.

    Attributes:
        folder, form: where, and how.
        model: the kind of model.
        parameters: elements of its tensors, zeros for biases that it has not included.
        tensors: how many.
        files: names of all files.
    """

    folder: str
    form: Form
    model: str
    parameters: int
    tensors: int
    files: list[str]


Follow = Callable[[list[Planned]], Iterable[Planned]]
"""Passes tensors on one by one, and shows how far it is."""


def converted(
    source: Source,
    out: Path,
    form: Form,
    *,
    shard_bytes: int = SHARD_BYTES,
    beside: Mapping[str, bytes] | None = None,
    special: Mapping[str, int] | None = None,
    follow: Follow = iter,
) -> Converted:
    """Write a source's weights into a new folder, which appears whole or not at all; every number stays as it is.

    Args:
        source: the weights.
        out: the folder, not there yet.
        form: how they are written.
        shard_bytes: of a file; if there are more, an index is written beside them.
        beside: further files, by name, such as a tokenizer's; those that lie beside the source's weights prevail.
        special: special tokens such as eos_token_id, for a config.json that does not say them.
        follow: sees the tensors go by.

    Raises:
        UserError: when the other form cannot say the model, or the folder cannot be written.
    """
    planned = _planned(source, form)
    try:
        with whole_folder(out) as part:
            if (free := shutil.disk_usage(part).free) < (needed := sum(each.nbytes for each in planned)):
                raise UserError(f"the weights have {needed:,} bytes, but the disk of {out} has {free:,} bytes free")
            single = WEIGHTS if form == "shardlab" else SINGLE
            files = shards_of((each.nbytes for each in planned), single, shard_bytes)
            for name, tensors in groupby(zip(follow(planned), files, strict=True), lambda pair: pair[1]):
                save_file({each.name: each.make() for each, _ in tensors}, part / name, {"format": "pt"})
            if files[0] != single:
                index = dict(zip((each.name for each in planned), files, strict=True))
                write_whole(index_of(part / single), index_text(index, needed))
            _describe(source, form, part, {each.dtype for each in planned}, special or {})
            for name, content in (beside or {}).items():
                (part / name).write_bytes(content)
            for path in sorted({path for pattern in BESIDE for path in source.folder.glob(pattern)}):
                if path.is_file():
                    shutil.copyfile(path, part / path.name)
            written = sorted(path.name for path in part.iterdir())
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{out} cannot be written ({reason(error)}); free some space, or name another folder"
        ) from error
    count = sum(each.numel for each in planned)
    return Converted(str(out), form, name_of(type(source.model)), count, len(planned), written)


def _planned(source: Source, form: Form) -> list[Planned]:
    """The tensors of the new folder."""
    if form == "shardlab":
        return [
            Planned(f"layers.{block}.{p.name}", p.numel, source.dtype(block, p), partial(_whole, source, block, p))
            for block, p in source.parameters()
        ]
    family, model = family_of(source.model, str(source.folder))
    there = {(block, parameter.name) for block, parameter in source.parameters()}
    default = source.dtype(*next(source.parameters()))
    planned: list[Planned] = []
    for block, parameter in parameters_of(replace(model, bias=True) if family is GPT2 else model):
        own = (block, parameter.name) in there
        dtype = source.dtype(block, parameter) if own else default
        for matrix, parts in enumerate(family.naming.parts(model, block, parameter)):
            for part in parts:
                read = partial(_part, source, block, parameter, matrix, part)
                make = read if own else partial(torch.zeros, part.shape, dtype=dtype)
                planned.append(Planned(part.name, math.prod(part.shape), dtype, make))
    return planned


def _whole(source: Source, block: int, parameter: Parameter) -> Tensor:
    """A parameter, in our form."""
    matrices = [
        source.read(block, parameter, matrix, torch.arange(part.rows), torch.arange(part.columns))
        for matrix, (part,) in enumerate(own_parts(block, parameter))
    ]
    return torch.stack(matrices).view(parameter.shape)


def _part(source: Source, block: int, parameter: Parameter, matrix: int, part: Part) -> Tensor:
    """A tensor of Hugging Face's, in its form."""
    rows = torch.arange(part.rows)
    ours = source.read(block, parameter, matrix, part.start + rows, torch.arange(part.columns))
    theirs = torch.empty_like(ours)
    theirs[part.theirs(rows)] = ours
    if part.vector:
        return theirs[:, 0].contiguous()
    return theirs.t().contiguous() if part.transposed else theirs


def _describe(source: Source, form: Form, folder: Path, dtypes: set[torch.dtype], special: Mapping[str, int]) -> None:
    """Write what model the weights are of; fields of config.json that ours have no word for come along."""
    if form == "shardlab":
        model = source.model
        record = {"model": {"kind": name_of(type(model)), **asdict(model)}, "converted_from": str(source.folder)}
        write_whole(folder / RUN, _json(record | ({"huggingface": dict(source.config)} if source.config else {})))
        return
    family, model = family_of(source.model, str(source.folder))
    kept: dict[str, Any] = dict(source.config) if source.config.get("model_type") == family.model_type else {}
    config = config_of(family, model)
    for name in ("rope_parameters", "dtype", "transformers_version"):  # said in other words below, or no longer true
        kept.pop(name, None)
    for name in ("bos_token_id", "eos_token_id", "architectures"):
        config[name] = kept.get(name, config[name])
    config |= {name: token for name, token in special.items() if config[name] is None}
    (dtype,) = dtypes if len(dtypes) == 1 else (torch.float32,)
    write_whole(folder / CONFIG, _json(kept | config | {"torch_dtype": str(dtype).removeprefix("torch.")}))


def _json(data: dict[str, Any]) -> str:
    return json.dumps(data, indent=2) + "\n"
