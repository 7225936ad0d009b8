"""The plan of each family that takes least memory: forecast first, it tells whether any of the family fits."""

from __future__ import annotations

from itertools import chain
from math import inf

import numpy as np

from shardlab.errors import UserError
from shardlab.planner.families import family, model_kinds
from shardlab.planner.floors import Floors
from shardlab.planner.plan_shape import PlanShape
from shardlab.planner.problem import Candidate
from shardlab.planner.shape_pipelines import pipelined
from shardlab.planner.sharing_floors import shared_as
from shardlab.planner.space import legal
from shardlab.program import Mesh

TRIED = 4
"""Meshes with the same kinds of parallelism on which the smallest plans are looked for."""

SMALL = "1f1b"
"""The schedule that holds least, but for what finer stages may save; others are looked at where it is not allowed."""


class SmallestPlans:
    """The plans that take least memory, of shapes that are noted one after the other."""

    def __init__(self, floors: Floors) -> None:
        self._floors = floors
        self._shapes: dict[str, dict[Mesh, tuple[float, PlanShape]]] = {}

    def note(self, shape: PlanShape, least: float) -> None:
        """Note a shape, no plan of which takes less than so many bytes."""
        known = self._shapes.setdefault(model_kinds(shape.mesh), {})
        most = known[shape.mesh][0] if shape.mesh in known else inf
        if len(known) >= TRIED:
            most = min(most, max(bytes for bytes, _ in known.values()))
        if least > most or (filled := self._floors.filled(shape)) > most:
            return
        if shape.mesh not in known or (filled, -shape.share) < (most, -known[shape.mesh][1].share):
            known[shape.mesh] = filled, shape
        if len(known) > TRIED:
            del known[max(known, key=lambda mesh: known[mesh][0])]

    def candidates(self) -> list[tuple[float, Candidate]]:
        """The smallest candidate of each family, by floors of bytes; the smallest one first, each with its floor."""
        found: dict[str, tuple[float, Candidate]] = {}
        for _, shape in chain(*(known.values() for known in self._shapes.values())):
            for bytes, candidate in self._of_shape(shape):
                known = found.get(name := family(candidate.plan))
                if known is None or bytes < known[0]:
                    found[name] = bytes, candidate
        return sorted(found.values(), key=lambda each: each[0])

    def _of_shape(self, shape: PlanShape) -> list[tuple[float, Candidate]]:
        """The smallest candidate of each family that a shape has with each of its pipelines, and a floor of its
        bytes."""
        problem, ways = self._floors.problem, self._floors.ways(shape)
        found: list[tuple[float, Candidate]] = []
        plans = list(pipelined(problem, shape))
        for plan in [each for each in plans if each.schedule == SMALL] or plans:
            if not self._floors.follows(shape, plan):
                continue
            named = set[str]()
            order: list[int] = np.argsort(self._floors.bytes_of_ways(shape, plan), kind="stable").tolist()
            for way in order:
                if (name := family(ways.plans[way])) in named:
                    continue
                try:
                    candidate = legal(problem, shape, shared_as(plan, ways.plans[way]))
                except UserError:
                    continue
                if candidate is not None:
                    named.add(name)
                    found.append((self._floors.memory.of(shape, candidate), candidate))
        return found
