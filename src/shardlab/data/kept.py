"""The tokenizer of a model, kept beside its weights."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from shardlab.data.bpe import GPT2_FILES, Gpt2, HuggingFace, read_tokenizer
from shardlab.data.exported import exported
from shardlab.data.manifest import FileSum, made_again
from shardlab.data.tokenizers import ByteTokenizer, Characters, Tokenizer
from shardlab.errors import UserError
from shardlab.program.nesting import read_file

RECORD = "run.json"
"""Where a run's folder tells of its tokenizer; one of Hugging Face's has only the files."""

FILES: dict[str, tuple[str, ...]] = {
    Characters.kind: (Characters.FILE,),
    HuggingFace.kind: ("tokenizer.json",),
    Gpt2.kind: tuple(GPT2_FILES),
}
"""Files by which the kind of a tokenizer is known, where nothing else tells it."""


def described(tokenizer: Tokenizer) -> dict[str, Any]:
    """What a run's record says of its tokenizer: kind, sizes, and the checksums of the files that lie beside it."""
    sums = {name: asdict(FileSum.of_content(content)) for name, content in tokenizer.files().items()}
    return {"kind": tokenizer.kind, "vocab_size": tokenizer.vocab_size, "end": tokenizer.end, "files": sums}


def kept_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer in a folder of weights, a run's or one of Hugging Face's form; None where nothing tells of one.

    A run's checkpoints, and its files of weights, have the run's.

    Raises:
        UserError: when its files are missing or have changed.
    """
    folder = home(folder)
    record = _record(folder / RECORD)
    if (recorded := _recorded(record, folder / RECORD)) is not None:
        kind, sums, end = recorded
        contents = {name: _content(folder / name, wanted) for name, wanted in sums.items()}
        return made_again(kind, contents, end)
    path, of_bytes = folder / "tokenizer.json", exported(ByteTokenizer())["tokenizer.json"]
    if path.is_file() and path.read_bytes() == of_bytes:
        return ByteTokenizer()
    for kind, names in FILES.items():
        if all((folder / name).is_file() for name in names):
            if kind == HuggingFace.kind:
                return read_tokenizer(path, record.get("huggingface"))
            return made_again(kind, {name: (folder / name).read_bytes() for name in names})
    return None


def want_tokenizer(folder: Path, vocab_size: int) -> Tokenizer:
    """The tokenizer in a folder of weights; where nothing tells of one, a run's tokens are bytes.

    Args:
        vocab_size: the model's.

    Raises:
        UserError: when a folder of Hugging Face's form has none, and its vocabulary is not that of bytes.
    """
    found = kept_tokenizer(folder)
    if found is None and not (home(folder) / RECORD).is_file() and vocab_size != ByteTokenizer.vocab_size:
        raise UserError(
            f"{folder} has no tokenizer (such as a tokenizer.json), and a vocabulary of {vocab_size:,} tokens is not "
            "that of bytes; copy its tokenizer there, or name the prepared folder of its data with --data"
        )
    return found or ByteTokenizer()


def home(folder: Path) -> Path:
    """Where the files beside weights lie: in the run's folder, if it is a checkpoint or a file in there."""
    if folder.suffix == ".safetensors":
        return folder.parent
    return folder.parents[1] if folder.parent.name == "checkpoints" else folder


def _record(path: Path) -> dict[str, Any]:
    found: Any = read_file(path, "JSON") if path.is_file() else {}
    return cast(dict[str, Any], found) if isinstance(found, dict) else {}


def _recorded(found: dict[str, Any], path: Path) -> tuple[str, dict[str, FileSum], int | None] | None:
    """Kind, checksums and end token in a run's record; None where it does not tell."""
    try:
        record: dict[str, Any] | None = found.get("tokenizer")
        if record is None:
            return None
        return record["kind"], {name: FileSum(**each) for name, each in record["files"].items()}, record.get("end")
    except (AttributeError, KeyError, TypeError) as error:
        raise UserError(f"{path}: tokenizer is not what a run records ({error}); copy the run's folder anew") from None


def _content(path: Path, wanted: FileSum) -> bytes:
    content = path.read_bytes() if path.is_file() else None
    if content is None or FileSum.of_content(content) != wanted:
        found = "is missing" if content is None else "has another checksum than run.json says"
        raise UserError(f"{path} {found}: the model was trained with another tokenizer; copy the run's folder whole")
    return content
