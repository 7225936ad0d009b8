"""The functions of `import shardlab`: trace, check, simulate, predict, plan, verify, train and draw.

Each is a thin layer over the package that does the work, and imports that package when it is called. The classes are
results: a `Prediction`, a `ChosenPlan`, and a `Drawing`. A notebook shows them as text or as a picture.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

from shardlab.common.calls import public, refuse_argument
from shardlab.common.errors import unknown_name
from shardlab.common.fields import SWITCH, WORD, check_field, choice
from shardlab.common.text import bytes_text, seconds_text
from shardlab.common.user_code import short_paths, trace_limits
from shardlab.language import Mesh, Program, Sizes, Store, Strategy, UserError, Value
from shardlab.language.ops import ColorBy, picture
from shardlab.language.precision import Optimizer

if TYPE_CHECKING:
    from shardlab.check import Checked
    from shardlab.cli.plan.command import PlanCommand
    from shardlab.models import Blocks
    from shardlab.planner.choose import PlanChoice
    from shardlab.simulate.hardware import Cluster
    from shardlab.simulate.predict.confidence import Confidence
    from shardlab.simulate.predict.forecast import Forecast
    from shardlab.simulate.predict.workload import Workload
    from shardlab.simulate.timeline import Timeline
    from shardlab.simulate.timeline.prices import Prices
    from shardlab.strategies.plan.plan import Plan
    from shardlab.strategies.registry import StrategyEntry
    from shardlab.train import Callback
    from shardlab.train.run import Summary
    from shardlab.train.verification.cases import Verdict

    AnyStrategy = str | Plan | Strategy
    Ranks = int | Mesh | None
    Layers = int | Sizes | None


@public
def trace(strategy: AnyStrategy, ranks: Ranks = None, layers: Layers = None, microbatches: int = 4) -> Program:
    """Run a strategy once on symbolic values, and return the program: for each rank a list of ops, its tape.

    >>> program = shardlab.trace("fsdp", ranks=2)
    >>> program
    <Program of 2 ranks, 4 layers and 4 microbatches>
    >>> print(program.tapes[0][0])
    load_weight(layer 0)

    Args:
        strategy: an async function of one rank, a plan, a built-in name, or path/to/file.py:function.
        ranks: number of ranks, or a mesh (default: the strategy's).
        layers: number of layers of the model of the LLM Training Puzzles, or the `Sizes` of another model (default: the
            strategy's).
        microbatches: number of microbatches in the global batch.

    Raises:
        Refused: for a wrong program.
        UserError: for an unknown name, or sizes that do not fit.
    """
    from shardlab.language import trace as run

    entry, count, sizes = _inputs(strategy, ranks, layers, microbatches)
    entry.require_ops(count, sizes if isinstance(sizes, int) else sizes.layers, microbatches)
    sizes = entry.puzzle(count, sizes) if isinstance(sizes, int) else sizes
    with short_paths():
        return run(entry.program, entry.grid(count), sizes, microbatches)


@public
def check(
    strategy: AnyStrategy | Program | Checked, ranks: Ranks = None, layers: Layers = None, microbatches: int = 4
) -> Checked:
    """Prove that a strategy computes the gradient of one device, and cannot hang.

    >>> shardlab.check("gpipe", ranks=4)
    <Checked <Program of 4 ranks, 4 layers and 4 microbatches> that runs on gloo and nccl>

    Args:
        strategy: as for `trace`, or a program that `trace` returned. If a strategy or plan names passes over tapes,
            they are applied.
        ranks, layers, microbatches: as for `trace`. A program has them already.

    Raises:
        Refused: for a wrong program. The message names the rank, the op, what is missing or doubled, and the line.
        UserError: for an unknown name, or sizes that do not fit.
    """
    from shardlab.check import Checked
    from shardlab.check import check as prove

    if isinstance(strategy, Program | Checked):
        if (ranks, layers, microbatches) != (None, None, 4):
            raise UserError(f"{strategy!r} keeps its ranks, layers and microbatches; leave them out here")
        return strategy if isinstance(strategy, Checked) else prove(strategy)
    from shardlab.cli.plan_options import checked
    from shardlab.simulate.passes import apply_passes

    entry, count, sizes = _inputs(strategy, ranks, layers, microbatches)
    with short_paths():
        return apply_passes(checked(entry, count, sizes, microbatches), entry.passes_on(count))


@public
def simulate(
    strategy: AnyStrategy | Program | Checked,
    costs: Prices | str | None = None,
    *,
    ranks: Ranks = None,
    layers: Layers = None,
    microbatches: int = 4,
) -> Timeline:
    """Check a strategy, and simulate one step: its time in time units, and its memory in elements.

    >>> timeline = shardlab.simulate("gpipe", ranks=4)
    >>> timeline.end, timeline.peak_memory
    (22.52000206, 1835008)

    Args:
        strategy: as for `check`, or a result of `check`.
        costs: times of ops: "teaching" (default; a forward pass of one microbatch through one layer takes 1), "puzzle"
            for those of the LLM Training Puzzles, or a text such as "forward=1,send=0.2".
        ranks, layers, microbatches: as for `check`.

    Raises:
        Refused, UserError: as `check` does.
    """
    from shardlab.cli.options import costs_of
    from shardlab.simulate.timeline import TEACHING_COSTS
    from shardlab.simulate.timeline import simulate as replay

    if not (costs is None or isinstance(costs, str) or hasattr(costs, "one_stream")):
        refuse_argument("costs", costs, 'teaching, puzzle, or times in quotes, such as "forward=1,send=0.2"')
    costs = costs_of(costs) if isinstance(costs, str) else costs or TEACHING_COSTS
    return replay(check(strategy, ranks, layers, microbatches), costs)


@dataclass(frozen=True)
class Prediction:
    """Predicted time and memory of one step.

    Attributes:
        seconds: duration of the step.
        tokens_per_second: tokens per second on all devices together.
        mfu: model FLOPs utilization, between 0 and 1.
        memory: bytes that the fullest device would hold if its memory were unlimited.
        fits: whether the step runs in the memory of the devices.
        workload: inputs of the prediction: model, cluster, plan and batch.
        forecast: time, peak memory of each pipeline rank, and memory of the fullest device by purpose.
    """

    seconds: float
    tokens_per_second: float
    mfu: float
    memory: float
    fits: bool
    workload: Workload
    forecast: Forecast

    def __repr__(self) -> str:
        speed, limit = f"{self.tokens_per_second:,.0f} tokens/s, MFU {self.mfu:.1%}", self.forecast.memory.capacity
        errors = {estimate.figure: f" ± {estimate.error:.0%}" for estimate in self.confidence}
        doubt = ", may not fit" if self.may_not_fit else ""
        fits = doubt if self.fits else ", does not fit"
        memory = f"{bytes_text(self.memory, 1)}{errors.get('memory', '')} of {bytes_text(limit, 1)}{fits}"
        return f"<Prediction {seconds_text(self.seconds)}{errors['time']} a step, {speed}, {memory}>"

    @property
    def confidence(self) -> tuple[Confidence, ...]:
        """Expected errors of the time and of the memory, from predictions of the most similar measured runs.

        With a profile of this machine as cluster, there is only the error of the time.
        """
        from shardlab.simulate.predict.confidence import step_confidence

        return step_confidence(self.workload)

    @property
    def may_not_fit(self) -> str:
        """Warning if the step leaves less memory free than the expected error of its memory ("": it leaves enough)."""
        from shardlab.simulate.predict.confidence import may_not_fit

        return may_not_fit(self.confidence, self.forecast.memory.total, self.forecast.memory.capacity)

    def timeline(self) -> Timeline:
        """Replay all ops of the step, and return their timeline. With many microbatches, the replay takes long."""
        return self.workload.estimate().timeline()


@public
def predict(
    model: str | Blocks,
    cluster: str | Cluster,
    plan: Plan | str,
    *,
    global_batch: int | None = None,
    tokens_per_step: int | str | None = None,
    micro_batch_size: int | None = None,
    precision: str | None = None,
    recipe: str | None = None,
    switches: Mapping[str, str] | None = None,
    optimizer: Optimizer = "adamw",
    memory: str | None = None,
    as_if: bool = False,
) -> Prediction:
    """Predict the time, the memory and the speed of one step of a plan.

    >>> plan = shardlab.Plan(Mesh(dp_shard=8), shard_optimizer=("dp_shard",))
    >>> step = shardlab.predict("gpt2-xl", "a100x8", plan, global_batch=64, micro_batch_size=2)
    >>> step.fits, 0.5 < step.seconds < 5, 0.2 < step.mfu < 0.8
    (True, True, True)

    Args:
        model: a name such as llama3-8b, a file, or a model of `shardlab.models`.
        cluster: devices and their number, such as h100x64, a file, or a cluster.
        plan: a plan, or the name of a built-in one, whose mesh then covers all devices.
        global_batch: sequences of a step (default: `micro_batch_size` for each device).
        tokens_per_step: tokens of a step, such as "4M", in place of `global_batch`.
        micro_batch_size: sequences of a microbatch (default: 1).
        precision: name of the precision, such as bf16, bf16-fp32-grads or fp8 (default: the recipe's).
        recipe: how a framework runs the step, such as torchtitan (default: Shardlab's own).
        switches: options of the recipe's framework by name, such as {"attention": "flash2"}.
        optimizer: optimizer whose state is counted.
        memory: memory that the step may use on each device, such as "72GiB" (default: all of it).
        as_if: predict a plan that the recipe's framework cannot run as if it could.

    Raises:
        UserError: for an unknown name, sizes that do not fit, or a plan that the recipe's framework cannot run. A step
            that does not fit into memory is not an error.
    """
    from shardlab.cli.step_request import StepRequest
    from shardlab.models import Blocks
    from shardlab.simulate.hardware import Cluster
    from shardlab.simulate.predict.forecast import forecast
    from shardlab.simulate.predict.workload import Workload
    from shardlab.strategies.load import load
    from shardlab.strategies.plan.plan import Plan
    from shardlab.train.config import BatchConfig

    accepted: dict[str, tuple[object, Any, str]] = {
        "model": (model, str | Blocks, "a name such as llama3-8b, a file, or a model such as models.Llama(layers=4)"),
        "cluster": (cluster, str | Cluster, "a name such as h100x64, a file, or a cluster"),
        "plan": (plan, str | Plan, "a plan such as shardlab.Plan(Mesh(dp_shard=8)), or the name of a built-in one"),
        "tokens_per_step": (tokens_per_step, int | str | None, 'tokens, such as 500000 or "4M"'),
        "precision": (precision, str | None, "a name such as bf16"),
        "recipe": (recipe, str | None, "a name such as torchtitan, or a file"),
        "switches": (switches, (Mapping, type(None)), 'options by name, such as {"attention": "flash2"}'),
        "memory": (memory, str | None, 'bytes with their unit, such as "72GiB"'),
    }
    for name, (value, kind, instead) in accepted.items():
        if not isinstance(value, kind) or value == "" or isinstance(value, bool):
            refuse_argument(name, value, instead)
    if any(not isinstance(word, str) for pair in (switches or {}).items() for word in pair):  # pyright: ignore[reportUnnecessaryIsInstance]
        refuse_argument("switches", switches, accepted["switches"][-1])
    check_field("optimizer", optimizer, choice(Optimizer), "adamw")
    check_field("as_if", as_if, SWITCH, False)
    request = StepRequest(
        model,
        cluster,
        batch=BatchConfig(global_batch=global_batch, micro_batch_size=micro_batch_size),
        tokens_per_step=None if tokens_per_step is None else str(tokens_per_step),
        precision=precision,
        optimizer=optimizer,
        recipe=recipe,
        switches=switches or {},
        memory=memory,
        as_if=as_if,
    )
    entry, devices = load(plan), request.found_cluster
    if entry.plan is None:
        raise UserError(f"{plan} is a program without a plan; give a plan, such as zero-3, or simulate the program")
    layout = entry.plan(devices.size)
    devices.require(layout.mesh.world)
    numbers, batch = request.step_precision, request.cut_batch(layout.data_ranks)
    workload = Workload(
        layout, request.found_model, devices, *batch, numbers, recipe=request.found_recipe, optimizer=optimizer
    )
    request.require_limits(workload)
    return _prediction(workload, forecast(workload))


def _prediction(workload: Workload, forecast: Forecast) -> Prediction:
    seconds, memory = forecast.seconds, forecast.memory
    speed, mfu = workload.tokens / seconds, workload.mfu(seconds)
    return Prediction(seconds, speed, mfu, memory.unlimited, memory.fits, workload, forecast)


@dataclass(frozen=True)
class ChosenPlan:
    """Plan that a search chose. Its text is the report of `shardlab plan`.

    Attributes:
        plan: the plan.
        prediction: predicted time and memory of a step.
        choice: results of the search, and the reasons for the plan.
        command: `shardlab plan` with the options of the call.
    """

    plan: Plan = field(repr=False)
    prediction: Prediction = field(repr=False)
    choice: PlanChoice
    command: PlanCommand = field(repr=False)

    def save(self, path: str | Path) -> None:
        """Write the plan with its model, cluster and batch into a job file, which the commands accept as --config."""
        from shardlab.cli.options import writing

        if not isinstance(path, str | Path):  # pyright: ignore[reportUnnecessaryIsInstance]
            refuse_argument("path", path, "a file, such as plan.toml")
        with writing("save", Path(path)):
            Path(path).write_text(self.command.job_text(self.choice), encoding="utf-8")

    def __str__(self) -> str:
        from rich.console import Console

        from shardlab.cli.plan.report import PlanReport

        command, choice, text = self.command, self.choice, StringIO()
        commands = command.commands_for(choice)
        report = PlanReport(choice, command.model or "", command.cluster or "", commands, command.top)
        # Jupyter sets FORCE_COLOR, which would colour this text as well.
        console = Console(file=text, highlight=False, force_terminal=False, force_jupyter=False, color_system=None)
        report.report(explain=command.explain).print(console)
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines())

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


@public
def plan(model: str, cluster: str, *, recipe: str | None = None, seconds: float = 120.0, **limits: Any) -> ChosenPlan:
    """Search all plans of a model on a cluster for the fastest one that fits, as `shardlab plan` does.

    >>> chosen = shardlab.plan("gpt2-xl", "a100x8", seconds=60, forecasts=6, tp=1, micro_batch_size=2)
    >>> chosen.plan.mesh.tp, chosen.prediction.fits
    (1, True)

    Args:
        model: a name such as llama3-8b, or a file.
        cluster: devices and their number, such as h100x64, or a file.
        recipe: how a framework runs the step, such as torchtitan (default: Shardlab's own).
        seconds: time limit in seconds, for the search and for the reasons that the report gives.
        limits: other options of the command by name, with `_` for `-`: global_batch=512, tp=8, max_pp=4,
            recompute="none", precision="bf16", memory="72GiB", explain=True. With forecasts=100, at most 100 plans are
            simulated. If `seconds` is long enough for them, the result does not depend on the speed of this machine.

    Raises:
        UserError: for unknown names and limits, and if no plan fits.
    """
    began = time.monotonic()
    from shardlab.cli.train.from_python import command_from

    for name, value in {"model": model, "cluster": cluster}.items():
        if not isinstance(value, str | Path):  # pyright: ignore[reportUnnecessaryIsInstance]
            refuse_argument(name, value, "a name, or a file")
    arguments = {"model": model, "cluster": cluster, "recipe": recipe, "seconds": seconds, **limits}
    command = cast("PlanCommand", command_from("plan", [], arguments))
    choice = command.search(command.problem(), began)
    best = choice.best
    prediction = _prediction(choice.problem.workload(best.candidate), best.forecast)
    return ChosenPlan(best.candidate.plan, prediction, choice, command)


@public
def verify(strategy: AnyStrategy, **settings: Any) -> Verdict | None:
    """Train a few steps on real processes and again on one device, and compare the results, as `shardlab verify` does.

    >>> verdict = shardlab.verify("ddp", ranks=2, steps=1)
    >>> verdict.ok, verdict.gradient_error < 1e-12
    (True, True)

    Args:
        strategy: name, path/to/file.py:function, a plan, or a function, which must be in a file.
        settings: options of the command by name, with `_` for `-`: ranks=4, layers=8, precision="bf16", clip=1.0.

    Returns:
        The errors of loss, gradients and weights. None if a launcher such as torchrun started this process, and it is
        not rank 0.

    Raises:
        Refused: for a wrong program.
        UserError: for options and values that the command refuses.
        RankFailed: when a rank fails.
    """
    from shardlab.cli.train.from_python import command_from, strategy_name
    from shardlab.cli.verify import Verify
    from shardlab.common.fields import as_flags
    from shardlab.planner.describe import chosen_fields
    from shardlab.strategies.plan.plan import Plan

    if isinstance(strategy, Plan):
        words = (as_flags(chosen_fields(strategy)) or "--dp-shard 1").split()
    else:
        words = [strategy if isinstance(strategy, str) else strategy_name(strategy)]
    command = cast(Verify, command_from("verify", words, settings))
    with trace_limits(command.max_ops, command.max_seconds_per_op), short_paths():
        result = command.compare(exits=False)
    return None if result is None else result.verdict


@public
def train(
    strategy: str | Callable[..., Any] | None = None, *, callbacks: Sequence[Callback] = (), **settings: Any
) -> Summary | None:
    """Train a language model, as the command `shardlab train` does.

    Ranks are processes of this machine. Under torchrun, srun or mpiexec, this process is one of them. The results are
    written to a folder, `out`, with the same files as by the command.

    >>> summary = shardlab.train("ddp", ranks=2, steps=2, hidden_size=16, layers=2, out="runs/short")
    >>> summary.steps
    2

    Args:
        strategy: name, path/to/file.py:function, or the function itself, which must be in a file.
        callbacks: observers of the training (`shardlab.train.Callback`), of which every rank gets a copy. Their
            classes may be defined in the script or notebook that calls this function.
        settings: options of the command by name, with `_` for `-`: ranks=2, hidden_size=64, learning_rate=1e-3,
            data=["text.txt"], out="runs/first". The value of a flag is True, or False for its opposite. An option
            with the value None is left out.

    Returns:
        Results of the training. None if a launcher such as torchrun started this process, and it is not rank 0.

    Raises:
        UserError: for options and values that the command refuses.
        RankFailed: when a rank fails or hangs.
        KeyboardInterrupt: when the training was interrupted before it could save.
    """
    from shardlab.cli.train.from_python import train as function

    return function(strategy, callbacks=callbacks, **settings)


@dataclass(frozen=True)
class Drawing:
    """Picture that a notebook shows.

    Attributes:
        svg: the SVG document.
    """

    svg: str

    def __repr__(self) -> str:
        return f"<Drawing of {len(self.svg):,} characters of SVG>"

    def _repr_svg_(self) -> str:
        return self.svg


@public
def draw(
    thing: Any,
    path: str | Path | None = None,
    *,
    title: str = "",
    color_by: ColorBy = "pass",
    costs: Prices | str | None = None,
    ranks: Ranks = None,
    layers: Layers = None,
    microbatches: int = 4,
) -> Drawing:
    """Draw a step over time, or a value or store with its slices, as SVG.

    >>> drawing = shardlab.draw("gpipe", "gpipe.svg", ranks=4)
    >>> drawing.svg.startswith("<?xml")
    True

    Args:
        thing: a timeline, a prediction, a value or a store, or a strategy or program as for `simulate`.
        path: SVG file to write as well. An existing file is replaced.
        title: title of a timeline (default: `thing` if it is a name, otherwise no title).
        color_by: what the colours of a timeline mean: "pass" or "layer".
        costs, ranks, layers, microbatches: as for `simulate`. A timeline, prediction, value or store has them already.

    Raises:
        Refused, UserError: as `simulate` does, and if the file cannot be written.
    """
    from shardlab.check import Checked
    from shardlab.draw import timeline_svg
    from shardlab.simulate.timeline import Timeline
    from shardlab.strategies.plan.plan import Plan

    check_field("title", title, WORD, None)
    if color_by not in get_args(ColorBy):
        raise unknown_name("color_by", color_by, get_args(ColorBy))
    if path is not None and not str(path).endswith(".svg"):
        refuse_argument("path", str(path), f"a file that ends in .svg, such as {Path(str(path)).stem}.svg")
    title = title or (thing if isinstance(thing, str) else "")
    if isinstance(thing, Value | Store) and (title or color_by != "pass"):
        raise UserError(f"{thing!r:.100} is no timeline; leave title and color_by out")
    if isinstance(thing, Value | Store | Timeline | Prediction):
        if (costs, ranks, layers, microbatches) != (None, None, None, 4):
            raise UserError(f"{thing!r} keeps its costs, ranks, layers and microbatches; leave them out here")
    else:
        if not (isinstance(thing, str | Plan | Program | Checked) or callable(thing) or inspect.iscoroutine(thing)):
            refuse_argument("thing", thing, "a timeline, a prediction, a value, a store, a strategy or a program")
        thing = simulate(cast(Any, thing), costs, ranks=ranks, layers=layers, microbatches=microbatches)
    thing = thing.timeline() if isinstance(thing, Prediction) else thing
    svg = timeline_svg(thing, title, color_by=color_by) if isinstance(thing, Timeline) else picture(thing)
    if svg is None:
        raise UserError("this store is empty, so there is nothing to draw; draw it when it has values")
    if path is not None:
        from shardlab.cli.options import writing
        from shardlab.common.files import write_atomically

        with writing("draw", Path(path)):
            write_atomically(Path(path), svg)
    return Drawing(svg)


def _inputs(
    strategy: AnyStrategy, ranks: Ranks, layers: Layers, microbatches: int
) -> tuple[StrategyEntry, int, int | Sizes]:
    """Return the strategy, its number of ranks, and its number of layers or its sizes.

    Raises:
        UserError: for an unknown name, an object that is not a strategy, and numbers below 1.
    """
    from shardlab.cli.plan_options import NO_FLAGS
    from shardlab.strategies import STRATEGIES, Plan
    from shardlab.strategies.registry import StrategyEntry, entry_from_plan

    numbers: dict[str, tuple[object, Any]] = {
        "ranks": (ranks, Mesh | None),
        "layers": (layers, Sizes | None),
        "microbatches": (microbatches, ()),
    }
    for name, (number, others) in numbers.items():
        if type(number) is int and number < 1:
            raise UserError(f"{name}: {number} is too few; give 1 or more")
        if type(number) is not int and not isinstance(number, others):
            raise UserError(f"{name}: {number!r:.100} is not a whole number; give 1 or more")
    count = ranks.world if isinstance(ranks, Mesh) else ranks
    if isinstance(strategy, str):
        entry, count = NO_FLAGS.entry(strategy, count)
    elif isinstance(strategy, Plan):
        if count not in (None, strategy.mesh.world):
            raise UserError(f"the plan's mesh {strategy.mesh} does not fit on {count} ranks; leave them out")
        entry, count = entry_from_plan(strategy, "plan"), strategy.mesh.world
    elif callable(strategy):
        code = getattr(strategy, "__code__", None)
        name = f"{code.co_filename}:{code.co_name}" if code else "program"
        entries = [candidate for candidate in STRATEGIES.values() if candidate.program is strategy]
        entry = entries[0] if entries else StrategyEntry(name, strategy, "as its program says", "")
        count = entry.ranks if count is None else count
    elif inspect.iscoroutine(strategy):
        strategy.close()  # which would otherwise warn that it was never awaited
        raise UserError(f"{strategy.__name__}(...) has been called already; give {strategy.__name__} itself")
    else:
        refuse_argument("strategy", strategy, "a name, a plan, or an async function of one rank")
    if isinstance(ranks, Mesh) and entry.plan is None:
        entry = replace(entry, mesh={count: ranks}.__getitem__)
    elif isinstance(ranks, Mesh) and ranks != (mesh := entry.grid(count)):
        raise UserError(
            f"ranks is the mesh {ranks}, and the plan's mesh is {mesh}; leave ranks out, or give a plan with this mesh"
        )
    return entry, count, entry.default_layers(count) if layers is None else layers
