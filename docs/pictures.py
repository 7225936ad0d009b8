"""Pictures of the README and of docs/, computed by Shardlab: `python docs/pictures.py` draws them.

They are written into docs/pictures. `timeline.svg` is the output of a command. `value.svg` shows one traced gradient,
and `layer.svg` the values that the rules derive for an MLP whose hidden features are split in two. The others are for
the pages of docs/strategies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from shardlab.check import check
from shardlab.cli import main
from shardlab.cli.schedule.costs import read_costs
from shardlab.common.text import listed
from shardlab.draw.canvas import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FAINT,
    FORWARD,
    IDLE,
    INK,
    Box,
    Page,
    fill,
    ink_on,
    style,
)
from shardlab.language import Holds, Kind, Mesh, OpKind, Rank, Spec, trace
from shardlab.language.rules import layer_graph
from shardlab.language.rules.kinds import bits
from shardlab.language.rules.layer_graph import Extent, Layer, Node, Port
from shardlab.language.rules.spec import Space
from shardlab.planner.schedule_search.problem import ScheduleProblem
from shardlab.planner.schedule_search.search import published_schedule, search_schedule
from shardlab.simulate.timeline import Costs, bubble, simulate
from shardlab.strategies import STRATEGIES
from shardlab.strategies.plan.context_parallel import slices_of_rank
from shardlab.strategies.schedules import SCHEDULES

FOLDER = Path(__file__).parent / "pictures"
EQUAL_PASSES = "forward=1,backward_input=1,backward_weight=1"
TIMELINE = ["simulate", "--pp", "4", "--schedule", "zb-v", "--microbatches", "8", "--costs", EQUAL_PASSES]

RANK, RANKS = 1, 4
"""Rank whose gradient is drawn, and number of ranks."""

SLICES, SLICE = 2, 0b10
"""Number of slices of the MLP, and the slice that is drawn, as a bit set."""


def timeline(path: Path) -> None:
    main([*TIMELINE, "--svg", str(path)])


def value(path: Path) -> None:
    """Draw the gradient of one weight on one rank after its backward pass, and after two collectives."""
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
    """Draw the pieces that each tensor and gradient of an MLP holds if its hidden features are split in two."""
    space = Space(microbatches=1, pieces=(("slice", SLICES),))
    cut = {"slice": SLICE}
    held = layer_graph.forward(MLP, {"x": Extent({})}, cut, space)
    gradients = layer_graph.backward(MLP, held, {"y": Extent({})}, cut, space).of_tensors
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


SHARDED = ("ddp", "zero-1", "zero-2", "wsdp", "zero-3", "hsdp", "partially-sharded")
"""Strategies in the picture, in the order of the data that each rank keeps."""


def sharding(path: Path) -> None:
    """Draw the parts of a weight, its gradient and its optimizer state that each rank keeps under some strategies."""
    with style():
        page = Page(9.6, 3.5)
        say(page, 0.2, 0.25, "What each of four ranks keeps of one layer", size=13, weight="bold")
        about = "A row is a rank.  W: weight, G: sum of its microbatches' gradients, O: optimizer state, in quarters."
        say(page, 0.2, 0.5, about, color=FAINT)
        for place, name in enumerate(SHARDED):
            left, top = 0.55 + 2.32 * (place % 4), 0.95 + 1.3 * (place // 4)
            say(page, left + 0.9, top - 0.1, name, weight="bold", ha="center")
            for column, (title, color) in enumerate((("W", FORWARD), ("G", BACKWARD), ("O", BACKWARD_WEIGHT))):
                kept = _kept(name)[column]
                cells = [
                    (rank, quarter) for rank, holds in enumerate(kept) for quarter in bits(holds.refined(RANKS).mask)
                ]
                start = left + 0.64 * column
                _grid(page, (start, top, start + 0.56, top + 0.76), RANKS, RANKS, cells, color[0])
                say(page, start + 0.28, top + 0.88, title, size=7.5, color=FAINT, ha="center")
            for rank in range(RANKS):
                say(page, left - 0.07, top + 0.19 * rank + 0.095, f"{rank}", size=7, color=FAINT, ha="right")
        path.write_text(page.svg(), encoding="utf-8")


def _kept(name: str) -> tuple[list[Holds], list[Holds], list[Holds]]:
    """Return the slices of layer 0's weight, gradient and optimizer state that each rank loads or adds up."""
    strategy = STRATEGIES[name]
    checked = check(trace(strategy.program, strategy.grid(RANKS), layers=2, microbatches=2 * RANKS))
    kept: tuple[list[Holds], list[Holds], list[Holds]] = [], [], []
    for tape, specs in zip(checked.program.tapes, checked.specs, strict=True):
        ops = {op.kind: op for op in reversed(tape) if op.layer == 0}  # the first of each kind
        gradient = ops[OpKind.ADD].outputs if OpKind.ADD in ops else ops[OpKind.UPDATE].inputs
        loads = ops[OpKind.LOAD_WEIGHT].outputs, ops[OpKind.LOAD_OPT_STATE].outputs
        for of, numbers in zip(kept, (loads[0], gradient, loads[1]), strict=True):
            of.append(specs[numbers[0]].holds)
    return kept


def schedules(path: Path) -> None:
    """Draw every schedule on four ranks with eight microbatches, equally long passes and free messages."""
    colors = {
        OpKind.FORWARD: FORWARD[0],
        OpKind.BACKWARD: BACKWARD[0],
        OpKind.BACKWARD_INPUT: BACKWARD_INPUT[0],
        OpKind.BACKWARD_WEIGHT: BACKWARD_WEIGHT[0],
    }
    costs = Costs(forward=1, backward_input=1, backward_weight=1, update=0, collective=0, send=0, recv=0)
    with style():
        page = Page(9.6, 5.67)
        say(page, 0.2, 0.25, "Schedules on four ranks with eight microbatches", size=13, weight="bold")
        about = "A row is a rank.  A box is one microbatch in one of the eight layers.  All passes take equally long."
        say(page, 0.2, 0.5, about, color=FAINT)
        for place, (kind, color) in enumerate(colors.items()):
            left = 0.2 + 1.45 * place
            fill(page.ink, [(left, 0.66, left + 0.12, 0.78)], color)
            say(page, left + 0.18, 0.72, kind.value.replace("_", ", "), size=7.5, color=FAINT)
        for place, name in enumerate(SCHEDULES):
            program = trace(STRATEGIES[name].program, Mesh(pp=RANKS), layers=2 * RANKS, microbatches=2 * RANKS)
            timeline = simulate(check(program), costs)
            left, top, scale = 0.2 + 4.7 * (place % 2), 1.2 + 0.92 * (place // 2), 4.5 / 68
            say(page, left, top - 0.13, name, weight="bold")
            say(page, left + 4.5, top - 0.13, f"bubble {bubble(timeline):.0%}", size=7.5, color=FAINT, ha="right")
            fill(page.ink, [(left, top, left + timeline.end * scale, top + 0.56)], IDLE)
            for kind, color in colors.items():
                passes = [
                    (left + e.start * scale, top + 0.14 * e.rank, left + e.end * scale, top + 0.14 * e.rank + 0.13)
                    for events in timeline.events
                    for e in events
                    if e.kind is kind
                ]
                fill(page.ink, passes, color, edge="white", width=0.3)
        path.write_text(page.svg(), encoding="utf-8")


def searched(path: Path) -> None:
    """Draw a published schedule and a searched one for the page's unequal stages and the same memory limit."""
    _beside(path, "Eight unequal stages on four ranks, memory of three microbatches", 3.0)


def limited(path: Path) -> None:
    """Draw the same comparison with the memory of two and a half microbatches."""
    _beside(path, "The same with memory of two and a half microbatches", 2.5)


def _beside(path: Path, title: str, limit: float) -> None:
    stages, message = read_costs(str(FOLDER.parents[1] / "examples/unequal_stages.toml"), RANKS, 2)
    found = search_schedule(ScheduleProblem(RANKS, 8, stages, message, limit, "vee"), evaluations=400)
    best = found.best_published
    assert best is not None
    colors = FORWARD[0], BACKWARD_INPUT[0], BACKWARD_WEIGHT[0]
    with style():
        page = Page(9.6, 2.75)
        say(page, 0.2, 0.25, title, size=13, weight="bold")
        names = ("forward", "backward, input gradient", "backward, weight gradient")
        for place, (name, color) in enumerate(zip(names, colors, strict=True)):
            left = 0.2 + 1.9 * place
            fill(page.ink, [(left, 0.46, left + 0.12, 0.58)], color)
            say(page, left + 0.18, 0.52, name, size=7.5, color=FAINT)
        scale = 9.2 / best.time
        for place, (name, timing) in enumerate(
            ((best.name, published_schedule(found, best.name).timing), ("found", found.timing))
        ):
            left, top = 0.2, 1.0 + 0.95 * place
            say(page, left, top - 0.13, name, weight="bold")
            say(page, left + 9.2, top - 0.13, f"{timing.time:.4g}", size=7.5, color=FAINT, ha="right")
            fill(page.ink, [(left, top, left + timing.time * scale, top + 0.6)], IDLE)
            for kind, color in enumerate(colors):
                boxes = [
                    (left + (end - timing.passes.duration[each]) * scale, top + 0.15 * rank,
                     left + end * scale, top + 0.15 * rank + 0.14)
                    for rank, order in enumerate(timing.orders)
                    for each in order
                    if timing.passes.parts(each)[0] == kind
                    for end in [timing.end[each]]
                ]  # fmt: skip
                fill(page.ink, boxes, color, edge="white", width=0.3)
        path.write_text(page.svg(), encoding="utf-8")


COLORS = (FORWARD[0], BACKWARD[0], BACKWARD_WEIGHT[0], BACKWARD_INPUT[1])
"""Colour of each of four ranks or groups."""


def context(path: Path) -> None:
    """Draw the parts of causal attention that each of four ranks computes, for three divisions of a sequence."""
    slices = 2 * RANKS
    ways = {
        "consecutive slices": [(2 * rank, 2 * rank + 1) for rank in range(RANKS)],
        "an early and a late slice": [slices_of_rank(rank, RANKS) for rank in range(RANKS)],
        "two stripes": [slices_of_rank(rank, RANKS, stripes=2) for rank in range(RANKS)],
    }
    with style():
        page = Page(9.6, 3.4)
        say(page, 0.2, 0.25, "Causal attention, cut over four ranks", size=13, weight="bold")
        about = "Down: slices of the queries.  Across: slices of the keys that they meet.  A colour is a rank."
        say(page, 0.2, 0.5, about, color=FAINT)
        for panel, (name, of_ranks) in enumerate(ways.items()):
            left = 0.45 + 3.15 * panel
            say(page, left, 0.82, name, weight="bold")
            box = (left, 0.98, left + 1.8, 2.78)
            _grid(page, box, slices, slices, [], IDLE)
            for rank, own in enumerate(of_ranks):
                _grid(
                    page,
                    box,
                    slices,
                    slices,
                    [(query, key) for query in own for key in range(query + 1)],
                    COLORS[rank],
                    empty=False,
                )
                work = sum(query + 0.5 for query in own)  # causal attention of a slice to itself is half of a square
                say(page, left + 1.95, 1.1 + 0.2 * rank, f"rank {rank}: {work:g}", size=7.5, color=FAINT)
            for i in range(slices):
                say(page, left - 0.07, 0.98 + 0.225 * (i + 0.5), str(i), size=7, color=FAINT, ha="right")
                say(page, left + 0.225 * (i + 0.5), 2.89, str(i), size=7, color=FAINT, ha="center")
        say(
            page,
            0.45,
            3.17,
            "Numbers beside the ranks: pairs of slices that they compute; of a slice with itself, half.",
            color=FAINT,
        )
        path.write_text(page.svg(), encoding="utf-8")


def experts(path: Path) -> None:
    """Draw the buffers of a mixture on each rank before and after the first exchange."""
    specs: dict[int, tuple[Spec, Spec]] = {}

    async def one_mixture(rank: Rank) -> None:
        rank.weights[0] = rank.load_weight(0)
        rank.activations[0] = rank.load_batch(rank.share())
        buffers, _ = rank.forward(0, (rank.activations[0],), rank.weights[0])
        specs[rank.index] = buffers.spec, (await rank.all_to_all(buffers)).spec

    strategy = STRATEGIES["expert-parallel"]
    trace(one_mixture, strategy.grid(RANKS), strategy.puzzle(RANKS, 1), RANKS)
    with style():
        page = Page(9.6, 2.75)
        say(page, 0.2, 0.25, "The exchange of a mixture's tokens", size=13, weight="bold")
        about = "Buffers on each of four ranks.  Down: microbatches whose tokens they hold.  Across: experts."
        say(page, 0.2, 0.5, about, color=FAINT)
        for moment, title in enumerate(
            ("before: own tokens, for every expert", "after: every rank's tokens, for one expert")
        ):
            say(page, 0.3 + 4.75 * moment, 0.86, title, weight="bold")
            for rank in range(RANKS):
                left = 0.45 + 4.75 * moment + 1.1 * rank
                spec = specs[rank][moment]
                cells = [(row, column) for row in bits(spec.microbatches) for column in bits(spec.pieces("expert"))]
                _grid(page, (left, 1.05, left + 0.9, 1.95), RANKS, RANKS, cells, COLORS[rank])
                say(page, left + 0.45, 2.1, f"rank {rank}", size=7.5, color=FAINT, ha="center")
        say(page, 4.82, 1.5, "→", size=14, color=FAINT, ha="center")
        say(page, 0.3, 2.45, f"Rank 1: {specs[1][0]}, then {specs[1][1]}", color=FAINT)
        path.write_text(page.svg(), encoding="utf-8")


def mesh(path: Path) -> None:
    """Draw the groups of eight ranks along each axis of a mesh."""
    grid = Mesh(pp=2, dp_shard=2, tp=2)
    with style():
        page = Page(9.6, 2.75)
        say(page, 0.2, 0.25, f"Eight ranks on the mesh {grid}", size=13, weight="bold")
        about = "Ranks of one colour form a group.  Down: pipeline stages.  Across: pairs of tp, then dp_shard."
        say(page, 0.2, 0.5, about, color=FAINT)
        meetings = {
            "pp": "activations between stages",
            "dp_shard": "gradients of the same slice",
            "tp": "terms of every matrix product",
        }
        for panel, (axis, meeting) in enumerate(meetings.items()):
            left = 0.4 + 3.15 * panel
            say(page, left, 0.88, f"{axis}: {meeting}", weight="bold")
            groups = list(dict.fromkeys(grid.group(rank, axis) for rank in range(grid.world)))
            for rank in range(grid.world):
                row, column, inner = (grid.coordinate(rank, each) for each in ("pp", "dp_shard", "tp"))
                x, y = left + 1.3 * column + 0.58 * inner, 1.1 + 0.7 * row
                color = COLORS[groups.index(grid.group(rank, axis))]
                fill(page.ink, [(x, y, x + 0.54, y + 0.54)], color)
                say(page, x + 0.27, y + 0.27, str(rank), size=10, color=ink_on(color), ha="center")
        path.write_text(page.svg(), encoding="utf-8")


def _indices(*tensors: Mapping[str, str]) -> set[str]:
    return {index for indices in tensors for of in indices.values() for index in of.split()}


def _tensor(page: Page, box: Box, name: str, held: Extent, color: str) -> None:
    """Draw a tensor with the pieces that are held. Terms of a sum are hatched."""
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


def _grid(
    page: Page, box: Box, rows: int, columns: int, held: Iterable[tuple[int, int]], color: str, *, empty: bool = True
) -> None:
    """Draw a box of cells. Held cells are filled, and the others are drawn only if `empty` is set."""
    left, top, right, bottom = box
    width, height = (right - left) / columns, (bottom - top) / rows

    def cell(row: int, column: int) -> Box:
        x, y = left + column * width, top + row * height
        return x, y, x + width, y + height

    others = [cell(row, column) for row in range(rows) for column in range(columns)] if empty else []
    fill(page.ink, others, IDLE, edge="#c6ccd2", width=0.6)
    fill(page.ink, [cell(row, column) for row, column in held], color, edge="white", width=0.6)


def say(page: Page, x: float, y: float, text: str, *, size: float = 8.5, color: str = INK, **looks: object) -> None:
    """Write a text at a position in inches. The text is centred vertically on y."""
    page.ink.text(x, y, text, **({"size": size, "color": color, "va": "center"} | looks))


DRAWN = (timeline, value, layer, sharding, schedules, searched, limited, context, experts, mesh)
PICTURES: Mapping[str, Callable[[Path], None]] = {f"{draw.__name__}.svg": draw for draw in DRAWN}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        draw(FOLDER / name)
