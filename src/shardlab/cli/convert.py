"""`shardlab convert FROM TO`: convert the weights of a run into Hugging Face's or torchtitan's format, and back."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.progress import track

from shardlab.cli.console import Report, print_path
from shardlab.cli.model_options import DEFAULT_MODEL, ModelFlags
from shardlab.cli.options import Count, Flag
from shardlab.common.text import counted
from shardlab.language import UserError

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True)
class Convert:
    """Write the weights of a run as a Hugging Face folder (config.json and safetensors), or the other way round.

    GPT-2, Llama and Mixtral are supported, and all models of torchtitan's kinds llama3, qwen3 and deepseek_v3 as its
    checkpoints (torch.distributed.checkpoint). Every number is copied exactly. At any time, only parts of the model are
    in memory.
    """

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FROM", help_behavior_hint="")]
    """Folder of a run, Hugging Face folder, or folder of torch.distributed.checkpoint."""

    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="TO", help_behavior_hint="")]
    """New folder."""

    to: Annotated[
        Literal["hf", "shardlab", "dcp"] | None,
        tyro.conf.arg(help_behavior_hint="(default: hf for a run, otherwise shardlab)"),
    ] = None
    """Format to write: Hugging Face's, a run's, or torch.distributed.checkpoint as torchtitan lays it out."""

    shard_mb: Count = 5000
    """Largest size of a file, in megabytes. Larger weights are split into several files."""

    settings: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="")] = None
    """Checkpoint with the settings of the new run. The state of AdamW is then converted as well, and train --resume TO
    continues the run."""

    json: Flag = False
    """Print only JSON."""

    model: ModelFlags = DEFAULT_MODEL

    def run(self) -> int:
        if self.out.exists():
            raise UserError(f"{self.out} exists; name a new folder, so that nothing is overwritten")
        from shardlab.train.data.prepared_folder import find_tokenizer
        from shardlab.train.data.tokenizers import export_tokenizer
        from shardlab.train.huggingface.convert import convert_weights
        from shardlab.train.huggingface.sources import open_source

        source = open_source(self.source, self.model.apply)
        form = self.to or ("hf" if source.form == "shardlab" and self.settings is None else "shardlab")
        if self.settings is not None and form != "shardlab":
            raise UserError(f"--settings is for a run, and --to {form} writes none; leave out one of them")
        tokenizer = find_tokenizer(source.folder) if form != "shardlab" else None
        tokenizer_files = {} if tokenizer is None else tokenizer.files() | export_tokenizer(tokenizer)
        special: dict[str, int] = {}
        if tokenizer is not None and tokenizer.end is not None:
            special["eos_token_id"] = tokenizer.end
        if tokenizer is not None and tokenizer.begin:
            special["bos_token_id"] = tokenizer.begin[0]
        result = convert_weights(
            source,
            self.out,
            form,
            shard_bytes=self.shard_mb * 10**6,
            extra_files=tokenizer_files,
            special=special,
            follow=_show_progress,
            settings=None if self.settings is None else _with_settings(self.settings),
        )
        report = Report(**asdict(result))
        report.fact("model", f"{result.model}, {result.parameters:,} parameters in {counted(result.tensors, 'tensor')}")
        report.draw(partial(print_path, label="folder", path=Path(result.folder)))
        report.fact("files", ", ".join(result.files))
        if result.left_out:
            note = "; --settings also converts the state of AdamW" if "optimizer" in result.left_out else ""
            reason = f"only weights are converted{note}" if self.settings is None else "those of the settings are used"
            report.fact("left out", f"{', '.join(result.left_out)}: {reason}")
        report.show(json=self.json)
        return 0


def _with_settings(folder: Path) -> Path:
    """Return the folder of a checkpoint: the given one or, for the folder of a run, that of its newest checkpoint.

    Raises:
        UserError: if the folder has no settings.
    """
    from shardlab.train.checkpoint.read import CONFIG, STATE
    from shardlab.train.checkpoints import find_checkpoint

    if (folder / STATE).is_file() and (folder / CONFIG).is_file():
        return folder
    checkpoint = find_checkpoint(folder)
    assert checkpoint is not None
    return checkpoint.folder


def _show_progress(planned: list[Any]) -> Iterable[Any]:
    console = Console(stderr=True)
    return track(planned, "converting", console=console, transient=True, disable=not console.is_terminal)
