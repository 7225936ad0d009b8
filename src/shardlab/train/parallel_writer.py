"""Text from a model in training, written by all ranks: each has some of its blocks, whole."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.execute.collect import collect
from shardlab.execute.state import State
from shardlab.models import Blocks
from shardlab.models.tensors import Choice, Share, Writer, named_views, whole_parameters
from shardlab.train.sample import for_text, in_writing

HURRY = 2.0
"""Seconds after which a text ends where it is, if a rank was asked to end."""


class ParallelWriter(Writer):
    """One rank's part of writing a text with the weights of a training, whatever its strategy.

    The blocks are dealt to the ranks and put together there, in their order. So the activations of each new token go
    from rank to rank, and no rank takes more than its share of the whole weights, and one layer. All ranks know the
    last one's scores, and draw the same token from them. Every rank makes one, and calls `go_on`.

    Args:
        state: the training's, whose weights are taken as they are now.
        whole: the model in whole blocks; dropout is left out, and no expert drops a token.
        choice: how tokens are drawn.
        asked: whether this rank is asked to end.
    """

    def __init__(self, state: State, whole: Blocks, choice: Choice, asked: Callable[[], bool]) -> None:
        ranks = dist.get_world_size()
        parts = [range(rank * whole.layers // ranks, (rank + 1) * whole.layers // ranks) for rank in range(ranks)]
        mine = parts[state.rank]
        super().__init__(for_text(whole), _whole_blocks(state, whole, parts), choice, blocks=mine)
        having = [rank for rank, part in enumerate(parts) if part and mine]
        self._before = next((rank for rank in having if parts[rank].stop == mine.start), None)
        self._after = next((rank for rank in having if parts[rank].start == mine.stop), None)
        self._writes = bool(mine) and self._after is None
        self._asked, self._began, self._width = asked, time.monotonic(), whole.hidden_size
        self._words = torch.zeros(whole.vocab_size + 1, dtype=state.exact, device=state.settings.device)

    def compute(self, x: Tensor, share: Share) -> Tensor:
        """The scores of what follows the last token, (1, 1, vocabulary), on every rank."""
        if self._before is not None:
            x = self._words.new_empty(*x.shape, self._width)
            dist.recv(x, self._before)
        x = super().compute(x, share)
        if self._after is not None:
            dist.send(x, self._after)
        self._words.zero_()
        if self._writes:
            self._words[:-1] = x[0, -1]
        self._words[-1] = float(self._asked() and time.monotonic() - self._began > HURRY)
        dist.all_reduce(self._words)
        return self._words[None, None, :-1]

    def go_on(self, tokens: Sequence[int], count: int) -> Iterator[int]:
        """Read some tokens, then write `count`, or fewer if a rank is asked to end.

        Raises:
            UserError: as `Writer` does, on every rank.
        """
        with in_writing(self._model, torch.get_num_threads()):
            for token in super().go_on(tokens, count):
                if self._words[-1] > 0:
                    return
                yield token


def _whole_blocks(state: State, whole: Blocks, parts: Sequence[range]) -> list[Tensor]:
    """Flat weights of the blocks that this rank computes, or borrows from; of others nothing. Every rank calls this."""
    model = state.model
    wanted = [
        {(block, each.name) for block in part for each in whole.layout(block).parameters}
        | {(0, name) for block in part for name in whole.borrowed(block)}
        for part in parts
    ]
    mine = {block for block, _ in wanted[state.rank]}
    lengths = [whole.layout(block).numel if block in mine else 0 for block in range(whole.layers)]
    flats = [torch.zeros(length, dtype=state.exact, device=state.settings.device) for length in lengths]
    views = {block: named_views(whole.layout(block), flats[block]) for block in mine}
    rooms = {(block, name): views[block][name] for block, name in wanted[state.rank]}
    for layer in range(model.layers):
        names = {(block, each.name) for block, each in model.run(layer).parameters()}
        for rank, theirs in enumerate(wanted):
            if names & theirs:
                _give(state, layer, rank, rooms)
    return flats


def _give(state: State, layer: int, rank: int, rooms: Mapping[tuple[int, str], Tensor]) -> None:
    """Put a layer together on a rank, which keeps the parameters that it has room for, by block and name."""
    flat = collect(state, state.kept, layer, rank)
    if flat is not None:
        for block, parameter, tensor in whole_parameters(state.model, layer, flat):
            if (block, parameter.name) in rooms:
                rooms[block, parameter.name].copy_(tensor)
