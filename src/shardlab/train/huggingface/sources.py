"""Folders with the weights of a model, in any supported format. Any rows of a tensor can be read.

`open_source` recognizes the format and checks the names and shapes of all tensors. `initial_from` returns the function
with which each rank of a training reads only the first weights that it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor

from shardlab.common.errors import UserError
from shardlab.common.fields import read_table
from shardlab.common.files import missing_path, read_file
from shardlab.common.text import counted
from shardlab.common.user_code import file_from_here
from shardlab.models import GPT, Blocks, CutModel, Llama, Model, Parameter
from shardlab.models.named import ENDING, SINGLE, find_model, weights_at, with_written
from shardlab.models.tensors import Initial
from shardlab.models.tensors.weights import TensorFiles, read_range, weight_files
from shardlab.train.checkpoint.contents import WEIGHTS as WEIGHTS_KIND
from shardlab.train.checkpoint.read import METADATA, STATE, Checkpoint, CheckpointTensors
from shardlab.train.huggingface.families import Part, read_model, run_parts
from shardlab.train.huggingface.torchtitan import EXPERT_BIASES, OLD_HEAD, OTHER_STATES, torchtitan_naming


@dataclass(frozen=True)
class CheckpointSource:
    """Checkpoint with weights.

    Attributes:
        folder: path of the checkpoint.
        model: model of the weights.
        checkpoint: the checkpoint.
        kind: kind of tensors that is read: the weights, their exact copies, or a moment.
        form: format of the weights, that of a run.
        config: config.json; a checkpoint has none.
        left_out: states that are not converted; always empty, since a run resumes from the checkpoint itself.
    """

    folder: Path
    model: Blocks
    checkpoint: Checkpoint
    kind: str = WEIGHTS_KIND
    form: Literal["shardlab"] = "shardlab"
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    left_out: tuple[str, ...] = ()

    @cached_property
    def tensors(self) -> CheckpointTensors:
        """Tensors of this kind."""
        return CheckpointTensors(self.checkpoint, self.kind)

    def dtype(self, block: int, parameter: Parameter) -> torch.dtype:
        """Return the data type of a parameter."""
        return self.tensors.dtype(block, parameter)

    def read(self, block: int, parameter: Parameter, matrix: int, rows: Tensor, columns: Tensor) -> Tensor:
        """Read some rows and columns of a parameter's matrix, as `WeightSource.read`."""
        return self.tensors.read(block, parameter, matrix, rows, columns)


def parameters_of(model: Blocks) -> Iterator[tuple[int, Parameter]]:
    """Yield every parameter of a model with its block, in the order of blocks."""
    for block in range(model.layers):
        for parameter in model.layout(block).parameters:
            yield block, parameter


Form = Literal["hf", "shardlab", "dcp"]
"""Format of the weights in a folder: that of transformers, that of a run, or torch.distributed.checkpoint's with the
names of torchtitan."""

RUN, WEIGHTS, CONFIG = "run.json", "weights.safetensors", "config.json"

EMBEDDING, ROUTER, HEAD = "wte.weight", "mlp.router.weight", "lm_head.weight"
"""Names of the token embedding and a router in our models, and of an untied head in files."""

HEADS = frozenset({HEAD, f"{OLD_HEAD}.weight"})
"""Names of a head in the files of all formats."""

COMPARED = 1 << 24
"""Number of elements of two matrices that are compared at once."""

Parts = Callable[[int, Parameter], list[list[Part]]]
"""Function that returns the parts of each matrix of a block's parameter."""


class Tensors(Protocol):
    """Tensors by name, of which parts are read: `TensorFiles`, or `DistributedFiles`."""

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        ...

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor."""
        ...

    def read(self, name: str, *indices: slice | int) -> Tensor:
        """Read the part `indices` of a tensor, or all of it if `indices` is empty."""
        ...


@dataclass(frozen=True)
class WeightSource:
    """Folder with weights.

    Attributes:
        folder: path of the folder.
        form: format of the weights.
        model: model of the weights.
        tensors: tensors of the files.
        parts: function that returns, for a parameter, the parts of tensors that store it.
        prefix: prefix to remove from the names of `parts`, if the files were saved without the head; else empty.
        config: the config.json of the weights, or of those from which they were converted.
        left_out: states in the folder that are not weights, such as the optimizer's.
    """

    folder: Path
    form: Form
    model: Blocks
    tensors: Tensors
    parts: Parts
    prefix: str = ""
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    left_out: tuple[str, ...] = ()

    def name(self, part: Part) -> str:
        """Return the name of a part's tensor in the files."""
        return part.name.removeprefix(self.prefix)

    def dtype(self, block: int, parameter: Parameter) -> torch.dtype:
        """Return the data type of a parameter: the widest one of its parts."""
        dtypes = [self.tensors.dtype(self.name(part)) for parts in self.parts(block, parameter) for part in parts]
        wide = dtypes[0]
        for dtype in dtypes[1:]:
            wide = torch.promote_types(wide, dtype)
        return wide

    def read(self, block: int, parameter: Parameter, matrix: int, rows: Tensor, columns: Tensor) -> Tensor:
        """Read some rows and columns of a parameter's matrix: (rows, columns). Few rows besides these are read.

        Args:
            block: block of the parameter.
            matrix: index of the expert, or 0.
            rows: indices, ascending.
            columns: consecutive indices.
        """
        pieces: list[Tensor] = []
        for part in self.parts(block, parameter)[matrix]:
            part_rows = rows[(rows >= part.start) & (rows < part.start + part.rows)] - part.start
            breaks = (part_rows.diff() != 1).nonzero()[:, 0] + 1
            pieces += [self._read(part, run, columns) for run in torch.tensor_split(part_rows, breaks) if len(run)]
        return torch.cat(pieces) if pieces else torch.empty(0, len(columns))

    def every_part(self) -> Iterator[tuple[Parameter, Part]]:
        """Yield each part of every parameter."""
        for block, parameter in parameters_of(self.model):
            for parts in self.parts(block, parameter):
                yield from ((parameter, part) for part in parts)

    def check(self, ignored: tuple[str, ...] = ()) -> WeightSource:
        """Require that the files have every tensor of the model in its shape, and no other.

        Biases that the model lacks are accepted if they are zero, and so is a stored copy of a tied head.

        Args:
            ignored: endings of the names of further tensors that are accepted.

        Raises:
            UserError: if a tensor is missing, superfluous, or of another shape. The message names it.
        """
        shapes: dict[str, tuple[int, ...]] = {}
        for parameter, part in self.every_part():
            several = () if part.expert is None else (parameter.shape[0],)
            shapes[self.name(part)] = (*several, *part.shape)
        stored_names = self.tensors.names
        if missing := sorted(shapes.keys() - stored_names):
            raise UserError(
                f"{self.folder} lacks {counted(len(missing), 'tensor')} of its model's {len(shapes)}: {_some(missing)}"
            )
        for name, shape in shapes.items():
            self.tensors.dtype(name)
            if (stored := self.tensors.shape(name)) != shape:
                raise UserError(
                    f"{self.folder}: {name} is {_dims(stored)}, but the model's fields make it {_dims(shape)}; "
                    "its configuration is not that of these weights"
                )
        extra = sorted(name for name in stored_names - shapes.keys() if not name.endswith(ignored))
        zeros = (".bias", *EXPERT_BIASES) if not self.model.bias else EXPERT_BIASES  # transformers' GPT-2 has biases
        extra = [name for name in extra if not name.endswith(zeros) or bool(self.tensors.read(name).any())]
        if balancing := [name for name in extra if name.endswith(EXPERT_BIASES)]:
            raise UserError(
                f"{self.folder}: {balancing[0]} is not zero. torchtitan's routers add it to choose experts, and "
                "Shardlab's do not; train there with load_balance_coeff None"
            )
        for head in HEADS.intersection(extra) if self.model.has_tied_head else ():
            extra.remove(head)
            self._want_tied(head)
        if extra:
            raise UserError(
                f"{self.folder} has {counted(len(extra), 'tensor')} that its model does not have: {_some(extra)}"
            )
        return self

    def _read(self, part: Part, rows: Tensor, columns: Tensor) -> Tensor:
        """Read consecutive rows of a part. If their order differs in the file, all rows in between are read."""
        name, stored_rows = self.name(part), part.theirs(rows)
        first, column_slice = int(stored_rows.min()), _slice(columns)
        row_slice = slice(first, int(stored_rows.max()) + 1)
        if part.vector:
            matrix = self.tensors.read(name, row_slice)[:, None]
        elif part.transposed:
            matrix = self.tensors.read(name, column_slice, row_slice).t()
        elif part.expert is not None:
            matrix = self.tensors.read(name, part.expert, row_slice, column_slice)
        else:
            matrix = self.tensors.read(name, row_slice, column_slice)
        return matrix[stored_rows - first] if part.heads else matrix

    def _want_tied(self, head: str) -> None:
        """Refuse a stored head that differs from the embedding to which it is tied.

        Raises:
            UserError: if it differs. The message says how to use that head, and how to keep the heads tied.
        """
        whole = next(
            (block, parameter) for block, parameter in parameters_of(self.model) if parameter.name == EMBEDDING
        )
        ((embedding,),) = self.parts(*whole)
        name, rows = self.name(embedding), max(1, COMPARED // embedding.columns)
        same_shape = self.tensors.shape(head) == self.tensors.shape(name)
        for first in range(0, embedding.rows, rows):
            part = slice(first, min(first + rows, embedding.rows))
            if same_shape and torch.equal(self.tensors.read(head, part), self.tensors.read(name, part)):
                continue
            raise UserError(
                f"{self.folder} ties the head to the embedding, but its {head} differs from {name}; set "
                f"tie_word_embeddings to false in {CONFIG} to use that head, or remove it from the files"
            )


Source = WeightSource | CheckpointSource


def open_source(folder: Path, change: Callable[[Blocks, str], Blocks] = lambda model, source: model) -> Source:
    """Open the weights in a folder, and check all names and shapes. The weights themselves are read later.

    Args:
        folder: folder of a run (run.json and weights.safetensors), of a checkpoint, in Hugging Face's format
            (config.json and safetensors), or of torch.distributed.checkpoint as torchtitan writes it; or another file
            of weights in a run's folder, such as ema.safetensors.
        change: function that returns the model to use. It takes the folder's model, and the name of the file that
            describes it.

    Raises:
        UserError: if there are no weights in these formats, Shardlab has no such model, or the weights do not fit it.
    """
    weights = folder / WEIGHTS
    if folder.suffix == ENDING and weights_at(folder) and (folder.parent / RUN).is_file():
        folder, weights = folder.parent, folder
    if not folder.is_dir():
        advice = "name the folder of a run, or one in Hugging Face's form"
        raise UserError(f"{folder} is a file; {advice}") if folder.exists() else missing_path(folder, advice)
    if (folder / METADATA).is_file() or any(folder.glob("*.distcp")):
        return _open_distributed(folder, change)
    if (folder / STATE).is_file():
        checkpoint = Checkpoint.open(folder).verify()
        model = change(recorded_model(dict(checkpoint.state), folder / STATE), str(folder / STATE))
        return CheckpointSource(folder, model, checkpoint)
    if weights_at(weights):
        record = read_table(read_file(folder / RUN, "JSON"), str(folder / RUN))
        model = change(recorded_model(record, folder / RUN), str(folder / RUN))
        tensors = TensorFiles(weight_files(weights))
        return WeightSource(
            folder, "shardlab", model, tensors, run_parts, config=record.get("huggingface") or {}
        ).check()
    if not (folder / CONFIG).is_file():
        if (folder / RUN).is_file():
            raise UserError(
                f"{folder} has no {WEIGHTS}: the run has ended without any; name another run, or one of its checkpoints"
            )
        if steps := sorted((path.parent for path in folder.glob(f"*/{METADATA}")), key=lambda at: (len(at.name), at)):
            raise UserError(
                f"{folder} is a folder of {counted(len(steps), 'checkpoint')}; name one, such as {steps[-1]}"
            )
        raise UserError(
            f"{folder} has no {WEIGHTS}, {CONFIG} or {METADATA}; name a run's folder, or one of Hugging Face's or "
            "torchtitan's form"
        )
    config = read_table(read_file(folder / CONFIG, "JSON"), str(folder / CONFIG))
    family, file_model = read_model(config, str(folder / CONFIG))
    model = change(file_model, str(folder / CONFIG))
    tensors = TensorFiles(weight_files(folder / SINGLE))
    bare = not any(name.startswith(family.prefix) for name in tensors.names)
    parts = partial(family.naming.parts, file_model)
    return WeightSource(folder, "hf", model, tensors, parts, family.prefix if bare else "", config).check(
        family.ignored
    )


class _Unknown(Llama):
    """Stands for the model of a folder that does not describe its model."""


def _open_distributed(folder: Path, change: Callable[[Blocks, str], Blocks]) -> WeightSource:
    """Open a folder of torch.distributed.checkpoint. A config.json, a run's record or `change` gives the model."""
    from shardlab.train.checkpoint.distributed import DistributedFiles  # imports much of torch

    path = folder / CONFIG
    config = read_table(read_file(path, "JSON"), str(path)) if path.is_file() else {}
    base_model: Blocks = _Unknown()
    if config:
        base_model = read_model(config, str(path))[1]
    elif (folder / RUN).is_file():
        base_model = recorded_model(read_table(read_file(folder / RUN, "JSON"), str(folder / RUN)), folder / RUN)
    model = change(base_model, str(folder))
    if isinstance(model, _Unknown):
        raise UserError(
            f"{folder} does not describe the model of its weights; name it, as by shardlab convert --model llama3-8b, "
            f"or put the model's {CONFIG} of Hugging Face into the folder"
        )
    tensors = DistributedFiles(folder, OTHER_STATES)
    parts = partial(torchtitan_naming(model, str(folder), tensors.names).parts, cast(GPT, model))
    source = WeightSource(folder, "dcp", model, tensors, parts, config=config, left_out=tensors.left_out)
    return source.check()


def recorded_model(record: Any, path: Path) -> Blocks:
    """Return the model in the record of a run, or in another file. A user's model file is found relative to the
    record's folder.

    Raises:
        UserError: if the record has no model, or an invalid one. The message has the path.
    """
    model_fields = cast(dict[str, Any], record).get("model") if isinstance(record, dict) else None
    model_fields = dict(cast(dict[str, Any], model_fields)) if isinstance(model_fields, dict) else {}
    kind = model_fields.pop("kind", None)
    if not isinstance(kind, str):
        raise UserError(f"{path} does not name the model of the weights; its field model has no kind")
    folder: Any = cast(dict[str, Any], record).get("folder")
    kind = file_from_here(kind, folder if isinstance(folder, str) else None)
    return with_written(find_model(kind), model_fields, str(path))


Ranges = Sequence[tuple[int, int]]


def initial_from(folder: Path, model: Model) -> Initial:
    """Return a function that reads parts of a layer's flat buffer from a folder.

    Args:
        folder: folder with weights in any format of `open_source`.
        model: the model that is trained, split into layers or not.

    Raises:
        UserError: if the folder has no weights of such a model.
    """
    source = open_source(folder)
    require_same(source.model, model.whole if isinstance(model, CutModel) else model, folder)

    def initial(layer: int, length: int, ranges: Ranges, dtype: torch.dtype) -> Tensor:
        return torch.cat([read_range(source, model, layer, length, *span, dtype) for span in ranges])

    return initial


def require_same(source: Blocks, model: Model, folder: Path) -> None:
    """Refuse the weights of another model.

    Dropout, and the capacity and the auxiliary loss of experts, may differ. The sequences of `model` may be shorter.

    Args:
        source: model of the weights.
        model: model for which they are used.
        folder: folder of the weights, for the error message.

    Raises:
        UserError: if the models differ. The message lists every field that does.
    """
    source_fields, expected_fields = _shared_fields(source), _shared_fields(model)
    wrong = [
        f"{name} is {source_fields.get(name)!r}, not {expected_fields.get(name)!r}"
        for name in (source_fields | expected_fields)
        if source_fields.get(name) != expected_fields.get(name)
    ]
    if source.seq_len < model.seq_len:
        wrong.append(f"seq_len is {source.seq_len}, less than {model.seq_len}")
    if wrong:
        raise UserError(f"{folder} has the weights of another model: {'; '.join(wrong)}")


def _slice(indices: Tensor) -> slice:
    """Return consecutive indices as a slice."""
    return slice(int(indices[0]), int(indices[-1]) + 1) if len(indices) else slice(0, 0)


def _dims(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def _some(names: list[str], limit: int = 3) -> str:
    omitted = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {omitted} more" if omitted > 0 else "")


def _shared_fields(model: Model) -> dict[str, object]:
    """Return the fields that must be equal in two models with the same weights. Defaults are filled in."""
    if isinstance(model, GPT):
        equal = model.head_size * model.heads == model.hidden_size
        head_dim = None if equal else model.head_size
        model = replace(model, kv_heads=model.kv_heads or model.heads, head_dim=head_dim, ffn_hidden_size=model.hidden)
    free = {"dropout", "seq_len", "capacity_factor", "auxiliary"}
    return {entry.name: getattr(model, entry.name) for entry in fields(model) if entry.name not in free}
