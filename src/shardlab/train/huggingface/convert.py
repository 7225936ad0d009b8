"""Conversion of a folder of weights into the other format: a run's, or Hugging Face's.

`convert_weights` first lists the tensors of the new folder (`_plan`), and then reads and writes them file by file, so
that memory holds only one file. Every number stays as it is.
"""

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
from shardlab.common.files import atomic_folder, write_atomically
from shardlab.models import Parameter
from shardlab.models.named import SHARD_BYTES, SINGLE, index_of, index_text, name_of, shards_of
from shardlab.models.tensors.weights import reason
from shardlab.train.huggingface.families import GPT2, Part, family_of, run_parts, write_config
from shardlab.train.huggingface.sources import CONFIG, RUN, WEIGHTS, Form, Source, parameters_of

COMPANIONS = (
    *("tokenizer*", "chat_template*", "vocab.json", "merges.txt", "special_tokens_map.json", "added_tokens.json"),
    *("generation_config.json", "vocabulary.json", "vocab.bpe", "encoder.json", "*.tiktoken", "*.model"),
)
"""Files beside the weights that are copied: those of Hugging Face's folders, and the tokenizers of runs."""


class OutputTensor(NamedTuple):
    """Tensor that will be written.

    Attributes:
        name: its name in the new file.
        numel: number of its elements.
        dtype: data type of its elements.
        make: function that reads it from the source.
    """

    name: str
    numel: int
    dtype: torch.dtype
    make: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Converted:
    """Result of a conversion.

    Attributes:
        folder, form: the new folder, and its format.
        model: kind of the model.
        parameters: elements of all tensors, including zeros for biases that the model does not have.
        tensors: number of tensors.
        files: names of all files.
    """

    folder: str
    form: Form
    model: str
    parameters: int
    tensors: int
    files: list[str]


Track = Callable[[list[OutputTensor]], Iterable[OutputTensor]]
"""Iterator over the tensors that also shows progress."""


def convert_weights(
    source: Source,
    out: Path,
    form: Form,
    *,
    shard_bytes: int = SHARD_BYTES,
    beside: Mapping[str, bytes] | None = None,
    special: Mapping[str, int] | None = None,
    follow: Track = iter,
) -> Converted:
    """Write the weights of a source into a new folder, which appears whole or not at all.

    Args:
        source: the weights.
        out: the new folder.
        form: format of the new folder.
        shard_bytes: most bytes of a file. If there are several files, an index is written beside them.
        beside: further files by name, such as a tokenizer's. Files beside the source's weights take precedence.
        special: special tokens such as eos_token_id, for a config.json that lacks them.
        follow: wraps the iterator over the tensors, to show progress.

    Raises:
        UserError: if the format cannot express the model, or the folder cannot be written.
    """
    planned = _plan(source, form)
    try:
        with atomic_folder(out) as part:
            if (free := shutil.disk_usage(part).free) < (needed := sum(each.nbytes for each in planned)):
                raise UserError(f"the weights have {needed:,} bytes, but the disk of {out} has {free:,} bytes free")
            single = WEIGHTS if form == "shardlab" else SINGLE
            files = shards_of((each.nbytes for each in planned), single, shard_bytes)
            for name, tensors in groupby(zip(follow(planned), files, strict=True), lambda pair: pair[1]):
                save_file({each.name: each.make() for each, _ in tensors}, part / name, {"format": "pt"})
            if files[0] != single:
                index = dict(zip((each.name for each in planned), files, strict=True))
                write_atomically(index_of(part / single), index_text(index, needed))
            _write_config(source, form, part, {each.dtype for each in planned}, special or {})
            for name, content in (beside or {}).items():
                (part / name).write_bytes(content)
            for path in sorted({path for pattern in COMPANIONS for path in source.folder.glob(pattern)}):
                if path.is_file():
                    shutil.copyfile(path, part / path.name)
            written = sorted(path.name for path in part.iterdir())
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{out} cannot be written ({reason(error)}); free some space, or name another folder"
        ) from error
    count = sum(each.numel for each in planned)
    return Converted(str(out), form, name_of(type(source.model)), count, len(planned), written)


def _plan(source: Source, form: Form) -> list[OutputTensor]:
    """List the tensors of the new folder."""
    if form == "shardlab":
        return [
            OutputTensor(
                f"layers.{block}.{p.name}", p.numel, source.dtype(block, p), partial(_read_whole, source, block, p)
            )
            for block, p in source.parameters()
        ]
    family, model = family_of(source.model, str(source.folder))
    there = {(block, parameter.name) for block, parameter in source.parameters()}
    default = source.dtype(*next(source.parameters()))
    planned: list[OutputTensor] = []
    for block, parameter in parameters_of(replace(model, bias=True) if family is GPT2 else model):
        own = (block, parameter.name) in there
        dtype = source.dtype(block, parameter) if own else default
        for matrix, parts in enumerate(family.naming.parts(model, block, parameter)):
            for part in parts:
                read = partial(_read_part, source, block, parameter, matrix, part)
                make = read if own else partial(torch.zeros, part.shape, dtype=dtype)
                planned.append(OutputTensor(part.name, math.prod(part.shape), dtype, make))
    return planned


def _read_whole(source: Source, block: int, parameter: Parameter) -> Tensor:
    """Read a parameter as a run stores it."""
    matrices = [
        source.read(block, parameter, matrix, torch.arange(part.rows), torch.arange(part.columns))
        for matrix, (part,) in enumerate(run_parts(block, parameter))
    ]
    return torch.stack(matrices).view(parameter.shape)


def _read_part(source: Source, block: int, parameter: Parameter, matrix: int, part: Part) -> Tensor:
    """Read a parameter's part as Hugging Face stores it."""
    rows = torch.arange(part.rows)
    ours = source.read(block, parameter, matrix, part.start + rows, torch.arange(part.columns))
    theirs = torch.empty_like(ours)
    theirs[part.theirs(rows)] = ours
    if part.vector:
        return theirs[:, 0].contiguous()
    return theirs.t().contiguous() if part.transposed else theirs


def _write_config(
    source: Source, form: Form, folder: Path, dtypes: set[torch.dtype], special: Mapping[str, int]
) -> None:
    """Write the description of the model. Fields of config.json that have no equivalent in a run are kept."""
    if form == "shardlab":
        model = source.model
        record = {"model": {"kind": name_of(type(model)), **asdict(model)}, "converted_from": str(source.folder)}
        write_atomically(folder / RUN, _json(record | ({"huggingface": dict(source.config)} if source.config else {})))
        return
    family, model = family_of(source.model, str(source.folder))
    kept: dict[str, Any] = dict(source.config) if source.config.get("model_type") == family.model_type else {}
    config = write_config(family, model)
    # These fields are written below, or are no longer valid.
    for name in ("rope_parameters", "dtype", "transformers_version", "head_dim"):
        kept.pop(name, None)
    for name in ("bos_token_id", "eos_token_id", "architectures"):
        config[name] = kept.get(name, config[name])
    config |= {name: token for name, token in special.items() if config[name] is None}
    (dtype,) = dtypes if len(dtypes) == 1 else (torch.float32,)
    write_atomically(folder / CONFIG, _json(kept | config | {"torch_dtype": str(dtype).removeprefix("torch.")}))


def _json(data: dict[str, Any]) -> str:
    return json.dumps(data, indent=2) + "\n"
