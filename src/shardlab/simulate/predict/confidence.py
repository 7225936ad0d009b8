"""Expected error of a prediction: the errors of earlier predictions of the most similar measured runs.

`errors.toml` beside this file lists measured runs by publisher and kind, with the relative errors of their predicted
step time and memory (predicted / measured - 1). Each run was predicted with constants that were fitted without the runs
of its publisher (`benchmarks/regenerate.py` writes the list). A kind is the recipe, the device, whether the model is a
mixture of experts, the axes of the mesh, and the length of a sequence.

`confidence` picks the runs of the same kind as a step, or else those of the nearest kinds. If a step has a property
that no run of its recipe has, or if only one publisher measured its kind, the error is at least that of similar first
predictions (`first_sight`), which were made before any run of the publisher was known.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from statistics import mean
from typing import Any, Literal, Protocol

from shardlab.common.fields import read_value
from shardlab.common.files import load_table
from shardlab.common.text import bytes_text, counted
from shardlab.language import Mesh
from shardlab.models import Blocks
from shardlab.simulate.hardware import DEVICES, Cluster
from shardlab.simulate.predict.recipe import OWN, Recipe

Figure = Literal["time", "memory"]
"""Predicted figure for which errors are known."""

AXES = ("tp", "pp", "cp")
"""Axes of a mesh that distinguish kinds of steps, because they bring other kernels and collectives."""

FEW = 5
"""Smallest number of runs that suffice; if there are fewer, the runs of the next nearest kinds are added."""

LONGER = 4
"""Ratio of two sequence lengths from which they count as different kinds."""

OTHER_LENGTH, OTHER_SWITCH, OTHER_AXIS, OTHER_RECIPE, OTHER_MODEL = 1, 1, {"pp": 2, "tp": 4, "cp": 4}, 10, 100
OTHER_SIZE, OTHER_DEVICE, RELATED_RECIPE = 3, 8, 3
"""Distances of two kinds that differ in one property. Devices with the same efficiencies, and recipes that build on one
another, are nearer than others. A mixture of experts is far from a dense model, whatever the other properties."""


class Step(Protocol):
    """Attributes of a `Workload` that decide its kind."""

    @property
    def mesh(self) -> Mesh: ...
    @property
    def model(self) -> Blocks: ...
    @property
    def cluster(self) -> Cluster: ...
    @property
    def recipe(self) -> Recipe: ...


@dataclass(frozen=True)
class Kind:
    """Kind of a step.

    Attributes:
        recipe: the recipe, then the recipes on which it builds.
        switches: the recipe's switches that differ from their defaults, each as `name=value`.
        device: name of the device.
        mixture: whether the model is a mixture of experts.
        axes: axes of `AXES` with several ranks (None: any axes).
        seq_len: tokens of a sequence.
    """

    recipe: tuple[str, ...]
    switches: frozenset[str]
    device: str
    mixture: bool
    axes: frozenset[str] | None
    seq_len: int

    @classmethod
    def of(cls, step: Step) -> Kind:
        """Return the kind of a step."""
        axes = frozenset(axis for axis in AXES if step.mesh.sizes()[axis] > 1)
        return cls.of_problem(step.recipe, step.cluster, step.model, axes)

    @classmethod
    def of_problem(cls, recipe: Recipe, cluster: Cluster, model: Blocks, axes: frozenset[str] | None = None) -> Kind:
        """Return the kind of a model's steps on a cluster, for any plan unless `axes` are given."""
        mixture = getattr(model, "experts", 0) > 1
        switches = frozenset(f"{name}={value}" for name, value in recipe.changed_switches.items())
        return cls((recipe.name, *recipe.bases), switches, cluster.device.name, mixture, axes, model.seq_len)


@dataclass(frozen=True)
class RunErrors:
    """Errors of the predictions of one publisher's runs of one kind.

    Attributes:
        publisher: publisher of the runs.
        recipe, device, seq_len, switches, mixture, axes: the kind of the runs (see `Kind`).
        time, memory: errors of the runs with a measured time or memory, predicted / measured - 1.
    """

    publisher: str
    recipe: str
    device: str
    seq_len: int
    switches: tuple[str, ...] = ()
    mixture: bool = False
    axes: tuple[str, ...] = ()
    time: tuple[float, ...] = ()
    memory: tuple[float, ...] = ()

    def errors(self, figure: Figure) -> tuple[float, ...]:
        """Return the errors of a figure."""
        return self.time if figure == "time" else self.memory

    def distance(self, kind: Kind) -> int:
        """Return the distance of these runs from a kind (0: they are of this kind)."""
        distance = OTHER_MODEL * (self.mixture != kind.mixture)
        if self.recipe != kind.recipe[0]:
            distance += RELATED_RECIPE if self.recipe in kind.recipe else OTHER_RECIPE
        if self.device != kind.device:
            distance += OTHER_SIZE if _same_chip(self.device, kind.device) else OTHER_DEVICE
        if kind.axes is not None:
            distance += sum(OTHER_AXIS[axis] for axis in kind.axes.symmetric_difference(self.axes))
        distance += OTHER_SWITCH * len(kind.switches.symmetric_difference(self.switches))
        long, short = max(self.seq_len, kind.seq_len), min(self.seq_len, kind.seq_len)
        return distance + OTHER_LENGTH * (long >= LONGER * short)


def _same_chip(one: str, other: str) -> bool:
    """Return whether two devices have the same peak FLOP/s, such as two boards or memory sizes of a GPU."""
    return one == other or (one in DEVICES and other in DEVICES and DEVICES[one].flops == DEVICES[other].flops)


@cache
def measured_runs() -> tuple[RunErrors, ...]:
    """Return the errors of all measured runs, each predicted with constants fitted without its publisher's runs."""
    return _read("runs")


@cache
def first_sight() -> tuple[RunErrors, ...]:
    """Return the errors of first predictions, made before any run of the publisher was known."""
    return _read("first_sight")


def _read(name: str) -> tuple[RunErrors, ...]:
    table = load_table("simulate/predict/errors.toml")
    return read_value(tuple[RunErrors, ...], table[name], "errors.toml", name)


NAMED = 3
"""Largest number of recipes or devices that a text names. If there are more, the text gives their number."""


@dataclass(frozen=True)
class Confidence:
    """Errors of the predictions of similar steps in the past.

    Attributes:
        figure: "time" or "memory".
        runs: number of runs.
        mean, worst: mean and maximum of the absolute values of the errors (predicted / measured - 1).
        bias: mean of the signed errors. Below 0, predictions are too fast or too small.
        basis: the runs as text, such as "26 runs of megatron-core on h100".
        recipes, devices, publishers: recipes, devices and publishers of the runs.
        unmeasured: as text, properties of the step that no run of its recipe has or, if there are none, the fact that
            only one publisher measured its kind (empty: the kind is measured).
        at_least: lower bound of the expected error, from first predictions, if the step is unmeasured (0: it is not).
    """

    figure: Figure
    runs: int
    mean: float
    worst: float
    bias: float
    basis: str
    recipes: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    publishers: tuple[str, ...] = ()
    unmeasured: tuple[str, ...] = ()
    at_least: float = 0.0

    @property
    def error(self) -> float:
        """Expected absolute error of the prediction, relative to the measurement."""
        return max(self.mean, self.at_least)

    def __str__(self) -> str:
        """Return the expected error and its basis as text."""
        lean = "" if abs(self.bias) < LEANING * self.mean else f", mostly too {LEANS[self.figure][self.bias > 0]}"
        if not self.unmeasured:
            unseen = ", publisher left out" if self.publishers else ""
            return f"{self.figure} ± {self.mean:.1%}, at most {self.worst:.0%}{lean}: {self.basis}{unseen}"
        new = " as for new publishers" if self.at_least > self.mean else ""
        nearest = f"{self.basis} are off by {self.mean:.1%}, at most {self.worst:.0%}{lean}"
        return f"{self.figure} ± {self.error:.1%}{new}: {', '.join(self.unmeasured)}; {nearest}"

    def fields(self) -> dict[str, Any]:
        """Return the error and the runs for --json."""
        return {"expected_error": self.error, **asdict(self), "text": str(self)}


LEANING = 0.6
"""Smallest ratio of the bias to the mean absolute error at which the text names the bias."""

LEANS: dict[Figure, tuple[str, str]] = {"time": ("fast", "slow"), "memory": ("small", "large")}
"""Words for the bias of predictions: for errors below 0, and above."""

ON_PROFILES = Confidence("time", 34, 0.061, 0.192, 0.0, "34 steps on two CPU cores")
"""Errors on a machine with a measured profile: the steps of runs 7 and 8 of docs/agreement.md."""


def step_confidence(step: Step) -> tuple[Confidence, ...]:
    """Return the confidence of a step's predicted time and memory."""
    return confidences(Kind.of(step), step.cluster)


def confidences(kind: Kind, cluster: Cluster) -> tuple[Confidence, ...]:
    """Return the confidence of the time and memory of a kind's steps.

    With a profile, only that of the time is known.
    """
    if cluster.profile is not None:
        return (ON_PROFILES,)
    return confidence(kind, "time"), confidence(kind, "memory")


@cache
def confidence(kind: Kind, figure: Figure, left_out_publisher: str = "") -> Confidence:
    """Return the confidence of the time or the memory of a kind's steps, from the runs of the nearest kinds.

    Args:
        kind: the kind.
        figure: "time" or "memory".
        left_out_publisher: publisher whose runs are left out.
    """
    runs = [run for run in measured_runs() if run.publisher != left_out_publisher]
    near = nearest(runs, kind, figure)
    errors = [error for run in near for error in run.errors(figure)]
    sizes = [abs(error) for error in errors]
    recipes, devices = _sorted(run.recipe for run in near), _sorted(run.device for run in near)
    publishers = _sorted(run.publisher for run in near)
    unmeasured = [*_unmeasured(kind, [run for run in runs if run.errors(figure)], figure)]
    if not unmeasured and len(publishers) == 1:
        unmeasured = [f"only {publishers[0]} measured it"]
    first = [run for run in first_sight() if run.publisher != left_out_publisher] if unmeasured else []
    first = nearest(first, kind, figure)
    return Confidence(
        figure,
        len(errors),
        mean(sizes),
        max(sizes),
        mean(errors),
        f"{counted(len(errors), 'run')} of {_names(recipes, 'recipe')} on {_names(devices, 'device')}",
        recipes,
        devices,
        publishers,
        tuple(unmeasured),
        _first_error(first, near, kind, figure),
    )


MOST_TIMES = 3
"""Largest ratio of the error of first predictions to the error of predictions without the runs of their publisher (for
the time of dense models, 16 % to 5 %). A larger ratio comes from predictions that were corrected since: those of
mixtures were 64 % too fast at first."""


def _first_error(first: Sequence[RunErrors], near: Sequence[RunErrors], kind: Kind, figure: Figure) -> float:
    """Return the lower bound of a kind's expected error that follows from first predictions (0: `first` is empty).

    Args:
        first: first predictions of the nearest kinds.
        near: runs of the nearest kinds, predicted without their publisher.
        kind: the kind.
        figure: "time" or "memory".
    """
    if not first:
        return 0.0
    error_size = mean(abs(error) for run in first for error in run.errors(figure))
    if any(run.mixture != kind.mixture for run in near):
        return error_size
    return min(error_size, MOST_TIMES * mean(abs(error) for run in near for error in run.errors(figure)))


def nearest(runs: Iterable[RunErrors], kind: Kind, figure: Figure) -> list[RunErrors]:
    """Return the runs of the nearest kinds, at least `FEW` of them unless that would mix dense models and mixtures."""
    by_distance = sorted((run for run in runs if run.errors(figure)), key=lambda run: run.distance(kind))
    near: list[RunErrors] = []
    for run in by_distance:
        distance = run.distance(kind)
        if near and distance > near[-1].distance(kind):
            has_enough = sum(len(one.errors(figure)) for one in near) >= FEW
            if has_enough or distance >= OTHER_MODEL > near[-1].distance(kind):
                break
        near.append(run)
    return near


def _unmeasured(kind: Kind, runs: Sequence[RunErrors], figure: Figure) -> Iterator[str]:
    """Yield, as text, the properties of a step that no run of its recipe has, or that no run has at all."""
    noun = "run" if figure == "time" else "memory"
    recipe = kind.recipe[0]
    of_recipe = [run for run in runs if run.recipe == recipe]
    if recipe == OWN.name:
        yield NEVER_RUN
    elif not of_recipe:
        yield f"no {noun} of {recipe} is known"
    if not any(_same_chip(run.device, kind.device) for run in runs):
        yield f"no {noun} on {kind.device} is known"
    elif of_recipe and not any(_same_chip(run.device, kind.device) for run in of_recipe):
        yield f"no {noun} of {recipe} on {kind.device}"
    similar = of_recipe or runs
    of_recipe_text = f" of {recipe}" if of_recipe else ""
    if kind.mixture and not any(run.mixture for run in similar):
        yield f"no {noun}{of_recipe_text} of a mixture of experts"
    axes = [axis for axis in AXES if axis in (kind.axes or ()) and not any(axis in run.axes for run in similar)]
    if axes and recipe != OWN.name:
        yield f"no {noun}{of_recipe_text} with {' or '.join(axes)}"
    longest = max(run.seq_len for run in similar)
    if kind.seq_len >= LONGER * longest and recipe != OWN.name:
        yield f"no {noun}{of_recipe_text} with sequences of more than {longest:,} tokens"


NEVER_RUN = f"{OWN.name} has never run on several GPUs"
"""Text for Shardlab's executor (docs/limits.md)."""


def _names(names: Sequence[str], noun: str) -> str:
    return ", ".join(names) if len(names) <= NAMED else counted(len(names), noun)


def _sorted(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(names)))


MOST_MARGIN = 0.075
"""Largest share of a device's memory that a plan must leave free for the error of its prediction."""


def memory_margin(recipe: Recipe, cluster: Cluster, model: Blocks) -> float:
    """Return the bytes of a device that must stay free for a plan to be chosen: 0 on CPU cores.

    It is the larger of the recipe's `margin_bytes` and the expected error of the predicted memory. The error counts as
    at most `MOST_MARGIN` of the device's memory.
    """
    if cluster.on_cpu:
        return 0.0
    error = confidence(Kind.of_problem(recipe, cluster, model), "memory").error
    return max(recipe.memory.margin_bytes, min(MOST_MARGIN, error) * cluster.device.memory)


def may_not_fit(confidences: Sequence[Confidence], total: float, capacity: float) -> str:
    """Return a warning if a step leaves less memory free than its expected error ("": it leaves enough).

    Args:
        confidences: confidence of the step's figures.
        total: predicted bytes in use on the fullest device.
        capacity: bytes of the device's memory.
    """
    error = next((confidence.error * total for confidence in confidences if confidence.figure == "memory"), 0.0)
    if total + error <= capacity:
        return ""
    free, expected = (bytes_text(max(0.0, bytes), 1) for bytes in (capacity - total, error))
    return f"may not fit: {free} are free, and the expected error of memory is {expected}"


def sure_as_json(confidences: Sequence[Confidence], doubt: str) -> dict[str, Any]:
    """Return the confidence of a step's figures for --json.

    Args:
        confidences: confidence of its figures.
        doubt: the warning that it may not fit.
    """
    return {**{confidence.figure: confidence.fields() for confidence in confidences}, "may_not_fit": doubt}
