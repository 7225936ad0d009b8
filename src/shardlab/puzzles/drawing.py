"""What the models did in the form that simulation produces, so that it is drawn alike."""

from __future__ import annotations

from collections.abc import Sequence

from shardlab.program import Mesh, Program, Sizes, UserError
from shardlab.program.tape import Op
from shardlab.puzzles.log import PuzzleEvent
from shardlab.puzzles.pictures import Picture, timeline_picture
from shardlab.puzzles.puzzle_model import PuzzleModel
from shardlab.rules.pieces import mask_of
from shardlab.timeline import Event, Timeline


def draw(models: Sequence[PuzzleModel]) -> Picture:
    """Print when the last op starts and where memory is largest; the picture of what the ranks did."""
    events = [(place, event) for place, model in enumerate(models) for event in model.log]
    if events:
        steps = max(model.log[-1].time for model in models if model.log)
        place, peak = max(events, key=lambda pair: pair[1].memory)  # the first of equals
        print(f"Timesteps: {steps} \nMaximum Memory: {peak.memory} at GPU: {place} time: {peak.time}")
    else:
        print("Timesteps: 0 \nMaximum Memory: 0: nothing has been computed")
    return timeline_picture(timeline_of(models))


def timeline_of(models: Sequence[PuzzleModel]) -> Timeline:
    """A timeline whose rank i is the i-th model.

    Raises:
        UserError: if there are no models.
    """
    if not models:
        raise UserError("no models were given; give those of all ranks")
    rows = {model.rank: row for row, model in enumerate(models)}
    tapes: list[list[Op]] = []
    events: list[list[Event]] = []
    for row, model in enumerate(models):
        # One that has done nothing yet still has its memory.
        log = model.log or [PuzzleEvent("load_batch", None, model.rank, 0, 0, model.memory())]
        tapes.append([_op(event, rows) for event in log])
        events.append(
            [
                Event(row, at, op.kind, op.layer, mask_of(event.batches), event.time, event.end, round(event.memory))
                for at, (op, event) in enumerate(zip(tapes[row], log, strict=True))
            ]
        )
    sizes = Sizes.puzzle(max(model.LAYERS for model in models))
    microbatches = max(model.BATCHES for model in models)
    return Timeline(Program(Mesh(dp_shard=len(models)), microbatches, sizes, tapes), events)


def _op(event: PuzzleEvent, rows: dict[int, int]) -> Op:
    peer = event.source if event.to is None else event.to
    layer = -1 if event.layer is None else event.layer
    return Op(event.kind, layer, peer=-1 if peer is None else rows.get(peer, -1))
