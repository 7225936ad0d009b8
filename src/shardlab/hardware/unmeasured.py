"""Ranks on CPU cores that nobody has measured, from `unmeasured.toml`: prices to choose by, not to predict with."""

from __future__ import annotations

from shardlab.hardware.cluster import Cluster
from shardlab.hardware.collectives import COSTS
from shardlab.hardware.figure import Figure
from shardlab.hardware.profile import AlphaBeta, Machine, Profile, Rate
from shardlab.program.files import packaged
from shardlab.program.lag import Lag

FIGURES = {name: Figure(**row) for name, row in packaged("hardware/unmeasured.toml")["figure"].items()}
"""Every figure, with where it is from."""

DEVICE = "unmeasured cores"
"""What such a machine's device is called."""

SPEEDS = {"float64": 0.5, "float32": 1.0, "bfloat16": 1.0, "float16": 1.0}
"""By dtype, a core's FLOP/s as a share of those in float32."""


def unmeasured(ranks: int, memory: float) -> Cluster:
    """A machine on which so many ranks run, of so many bytes that they have together."""
    value = {name: figure.value for name, figure in FIGURES.items()}
    line = AlphaBeta(value["latency"], 1 / value["bandwidth"])
    rates = {
        "matmul": (0.0, value["flops"], 0.0),
        "attention": (value["launch"], value["flops"] / 2, 0.0),
        "pointwise": (value["launch"], 0.0, value["memory"]),
        "update": (value["update"], 0.0, value["update_memory"]),
        "op:forward": (value["op"], 0.0, 0.0),
        "op:backward": (value["op"], 0.0, 0.0),
    }
    kernels = {
        (family, dtype): Rate(launch, flops * speed, bytes)
        for family, (launch, flops, bytes) in rates.items()
        for dtype, speed in SPEEDS.items()
    }
    machine = Machine(DEVICE, ranks, "", "gloo")
    lines = {(kind, 2): line for kind in COSTS}
    lag = Lag(value["lag_share"], value["lag_most"], value["lag_hidden"])
    return Cluster.of_profile(Profile(machine, lines, line, kernels, memory, contention=value["contention"], lag=lag))
