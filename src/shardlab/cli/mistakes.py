"""Mistakes in a command line, as one sentence each."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import sysconfig
from collections.abc import Collection, Generator
from itertools import takewhile
from pathlib import Path

from shardlab.errors import UserError, closest, nearest

NAMED, EXPLAINED = 5, 9
"""In a box that lists options, their names are indented so far at least, and their explanations."""

COLOR = re.compile(r"\x1b\[[0-9;]*m")
"""Start or end of a color on a terminal."""

PEERS = {
    "--learning-rate": "lr max-lr",
    "--min-learning-rate-ratio": "min-lr min-lr-ratio",
    "--learning-rate-schedule": "lr-scheduler lr-scheduler-type lr-decay-style lr-schedule decay-lr",
    "--warmup-steps": "warmup warmup-iters lr-warmup-iters lr-warmup-steps num-warmup-steps",
    "--decay-steps": "lr-decay-iters lr-decay-steps",
    "--clip": "grad-clip clip-grad max-grad-norm max-norm gradient-clip-val gradient-clipping",
    "--optimizer": "optim",
    "--steps": "max-steps max-iters train-iters num-steps iterations iters num-train-steps training-steps",
    "--microbatches": "gradient-accumulation-steps grad-accum accumulate-grad-batches gradient-accumulation",
    "--micro-batch-size": "per-device-train-batch-size local-batch-size device-batch-size",
    "--global-batch": "global-batch-size gbs train-batch-size",
    "a step has --microbatches of --micro-batch-size sequences": "batch-size global-batch global-batch-size gbs "
    "train-batch-size",
    "a run's length is in --steps": "epochs num-epochs num-train-epochs max-epochs",
    "--precision": "dtype torch-dtype bf16 fp16 mixed-precision param-dtype",
    "the tokenizer comes from the folder in --data, which shardlab data prepare makes, or from --init":
    "tokenizer tokenizer-name tokenizer-type tokenizer-path",
    "each of --ranks uses a GPU if the host has one for each, otherwise CPUs (CUDA_VISIBLE_DEVICES= "
"hides GPUs)": "device accelerator no-cuda use-cpu cpu gpu",
    "--ranks": "gpus num-gpus nproc-per-node nproc devices world-size num-processes",
    "--out": "output-dir output out-dir save-dir checkpoint-dir save-folder",
    "--save-every": "save-interval save-steps checkpoint-interval checkpoint-every checkpointing-steps",
    "--keep": "save-total-limit",
    "--resume": "resume-from-checkpoint load ckpt-path resume-from restore init-from",
    "--init": "model-name-or-path pretrained finetune-from",
    "--model": "model-name model-type arch",
    "--log-every": "log-interval logging-steps log-freq",
    "--validate-every": "eval-interval eval-steps eval-every val-check-interval validation-interval",
    "--wandb": "wandb-log wandb-project use-wandb report-to",
    "--compile": "torch-compile",
    "--seq-len": "block-size context-length seq-length max-seq-length max-seq-len max-length sequence-length ctx-len",
    "--layers": "n-layer n-layers num-layers num-hidden-layers depth",
    "--hidden-size": "n-embd d-model dim embed-dim n-embed",
    "--heads": "n-head n-heads num-heads num-attention-heads",
    "--kv-heads": "n-kv-head n-kv-heads num-kv-heads num-key-value-heads num-query-groups",
    "--ffn-hidden-size": "intermediate-size d-ff n-inner mlp-hidden-size",
    "--experts": "num-experts n-experts num-local-experts",
    "--tp": "tensor-parallel-size tensor-model-parallel-size tensor-parallel tensor-parallel-degree",
    "--pp": "pipeline-parallel-size pipeline-model-parallel-size pipeline-parallel pipeline-parallel-degree",
    "--cp": "context-parallel-size context-parallel context-parallel-degree",
    "--ep": "expert-parallel-size expert-model-parallel-size expert-parallel expert-parallel-degree",
    "--dp-replicate": "data-parallel-replicate-degree data-parallel-size dp ddp",
    "--dp-shard": "data-parallel-shard-degree fsdp",
    "--recompute": "gradient-checkpointing activation-checkpointing recompute-activations",
    "--data": "dataset data-path dataset-name train-data train-file data-dir",
    "--tokens": "max-new-tokens max-tokens num-tokens",
    "--time": "walltime time-limit",
    "--ranks-per-node": "ntasks-per-node tasks-per-node nproc-per-node",
    "--gpus-per-node": "gres gpus gpus-per-task",
    "--cpus-per-rank": "cpus-per-task",
    "--name": "job-name",
}  # fmt: skip
"""What is meant by options of nanoGPT, Hugging Face's trainer, torchtitan, Megatron-LM and schedulers: an option, or a
sentence with options, and names that peers have for it. Where a command has not all these options, the next counts."""


def meant_by(word: str, flags: Collection[str]) -> str:
    """The second half of a sentence about an option that a command does not have.

    >>> meant_by("--lr", ["--layers", "--learning-rate"])
    'did you mean --learning-rate?'

    Args:
        word: the option as it was given, with a value after = or without.
        flags: the command's options.
    """
    given = word.partition("=")[0].lower().replace("_", "-")
    for meaning, peers in PEERS.items():
        if given.removeprefix("--") in peers.split() and set(re.findall(r"--[a-z-]+", meaning)) <= set(flags):
            return f"did you mean {meaning}?" if meaning in flags else meaning
    close = closest(given, flags)
    return f"did you mean {close}?" if close else "--help lists them"


@contextlib.contextmanager
def mistakes_as_sentences() -> Generator[None, None, None]:
    """Make a sentence of the box in which tyro says what is wrong with a command line.

    Raises:
        UserError: with that sentence.
    """
    written = io.StringIO()
    try:
        with contextlib.redirect_stderr(written):
            yield
    except SystemExit as end:
        if end.code:
            raise UserError(sentence_of(written.getvalue())) from None
        raise
    sys.stderr.write(written.getvalue())


def sentence_of(box: str) -> str:
    r"""What a box says between its title and its first rule, without explanations of options.

    >>> sentence_of("Required options\n ---\n  Missing from shardlab convert:\n      TO\n          A folder.\n  ---")
    'missing from shardlab convert: TO; --help tells more'
    """
    plain = COLOR.sub("", box)  # in a terminal
    _, *lines = re.sub("[│╭╮╰╯├┤]", " ", plain.replace("─", "-")).splitlines()
    body = [line for line in lines if line.strip()]
    while body and not body[0].strip(" -"):
        body.pop(0)
    body = list(takewhile(lambda line: line.strip(" -"), body))
    indented = [(len(line) - len(line.lstrip()), line.strip()) for line in body]
    text = " ".join(line for indent, line in indented if indent < NAMED).rstrip(".")
    if choice := re.fullmatch(r"invalid choice '(.*)' for argument '(.*)'\. Expected one of \((.*)\)", text):
        given, flag, listed = choice.groups()
        names = sorted(set(re.findall("'([^']*)'", listed)) - {"None"})
        return f"{flag} is {given!r}; {nearest(given, names)}"
    if unfit := re.match(r"Error parsing (\S+): no type matching .* could be instantiated from \[(.*?)\]\.", text):
        usage = next((line.strip() for line in lines if line.split()[:1] == [unfit[1]]), unfit[1])
        return f"{unfit[1]}: {unfit[2]} does not fit; give {usage}"
    text = text.removeprefix("Error parsing ").replace("Missing", "missing")
    named = ", ".join(line for indent, line in indented if NAMED <= indent < EXPLAINED)
    return f"{text} {named}".strip() + "; --help tells more" * ("; give" not in text)


def unreadable_python(error: BaseException) -> str | None:
    """Find a file of Python's own for want of which an error was raised: this user may not read it.

    It may be in the home folder of the user who installed it, who has kept that from others.
    """
    packages = Path(sysconfig.get_path("purelib"))
    paths = [Path(sysconfig.get_path("stdlib")), Path(sys.executable), packages]
    if isinstance(error, ImportError) and error.name:
        paths.append(packages / error.name.partition(".")[0])
    if isinstance(error, OSError) and isinstance(error.filename, str):
        paths += [path for path in [Path(error.filename)] if path.is_relative_to(packages)]
    return next((str(path) for path in paths if _is_denied(path)), None)


def _is_denied(path: Path) -> bool:
    try:
        os.scandir(path).close() if os.path.isdir(path) else path.open("rb").close()
    except PermissionError:
        return True
    except OSError:
        return False
    return False
