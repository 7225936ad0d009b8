"""Measured points, and the numbers of a profile that are fitted to them.

All fits minimize the squares of the relative errors, so that short times count as much as long ones
(`nonnegative_least_squares`, `fit_relative`). Three kinds of numbers follow:

- Rates of kernels (`fit_kernels`). The time of a layer is the overhead of its op, plus for each kernel (launch + FLOPs
  / rate + bytes / bandwidth), all of them 0 or more. Every measured layer is one equation.
- Lines of collectives (`fit_lines`): latency, and seconds per byte. A short measurement on a busy machine can give
  impossible lines, so each line has a reason to doubt it, or None.
- Costs of a collective during a step that computes (`fit_contention`, `fit_lag`).

The second half has the measured points (`CollectivePoint`, `LayerPoint`, ...) and their file. Each point is appended as
soon as it is measured, so that an interrupted measurement keeps its points. At the end are the small models whose
layers are timed (`Subject`).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from shardlab.check import Checked, check
from shardlab.language import Mesh, Op, OpKind, UserError, trace
from shardlab.language.pass_names import Lag
from shardlab.language.rules.kinds import bytes_of
from shardlab.models import GPT, CutModel, Llama, Model, cut
from shardlab.models.layout import Kernel
from shardlab.simulate.hardware import AlphaBeta, Rate
from shardlab.simulate.hardware.collectives import COSTS
from shardlab.simulate.hardware.device import algorithm_bandwidth, bus_bandwidth, cs336_bandwidth
from shardlab.simulate.hardware.profile import families, profiled_name
from shardlab.strategies.load import load
from shardlab.strategies.plan.plan import Plan

Array = NDArray[np.float64]

ROUNDS = 8
"""Number of rounds of reweighting. After them, the changes per round are smaller than the variation of timings."""


@dataclass(frozen=True)
class FitErrors:
    """Median and largest absolute error of `points` predictions, relative to the measurements."""

    median: float
    worst: float
    points: int

    @classmethod
    def compare(cls, predicted: Sequence[float], measured: Sequence[float]) -> FitErrors:
        errors = [abs(p - m) / m for p, m in zip(predicted, measured, strict=True)]
        return cls(median(errors), max(errors), len(errors))


def nonnegative_least_squares(matrix: Array, target: Array) -> Array:
    """Return the x >= 0 that minimizes |matrix x - target| (active set method, Lawson and Hanson 1974, chapter 23).

    Args:
        matrix: (equations, unknowns). If a column is zero, its unknown is 0.
        target: (equations,).

    Returns:
        (unknowns,).
    """
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1  # columns in seconds and in seconds per byte differ by ten orders of magnitude
    triangle = cast(Array, np.linalg.qr(np.column_stack([matrix / scale, target]), mode="r"))
    scaled, target = triangle[:, :-1], triangle[:, -1]  # an equivalent problem with as many equations as unknowns
    x = np.zeros(scaled.shape[1])
    free = np.zeros(len(x), dtype=bool)
    tolerance = 1e-12 * max(1.0, float(np.abs(scaled.T @ target).max(initial=0)))
    for _ in range(10 * len(x)):
        slope = scaled.T @ (target - scaled @ x)
        slope[free] = -np.inf
        if not len(x) or slope.max() <= tolerance:
            break
        free[int(slope.argmax())] = True
        while True:
            trial = np.zeros(len(x))
            trial[free] = np.linalg.lstsq(scaled[:, free], target, rcond=None)[0]
            nonpositive = free & (trial <= 0)
            if not nonpositive.any():
                break
            # the longest step that keeps x >= 0
            step = float((x[nonpositive] / (x[nonpositive] - trial[nonpositive] + 1e-300)).min())
            x += step * (trial - x)
            free &= x > 1e-14 * max(1.0, float(x.max()))
            x[~free] = 0
        x = trial
    return x / scale


def fit_relative(matrix: Array, measured: Array) -> Array:
    """Return the x >= 0 for which `matrix @ x` has the smallest relative errors.

    Timings on a busy machine have outliers, which are always too large. Residuals above the typical one therefore count
    linearly instead of squared (Huber 1964, by iteratively reweighted least squares).

    Args:
        matrix: (points, unknowns).
        measured: (points,), positive.
    """
    relative = matrix / measured[:, None]
    weights = np.ones(len(measured))
    x = np.zeros(matrix.shape[1])
    for _ in range(ROUNDS):
        x = nonnegative_least_squares(relative * weights[:, None], weights)
        residuals = np.abs(relative @ x - 1)
        scale = max(1.5 * float(np.median(residuals)), 1e-9)
        weights = np.sqrt(np.minimum(1, scale / np.maximum(residuals, 1e-300)))
    return x


def alpha_beta(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Return latency in seconds and seconds per byte: time = alpha + beta x bytes (Hockney 1994).

    Args:
        sizes, seconds: measurements, one at each size. With a single size, all time is latency.
    """
    if len(set(sizes)) < 2:
        return median(seconds), 0.0
    matrix = np.stack([np.ones(len(sizes)), np.asarray(sizes, dtype=float)], axis=1)
    alpha, beta = fit_relative(matrix, np.asarray(seconds, dtype=float))
    return float(alpha), float(beta)


Rates = dict[tuple[str, str], Rate]
"""Rates by family of kernels and dtype, as in `hardware.Profile`."""

POINTWISE = "pointwise:"

OPS_WITH_OVERHEAD = ("forward", "backward", "backward_input", "backward_weight", "load_batch")
"""Ops that take time besides their kernels, to build or traverse autograd's graph or to load tokens. All other ops
consist of one kernel."""


def fit_kernels(points: Sequence[LayerPoint]) -> Rates:
    """Return the rates of every family in every dtype, from layers that were measured with the same number of
    processes.

    Pointwise kernels that were not measured get rates that are fitted to all measured pointwise kernels.
    """
    rates: Rates = {}
    for dtype in sorted({point.dtype for point in points}):
        of_dtype = [point for point in points if point.dtype == dtype]
        pointwise = _fit(of_dtype, any_pointwise=True)
        other_rates = _fit(of_dtype, any_pointwise=False)
        rates |= {(family, dtype): rate for family, rate in (pointwise | other_rates).items()}
    return rates


def predict(point: LayerPoint, rates: Rates) -> float:
    """Return the predicted seconds of an op on a layer."""
    overhead = rates.get((f"op:{point.op}", point.dtype))
    kernels = (rates[family, point.dtype].seconds(flops, bytes) for family, flops, bytes in point.kernels)
    return (overhead.launch if overhead else 0.0) + sum(kernels)


def errors_by_layer(points: Sequence[LayerPoint], rates: Rates) -> dict[tuple[str, str], FitErrors]:
    """Return the errors of rates on the points to which they were fitted, by (layer, op)."""
    groups: dict[tuple[str, str], list[LayerPoint]] = defaultdict(list)
    for point in points:
        groups[point.layer, point.op].append(point)
    return {key: rate_errors(group, rates) for key, group in groups.items()}


def rate_errors(points: Sequence[LayerPoint], rates: Rates) -> FitErrors:
    """Return the errors of rates on the points to which they were fitted."""
    return FitErrors.compare([predict(point, rates) for point in points], [point.seconds for point in points])


MOST_MISSED = 1 / 3
"""A line is doubted if the relative errors of half of its points exceed this."""

ONE_SIZE = "a single size does not separate latency from bandwidth; give a --max above --min"
NO_SLOPE = "larger sizes hardly took longer, so bandwidth is a guess; measure longer and larger: --seconds, --max"
SCATTERED = "half of the points miss the line by more than a third; measure longer: --seconds"
NO_LATENCY = "no latency was found, so small sizes are too cheap; measure longer and smaller: --seconds, --min"


@dataclass(frozen=True)
class FittedLine:
    """Line of a collective, its errors, and the reason to doubt it (None: no doubt)."""

    line: AlphaBeta
    errors: FitErrors
    doubt: str | None


def collective_seconds(points: Sequence[Point]) -> dict[tuple[str, int], dict[int, float]]:
    """Return the measured seconds by bytes, for each (name of the collective in a profile, ranks)."""
    seconds: dict[tuple[str, int], dict[int, float]] = defaultdict(dict)
    for point in points:
        if isinstance(point, CollectivePoint):
            seconds[profiled_name(point.kind, point.bytes, point.ranks), point.ranks][point.bytes] = point.seconds
    return seconds


def fit_lines(points: Sequence[Point]) -> dict[tuple[str, int], FittedLine]:
    """Return the line of every collective and group size, fitted to `collective_seconds`."""
    return {key: fit_line(seconds) for key, seconds in collective_seconds(points).items()}


def fit_line(seconds_by_size: Mapping[int, float]) -> FittedLine:
    """Fit the line of a collective.

    If the time grows less with the size than the points scatter, the fit has no finite bandwidth. The bandwidth is then
    the largest size over its whole time, with latency. It is a lower bound, so that larger sizes are predicted to take
    longer.

    Args:
        seconds_by_size: seconds by bytes. A barrier has no bytes, so its line has only a latency.
    """
    line = AlphaBeta(*alpha_beta([*seconds_by_size], [*seconds_by_size.values()]))
    errors, largest = line_errors(line, seconds_by_size), max(seconds_by_size)
    doubt = None
    if largest and line.beta * largest <= errors.median * line.alpha:
        beta = seconds_by_size[largest] / largest
        line = AlphaBeta(max(0.0, median(seconds - beta * size for size, seconds in seconds_by_size.items())), beta)
        errors = line_errors(line, seconds_by_size)
        doubt = NO_SLOPE if len(seconds_by_size) > 1 else ONE_SIZE
    elif errors.median > MOST_MISSED:
        doubt = SCATTERED
    elif largest and line.alpha == 0:
        doubt = NO_LATENCY
    return FittedLine(line, errors, doubt)


def line_errors(line: AlphaBeta, seconds: Mapping[int, float]) -> FitErrors:
    """Return the errors of a line on its points."""
    return FitErrors.compare([line.seconds(size) for size in seconds], [*seconds.values()])


def fit_contention(points: Sequence[OverlapPoint]) -> float:
    """Return the seconds that compute loses for each second of concurrent communication.

    It is the median over the third of the points with the most bytes. Smaller points mostly measure the start of the
    communication.
    """
    ascending = sorted(points, key=lambda point: point.bytes)
    return median(point.contention for point in ascending[2 * len(points) // 3 :])


def fit_lag(points: Sequence[OverlapPoint]) -> Lag:
    """Return the lag of ranks that wait for each other: a share of their compute time, its limit, and its hidden part.

    Short rounds determine the share, and long rounds the limit. The hidden part is the time that rounds with concurrent
    communication lose beyond contention, as a share of the lag.
    """
    ascending = sorted(points, key=lambda point: point.compute)
    middle = len(ascending) // 2
    short, long = ascending[: middle or 1], ascending[middle:]
    share = median(point.lag / point.compute for point in short)
    lag = Lag(min(1.0, share), median(point.lag for point in long))  # a rank waits at most until the other rank stops
    contention = fit_contention(points)
    parts = [
        (point.lost_seconds - contention * min(point.compute, point.alone)) / lag.seconds(point.compute)
        for point in points
        if lag.seconds(point.compute)
    ]
    return replace(lag, hidden=min(1.0, max(0.0, median(parts)))) if parts else lag


KINDS = (*COSTS, "send_recv")
"""Names of the measured collectives. The last one is a message from one rank to another."""


@dataclass(frozen=True)
class CollectivePoint:
    """Measurement of one collective at one size.

    Attributes:
        kind: name of the collective (see `KINDS`).
        ranks: number of ranks of each group. All groups of the world work at the same time.
        bytes: size of the whole value: the result of an all_gather or gather, the input of a reduce_scatter or scatter,
            one rank's input of an all_to_all; 0 for a barrier.
        seconds: seconds of one call: the mean over the calls of a batch and the ranks, then the median over batches.
        iterations: number of timed calls.
        wrong: number of wrong elements in the results of all ranks.
    """

    kind: str
    ranks: int
    bytes: int
    seconds: float
    iterations: int
    wrong: int

    @property
    def algorithm_bandwidth(self) -> float:
        """Bytes of the whole value per second."""
        return algorithm_bandwidth(self.bytes, self.seconds)

    @property
    def bus_bandwidth(self) -> float:
        """Bytes per second that each rank's link carries."""
        return bus_bandwidth(self.kind, self.bytes, self.ranks, self.seconds)

    @property
    def cs336_bandwidth(self) -> float | None:
        """Bandwidth as CS336 computes it, in 2^30 bytes per second; None if CS336 does not measure this collective."""
        return cs336_bandwidth(self.kind, self.bytes, self.ranks, self.seconds)


@dataclass(frozen=True)
class OverlapPoint:
    """Measurement of a collective in rounds with matrix products of about the same duration, or longer.

    Attributes:
        kind, ranks, bytes: as in `CollectivePoint`.
        alone: seconds of the collective when it is called repeatedly.
        compute: seconds of the products of a round.
        communication: seconds that the collective adds to a round if it follows the products; at least `alone`.
        together: seconds of a round that starts the collective, computes the products, and then waits for the
            collective.
    """

    kind: str
    ranks: int
    bytes: int
    alone: float
    compute: float
    communication: float
    together: float

    @property
    def overlap(self) -> float:
        """Share of the shorter of the two durations that is hidden.

        1: together they take as long as the longer one. 0: they take the sum of both. Below 0: they slow each other
        down.
        """
        return (self.compute + self.communication - self.together) / min(self.compute, self.communication)

    @property
    def lag(self) -> float:
        """Seconds by which the collective takes longer after products than when it is called repeatedly."""
        return self.communication - self.alone

    @property
    def lost_seconds(self) -> float:
        """Seconds by which products and collective together take longer than the longer one of the two alone."""
        return max(0.0, self.together - max(self.compute, self.alone))

    @property
    def contention(self) -> float:
        """Seconds lost for each second in which products and collective ran at the same time.

        0: neither slows the other down. 1: they run one after the other. Above 1: the cores have more work than for
        both separately.
        """
        return self.lost_seconds / min(self.compute, self.alone)


KernelWork = tuple[str, float, float]
"""Family of a kernel (see `hardware.Profile`), its FLOPs, and the bytes that it moves."""


@dataclass(frozen=True)
class LayerPoint:
    """Measurement of one op of a training step on one layer.

    Attributes:
        layer: kind of the layer: "embedding", "norm", "attention", "mlp", "head", "first block", ...
        op: name of the op on the tape: "forward", "backward", "backward_input", ...
        width: features of a token.
        rows, tokens: sequences of the microbatch, and tokens of each.
        elements: parameters of the layer, padded.
        dtype: dtype of weights and activations.
        processes: number of processes that computed at the same time, each on its own device or core.
        seconds: seconds of one call: the mean over processes of the median over steps.
        fastest: like `seconds`, with the minimum over steps in place of the median; far below it on a busy machine.
        kernels: (family, FLOPs, bytes) of each kernel.
    """

    layer: str
    op: str
    width: int
    rows: int
    tokens: int
    elements: int
    dtype: str
    processes: int
    seconds: float
    fastest: float
    kernels: tuple[KernelWork, ...]

    @property
    def flops(self) -> float:
        return sum(flops for _, flops, _ in self.kernels)


@dataclass(frozen=True)
class PeakPoint:
    """Measurement of the fastest matrix product.

    Attributes:
        dtype: dtype of both matrices.
        processes: number of processes that computed at the same time.
        size: rows and columns of both matrices.
        flops: FLOPs per second of one process.
        threads: threads of each process.
    """

    dtype: str
    processes: int
    size: int
    flops: float
    threads: int = 1


Point = CollectivePoint | OverlapPoint | LayerPoint | PeakPoint

POINTS: dict[str, type[Any]] = {
    "collective": CollectivePoint,
    "overlap": OverlapPoint,
    "layer": LayerPoint,
    "peak": PeakPoint,
}


def append(path: Path, point: Point) -> None:
    """Append a point to a file."""
    name = next(name for name, kind in POINTS.items() if isinstance(point, kind))
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"point": name, **asdict(point)}) + "\n")


def read_points(path: Path) -> list[Point]:
    """Read all points of a file; none if there is no file. An incomplete last line is ignored."""
    if not path.exists():
        return []
    points: list[Point] = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n"):
            fields = json.loads(line)
            kind = POINTS[fields.pop("point")]
            if "kernels" in fields:
                fields["kernels"] = tuple(tuple(kernel) for kernel in fields["kernels"])
            points.append(kind(**fields))
    return points


MICROBATCHES = 2
"""Number of microbatches of a timed step. The second gradient is added to the first."""

MEASURED = (
    OpKind.FORWARD,
    OpKind.LOSS,
    OpKind.BACKWARD,
    OpKind.BACKWARD_INPUT,
    OpKind.BACKWARD_WEIGHT,
    OpKind.LOAD_BATCH,
    OpKind.NORM,
    OpKind.UPDATE,
)


OF_NO_LAYER = {OpKind.LOSS: "loss", OpKind.UPDATE: "model", OpKind.LOAD_BATCH: "batch"}
"""Ops that work on no layer, and the words that stand for the kind of their layer."""

DTYPES = ("float32", "bfloat16", "float16", "float64")
"""Dtypes in which layers are computed."""


class Shape(NamedTuple):
    """Width of a model, and the sequences and tokens of a microbatch."""

    width: int
    rows: int
    tokens: int


def parse_batch(text: str) -> tuple[int, int]:
    """Parse the sequences of a microbatch, and the tokens of each.

    >>> parse_batch("8x128")
    (8, 128)

    Raises:
        UserError: if the text is not such a pair.
    """
    rows, _, tokens = text.lower().partition("x")
    if not (rows.isdecimal() and tokens.isdecimal() and int(rows) and int(tokens)):
        raise UserError(f"{text!r} is not a microbatch; write SEQUENCESxTOKENS, such as 8x128")
    return int(rows), int(tokens)


@dataclass(frozen=True)
class Subject:
    """Model whose layers are timed in a training on one rank.

    Attributes:
        model: the model, split into blocks or half-blocks.
        rows: sequences of a microbatch.
        split: whether the backward pass has two halves.
        dtype: name of the dtype in torch.
    """

    model: Model
    rows: int
    split: bool
    dtype: str

    def checked(self) -> Checked:
        """Return a checked step of two microbatches, one after the other."""
        plan = Plan(schedule="zb-h1" if self.split else "1f1b")
        sizes = self.model.sizes(self.rows, int(bytes_of(self.dtype)))
        return check(trace(load(plan).program, Mesh(), sizes, MICROBATCHES))

    def layer_name(self, op: Op) -> str:
        """Return the kind of layer on which an op works, such as "norm", "attention", "first block" or "loss".

        For an update it is "model", because all layers are updated together.
        """
        if op.kind in OF_NO_LAYER:
            return OF_NO_LAYER[op.kind]
        model, last = self.model, self.model.layers - 1
        if isinstance(model, CutModel):
            if not model.run(op.layer).cut:
                return "norm"
            return model.place(op.layer).split(", ")[-1].replace("feed-forward", "mlp")
        return {0: "first block", last: "last block"}.get(op.layer, "block")

    def work(self, op: Op, elements: int) -> tuple[KernelWork, ...]:
        """Return the kernels of an op on a layer whose weights have `elements` elements."""
        bytes = bytes_of(self.dtype)
        if op.kind is OpKind.UPDATE:
            return (("update", 0.0, float(elements * bytes * UPDATE_MOVES)),)
        if op.kind is OpKind.LOAD_BATCH:
            return ()
        if op.kind is OpKind.NORM:
            return (("pointwise:norm", 0.0, float(elements * bytes)),)
        tokens = self.model.seq_len
        forward = (
            self.model.loss_kernels(self.rows, tokens)
            if op.kind is OpKind.LOSS
            else self.model.kernels(op.layer, self.rows, tokens)
        )
        kernels: list[Kernel] = []
        if op.kind in (OpKind.FORWARD, OpKind.LOSS):
            kernels += forward
        if op.kind in (OpKind.BACKWARD, OpKind.BACKWARD_INPUT, OpKind.LOSS):
            kernels += [gradient_kernel for kernel in forward for gradient_kernel in kernel.backward_input()]
        if op.kind in (OpKind.BACKWARD, OpKind.BACKWARD_WEIGHT):
            kernels += [gradient_kernel for kernel in forward for gradient_kernel in kernel.backward_weight()]
        return tuple((families(kernel)[0], kernel.flops, kernel.elements * bytes) for kernel in kernels)


UPDATE_MOVES = 7
"""Elements that AdamW reads or writes for each element of a weight: it reads gradient, weight and two moments, and
writes all but the gradient."""


def subjects(shape: Shape, dtype: str, vocab_size: int) -> list[Subject]:
    """Return the models that are timed for a shape.

    They are a GPT in blocks (first, middle, last) and one in half-blocks, both with a whole and with a split backward
    pass, and a Llama in half-blocks, which has the same ops but other kernels.
    """
    heads = heads_of(shape.width)
    gpt = GPT(layers=1, hidden_size=shape.width, heads=heads, seq_len=shape.tokens, vocab_size=vocab_size)
    llama = Llama(layers=1, hidden_size=shape.width, heads=heads, seq_len=shape.tokens, vocab_size=vocab_size)
    blocks = replace(gpt, layers=3)
    return [
        *(Subject(model, shape.rows, split, dtype) for split in (False, True) for model in (blocks, cut(gpt))),
        Subject(cut(llama), shape.rows, False, dtype),
    ]


def heads_of(width: int) -> int:
    """Return the number of heads with about 64 features each, as in common models, but at least 2.

    >>> heads_of(64), heads_of(768)
    (2, 12)
    """
    return next((heads for heads in range(max(2, width // 64), width) if width % heads == 0), 1)


def _fit(points: Sequence[LayerPoint], any_pointwise: bool) -> dict[str, Rate]:
    families: dict[str, None] = {}
    for point in points:
        overhead = [f"op:{point.op}"] if point.op in OPS_WITH_OVERHEAD else []
        families |= dict.fromkeys([*overhead, *(_family(kernel, any_pointwise) for kernel in point.kernels)])
    column = {family: number for number, family in enumerate(families)}
    matrix: Array = np.zeros((len(points), len(column), 3))
    for row, point in zip(matrix, points, strict=True):
        if point.op in OPS_WITH_OVERHEAD:
            row[column[f"op:{point.op}"], 0] = 1
        for kernel in point.kernels:
            row[column[_family(kernel, any_pointwise)]] += (1, *kernel[1:])
    measured = np.array([point.seconds for point in points])
    fitted = fit_relative(matrix.reshape(len(points), -1), measured).reshape(-1, 3)
    return {
        family: Rate(float(launch), float(1 / flop) if flop else 0.0, float(1 / byte) if byte else 0.0)
        for family, (launch, flop, byte) in zip(families, fitted, strict=True)
    }


def _family(kernel: KernelWork, any_pointwise: bool) -> str:
    family = kernel[0]
    if any_pointwise and family.startswith(POINTWISE):
        return "pointwise_backward" if family.endswith("_backward") else "pointwise"
    return family
