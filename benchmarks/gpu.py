"""Compare training steps of Shardlab on a GPU with a plain loop. `make gpu` runs the GPU's tests and this.

    python benchmarks/gpu.py

    python benchmarks/gpu.py --cpu

The model is GPT-2 small on sequences of 1,024 tokens, without dropout and biases. Four loops train it from the same
weights on the same batches: a plain loop like nanoGPT's (autocast to bfloat16, fused AdamW, clipping), and Shardlab's
plan on one rank with `--precision bf16`, each with and without torch.compile. On a GPU, two more loops run Shardlab's
steps as CUDA graphs. Times count only if the losses agree in every step. With several GPUs, data parallelism and ZeRO-3
on all of them follow. In the end, a step is traced and compared with its prediction (`shardlab compare`). With `--cpu`,
a tiny model shows that everything runs.
"""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from shardlab.cli.train.this_machine import device_called
from shardlab.common.errors import UserError
from shardlab.execute.executor import Executor
from shardlab.execute.optimizers.settings import OptimizerConfig
from shardlab.execute.requirements import want_compilable
from shardlab.execute.settings import Settings
from shardlab.language import Mesh
from shardlab.models import GPT
from shardlab.models.tensors import initial_weights, named_views
from shardlab.models.tensors.attention import to_device
from shardlab.simulate.hardware import DEVICES
from shardlab.strategies.plan.plan import Plan
from shardlab.train.job import Job
from shardlab.train.launch.ranks import backend_of, device_of, run_ranks
from shardlab.train.steps import flops_per_token, peak_memory

SMALL = GPT(layers=12, hidden_size=768, heads=12, vocab_size=50304, seq_len=1024, bias=False, tied=True)
TINY = GPT(layers=2, hidden_size=32, heads=2, vocab_size=256, seq_len=32, bias=False, tied=True)

SHARD = ("dp_shard",)

AGREED = 1e-2
"""Largest relative difference of two loops' losses: both compute in bfloat16, whose rounding is 4e-3."""

BENCH = "--widths 768 --batches 4x1024 12x1024 --vocab-size 50304"
BENCH_TINY = "--widths 32 64 --batches 2x32 4x32 --seconds 0.05"
"""Options of `shardlab bench`, whose profile the prediction uses."""

TRACED = "--layers 12 --hidden-size 768 --heads 12 --vocab-size 50304 --seq-len 1024 --micro-batch-size 12"
TRACED_TINY = "--layers 2 --hidden-size 32 --heads 2 --seq-len 32 --micro-batch-size 2"
"""The model whose step is recorded."""


@dataclass(frozen=True)
class Options:
    """Measure training steps on this machine's GPUs."""

    cpu: bool = False
    """Run a tiny model on the CPU, to see that everything works."""

    compile: bool = True
    """Run the loops with torch.compile as well."""

    agreement: bool = True
    """Record a step and compare it with its prediction, for which the machine is measured first."""

    sequences: int = 12
    """Sequences of each rank's step."""

    warm_up: int = 10
    """Steps of each loop that are not timed."""

    steps: int = 20
    """Steps of each loop that are timed."""

    json: bool = False
    """Print JSON alone."""


@dataclass(frozen=True)
class RandomBatches:
    """Batches of random tokens, one for each step and microbatch."""

    micro_batch_size: int
    model: GPT

    def microbatch(self, step: int, microbatch: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1000 * step + microbatch)
        shape = self.micro_batch_size, self.model.seq_len + 1
        tokens = torch.randint(self.model.vocab_size, shape, generator=generator)
        return tokens[:, :-1], tokens[:, 1:]

    def counted(self, step: int, microbatches: int) -> int:
        return microbatches * self.micro_batch_size * self.model.seq_len


class PlainBlock(nn.Module):
    """A block of GPT-2, written for one device."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = (nn.LayerNorm(width, bias=False) for _ in range(2))
        linear = {"c_attn": nn.Linear(width, 3 * width, bias=False), "c_proj": nn.Linear(width, width, bias=False)}
        self.attn = nn.ModuleDict(linear)
        self.mlp = nn.ModuleDict(
            {"c_fc": nn.Linear(width, 4 * width, bias=False), "c_proj": nn.Linear(4 * width, width, bias=False)}
        )

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        features = self.attn["c_attn"](self.ln_1(x)).split(width, dim=2)
        q, k, v = (each.view(rows, length, self.heads, -1).transpose(1, 2) for each in features)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn["c_proj"](mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x))))


class PlainGPT(nn.Module):
    """GPT-2 for one device, with a model's first weights; its head is the embedding."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.wte = nn.Embedding(model.vocab_size, model.hidden_size)
        self.wpe = nn.Embedding(model.seq_len, model.hidden_size)
        self.blocks = nn.ModuleList(PlainBlock(model.hidden_size, model.heads) for _ in range(model.layers))
        self.ln_f = nn.LayerNorm(model.hidden_size, bias=False)
        own = dict(self.named_parameters())
        with torch.no_grad():
            for layer in range(model.layers):
                flat = initial_weights(model, layer, 0, torch.float32)
                for name, view in named_views(model.layout(layer), flat).items():
                    own[name if name in own else f"blocks.{layer}.{name}"].copy_(view)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe.weight
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@dataclass(frozen=True)
class Took:
    """Results of a loop.

    Attributes:
        losses: of each step.
        seconds: of a timed step.
        memory: peak bytes of the GPU, or of the process on a CPU.
    """

    losses: list[float]
    seconds: float
    memory: int


def timed(step: Callable[[int], Tensor], device: torch.device, options: Options) -> Took:
    """Time a loop, without synchronizing the device within it."""
    losses: list[Tensor] = []
    start = 0.0
    for number in range(options.warm_up + options.steps):
        if number == options.warm_up:
            start = _now(device)
        losses.append(step(number))
    seconds = (_now(device) - start) / options.steps
    return Took([float(loss) for loss in losses], seconds, peak_memory(device))


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def config_of(options: Options) -> OptimizerConfig:
    return OptimizerConfig(learning_rate=6e-4, clip=1.0, schedule_steps=options.warm_up + options.steps, warmup_steps=2)


def plain_rank(rank: int, device: torch.device, model: GPT, compile: bool, options: Options) -> Took:
    """Run the plain loop."""
    torch.set_float32_matmul_precision("high")
    plain, config = PlainGPT(model).to(device), config_of(options)
    batches = RandomBatches(options.sequences, model)
    groups = [[p for p in plain.parameters() if p.dim() == dims] for dims in (2, 1)]
    decay = [{"params": groups[0], "weight_decay": config.weight_decay}, {"params": groups[1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(decay, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=True)
    run = cast(Callable[[Tensor, Tensor], Tensor], torch.compile(plain) if compile else plain)

    def step(number: int) -> Tensor:
        tokens, targets = (to_device(device, each.contiguous()) for each in batches.microbatch(number, 0))
        for group in optimizer.param_groups:
            group["lr"] = config.rate(number)
        with torch.autocast(device.type, torch.bfloat16):
            loss = run(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), cast(float, config.clip))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return timed(step, device, options)


def our_rank(
    rank: int, device: torch.device, job: Job, compile: bool, options: Options, cuda_graph: bool = False
) -> Took | None:
    """Run one rank's part of a job; rank 0 reports."""
    settings = Settings(job.seed, job.numbers, device, config_of(options), compile=compile, cuda_graph=cuda_graph)
    batches = RandomBatches(job.micro_batch_size, cast(GPT, job.model))
    executor = Executor(job.checked(), rank, job.cut, batches, settings, backend_of(device.type))

    def step(number: int) -> Tensor:
        total, tokens = executor.step()
        return total / tokens

    took = timed(step, device, options)
    return took if rank == 0 else None


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    loop: str
    ranks: int
    compile: bool
    loss: float
    seconds: float
    tokens_per_second: float
    mfu: float | None
    memory: int


def plans(ranks: int) -> dict[str, Plan]:
    """Plans for several GPUs."""
    mesh = Mesh(dp_shard=ranks)
    zero = Plan(mesh, shard_parameters=SHARD, shard_gradients=SHARD, shard_optimizer=SHARD)
    return {"data parallel": Plan(mesh), "zero-3": zero}


def loops(model: GPT, options: Options) -> list[Row]:
    """Run all loops on one rank, compare their losses, and run the plans on as many ranks as there are GPUs.

    Raises:
        UserError: if the losses do not agree.
    """
    rows: list[Row] = []
    peak = peak_of()

    def row(name: str, ranks: int, compile: bool, took: Took) -> Row:
        tokens = ranks * options.sequences * model.seq_len / took.seconds
        mfu = None if peak is None else flops_per_token(model) * tokens / peak / ranks
        print(f"gpu: {name}{', compiled' * compile}: {1000 * took.seconds:.1f} ms/step", file=sys.stderr, flush=True)
        return Row(name, ranks, compile, took.losses[-1], took.seconds, tokens, mfu, took.memory)

    compiles = (False, True) if options.compile else (False,)
    job = Job(Plan(Mesh()), 1, 1, model, options.sequences, "bf16")
    if options.compile:
        want_compilable(job.checked(), device_of(0, 1).type)
    expected: list[float] = []
    for compile in compiles:
        for name in ("plain", "shardlab", *(["shardlab, CUDA graph"] if not options.cpu else [])):
            took = (
                run_ranks(1, plain_rank, model, compile, options)
                if name == "plain"
                else run_ranks(1, our_rank, job, compile, options, name != "shardlab")
            )
            assert took is not None
            expected = expected or took.losses
            apart = max(abs(a - b) / abs(b) for a, b in zip(took.losses, expected, strict=True))
            if not apart <= AGREED:
                raise UserError(f"losses of {name}, compile {compile}, are {apart:.1e} from the plain loop's: no times")
            rows.append(row(name, 1, compile, took))
    if (gpus := 0 if options.cpu else torch.cuda.device_count()) > 1:
        for name, plan in plans(gpus).items():
            for compile in compiles:
                job = Job(plan, gpus, gpus, model, options.sequences, "bf16")
                took = run_ranks(gpus, our_rank, job, compile, options)
                assert took is not None
                rows.append(row(name, gpus, compile, took))
    return rows


def peak_of() -> float | None:
    """FLOP/s of a GPU in bfloat16, if the tables know it."""
    name = device_called(torch.cuda.get_device_name(0)) if torch.cuda.is_available() else ""
    return DEVICES[name].peak("bfloat16") if name else None


def shardlab(words: Sequence[str], folder: Path) -> Any:
    """Run a command in a folder, which also contains the profile, and return its JSON output.

    Raises:
        UserError: if it fails, with the last line of its output.
    """
    environment = os.environ | {"XDG_CACHE_HOME": str(folder)}
    command = [sys.executable, "-m", "shardlab", *words, "--json"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"shardlab {' '.join(words)} failed: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout)


def agreement(options: Options, ranks: int) -> dict[str, float]:
    """Predicted and measured seconds of a step of `ranks` ranks."""
    with tempfile.TemporaryDirectory(prefix="shardlab-") as place:
        folder = Path(place)
        bench = BENCH_TINY if options.cpu else BENCH
        shardlab(["bench", "compute", "--ranks", str(ranks), "--dtype", "bfloat16", "float32", *bench.split()], folder)
        if ranks > 1:
            shardlab(["bench", "collectives", "--ranks", str(ranks), "--kinds", "all_reduce"], folder)
        model = (TRACED_TINY if options.cpu else TRACED).split()
        words = ["--dp-shard", str(ranks), "--microbatches", str(ranks), "--precision", "bf16", *model]
        shardlab(["train", *words, "--steps", "20", "--trace", "--out", "traced"], folder)
        step = shardlab(["compare", "traced"], folder)["step"]
        return {"ranks": ranks, **step}


def show(rows: Sequence[Row], found: dict[str, Any]) -> None:
    """Print one table, and a line for each other result."""
    console = Console(highlight=False)
    table = Table("loop", "ranks", "compile", box=None, header_style="dim")
    for heading in ("loss", "ms/step", "tokens/s", "MFU", "peak MiB"):
        table.add_column(heading, justify="right")
    for row in rows:
        mfu = "-" if row.mfu is None else f"{row.mfu:.1%}"
        words = (
            row.loop,
            str(row.ranks),
            "yes" if row.compile else "no",
            f"{row.loss:.4f}",
            f"{1000 * row.seconds:,.1f}",
        )
        table.add_row(*words, f"{row.tokens_per_second:,.0f}", mfu, f"{row.memory / 2**20:,.0f}")
    console.print(table)
    if step := found.get("agreement"):
        pair = f"{1000 * step['predicted']:,.1f} ms predicted, {1000 * step['measured']:,.1f} ms measured"
        console.print(f"a step by shardlab compare: {pair} ({step['ratio']:.2f})")
    console.print(f"{found['device']}, torch {torch.__version__}")


def main(options: Options) -> None:
    gpus = torch.cuda.device_count()
    if not options.cpu and not gpus:
        sys.exit("gpu: torch sees no CUDA device here; a tiny model runs with --cpu")
    if options.cpu and gpus:
        sys.exit("gpu: --cpu is for machines without a GPU; hide them by CUDA_VISIBLE_DEVICES=")
    device = "CPU" if options.cpu else f"{gpus} x {torch.cuda.get_device_name(0)}"
    try:
        rows = loops(TINY if options.cpu else SMALL, options)
        found: dict[str, Any] = {"device": device, "torch": torch.__version__, "loops": [asdict(row) for row in rows]}
        if options.agreement:
            found["agreement"] = agreement(options, max(1, gpus))
    except UserError as error:
        sys.exit(f"gpu: {error}")
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        show(rows, found)


if __name__ == "__main__":
    main(tyro.cli(Options))
