"""`shardlab sample FOLDER`: generate text with the weights of a run or a Hugging Face folder."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from shardlab.cli.console import print_json
from shardlab.cli.options import Count, Flag, OptionalCount
from shardlab.common.text import counted
from shardlab.language import UserError

if TYPE_CHECKING:
    from shardlab.models import Model
    from shardlab.models.tensors import TextGenerator
    from shardlab.train.data.tokenizers import Tokenizer
    from shardlab.train.sample import Conversation


@dataclass(frozen=True)
class Sample:
    """Continue a text with the weights of a run or a Hugging Face folder, and print it as it is generated.

    The model sees as many of the last tokens as it has positions.
    """

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="")]
    """Folder of a run, or Hugging Face folder."""

    prompt: Annotated[str | None, tyro.conf.arg(metavar="TEXT", help_behavior_hint="")] = None
    """Text to continue."""

    data: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="")] = None
    """Prepared folder whose tokenizer is used in place of the one beside the weights."""

    chat: Flag = False
    """Chat with the model until Ctrl-D: each line from stdin is followed by an answer. The template in the model's
    folder is used, otherwise "User: ..." and "Assistant: ..."."""

    tokens: Count = 200
    """Number of tokens to generate; in a chat, the largest number in an answer."""

    temperature: float = 1.0
    """Divide the logits by this number before sampling; 0 always takes the likeliest token."""

    top_k: OptionalCount = None
    """Sample from the N likeliest tokens."""

    top_p: float = 1.0
    """Sample from the likeliest tokens that together have this probability."""

    seed: int = 0
    """Seed of the sampling."""

    no_cache: Flag = False
    """Recompute the whole text for every token, without a cache of keys and values."""

    json: Flag = False
    """Print only JSON, at the end."""

    def run(self) -> int:
        if self.prompt is None and not self.chat:
            raise UserError("there is no text to continue; give --prompt TEXT, or --chat")
        if self.chat and self.json:
            raise UserError("both --chat and --json were given; give one of them")
        if self.temperature == 0 and (self.top_k is not None or self.top_p != 1):
            flag = "--top-p" if self.top_k is None else "--top-k"
            raise UserError(
                f"{flag} has no effect, because --temperature 0 takes the likeliest token; leave out one of them"
            )
        import torch

        from shardlab.execute.kernel_choice import KeptChoices
        from shardlab.models.tensors import TextGenerator, TokenSampling
        from shardlab.models.tensors.compute import kernel_choices
        from shardlab.train.data.chat import chat_template
        from shardlab.train.data.prepared_folder import PreparedFolder, require_tokenizer
        from shardlab.train.huggingface.sources import initial_from, open_source
        from shardlab.train.launch.environment import CpuShare, threads_of
        from shardlab.train.launch.ranks import pick_device
        from shardlab.train.sample import Conversation, for_text, in_writing, whole_weights

        choice = TokenSampling(self.temperature, self.top_k, self.top_p, self.seed)
        source = open_source(self.folder)
        model, use_cache = for_text(source.model), not self.no_cache
        tokenizer = (
            require_tokenizer(self.folder, model.vocab_size)
            if self.data is None
            else PreparedFolder.open(self.data).tokenizer()
        )
        flat_weights = whole_weights(source.model, initial_from(self.folder, source.model), pick_device())
        writing = in_writing(source.model, threads_of([CpuShare.of_this_process()]))
        with writing, kernel_choices(KeptChoices().read(torch.get_num_threads())):
            if self.chat:
                template = chat_template(self.folder, tokenizer)
                self._chat(Conversation(model, flat_weights, tokenizer, template, choice, self.tokens, use_cache))
            else:
                self._continue(TextGenerator(model, flat_weights, choice, cached=use_cache), model, tokenizer)
        return 0

    def _continue(self, writer: TextGenerator, model: Model, tokenizer: Tokenizer) -> None:
        """Print the prompt and its continuation by the model."""
        import numpy as np

        from shardlab.common.text import printable
        from shardlab.train.data.prepare import lost_text
        from shardlab.train.sample import as_text, tokens_of

        prompt = (self.prompt or "").encode(errors="surrogateescape")
        tokens, times = tokens_of(prompt, tokenizer), list[float]()
        if note := lost_text(tokenizer.count_lost(prompt, np.array(tokens, np.int64))):
            print(f"shardlab: --prompt: {note}", file=sys.stderr)
        text: list[str] = []
        for part in as_text(_record_times(writer.generate(tokens, self.tokens), times), tokenizer, tokens):
            if not text and not self.json:
                print(printable(prompt.decode(errors="replace")), end="")
            text.append(part)
            if not self.json:
                print(part, end="", flush=True)
        if self.json:
            print_json(
                {
                    "prompt": printable(prompt.decode(errors="replace")),
                    "text": "".join(text),
                    "tokens": self.tokens,
                    "seed": self.seed,
                }
            )
            return
        print(flush=True)
        seconds = times[-1] - times[0]
        speed = f", {(len(times) - 1) / seconds:,.0f} tokens/s after the first" if seconds else ""
        window = len(tokens) + self.tokens > model.seq_len
        limit = f"; the model sees the last {model.seq_len:,}" if window else ""
        print(f"{len(times)} tokens{speed}{limit}", file=sys.stderr)

    def _chat(self, conversation: Conversation) -> None:
        """Answer each line of stdin until its end."""
        reported, first_line = 0, self.prompt
        while True:
            try:
                line = first_line or input("> " if sys.stdin.isatty() else "")
            except EOFError:
                print(end="\n" if sys.stdin.isatty() else "")
                return
            first_line = None
            if not line.strip():
                continue
            try:
                for part in conversation.answer(line):
                    print(part, end="", flush=True)
            except UserError as error:
                if not sys.stdin.isatty():
                    raise
                print(f"shardlab: {error}", file=sys.stderr)
                continue
            print(flush=True)
            if conversation.dropped > reported:
                reported = conversation.dropped
                reason = f"the model sees {conversation.model.seq_len:,} tokens"
                print(f"{counted(reported, 'turn')} dropped from the beginning: {reason}", file=sys.stderr)


def _record_times(tokens: Iterator[int], times: list[float]) -> Iterator[int]:
    """Yield tokens, and append the time of each to `times`."""
    for token in tokens:
        times.append(time.perf_counter())
        yield token
