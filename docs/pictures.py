"""The pictures of the README, from what Shardlab computes: `python docs/pictures.py` draws them into docs/pictures.

`timeline.svg` is what a command draws. `value.svg` shows one traced gradient, and `layer.svg` what the rules derive for
an MLP that is cut in two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from shardlab.cli import main
from shardlab.draw.canvas import FAINT, IDLE, INK, Box, Page, fill, style
from shardlab.draw.palette import BACKWARD, BACKWARD_WEIGHT, FORWARD
from shardlab.program import Kind, Rank, Spec, trace
from shardlab.rules import derive
from shardlab.rules.derive import Held
from shardlab.rules.node import Layer, Node, Port
from shardlab.rules.pieces import bits, listed
from shardlab.rules.spec import Space

FOLDER = Path(__file__).parent / "pictures"
TIMELINE = ["simulate", "--pp", "4", "--schedule", "zb-v"]

RANK, RANKS = 1, 4
"""Whose gradient is drawn."""

SLICES, SLICE = 2, 0b10
"""Into how many slices the MLP is cut, and which of them is drawn, as a bit set."""


def timeline(path: Path) -> None:
    main([*TIMELINE, "--svg", str(path)])


def value(path: Path) -> None:
    """The gradient of one weight after its backward pass, and after two collectives, on one rank."""
    specs: list[Spec] = []

    async def one_layer(rank: Rank) -> None:
        rank.weights[0], rank.opt_states[0] = rank.load_weights(0)
        rank.activations[0] = rank.load_batch(rank.share())
        output = rank.forward(0, rank.activations[0], rank.weights[0])
        rank.grad_weights[0], _ = rank.backward(0, rank.activations[0], rank.loss(output), rank.weights[0])
        reduced = await rank.all_reduce(rank.grad_weights[0])
        scattered = await rank.reduce_scatter(rank.grad_weights[0])
        if rank.index == RANK:
            specs.extend(each.spec for each in (rank.grad_weights[0], reduced, scattered))

    trace(one_layer, ranks=RANKS, layers=1, microbatches=RANKS)
    with style():
        page = Page(9.6, 3.05)
        say(page, 0.2, 0.25, "A value: what it holds, and what it sums", size=13, weight="bold")
        about = (
            f"The gradient of layer 0's weight on rank {RANK} of {RANKS}.  Across: the slices of the weight that it "
        )
        say(page, 0.2, 0.5, about + "holds.  Down: the microbatches that are summed in it.", color=FAINT)
        calls = ("grad, _ = rank.backward(...)", "await rank.all_reduce(grad)", "await rank.reduce_scatter(grad)")
        words = (
            "its own microbatch, in every slice",
            "the sums of all ranks, united",
            "the same sum; each rank keeps a slice",
        )
        for panel, (call, spec, meaning) in enumerate(zip(calls, specs, words, strict=True)):
            left = 0.62 + 3.06 * panel
            say(page, left - 0.3, 0.86, call, weight="bold")
            columns = [column * RANKS // spec.holds.of for column in bits(spec.holds.mask)]
            columns = [c + i for c in columns for i in range(RANKS // spec.holds.of)]
            grid = (left, 1.08, left + 1.9, 2.18)
            cells = [(row, column) for row in bits(spec.microbatches) for column in columns]
            _grid(page, grid, RANKS, RANKS, cells, BACKWARD[0])
            for i in range(RANKS):
                say(page, left + 1.9 * (i + 0.5) / RANKS, 2.28, str(i), size=7.5, color=FAINT, ha="center")
                say(page, left - 0.08, 1.08 + 1.1 * (i + 0.5) / RANKS, str(i), size=7.5, color=FAINT, ha="right")
            say(page, left - 0.3, 1.63, "microbatch", size=7.5, color=FAINT, ha="center", rotation=90)
            say(page, left + 0.95, 2.43, "slice", size=7.5, color=FAINT, ha="center")
            say(page, left - 0.3, 2.67, str(spec))
            say(page, left - 0.3, 2.87, meaning, color=FAINT)
        path.write_text(page.svg(), encoding="utf-8")


MLP = Layer(
    "mlp",
    (
        Node("linear", {"x": "in"}, {"h": "slice"}, {"w1": "slice in"}),
        Node("gelu", {"h": "slice"}, {"a": "slice"}),
        Node("linear", {"a": "slice"}, {"y": "out"}, {"w2": "out slice"}),
    ),
    (Port("x", Kind.ACTIVATION, 0),),
    (Port("y", Kind.ACTIVATION, 1),),
    ("slice",),
)


def layer(path: Path) -> None:
    """What every tensor of an MLP and every gradient holds where its hidden features are cut in two."""
    space = Space(microbatches=1, pieces=(("slice", SLICES),))
    cut = {"slice": SLICE}
    held = derive.forward(MLP, {"x": Held({})}, cut, space)
    gradients = derive.backward(MLP, held, {"y": Held({})}, cut, space).of_tensors
    indices = {"x": "in"} | {name: of for node in MLP.nodes for name, of in node.makes.items()}
    with style():
        page = Page(9.6, 3.9)
        say(page, 0.2, 0.25, "A layer: a run of primitives, and what follows from them", size=13, weight="bold")
        given = f"Given x and the gradient of y whole, and slice {listed(bits(SLICE))} of {SLICES} of both weights, "
        say(page, 0.2, 0.5, given + "all else follows from the indices in brackets.", color=FAINT)
        for place, (name, of) in enumerate(indices.items()):
            left = 0.35 + 2.5 * place
            _tensor(page, (left, 1.0, left + 1.0, 1.6), f"{name}[{of}]", held[name], FORWARD[0])
            _tensor(page, (left, 2.85, left + 1.0, 3.45), f"gradient of {name}[{of}]", gradients[name], BACKWARD[0])
        for place, node in enumerate(MLP.nodes):
            middle = 0.35 + 2.5 * place + 1.75
            for y, start, end in ((1.3, -0.66, 0.66), (3.15, 0.66, -0.66)):
                ends = {"xy": (middle + end, y), "xytext": (middle + start, y)}
                page.ink.annotate("", **ends, arrowprops={"arrowstyle": "-|>", "color": FAINT, "linewidth": 1.2})
            say(page, middle, 1.14, node.name, weight="bold", ha="center")
            for name, of in node.weights.items():
                box = (middle - 0.4, 2.02, middle + 0.4, 2.32)
                _grid(page, box, 1, SLICES, [(0, column) for column in bits(SLICE)], BACKWARD_WEIGHT[0])
                say(page, middle, 1.9, f"{name}[{of.replace(' ', ', ')}]", size=8, ha="center")
            if gone := _indices(node.reads, node.weights) - _indices(node.makes):
                say(page, middle, 1.47, f"sums over {', '.join(gone)}", size=8, color=FAINT, ha="center")
                gone = _indices(node.makes, node.weights) - _indices(node.reads)
                say(page, middle, 3.32, f"sums over {', '.join(gone)}", size=8, color=FAINT, ha="center")
        path.write_text(page.svg(), encoding="utf-8")


def _indices(*tensors: Mapping[str, str]) -> set[str]:
    return {index for indices in tensors for of in indices.values() for index in of.split()}


def _tensor(page: Page, box: Box, name: str, held: Held, color: str) -> None:
    """A tensor by what is held of it; a term of a sum is hatched."""
    left, _, right, bottom = box
    middle = (left + right) / 2
    if held.term is not None:
        fill(page.ink, [box], "white", edge=color, width=0.8, hatch="////")
        text = f"the term of slice {listed(bits(held.term.bits))}"
    elif "slice" in held.slices:
        _grid(page, box, 1, SLICES, [(0, column) for column in bits(held.slices["slice"])], color)
        text = f"slice {listed(bits(held.slices['slice']))} of {SLICES}"
    else:
        fill(page.ink, [box], color)
        text = "whole"
    say(page, middle, box[1] - 0.12, name, weight="bold", ha="center")
    say(page, middle, bottom + 0.13, text, size=8, ha="center")


def _grid(page: Page, box: Box, rows: int, columns: int, held: Iterable[tuple[int, int]], color: str) -> None:
    """A box in cells, some of them filled."""
    left, top, right, bottom = box
    width, height = (right - left) / columns, (bottom - top) / rows

    def cell(row: int, column: int) -> Box:
        x, y = left + column * width, top + row * height
        return x, y, x + width, y + height

    fill(page.ink, [cell(row, c) for row in range(rows) for c in range(columns)], IDLE, edge="#c6ccd2", width=0.6)
    fill(page.ink, [cell(row, column) for row, column in held], color, edge="white", width=0.6)


def say(page: Page, x: float, y: float, text: str, *, size: float = 8.5, color: str = INK, **looks: object) -> None:
    """Text at a place in inches, its middle on the line."""
    page.ink.text(x, y, text, **({"size": size, "color": color, "va": "center"} | looks))


PICTURES: Mapping[str, Callable[[Path], None]] = {"timeline.svg": timeline, "value.svg": value, "layer.svg": layer}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        draw(FOLDER / name)
