"""RankMoments of an outlined rank between two steps: told so that equal ones are equal, and brought back."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

from shardlab.predict.outline import Outline
from shardlab.predict.outline_values import OutlineHandle, OutlineValue
from shardlab.predict.priced_sample import SizedPart
from shardlab.program import Group
from shardlab.strategies.gathering import ParameterGatherer
from shardlab.strategies.reducing import GradientReducer


class ToldValue(NamedTuple):
    """A value, as of `OutlineValue`; the part by its `id`."""

    part: int
    layer: int
    pieces: int
    of: int
    room: int
    slot: int
    keys: int
    updated: bool


Place = tuple[int, Hashable]
"""Where a value is: in which of the rank's stores, by which key."""


class ToldHandle(NamedTuple):
    """A collective, as of `OutlineHandle`: how many collectives ago it was begun instead of its number."""

    group: Group
    ago: int
    result: ToldValue | None
    read: Place | ToldValue | None


class RankMoment(NamedTuple):
    """All that decides what a rank's next steps do, beside the plan.

    Attributes:
        held: values in stores. Weights that are not gathered and the optimizer's state are left out: no step but the
            update changes them.
        under_way: collectives, in order.
        gathering, reducing: how far these are; handles by their places among the collectives.
    """

    held: frozenset[tuple[int, Hashable, ToldValue]]
    under_way: tuple[ToldHandle, ...]
    gathering: Any
    reducing: Any


class RankMoments:
    """RankMoments of one rank."""

    def __init__(
        self, rank: Outline, weights: ParameterGatherer[OutlineValue], gradients: GradientReducer[OutlineValue]
    ) -> None:
        self._rank, self._weights, self._gradients = rank, weights, gradients
        self._stores = (rank.weights, rank.grad_weights, rank.scalars)
        self._lasting = frozenset(rank.weights)

    def now(self, parts: dict[int, SizedPart]) -> RankMoment:
        """Tell the present moment.

        Args:
            parts: gets all that are told by their `id`.
        """
        rank = self._rank

        def told(value: OutlineValue) -> ToldValue:
            part = value.part
            parts[id(part)] = part
            return ToldValue(
                id(part), value.layer, value.pieces, value.of, value.room, value.slot, value.keys, value.updated
            )

        places: dict[int, Place] = {}
        held: list[tuple[int, Hashable, ToldValue]] = []
        for number, store in enumerate(self._stores):
            for key, value in store.items():
                places[id(value)] = (number, key)
                if number or key not in self._lasting:
                    held.append((number, key, told(value)))
        under_way = tuple(
            [
                ToldHandle(
                    each.group,
                    rank.collectives - each.number,
                    each.result and told(each.result),
                    each.read and (places.get(id(each.read)) or told(each.read)),
                )
                for each in rank.outstanding
            ]
        )
        numbers: dict[Any, int] = {handle: number for number, handle in enumerate(rank.outstanding)}
        told_by = numbers.__getitem__
        return RankMoment(frozenset(held), under_way, self._weights.state(told_by), self._gradients.state(told_by))

    def back(self, moment: RankMoment, parts: dict[int, SizedPart]) -> None:
        """Bring a moment back."""
        rank = self._rank

        def made(told: ToldValue) -> OutlineValue:
            value = OutlineValue(rank, parts[told.part], told.layer, told.pieces, told.of)
            value.room, value.slot, value.keys, value.updated = told[4:]
            return value

        for handle in rank.outstanding:
            if handle.read is not None:
                handle.read.reading = ()
        for number, store in enumerate(self._stores):
            store.reset({key: value for key, value in store.items() if not number and key in self._lasting})
        for number, key, told in moment.held:
            self._stores[number].put(key, made(told))
        rank.outstanding.clear()
        rank.open.clear()
        rank.collectives = max((told.ago for told in moment.under_way), default=0)
        for told in moment.under_way:
            read = told.read
            value = made(read) if isinstance(read, ToldValue) else read and self._stores[read[0]][read[1]]
            result = told.result and made(told.result)
            rank.begin(OutlineHandle(rank, told.group, rank.collectives - told.ago, result, value))
        handles: list[Any] = list(rank.outstanding)
        self._weights.restore(moment.gathering, handles.__getitem__)
        self._gradients.restore(moment.reducing, handles.__getitem__)
