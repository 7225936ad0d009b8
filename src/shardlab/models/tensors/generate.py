"""Text from a trained model, token by token."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardlab.common.errors import UserError
from shardlab.models.model import Model
from shardlab.models.tensors.attention import KeysValues, can_cache
from shardlab.models.tensors.dropout import generator_of
from shardlab.models.tensors.layers import layers_of
from shardlab.models.tensors.share import Share
from shardlab.models.tensors.weights import named_views, views


@dataclass(frozen=True)
class Choice:
    """How the next token is drawn from a model's scores.

    Attributes:
        temperature: by what scores are divided; 0 takes the likeliest token.
        top_k: of how many of the likeliest tokens one is drawn (None: of all).
        top_p: of the likeliest tokens that together have this probability, one is drawn (Holtzman et al. 2019,
            arXiv 1904.09751); after `top_k`.
        seed: what is drawn is a function of it, the weights and the text.

    Raises:
        UserError: for a value that means nothing.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"a temperature of {self.temperature:g} means nothing; give 0 or more, such as 0.8")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"a top-k of {self.top_k} leaves no token to draw; give 1 or more")
        if not 0 < self.top_p <= 1:
            raise UserError(f"a top-p of {self.top_p:g} is no probability to draw from; give more than 0, at most 1")

    def draw(self, logits: Tensor, generator: torch.Generator) -> int:
        """A token, from scores (vocabulary,).

        Raises:
            UserError: when they are not numbers.
        """
        exact = logits.double().cpu()
        if exact.isnan().any() or exact.isposinf().any():
            raise UserError("the model's scores are not numbers, so no token can be drawn; its weights have diverged")
        if self.temperature == 0:
            return int(exact.argmax())
        probabilities = (exact / self.temperature).softmax(0)
        values, tokens = probabilities.sort(descending=True, stable=True)
        if self.top_k is not None:
            values[self.top_k :] = 0
        if self.top_p < 1:
            before = values.cumsum(0) - values
            values[before >= self.top_p * values.sum()] = 0
        drawn_from = torch.zeros_like(values).scatter_(0, tokens, values)
        return int(torch.multinomial(drawn_from, 1, generator=generator))


class Writer:
    """A model that reads and writes one text.

    It sees the last `model.seq_len` tokens. While the text is no longer than that, keys and values of earlier tokens
    are kept; later every token costs a whole sequence, since its places move.

    Args:
        model: of whole blocks.
        flats: each block's complete flat weights; of a block that is not computed here, and from which none that is
            borrows, anything.
        choice: how tokens are drawn.
        cached: keep keys and values, if the model's tokens meet in attention alone.
        blocks: those that are computed here (None: all).
    """

    def __init__(
        self,
        model: Model,
        flats: Sequence[Tensor],
        choice: Choice,
        *,
        cached: bool = True,
        blocks: range | None = None,
    ) -> None:
        self._model, self._choice = model, choice
        here, layers = range(model.layers) if blocks is None else blocks, layers_of(model)
        self._layers = [layers[block] for block in here]
        self._device = flats[0].device
        self._parameters = [
            [*views(model.layout(block), flats[block]), *_borrowed(model, block, flats[0])] for block in here
        ]
        self._caches = [KeysValues() for _ in here] if cached and can_cache(model) else None
        self._text: list[int] = []
        self._unread: list[int] = []
        self._generator = generator_of("generate", choice.seed)

    @torch.no_grad()
    def read(self, tokens: Sequence[int]) -> Tensor:
        """Go on with some tokens: their scores (tokens, vocabulary) of what comes next.

        Of more tokens than the model sees, the last ones'.

        Raises:
            UserError: when there is none, or one is outside the vocabulary.
        """
        if not tokens:
            raise UserError("the prompt is empty; text is continued from at least one token")
        for token in tokens:
            if not 0 <= token < self._model.vocab_size:
                raise UserError(
                    f"token {token} of the text is outside the model's vocabulary of {self._model.vocab_size:,}; "
                    "give text that it was made for"
                )
        start = len(self._text)
        self._text += tokens
        if len(self._text) > self._model.seq_len:
            self._caches = None
        if self._caches is None:
            start = 0
        seen = self._text[start:][-self._model.seq_len :]
        x = torch.tensor(seen, device=self._device)[None]
        return self.compute(x, Share(tokens=range(start, start + len(seen))))[0, -len(tokens) :]

    def compute(self, x: Tensor, share: Share) -> Tensor:
        """The blocks' outputs (1, tokens, features) for the tokens (1, tokens) that follow those seen before."""
        caches = self._caches or [None] * len(self._layers)
        for layer, weights, cache in zip(self._layers, self._parameters, caches, strict=True):
            (x,) = layer.run(weights, (x,), share, cache=cache)
        return x

    def go_on(self, tokens: Sequence[int], count: int) -> Iterator[int]:
        """Read some tokens, then write `count`, each given as it is drawn.

        Raises:
            UserError: as `read` and `Choice.draw` do.
        """
        given = [*self._unread, *tokens]
        self._unread = []
        for _ in range(count):
            logits = self.read(given)
            token = self._choice.draw(logits[-1], self._generator)
            given = self._unread = [token]
            yield token


def _borrowed(model: Model, block: int, first: Tensor) -> list[Tensor]:
    """The parameters of the first block that this one computes with as well."""
    names = model.borrowed(block)
    return [named_views(model.layout(0), first)[name] for name in names]
