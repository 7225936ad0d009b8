"""Which tokens begin and end a text: as files beside a tokenizer say, its post-processor, or at last their names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import takewhile
from typing import Any, NamedTuple, cast

from shardlab.errors import UserError

END = "<|endoftext|>"

ENDS = (END, "<|end_of_text|>", "</s>", "<eos>", "<\uff5cend▁of▁sentence\uff5c>")
"""Names of the token that ends a document, where no file says it: GPT-2's and ours, Llama 3's and 2's, Gemma's,
DeepSeek's. Special tokens come first: Gemma's vocabulary has the HTML tag </s> as well."""


class SpecialTokens(NamedTuple):
    """What files beside a tokenizer say of special tokens.

    Attributes:
        roles: the text of each by its role, such as eos_token.
        added: tokens that are listed with their numbers.
        adds_begin: whether bos_token begins every text (None: the post-processor says it).
        end: the number of the token that ends a text, as a model's configuration says it.
    """

    roles: dict[str, str]
    added: dict[int, str]
    adds_begin: bool | None
    end: int | None


def special_tokens(files: Mapping[str, bytes]) -> SpecialTokens:
    """What files say of special tokens, by their names; others are left alone.

    Raises:
        UserError: when one is no JSON.
    """
    names = ("added_tokens.json", "special_tokens_map.json", "tokenizer_config.json", "config.json")
    added, roles, config, *models = (_table(files, name) for name in (*names, "generation_config.json"))
    texts = {role: token_text(token) for role, token in (roles | config).items() if role.endswith("_token")}
    listed = cast(dict[str, Any], config.get("added_tokens_decoder") or {})
    numbers = {number: token for token, number in added.items()}
    numbers |= {int(number): token_text(token) for number, token in listed.items()}
    ids = (each for model in models for each in _listed(model.get("eos_token_id")))
    end = next((each for each in ids if isinstance(each, int)), None)
    adds: Any = config.get("add_bos_token")
    return SpecialTokens({role: text for role, text in texts.items() if text}, numbers, adds, end)


def _table(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    try:
        found: Any = json.loads(files.get(name, b"{}"))
    except ValueError as error:
        raise UserError(f"{name} beside the tokenizer is not JSON ({error}); copy the folder anew") from None
    return cast(dict[str, Any], found) if isinstance(found, dict) else {}


def _listed(value: Any) -> list[Any]:
    return cast(list[Any], value) if isinstance(value, list) else [value]


def token_text(token: Any) -> str:
    """A special token's text, which some files have in a table."""
    text: Any = cast(dict[str, Any], token).get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


def begin_of(post_processor: Any, config: SpecialTokens, vocabulary: Mapping[str, int]) -> tuple[int, ...]:
    """The tokens that begin a text: what the files beside a tokenizer say prevails over its post-processor."""
    if config.adds_begin is not None:
        first = vocabulary.get(config.roles.get("bos_token", ""))
        return (first,) if config.adds_begin and first is not None else ()
    match post_processor:
        case {"type": "Sequence", "processors": [*parts]}:
            return tuple(token for each in parts for token in begin_of(each, config, vocabulary))
        case {"type": "TemplateProcessing", "single": [*pieces], "special_tokens": {**special}}:
            named = takewhile(lambda piece: "SpecialToken" in piece, pieces)
            ids: list[list[int]] = [cast(Any, special)[piece["SpecialToken"]["id"]]["ids"] for piece in named]
            return tuple(token for each in ids for token in each)
        case {"type": "BertProcessing" | "RobertaProcessing", "cls": [_, int(token)]}:
            return (token,)
        case _:
            return ()


def end_of(config: SpecialTokens, vocabulary: Mapping[str, int], special: set[str]) -> int | None:
    """The token that ends a document: files beside a tokenizer say it, by name or number, or else it has a name for
    it, if need be one of no special token.
    """
    if (named := vocabulary.get(config.roles.get("eos_token", ""))) is not None:
        return named
    if config.end in vocabulary.values():
        return config.end
    names = [*(name for name in ENDS if name in special), *ENDS]
    return next((vocabulary[name] for name in names if name in vocabulary), None)
