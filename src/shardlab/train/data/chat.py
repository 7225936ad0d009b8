"""Conversations as text that a model goes on with: by the template in its folder, or by a plain one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, cast

from shardlab.common.errors import UserError
from shardlab.common.files import read_file
from shardlab.train.data.prepared_folder import home
from shardlab.train.data.tokenizers import Tokenizer, special_tokens, token_text

Message = dict[str, str]
"""What one side says: role (user or assistant) and content."""

ABSENT = {"tools": None, "documents": None}
"""Variables that transformers gives a template although there are no tools and no documents."""

PLAIN = {"user": "User", "assistant": "Assistant"}
"""Names of the sides in the plain template: `User: ...` and `Assistant: ...` by turns, each on a line of its own."""


@dataclass(frozen=True)
class ChatTemplate:
    """How a conversation is written down.

    Attributes:
        render: a conversation as text, up to where the model's answer begins.
        begin: tokens before that text; a folder's own template spells them out.
        ends: tokens that end an answer.
        stop: text that ends an answer (empty: none does).
    """

    render: Callable[[Sequence[Message]], str]
    ends: frozenset[int]
    stop: str = ""
    begin: tuple[int, ...] = ()


def chat_template(folder: Path, tokenizer: Tokenizer) -> ChatTemplate:
    """The template in a folder of weights (chat_template.jinja, or chat_template in tokenizer_config.json), or else
    the plain one.

    Raises:
        UserError: for a template that is none.
    """
    folder = home(folder)
    config = _table(folder / "tokenizer_config.json")
    written = _written(folder / "chat_template.jinja", config)
    ends = _ends(folder, config, tokenizer)
    if written is None:
        return ChatTemplate(_plain, ends, f"\n{PLAIN['user']}:", tokenizer.begin)
    files = [folder / name for name in ("special_tokens_map.json", "tokenizer_config.json")]
    special = special_tokens({path.name: path.read_bytes() for path in files if path.is_file()})
    return ChatTemplate(_rendering(written, special.roles, folder), ends)


def _plain(messages: Sequence[Message]) -> str:
    turns = [f"{PLAIN[each['role']]}: {each['content']}\n" for each in messages]
    return "".join(turns) + f"{PLAIN['assistant']}:"


def _written(path: Path, config: dict[str, Any]) -> str | None:
    """The template of a folder; of several the one that is named default."""
    if path.is_file():
        return path.read_text(encoding="utf-8")
    found: Any = config.get("chat_template")
    if isinstance(found, list):
        named = [each["template"] for each in cast(list[dict[str, Any]], found) if each["name"] == "default"]
        found = named[0] if named else None
    return found if isinstance(found, str) else None


def _rendering(written: str, special: dict[str, str], folder: Path) -> Callable[[Sequence[Message]], str]:
    """A template of Jinja, in the sandbox and with the functions that transformers gives it."""
    from jinja2 import TemplateError  # it comes with torch, and takes a while to be imported
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    variables: dict[str, Any] = {"raise_exception": refuse, "strftime_now": datetime.now().strftime, **special}

    def render(messages: Sequence[Message]) -> str:
        try:
            template = environment.from_string(_without_marks(written))
            return template.render(messages=list(messages), **ABSENT, add_generation_prompt=True, **variables)
        except TemplateError as error:
            raise UserError(f"the chat template in {folder} cannot be followed ({error}); mend it") from None

    return render


def _without_marks(written: str) -> str:
    """Without the marks around what a model is trained to say, which Jinja itself does not know."""
    mark = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")
    return mark.sub(lambda m: f"{m[1]}{'endif' if m[2] else 'if true'}{m[3]}", written)


def _ends(folder: Path, config: dict[str, Any], tokenizer: Tokenizer) -> frozenset[int]:
    """Tokens that end what a model says, wherever its folder tells of one."""
    found: set[int] = set() if tokenizer.end is None else {tokenizer.end}
    for name in ("generation_config.json", "config.json"):
        given: Any = _table(folder / name).get("eos_token_id")
        listed = cast(list[Any], given) if isinstance(given, list) else [given]
        found |= {each for each in listed if isinstance(each, int)}
    if eos := token_text(config.get("eos_token")):
        tokens = tokenizer.encode_spelled(eos)
        found |= set(tokens) if len(tokens) == 1 else set()
    return frozenset(found)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers' filter writes it, without what HTML needs."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _table(path: Path) -> dict[str, Any]:
    found: Any = read_file(path, "JSON") if path.is_file() else {}
    return cast(dict[str, Any], found) if isinstance(found, dict) else {}
