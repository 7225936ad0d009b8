"""ALL_TO_ALL on tensors: each member sends every other one what it holds of that one's result."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardlab.execute.communicator import Communicator, Wait
from shardlab.execute.shapes import Shapes
from shardlab.execute.state import State
from shardlab.program import Op, Spec
from shardlab.rules.pieces import bits

Places = tuple[Tensor, ...]
"""Indices of some of a tensor's elements, a grid for each dim that is chosen from."""


def all_to_all(
    state: State, links: Communicator, at: int, op: Op, members: Sequence[Spec], received: Sequence[Spec]
) -> Callable[[], Wait]:
    """Start the exchange; `members` are the specs that the group's ranks give, `received` those that they receive.

    Equal parts go to all members: the cells and the pieces of an index that both sides hold.
    """
    (given,), (output,), values, group = op.inputs, op.outputs, state.values, op.group
    assert group is not None
    mine, result = state.specs[given], state.specs[output]
    sent = [_places(state, mine, _common(mine, theirs)) for theirs in received]
    came = [_places(state, result, _common(theirs, result)) for theirs in members]
    shape, over = state.shapes.shape(result), at in state.analysis.last_copies

    def start() -> Wait:
        tensor: Tensor = values[given]
        parts = torch.stack([tensor[places] for places in sent])
        if over:
            values[given] = None
        inbox = torch.empty_like(parts)
        wait = links.all_to_all(inbox, parts, group)

        def sort() -> None:
            wait()
            whole = values[output] = inbox.new_empty(shape)
            for places, part in zip(came, inbox, strict=True):
                whole[places] = part

        return sort

    return start


def _common(one: Spec, other: Spec) -> Spec:
    """What two values of one tensor both hold."""
    names = {index for index, _ in (*one.form.slices, *other.form.slices)}
    slices = tuple(sorted((index, one.pieces(index) & other.pieces(index)) for index in names))
    return one._replace(form=one.form.but(slices=slices), cells=one.cells & other.cells)


def _places(state: State, spec: Spec, part: Spec) -> Places:
    """Where the elements of a part lie in the tensor of a value that holds it."""
    shapes, device = state.shapes, state.settings.device
    held = list(bits(spec.microbatches))
    rows = [held.index(m) for m in bits(part.microbatches)]
    if shapes.model.is_buffers(spec.layer):  # experts' buffers: of each microbatch, one expert's after the other's
        of = spec.form.space.count("expert")
        experts = shapes.model.activation_shape(spec.layer)[0] // of
        here = list(bits(spec.pieces("expert")))
        mine = [here.index(piece) * experts + e for piece in bits(part.pieces("expert")) for e in range(experts)]
        return (torch.tensor([row * len(here) * experts + e for row in rows for e in mine], device=device),)
    rows = [row * shapes.rows + r for row in rows for r in range(shapes.rows)]
    places = (rows, shapes.positions(spec, part), _features(shapes, spec, part))
    return torch.meshgrid(*(torch.tensor(each, device=device) for each in places), indexing="ij")


def _features(shapes: Shapes, spec: Spec, part: Spec) -> list[int]:
    """Where the features of some pieces of heads lie among those of the pieces that a value holds.

    Both hold runs of whole heads; a piece alone may be finer than a head.
    """
    of = spec.form.space.count("head")
    held, wanted = (list(bits(each.pieces("head"))) for each in (spec, part))
    places: list[int] = []
    start = 0
    for section in shapes.sections(spec):
        first, last, begin, end = (
            piece * section // of for piece in (held[0], held[-1] + 1, wanted[0], wanted[-1] + 1)
        )
        places += range(start + begin - first, start + end - first)
        start += last - first
    return places
