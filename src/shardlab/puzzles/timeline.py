"""The models' logs in the form that simulation produces, so that they are drawn alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardlab import simulate
from shardlab.program import Mesh, OpKind, Program, Sizes, UserError
from shardlab.program.tape import Op
from shardlab.puzzles.log import Event
from shardlab.puzzles.model import Model
from shardlab.rules.pieces import mask_of

Moment = tuple[Op, simulate.Event]


def timeline_of(models: Sequence[Model]) -> simulate.Timeline:
    """A timeline whose rank i is the i-th model.

    Raises:
        UserError: if there are no models.
    """
    if not models:
        raise UserError("no models were given; give those of all ranks")
    rows = {model.rank: row for row, model in enumerate(models)}
    moments = [_moments(model, row, rows) for row, model in enumerate(models)]
    program = Program(
        Mesh(dp_shard=len(models)),
        max(model.BATCHES for model in models),
        Sizes.puzzle(max(model.LAYERS for model in models)),
        [[op for op, _ in row] for row in moments],
    )
    return simulate.Timeline(program, [[event for _, event in row] for row in moments])


def _moments(model: Model, row: int, rows: Mapping[int, int]) -> list[Moment]:
    """What a rank did; one that has done nothing yet still has its memory."""
    if model.log:
        return [_moment(event, row, at, rows) for at, event in enumerate(model.log)]
    kind = OpKind.LOAD_BATCH
    return [(Op(kind, -1), simulate.Event(row, 0, kind, -1, 0, 0, 0, round(model.memory())))]


def _moment(event: Event, row: int, at: int, rows: Mapping[int, int]) -> Moment:
    kind, layer = event.kind, -1 if event.layer is None else event.layer
    peer = event.source if event.to is None else event.to
    op = Op(kind, layer, peer=-1 if peer is None else rows.get(peer, -1))
    batches, memory = mask_of(event.batches), round(event.memory)
    return op, simulate.Event(row, at, kind, layer, batches, event.time, event.end, memory)
