"""What the table says that a rank keeps is what its tape keeps, but for a few whole layers on their way."""

from __future__ import annotations

import pytest

from shardlab.check import Checked, check
from shardlab.language import Kind, OpKind, trace
from shardlab.simulate.timeline import live_memory
from shardlab.strategies import STRATEGIES

LAYERS = 32
BLOCKS = 8
"""Of a model in half-blocks: 18 matrices, and norms between them."""

ON_THEIR_WAY = 3.01
"""Matrices that may come on top for a while, with the norms between them."""

UNITS = {"W": Kind.WEIGHT, "G": Kind.GRAD_WEIGHT, "O": Kind.OPT_STATE}


def checked(name: str) -> Checked:
    entry = STRATEGIES[name]
    mesh = entry.grid(entry.ranks)
    return check(
        trace(entry.program, mesh, entry.puzzle(entry.ranks, LAYERS if mesh.tp == mesh.cp == 1 else BLOCKS), 16)
    )


def formula(name: str, unit: str, layers: float = LAYERS, experts: float = 0) -> float:
    """What the formula comes to in layers, where only this unit is counted; `experts` of the layers are experts.

    "D + E/n of W, G and O" says of each unit what is kept of its dense layers D and of its experts E.
    """
    mesh = STRATEGIES[name].grid(STRATEGIES[name].ranks)
    names = {
        "n": mesh.world,
        "p": mesh.pp,
        "s": mesh.dp_shard,
        "t": mesh.tp,
        "v": 2,
        **dict.fromkeys(UNITS, 0),
        unit: layers,
    }
    each, _, units = STRATEGIES[name].memory.partition(" of ")
    if units:
        assert unit in units
        names |= {"D": layers - experts, "E": experts}
    return float(eval(each, {"__builtins__": {}}, names))


@pytest.mark.parametrize("name", STRATEGIES)
def test_what_a_rank_keeps_is_what_the_formula_says(name: str) -> None:
    program = checked(name)
    sizes = program.program.sizes
    layer, layers = sizes.weights[0], sum(sizes.weights) / sizes.weights[0]
    experts = sum("expert" in its.cut for its in sizes.signatures)
    for unit, kind in UNITS.items():
        peak = max(max(memory) for memory in live_memory(program, [kind])) / layer
        kept = formula(name, unit, layers, experts)
        assert kept <= peak <= kept + ON_THEIR_WAY, unit


def test_loading_is_the_part_that_is_never_gathered() -> None:
    for name, whole in (("ddp", 1), ("fsdp", 4), ("zero-3", 4), ("hsdp", 2), ("zero-1", 1)):
        loads = [op for op in checked(name).program.tapes[0] if op.kind is OpKind.LOAD_WEIGHT]
        assert sum(1 / op.holds.of for op in loads if op.holds) == LAYERS / whole == formula(name, "W")
