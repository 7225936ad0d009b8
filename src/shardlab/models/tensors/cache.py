"""Keys and values of a text's earlier tokens, so that each new token is computed alone."""

from __future__ import annotations

from torch import Tensor

from shardlab.models.attention import Attend
from shardlab.models.mixture import Routing
from shardlab.models.model import Model


class KeysValues:
    """What one layer's attention keeps of a text: the keys and values of its tokens so far."""

    def __init__(self) -> None:
        self._room: Tensor | None = None
        self._length = 0

    def add(self, new: Tensor) -> Tensor:
        """Keep those of the next tokens, (rows, T, 2 kv_width); gives those of all tokens so far.

        Room is made for twice as many tokens when it ends, so that a text of n tokens copies no more than 2 n.
        """
        start, self._length = self._length, self._length + new.shape[1]
        if self._room is None or self._length > self._room.shape[1]:
            room = new.new_empty(len(new), 2 * self._length, new.shape[-1])
            if self._room is not None:
                room[:, :start] = self._room[:, :start]
            self._room = room
        self._room[:, start : self._length] = new
        return self._room[:, : self._length]


def can_cache(model: Model) -> bool:
    """Whether attention alone lets a model's tokens see one another; routing does not, where no expert drops one."""
    mixing = [step.primitive for run in model.runs for step in run.steps if step.primitive.mixes_tokens]
    return all(
        isinstance(each, Attend) or (isinstance(each, Routing) and each.router.capacity_factor is None)
        for each in mixing
    )
