"""`shardlab eval FOLDER --data PATH`: compute the loss of a text with the weights of a run or a Hugging Face folder."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from shardlab.cli.console import Report
from shardlab.cli.options import Flag, Name, OptionalCount, Ranks
from shardlab.cli.plan_options import NO_FLAGS, JobFile, Layout, job_source
from shardlab.common.text import counted
from shardlab.execute.optimizers.settings import OptimizerConfig
from shardlab.language import Mesh, UserError
from shardlab.strategies.plan.plan import Plan
from shardlab.strategies.registry import entry_from_plan
from shardlab.train.config import BatchConfig
from shardlab.train.config_sources import batch_of
from shardlab.train.launch.environment import require_port

DEFAULT_BATCH = BatchConfig(microbatches=4, micro_batch_size=4)


@dataclass(frozen=True)
class Eval:
    """Compute the loss, the perplexity and the bits per byte of a text, on one device or on ranks.

    The tokenizer beside the weights converts the text into tokens. Each document is split into sequences. Each token
    except the first of a document is predicted once, from the tokens before it in its sequence.
    """

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="")]
    """Folder of a run, or Hugging Face folder."""

    data: Annotated[Path | None, tyro.conf.arg(metavar="PATH", help_behavior_hint="")] = None
    """Text, file of documents (.jsonl, .parquet), or validation part of a prepared folder."""

    format: Name = None
    """text, jsonl, parquet or tokens, if the file name does not tell."""

    field: Annotated[str, tyro.conf.arg(metavar="NAME")] = "text"
    """Field of a JSON line, or column of a Parquet file, that contains the text."""

    batches: OptionalCount = None
    """Number of microbatches to evaluate, from the beginning of the text. Default: all."""

    strategy: Annotated[str | None, tyro.conf.arg(metavar="STRATEGY", help_behavior_hint="")] = None
    """Built-in name, or path/to/file.py:function. Leave it out for one device, or for a plan by flags."""

    ranks: Ranks = None
    """Number of ranks."""

    microbatches: Annotated[OptionalCount, tyro.conf.arg(help_behavior_hint="(default: 4)")] = None
    """Number of microbatches that the ranks compute at once."""

    micro_batch_size: Annotated[OptionalCount, tyro.conf.arg(help_behavior_hint="(default: 4)")] = None
    """Sequences of a microbatch."""

    seq_len: OptionalCount = None
    """Tokens of a sequence. Default: the number of positions of the model, which is also the maximum."""

    json: Flag = False
    """Print only JSON."""

    layout: Layout = NO_FLAGS

    config: JobFile = None

    def run(self) -> int:
        require_port(os.environ)
        if self.data is None:
            raise UserError("there is no text to predict; give --data PATH")
        from shardlab.cli.train.before_ranks import checked_to_run, failures_as_exit
        from shardlab.cli.train.choose_passes import settle_passes
        from shardlab.train.data.prepare import lost_text
        from shardlab.train.evaluate import TextJob, evaluate_rank
        from shardlab.train.huggingface.sources import open_source
        from shardlab.train.job import Job
        from shardlab.train.launch.ranks import launched_ranks, run_ranks

        model = open_source(self.folder).model
        if self.seq_len is not None:
            if self.seq_len > model.seq_len:
                raise UserError(
                    f"--seq-len {self.seq_len} is more than the model's {model.seq_len} positions; give at most "
                    f"{model.seq_len}"
                )
            model = replace(model, seq_len=self.seq_len)
        file, launched = job_source(self.config), launched_ranks(0) or None
        batch = BatchConfig(None, self.microbatches, self.micro_batch_size).fill(batch_of(file)).fill(DEFAULT_BATCH)
        microbatches, micro_batch_size = batch.cut(1, None)
        is_default = self.strategy is None and self.layout == NO_FLAGS and not file.sections.get("plan")
        if is_default and (self.ranks or launched) in (None, 1):
            entry, ranks = entry_from_plan(Plan(Mesh()), "one device"), 1
        else:
            entry, ranks = self.layout.entry(self.strategy, self.ranks, [file], otherwise=launched)
        job = Job(
            entry.for_job(ranks), ranks, microbatches, model, micro_batch_size, name=entry.name, passes=entry.passes
        )
        text_job = TextJob((job,), self.folder, self.data, model.seq_len, self.batches, self.format, self.field)
        text = text_job.text()
        if note := lost_text(text.lost_counts):
            print(f"shardlab: {self.data}: {note}; bits per byte count the whole text", file=sys.stderr)
        text_job = text_job.with_widths(text)
        entry = settle_passes(entry, text_job.jobs[-1])
        jobs = (replace(job, strategy=entry.for_job(ranks), passes=entry.passes) for job in text_job.jobs)
        text_job = replace(text_job, jobs=tuple(jobs))
        for job in text_job.jobs:
            checked_to_run(entry, job, OptimizerConfig())
        with failures_as_exit():
            loss = run_ranks(ranks, evaluate_rank, text_job)
        if loss is None:  # a rank of an existing world, but not the one that reports
            return 0
        report = Report()
        report.fact("loss", f"nats per token, over {counted(loss.tokens, 'token')}", f"{loss.mean:.4f}", loss=loss.mean)
        report.fact("perplexity", "", f"{loss.perplexity:.4f}", perplexity=loss.perplexity)
        report.fact("bits per byte", "", f"{loss.bits_per_byte:.4f}", bits_per_byte=loss.bits_per_byte)
        report.data |= {**asdict(loss), "strategy": entry.name, "ranks": ranks}
        report.show(json=self.json)
        return 0
