"""The table of ops: one row for each op, with all properties that other packages need.

Tracing, the check, the simulator, the pictures and the executor read this table instead of keeping tables of their own.
To add an op, add a row to `OpKind`, a rule in `rules`, the verb that calls it and the function that runs it. Below the
table are common sets of ops, the colours of the rows, and the registry of functions that draw objects in a notebook.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import singledispatch
from typing import Literal, NamedTuple

from shardlab.language.rules.kinds import Kind

Color = Literal[
    "blue", "light blue", "orange", "teal", "green", "black", "brown", "grey", "light grey", "yellow", "magenta", "red",
    "violet", "lilac", "pink", "cream", "rose", "slate", "light slate",
    "olive", "light olive",
]  # fmt: skip
"""Names of colours. `HUES` has the colour of each name in a picture, in a terminal and in Chrome's trace viewer.

Passes are coloured as in the figures of Qi et al. 2023, arXiv 2401.10241: forward blue, input gradient teal, weight
gradient green, full backward orange.
"""


class Stream(Enum):
    """Stream of a rank in which an op runs.

    COMPUTE: ops run one at a time, in tape order. COLLECTIVE and MESSAGE: the op runs beside compute, together with the
    group or the peer. COPY: the op runs beside compute, on this rank only. Ops of the streams COLLECTIVE, MESSAGE and
    COPY have a handle. NONE: bookkeeping, which takes no time.
    """

    COMPUTE = "compute"
    COLLECTIVE = "collective"
    MESSAGE = "message"
    COPY = "copy"
    NONE = "none"


class Price(Enum):
    """Quantity on which the time of a compute op depends. Predictions for a cluster use only BYTES and NOTHING.

    MICROBATCH: the number of microbatches that the op computes. OP: none; every op of the kind takes the same time.
    BYTES: the bytes that the device reads and writes (time 0 without a cluster). NOTHING: the op takes no time.
    """

    MICROBATCH = "microbatch"
    OP = "op"
    BYTES = "bytes"
    NOTHING = "nothing"


class Combiner(Enum):
    """Combination of several values into one: their sum, or their concatenation."""

    SUM = "sum"
    UNION = "union"


@dataclass(frozen=True)
class OpRow:
    """Row of the table of ops.

    Attributes:
        name: name in programs, tapes and messages.
        inputs, outputs: allowed numbers of inputs and outputs (empty inputs: one or more).
        sign: character in a timeline on a terminal. Capital letters are compute.
        color: colour of the sign or box.
        letters: letters on the box of a communication.
        word: name in a picture's legend, if it differs from `name`.
        hatch: matplotlib's pattern over the colour.
        part_of: the pass to which a picture assigns the op.
        stream: stream in which the op runs.
        price: quantity on which the op's time depends.
        root: whether only the root gives a value, or only the root receives one (None: the op has no root).
        combines: how the op combines several values into one (None: it does not).
        in_place: whether the op may overwrite its first input if no later op reads that input.
        ends: indices of the inputs that no later op may read: the op frees or overwrites them.
        saved_input: index of the input that an earlier pass of the layer saved for this op (-1: none).
        keeps: kind of the value that the op may save for a later pass of the layer, as its last output (None: it saves
            none).
    """

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    sign: str = ""
    color: Color = "light grey"
    letters: str = ""
    word: str = ""
    hatch: str = ""
    part_of: str = ""
    stream: Stream = Stream.COMPUTE
    price: Price = Price.OP
    root: Literal["gives", "receives"] | None = None
    combines: Combiner | None = None
    in_place: bool = False
    ends: tuple[int, ...] = ()
    saved_input: int = -1
    keeps: Kind | None = None

    @property
    def legend(self) -> str:
        """Name in a picture's legend."""
        return self.word or self.hyphenated

    @property
    def hyphenated(self) -> str:
        """Name in sentences and tables, such as "all-gather"."""
        return self.name.replace("_", "-")


_COLLECTIVE, _MESSAGE, _COPY, _NONE = Stream.COLLECTIVE, Stream.MESSAGE, Stream.COPY, Stream.NONE
_EACH, _BYTES, _NOTHING = Price.MICROBATCH, Price.BYTES, Price.NOTHING
_SUM, _UNION = Combiner.SUM, Combiner.UNION
_SAVED, _HALF = Kind.SAVED, Kind.SAVED_FOR_WEIGHT


class OpKind(Enum):
    """Kind of a tape's entry, in the order of legends. `row` is its row of the table."""

    _value_: str
    row: OpRow

    def __new__(cls, row: OpRow) -> OpKind:
        self = object.__new__(cls)
        self._value_, self.row = row.name, row
        return self

    __hash__ = object.__hash__  # kinds are dictionary keys in hot loops

    # fmt: off
    FORWARD = OpRow("forward", (2, 3, 4), (1, 2, 3, 4), "F", "blue", part_of="forward", price=_EACH, keeps=_SAVED)
    RECOMPUTE = OpRow("recompute", (2,), (1,), "R", "light blue", hatch="////", part_of="backward", price=_EACH,
                    keeps=_SAVED)
    BACKWARD = OpRow("backward", (4, 5, 6), (2, 3, 4), "B", "orange", part_of="backward", price=_EACH, saved_input=3)
    BACKWARD_INPUT = OpRow("backward_input", (4, 5, 6), (2, 3, 4), "I", "teal", word="backward: input gradient",
                         part_of="backward", price=_EACH, saved_input=3, keeps=_HALF)
    BACKWARD_WEIGHT = OpRow("backward_weight", (3,), (1,), "W", "green", word="backward: weight gradient",
                          part_of="backward_weight", price=_EACH, saved_input=2)
    ATTEND = OpRow("attend", (2,), (1,), "A", "blue", word="attention between slices", hatch="....", part_of="forward",
                 price=_EACH)
    ATTEND_BACKWARD = OpRow("attend_backward", (4,), (2,), "G", "orange", word="its backward", hatch="....",
                          part_of="backward", price=_EACH)
    LOSS = OpRow("loss", (1, 2), (0, 1), "L", "brown")
    LOSS_STATS = OpRow("loss_stats", (1,), (1,), "T", "grey", word="statistics of the loss")
    ADD = OpRow("add", (2,), (1,), "S", "grey", word="sum of gradients", combines=_SUM, in_place=True)
    NORM = OpRow("norm", (1,), (1,), "N", "grey", word="norm of the gradient")
    SCALE = OpRow("scale", (1,), (1,), "M", "grey", word="scaling", price=_BYTES, in_place=True)
    CAST = OpRow("cast", (1,), (1,), "V", "light grey", price=_BYTES)
    CONCATENATE = OpRow("concatenate", (), (1,), "C", "grey", word="concatenation", price=_BYTES, combines=_UNION)
    SLICE = OpRow("slice", (1,), (1,), "P", "grey", price=_NOTHING)
    ZERO_GRADIENT = OpRow("zero_gradient", (0,), (1,), "O", "grey", price=_NOTHING)
    DIRECTION = OpRow("direction", (2, 3), (1,), "H", "grey", word="direction of the update", price=_BYTES)
    UPDATE = OpRow("update", (3, 4, 5), (2,), "U", "black", ends=(1, 2))
    LOAD_BATCH = OpRow("load_batch", (0,), (1,), "D", price=_NOTHING)
    LOAD_WEIGHT = OpRow("load_weight", (0,), (1,), "Y", price=_NOTHING)
    LOAD_OPT_STATE = OpRow("load_opt_state", (0,), (1,), "Z", price=_NOTHING)
    ALL_GATHER = OpRow("all_gather", (1,), (1,), "+", "yellow", "AG", stream=_COLLECTIVE, combines=_UNION)
    REDUCE_SCATTER = OpRow("reduce_scatter", (1,), (1,), "/", "magenta", "RS", stream=_COLLECTIVE, combines=_SUM)
    ALL_REDUCE = OpRow("all_reduce", (1,), (1,), "=", "red", "AR", stream=_COLLECTIVE, combines=_SUM, in_place=True)
    ALL_TO_ALL = OpRow("all_to_all", (1,), (1,), "x", "violet", "AA", stream=_COLLECTIVE)
    BROADCAST = OpRow("broadcast", (0, 1), (0, 1), "*", "lilac", "BC", stream=_COLLECTIVE, root="gives")
    SCATTER = OpRow("scatter", (0, 1), (1,), ":", "pink", "SC", stream=_COLLECTIVE, root="gives")
    GATHER = OpRow("gather", (1,), (0, 1), "&", "cream", "GA", stream=_COLLECTIVE, root="receives", combines=_UNION)
    REDUCE = OpRow("reduce", (1,), (0, 1), "-", "rose", "RE", stream=_COLLECTIVE, root="receives", combines=_SUM,
                 in_place=True)
    BARRIER = OpRow("barrier", (0,), (0,), "|", "light grey", "‖", stream=_COLLECTIVE)
    SEND = OpRow("send", (1,), (0,), ">", "slate", "→", stream=_MESSAGE)
    RECV = OpRow("recv", (0,), (1,), "<", "light slate", "←", word="receive", stream=_MESSAGE)
    OFFLOAD = OpRow("offload", (1,), (1,), "^", "olive", "↓", stream=_COPY)
    RELOAD = OpRow("reload", (1,), (1,), "@", "light olive", "↑", stream=_COPY)
    WAIT = OpRow("wait", (0,), (0,), stream=_NONE, price=_NOTHING)
    FREE = OpRow("free", (1,), (0,), stream=_NONE, price=_NOTHING, ends=(0,))
    # fmt: on


COLLECTIVES = frozenset(kind for kind in OpKind if kind.row.stream is Stream.COLLECTIVE)
POINT_TO_POINT = frozenset(kind for kind in OpKind if kind.row.stream is Stream.MESSAGE)
COPIES = frozenset(kind for kind in OpKind if kind.row.stream is Stream.COPY)
COMMUNICATION = COLLECTIVES | POINT_TO_POINT | COPIES
"""Ops with a handle, which run beside compute until their WAIT."""

BOOKKEEPING = frozenset(kind for kind in OpKind if kind.row.stream is Stream.NONE)

ROOT_GIVES = frozenset(kind for kind in OpKind if kind.row.root == "gives")
"""Collectives in which only the root gives a value."""

ROOT_RECEIVES = frozenset(kind for kind in OpKind if kind.row.root == "receives")
"""Collectives in which only the root receives a value."""

ROOTED = ROOT_GIVES | ROOT_RECEIVES


class Hue(NamedTuple):
    """Colour of an op wherever it is shown.

    Attributes:
        fill: colour in a picture. A pass is drawn in shades, of which this is the darkest.
        terminal: rich's name of the colour. Ops with the same terminal colour differ in their signs.
        lightest: the lightest shade of a pass.
        chrome: name of a colour in Chrome's viewer (catapult's color_scheme.html); "": the viewer chooses.
    """

    fill: str
    terminal: str
    lightest: str = ""
    chrome: str = ""


HUES: dict[Color, Hue] = {
    "blue": Hue("#2a62b8", "dodger_blue2", "#a9cbf5", "rail_response"),
    "light blue": Hue("#2a62b8", "dodger_blue2", "#a9cbf5", "thread_state_runnable"),
    "orange": Hue("#e0761b", "dark_orange", "#fad0a0", "rail_idle"),
    "teal": Hue("#10908f", "dark_cyan", "#98dcd6", "background_memory_dump"),
    "green": Hue("#5d9c1f", "green", "#c5e39a", "rail_load"),
    "black": Hue("#24292f", "bold", chrome="black"),
    "brown": Hue("#9a6700", "bold"),
    "grey": Hue("#8c959f", "bold"),
    "light grey": Hue("#8c959f", "dim"),
    "yellow": Hue("#f2c811", "yellow"),
    "magenta": Hue("#c763a5", "magenta"),
    "red": Hue("#b3243f", "red"),
    "violet": Hue("#8a63c7", "cyan"),
    "lilac": Hue("#c3b1e1", "yellow"),
    "pink": Hue("#ecc3de", "magenta"),
    "cream": Hue("#f8e79b", "yellow"),
    "rose": Hue("#dc98a3", "red"),
    "slate": Hue("#57606a", "yellow"),
    "light slate": Hue("#a4adb6", "magenta"),
    "olive": Hue("#6f7a1e", "cyan"),
    "light olive": Hue("#bfc777", "cyan"),
}


ColorBy = Literal["pass", "layer"]
"""Property that a box's colour shows in a timeline: the pass or the layer."""


@singledispatch
def picture(thing: object) -> str | None:
    """Return an SVG of an object, or None if no package has registered how its type is drawn."""
    del thing
    return None
