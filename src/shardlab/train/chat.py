"""A conversation with a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from torch import Tensor

from shardlab.data.chat import ChatTemplate, Message
from shardlab.data.tokenizers import Tokenizer
from shardlab.errors import UserError
from shardlab.models import Model
from shardlab.models.tensors import Choice, Writer
from shardlab.rules.pieces import counted
from shardlab.train.sample import as_text


@dataclass
class Conversation:
    """Turns of a user and a model, of which the model sees as many as it has positions for.

    Attributes:
        model, flats: that answers (see `Writer`).
        tokenizer: of its tokens.
        template: how turns are written down.
        choice: how tokens are drawn; each answer has a seed of its own.
        most: tokens of an answer.
        cached: see `Writer`.
        messages: what was said, but for what the model no longer sees.
        dropped: how many turns it no longer sees.
    """

    model: Model
    flats: Sequence[Tensor]
    tokenizer: Tokenizer
    template: ChatTemplate
    choice: Choice
    most: int
    cached: bool = True
    messages: list[Message] = field(default_factory=list[Message])
    dropped: int = 0
    _answers: int = 0

    def answer(self, question: str) -> Iterator[str]:
        """The model's answer to the user's question, in pieces as they come; oldest turns are dropped if need be.

        Raises:
            UserError: when the question cannot be encoded, or is longer than all that the model sees.
        """
        messages, tokens = self._fitting([*self.messages, {"role": "user", "content": question}])
        self.dropped += (len(self.messages) + 1 - len(messages)) // 2
        writer = Writer(self.model, self.flats, replace(self.choice, seed=self.choice.seed + self._answers),
                        cached=self.cached)  # fmt: skip
        self._answers += 1
        drawn = takewhile(lambda token: token not in self.template.ends, writer.go_on(tokens, self.most))
        answer = ""
        for part in until(as_text(drawn, self.tokenizer, tokens), self.template.stop):
            shown = part if answer else part.lstrip()
            answer += shown
            yield shown
        self.messages = [*messages, {"role": "assistant", "content": answer.strip()}]

    def _fitting(self, messages: list[Message]) -> tuple[list[Message], list[int]]:
        """The last turns that leave room for an answer, and their tokens."""
        room = min(self.most, self.model.seq_len // 4)
        while True:
            tokens = [*self.template.begin, *self.tokenizer.encode_spelled(self.template.render(messages))]
            if len(tokens) + room <= self.model.seq_len:
                return messages, tokens
            if len(messages) == 1:
                break
            messages = messages[2:]
        if len(tokens) > self.model.seq_len:
            raise UserError(
                f"this turn has {counted(len(tokens), 'token')} with its template, but the model sees "
                f"{self.model.seq_len}; say less"
            )
        return messages, tokens


def until(parts: Iterator[str], stop: str) -> Iterator[str]:
    """A text as it comes, up to where `stop` begins in it."""
    held = ""
    for part in parts:
        held += part
        before, found, _ = held.partition(stop) if stop else (held, "", "")
        if found:
            yield before
            return
        kept = next((n for n in range(min(len(stop), len(held)), 0, -1) if held.endswith(stop[:n])), 0)
        yield held[: len(held) - kept]
        held = held[len(held) - kept :]
    yield held
