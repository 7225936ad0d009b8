"""Text generation by a trained model, token by token.

`TextGenerator` computes the scores of the next token, and `TokenSampling` draws a token from them.
"""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardlab.common.errors import UserError
from shardlab.models.model import Model
from shardlab.models.tensors.attention import KeyValueCache, can_cache
from shardlab.models.tensors.dropout import make_generator
from shardlab.models.tensors.layers import make_layers
from shardlab.models.tensors.share import Share
from shardlab.models.tensors.weights import named_views, parameter_views


@dataclass(frozen=True)
class TokenSampling:
    """Settings for drawing the next token from a model's scores.

    Attributes:
        temperature: divisor of the scores; 0 takes the likeliest token.
        top_k: number of the likeliest tokens to draw from (None: all).
        top_p: draw from the likeliest tokens that together have this probability (Holtzman et al. 2019, arXiv
            1904.09751); applied after `top_k`.
        seed: seed of the random numbers. The text is a function of it, the weights and the prompt.

    Raises:
        UserError: for a value out of range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature is {self.temperature:g}; give 0 or more, such as 0.8")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top-k is {self.top_k}, which leaves no token to draw; give 1 or more")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top-p is {self.top_p:g}; give a probability above 0 and of at most 1")

    def draw(self, logits: Tensor, generator: torch.Generator) -> int:
        """Draw a token from scores (vocabulary,).

        Raises:
            UserError: if a score is NaN or infinite.
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
            cumulative = values.cumsum(0) - values
            values[cumulative >= self.top_p * values.sum()] = 0
        drawn_from = torch.zeros_like(values).scatter_(0, tokens, values)
        return int(torch.multinomial(drawn_from, 1, generator=generator))


class TextGenerator:
    """Generator that reads a text and continues it.

    The model reads the last `model.seq_len` tokens. While the text is no longer than that, keys and values of earlier
    tokens are cached. After that, every token takes a forward pass of a whole sequence, because all positions change.

    Args:
        model: a model of whole blocks.
        flats: flat weights of each whole block. The weights of a block that is neither computed here nor borrowed from
            are not read.
        choice: how tokens are drawn.
        cached: whether to cache keys and values, if the model allows it (`can_cache`).
        blocks: blocks that are computed here (None: all).
    """

    def __init__(
        self,
        model: Model,
        flats: Sequence[Tensor],
        choice: TokenSampling,
        *,
        cached: bool = True,
        blocks: range | None = None,
    ) -> None:
        self._model, self._choice = model, choice
        own_blocks, layers = range(model.layers) if blocks is None else blocks, make_layers(model)
        self._layers = [layers[block] for block in own_blocks]
        self._device = flats[0].device
        self._parameters = [
            [*parameter_views(model.layout(block), flats[block]), *_borrowed(model, block, flats[0])]
            for block in own_blocks
        ]
        self._caches = [KeyValueCache() for _ in own_blocks] if cached and can_cache(model) else None
        self._text: list[int] = []
        self._unread: list[int] = []
        self._generator = make_generator("generate", choice.seed)

    @torch.no_grad()
    def read(self, tokens: Sequence[int]) -> Tensor:
        """Append tokens to the text and return the scores (tokens, vocabulary) of the token after each of them.

        If there are more tokens than the model's context, only the last ones get scores.

        Raises:
            UserError: if there are no tokens, or one is outside the vocabulary.
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
        context = self._text[start:][-self._model.seq_len :]
        x = torch.tensor(context, device=self._device)[None]
        return self.compute(x, Share(tokens=range(start, start + len(context))))[0, -len(tokens) :]

    def compute(self, x: Tensor, share: Share) -> Tensor:
        """Compute the last block's output (1, tokens, features) for the tokens (1, tokens) after the cached ones."""
        caches = self._caches or [None] * len(self._layers)
        for layer, weights, cache in zip(self._layers, self._parameters, caches, strict=True):
            (x,) = layer.run(weights, (x,), share, cache=cache)
        return x

    def generate(self, tokens: Sequence[int], count: int) -> Iterator[int]:
        """Read some tokens, then generate `count` more and yield each as it is drawn.

        Raises:
            UserError: if there are no tokens, one is outside the vocabulary, or a score is NaN or infinite.
        """
        unread = [*self._unread, *tokens]
        self._unread = []
        for _ in range(count):
            logits = self.read(unread)
            token = self._choice.draw(logits[-1], self._generator)
            unread = self._unread = [token]
            yield token


def _borrowed(model: Model, block: int, first: Tensor) -> list[Tensor]:
    """Return the parameters of the first block that this block uses as well."""
    names = model.borrowed(block)
    return [named_views(model.layout(0), first)[name] for name in names]
