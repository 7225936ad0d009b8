"""How the loss of a random program is computed: of whole values or slices, of one unit or several, once or twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.attack.writing import Named, Unit, Writing


def losses_of(writing: Writing, units: Sequence[Unit]) -> None:
    """Compute the gradients of the last activations of some units that have passed all layers."""
    left = list(units)
    while left:
        unit = left.pop()
        same = [each for each in left if each.path[-1] == unit.path[-1] and each.cells == unit.cells]
        others = {each.path[-1]: each for each in left if each.path[-1] != unit.path[-1] and each.cells == unit.cells}
        if writing.together != "ep" and same and writing.chance(0.4):
            left = [each for each in left if each not in same]
            _joint([unit, *same], writing)
        elif writing.together != "ep" and others and writing.mesh.cp == 1 and writing.chance(0.4):
            left = [each for each in left if each not in others.values()]
            _across([unit, *others.values()], writing)
        else:
            unit.gradient = _gradient(writing, unit.path[-1], unit.value, unit.cells)
        if writing.chance(0.15):
            _unused(writing, unit)
    for unit in units:
        if writing.factor[0]:
            unit.gradient = {
                rank: writing.lines.make(rank, "d", f"rank.scale(k.{name}, {writing.factor[0]})")
                for rank, name in unit.gradient.items()
            }


def _gradient(writing: Writing, site: Sequence[int], values: Named, cells: int) -> Named:
    """The loss's gradient on a site, at once or of slices."""
    random, make = writing.random, writing.lines.make
    parts = [n for n in (1, 2, 3, 4) if _divides(writing, cells, n)]
    of = random.choice(parts) if writing.together != "ep" and writing.mesh.cp == 1 and writing.chance(0.3) else 1
    if of == 1:
        return _loss(writing, site, values)
    slices = [
        {rank: make(rank, "x", f"rank.slice(k.{name}, {at}, {of})") for rank, name in values.items()}
        for at in range(of)
    ]
    found = [_loss(writing, site, each) for each in random.sample(slices, of)]
    return joined(writing, found, "d")


def _divides(writing: Writing, cells: int, of: int) -> bool:
    sequence = writing.sizes.space(writing.mesh, 1).sequence
    whole = sequence if sequence > 1 else cells
    return whole % of == 0


def _loss(writing: Writing, site: Sequence[int], values: Named) -> Named:
    make = writing.lines.make
    if writing.together != "tp":
        return {rank: make(rank, "d", f"rank.loss(k.{values[rank]})") for rank in site}
    stats = statistics(writing, site, values)
    return {rank: make(rank, "d", f"rank.loss(k.{values[rank]}, k.{stats[rank]})") for rank in site}


def statistics(writing: Writing, site: Sequence[int], values: Named) -> Named:
    """Softmax statistics of all slices of the vocabulary."""
    mine = {rank: writing.lines.make(rank, "t", f"rank.loss_stats(k.{values[rank]})") for rank in site}
    return writing.collective("t", site, "all_gather", mine)


def joined(writing: Writing, values: Sequence[Named], stem: str) -> Named:
    """Values of some ranks put together, piece by piece."""
    return {
        rank: writing.lines.make(rank, stem, f"rank.concatenate([{', '.join(f'k.{each[rank]}' for each in values)}])")
        for rank in values[0]
    }


def _joint(units: Sequence[Unit], writing: Writing) -> None:
    """One loss of several units on one site, whose gradient is cut again."""
    random, make, site = writing.random, writing.lines.make, units[0].path[-1]
    logits = joined(writing, [unit.value for unit in units], "x")
    if writing.together == "tp":
        way = random.choice(["whole", "joined", "gathered after"])
        if way == "whole":
            stats = statistics(writing, site, logits)
        elif way == "joined":
            stats = joined(writing, [statistics(writing, site, unit.value) for unit in units], "t")
        else:
            mine = [
                {rank: make(rank, "t", f"rank.loss_stats(k.{unit.value[rank]})") for rank in site} for unit in units
            ]
            stats = writing.collective("t", site, "all_gather", joined(writing, mine, "t"))
        whole = {rank: make(rank, "d", f"rank.loss(k.{logits[rank]}, k.{stats[rank]})") for rank in site}
    else:
        whole = {rank: make(rank, "d", f"rank.loss(k.{logits[rank]})") for rank in site}
    for at, unit in enumerate(units):
        unit.gradient = {rank: make(rank, "d", f"rank.slice(k.{whole[rank]}, {at}, {len(units)})") for rank in site}


def _across(units: Sequence[Unit], writing: Writing) -> None:
    """Every site computes the loss of all sites' units, and takes its own part of the gradient."""
    make, sites = writing.lines.make, [unit.path[-1] for unit in units]
    gathered: Named = {}
    stats: Named = {}
    order = writing.random.sample(range(len(units)), len(units))
    local: Named = {}
    if writing.together == "tp":
        for unit in units:
            local |= statistics(writing, unit.path[-1], unit.value)
    for place in range(len(sites[0])):
        ranks = [sites[at][place] for at in order]
        values = {sites[at][place]: units[at].value[sites[at][place]] for at in order}
        gathered |= writing.issue("x", ranks, "all_gather", values, f"among={ranks}")
        if local:
            stats |= writing.issue("t", ranks, "all_gather", {rank: local[rank] for rank in ranks}, f"among={ranks}")
    for at, unit in enumerate(units):
        place = order.index(at)
        unit.gradient = {}
        for rank in unit.path[-1]:
            given = f"k.{gathered[rank]}" + (f", k.{stats[rank]}" if stats else "")
            whole = make(rank, "d", f"rank.loss({given})")
            unit.gradient[rank] = make(rank, "d", f"rank.slice(k.{whole}, {place}, {len(units)})")


def _unused(writing: Writing, unit: Unit) -> None:
    """A loss whose gradient nobody needs, of all or of a slice, here or on a rank that may do nothing else."""
    random, make = writing.random, writing.lines.make
    if writing.together:
        return
    value, rank = unit.value[unit.path[-1][0]], unit.path[-1][0]
    others = [other for other in range(writing.mesh.world) if other != rank]
    if others and writing.chance(0.6):
        other = random.choice(others)
        value, rank = writing.moved({rank: value}, [rank], [other])[other], other
    parts = [n for n in (1, 2, 3, 4) if _divides(writing, unit.cells, n)] if writing.mesh.cp == 1 else [1]
    of = random.choice(parts)
    if of > 1 or writing.chance(0.3):
        value = make(rank, "x", f"rank.slice(k.{value}, {random.randrange(of)}, {of})")
    make(rank, "d", f"rank.loss(k.{value})")
