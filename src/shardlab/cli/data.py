"""`shardlab data`: convert texts into a folder of tokens for training, and describe such a folder.

`Prepare` and `TinyShakespeare` share the options of `Preparing`, and its method `prepare_folder`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

import tyro
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from tyro.conf import subcommand

from shardlab.cli.console import Report, print_path
from shardlab.cli.options import Flag, Name, OptionalCount
from shardlab.common.errors import UserError
from shardlab.common.text import counted
from shardlab.common.user_code import file_and_name, find_member, load_module, reporting_errors_of
from shardlab.train.data.documents import Document, Documents, DocumentSource, Input
from shardlab.train.data.prepare import Progress, lost_text, prepare
from shardlab.train.data.prepared_folder import PreparedFolder, TokenCount

TokenizerName = Annotated[str, tyro.conf.arg(metavar="TOKENIZER")]
"""Tokenizer: chars, bytes, gpt2, a file or a folder."""

NewFolder = Annotated[Path, tyro.conf.arg(metavar="FOLDER")]
"""Path of a folder to create."""

PROGRESS_LINES = 10
"""Number of progress lines for each pass over the input if stderr is not a terminal."""

QUIET = 10_000_000
"""Largest input in bytes for which no progress lines are printed, because it takes only moments."""


@dataclass(frozen=True, kw_only=True)
class Preparing:
    """Options of the commands that convert texts into tokens."""

    train_bpe: OptionalCount = None
    """Train a byte-pair encoding (BPE) on the text, with up to N tokens, instead of --tokenizer."""

    validation: Annotated[float, tyro.conf.arg(metavar="PART")] = 0.1
    """Fraction of the tokens, from the end, to use for validation. If a document ends nearby, the split is moved
    there."""

    json: Flag = False
    """Print only the manifest, as JSON."""

    def prepare_folder(
        self, inputs: Sequence[DocumentSource], out: Path, tokenizer: str, sources: list[str] | None = None
    ) -> int:
        """Prepare a folder of tokens from some sources, and describe it.

        Args:
            sources: names of the sources for the manifest (None: those of `inputs`).
        """
        with progress_of(sum(source.size for source in inputs)) as progress:
            data = prepare(inputs, out, tokenizer, self.train_bpe, self.validation, progress, sources)
        show(data, json=self.json)
        return 0


@dataclass(frozen=True, kw_only=True)
class Prepare(Preparing):
    """Convert text, JSONL or Parquet files into a folder of tokens, which train accepts as --data FOLDER."""

    files: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FILE ...", help_behavior_hint="")]
    """Files with one document each, or one in each line (.jsonl) or row (.parquet), or nanoGPT's tokens (.bin); or
    path/to/file.py:function, which yields documents."""

    out: NewFolder
    """New folder."""

    tokenizer: TokenizerName = "bytes"
    """chars, bytes, gpt2, a Hugging Face tokenizer.json, or a folder with a tokenizer."""

    format: Name = None
    """text, jsonl, parquet or tokens, if the file names do not tell."""

    field: Annotated[str, tyro.conf.arg(metavar="NAME")] = "text"
    """Field of a JSON line, or column of a Parquet file, that contains the text."""

    def run(self) -> int:
        if self.train_bpe is not None and self.tokenizer != "bytes":
            raise UserError(f"--tokenizer {self.tokenizer} and --train-bpe exclude each other; give one of them")
        if not self.files:
            raise UserError("no file is given; name a .txt, .jsonl or .parquet file")
        return self.prepare_folder([self._source(file) for file in self.files], self.out, self.tokenizer)

    def _source(self, file: str) -> DocumentSource:
        path, function = file_and_name(file)
        if path is None or path.suffix != ".py" or not function or Path(file).exists():
            return Input.from_path(Path(file), self.format, self.field)
        return documents_of(path, function)


@dataclass(frozen=True, kw_only=True)
class TinyShakespeare(Preparing):
    """Download tiny Shakespeare (1.1 MB), or take it from a file, verify its checksum, and prepare it."""

    file: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: it is downloaded)")] = None
    """File with the text."""

    out: NewFolder = Path("data/shakespeare")
    """New folder."""

    tokenizer: TokenizerName = "chars"
    """chars, bytes, gpt2, or a Hugging Face tokenizer.json."""

    def run(self) -> int:
        from shardlab.train.data.documents import SHAKESPEARE_URL, tiny_shakespeare

        with tiny_shakespeare(self.file) as path:
            return self.prepare_folder([Input(path, "text")], self.out, self.tokenizer, [SHAKESPEARE_URL])


@dataclass(frozen=True)
class ShowData:
    """Describe the contents of a prepared folder."""

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """Prepared folder."""

    verify: Flag = False
    """Read all files, and verify every checksum."""

    json: Flag = False
    """Print only the manifest, as JSON."""

    def run(self) -> int:
        data = PreparedFolder.open(self.folder)
        if self.verify:
            data.verify()
        show(data, json=self.json, verified=self.verify)
        return 0


@dataclass(frozen=True)
class DataCommand:
    """Prepare training data, and look at prepared data."""

    what: Annotated[
        Annotated[Prepare, subcommand("prepare", prefix_name=False)]
        | Annotated[TinyShakespeare, subcommand("shakespeare", prefix_name=False)]
        | Annotated[ShowData, subcommand("show", prefix_name=False)],
        tyro.conf.arg(name=""),
    ]

    def run(self) -> int:
        return self.what.run()


def show(data: PreparedFolder, *, json: bool, verified: bool = False) -> None:
    """Print the manifest of a prepared folder.

    Args:
        verified: whether the checksums were verified.
    """
    manifest = data.manifest
    report = Report(folder=str(data.folder), sha256=data.sha256, **asdict(manifest))
    others = f" and {len(manifest.sources) - 3} more" if manifest.sources[3:] else ""
    report.fact("from", ", ".join(manifest.sources[:3]) + others)
    end = "" if manifest.end is None else f"; token {manifest.end:,} ends a document"
    report.fact("tokenizer", f"{manifest.tokenizer}, {manifest.vocab_size:,} tokens{end}")
    report.fact("training", _count(manifest.training), style="bold")
    report.fact("validation", _count(manifest.validation), style="bold")
    checked = "all checksums are right" if verified else "checksums in manifest.json"
    report.fact("files", f"{data.bytes:,} bytes, {manifest.dtype} tokens; {checked}")
    report.draw(partial(print_path, label="data", path=data.folder))
    report.show(json=json)
    if manifest.lost and not json:
        print(f"shardlab: {lost_text(manifest.lost)}", file=sys.stderr)


def _count(count: TokenCount) -> str:
    return f"{counted(count.tokens, 'token')} in {counted(count.documents, 'document')}"


def documents_of(path: Path, function: str) -> Documents:
    """Return the documents that a function in a user's file yields.

    Raises:
        UserError: if there is no such function.
    """
    _, generator = find_member(load_module(path), path, function, ("function", "functions"), inspect.isfunction)
    if not callable(generator):
        raise UserError(
            f"{function} in {path} is not a function; write one that yields documents: texts, bytes or tokens"
        )

    def documents() -> Iterator[Document]:
        with reporting_errors_of(path):
            iterator: Iterator[Document] = iter(cast(Any, generator)())
        while True:
            with reporting_errors_of(path):  # output printed by the user's function goes to stderr
                document = next(iterator, None)
            if document is None:
                return
            yield document

    return Documents(documents, f"{path}:{function}")


@contextmanager
def progress_of(total: int) -> Generator[Progress]:
    """Show the progress of a preparation on stderr: a live line in a terminal, ten lines for each pass in a pipe.

    The value of the context is the callback `progress(name of the pass, bytes done)`.

    Args:
        total: bytes of the input.
    """
    console = Console(file=sys.stderr)
    columns = TextColumn("{task.description}"), BarColumn(bar_width=None), DownloadColumn(), TimeRemainingColumn()
    last_progress = ("", 0)
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total or None)

        def progress(pass_name: str, finished_bytes: int) -> None:
            nonlocal last_progress
            bar.update(task, description=pass_name, completed=finished_bytes)
            tenth = PROGRESS_LINES * finished_bytes // max(1, total)
            if not console.is_terminal and (pass_name, tenth) != last_progress and tenth and total > QUIET:
                last_progress = pass_name, tenth
                print(f"{pass_name}: {finished_bytes:,} of {total:,} bytes", file=sys.stderr, flush=True)

        yield progress
