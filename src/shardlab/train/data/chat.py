"""Conversations as text that a model continues, formatted by the chat template in the model's folder or by a plain one.

`chat_template` finds the template. `ChatTemplate.render` turns messages into a prompt, and `ChatTemplate.ends` has the
tokens that end an answer.
"""

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
from shardlab.train.data.prepared_folder import run_folder
from shardlab.train.data.tokenizers import Tokenizer, read_special_tokens, token_text

Message = dict[str, str]
"""Message of a conversation: its role (user or assistant) and its content."""

ABSENT_VARIABLES = {"tools": None, "documents": None}
"""Variables that transformers passes to a template even if there are no tools and no documents."""

PLAIN_NAMES = {"user": "User", "assistant": "Assistant"}
"""Names in the plain template, which begins each line with `User:` or `Assistant:`."""


@dataclass(frozen=True)
class ChatTemplate:
    """Format of a conversation.

    Attributes:
        render: function that formats messages as text, up to the beginning of the model's answer.
        ends: tokens that end an answer.
        stop: text that ends an answer (empty: none does).
        begin: tokens before the rendered text (empty: there are none, or the template writes them).
    """

    render: Callable[[Sequence[Message]], str]
    ends: frozenset[int]
    stop: str = ""
    begin: tuple[int, ...] = ()


def chat_template(folder: Path, tokenizer: Tokenizer) -> ChatTemplate:
    """Find the chat template in a folder of weights, or return the plain one.

    A template is in chat_template.jinja, or in the field chat_template of tokenizer_config.json.

    Raises:
        UserError: if the template is invalid, or if there is none and the vocabulary lacks characters of the plain one.
    """
    folder = run_folder(folder)
    config = _table(folder / "tokenizer_config.json")
    template = _read_template(folder / "chat_template.jinja", config)
    ends = _find_end_tokens(folder, config, tokenizer)
    if template is None:
        try:
            tokenizer.encode([_render_plain([{"role": role, "content": ""} for role in PLAIN_NAMES]).encode()])
        except UserError as error:
            raise UserError(
                "this folder has no chat template, and its tokenizer cannot write the plain one, 'User: ...' and "
                f"'Assistant: ...' ({str(error).partition(';')[0]}); give --prompt TEXT instead of --chat"
            ) from None
        return ChatTemplate(_render_plain, ends, f"\n{PLAIN_NAMES['user']}:", tokenizer.begin)
    files = [folder / name for name in ("special_tokens_map.json", "tokenizer_config.json")]
    special = read_special_tokens({path.name: path.read_bytes() for path in files if path.is_file()})
    return ChatTemplate(_compile_template(template, special.roles, folder), ends)


def _render_plain(messages: Sequence[Message]) -> str:
    turns = [f"{PLAIN_NAMES[message['role']]}: {message['content']}\n" for message in messages]
    return "".join(turns) + f"{PLAIN_NAMES['assistant']}:"


def _read_template(path: Path, config: dict[str, Any]) -> str | None:
    """Return the template of a folder. If it has several, return the one named `default`."""
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template: Any = config.get("chat_template")
    if isinstance(template, list):
        defaults = [entry["template"] for entry in cast(list[dict[str, Any]], template) if entry["name"] == "default"]
        template = defaults[0] if defaults else None
    return template if isinstance(template, str) else None


def _compile_template(source: str, special: dict[str, str], folder: Path) -> Callable[[Sequence[Message]], str]:
    """Return a function that renders a Jinja template, in the sandbox and with the functions that transformers
    provides.
    """
    from jinja2 import TemplateError  # torch depends on it; its import is slow
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
            template = environment.from_string(_remove_generation_marks(source))
            return template.render(messages=list(messages), **ABSENT_VARIABLES, add_generation_prompt=True, **variables)
        except TemplateError as error:
            raise UserError(f"the chat template in {folder} cannot be rendered ({error}); correct it") from None

    return render


def _remove_generation_marks(template: str) -> str:
    """Remove the `generation` tags around assistant messages, which plain Jinja does not know."""
    mark = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")
    return mark.sub(lambda m: f"{m[1]}{'endif' if m[2] else 'if true'}{m[3]}", template)


def _find_end_tokens(folder: Path, config: dict[str, Any], tokenizer: Tokenizer) -> frozenset[int]:
    """Return the tokens that end an answer according to any file of the folder."""
    ends: set[int] = set() if tokenizer.end is None else {tokenizer.end}
    for name in ("generation_config.json", "config.json"):
        token_ids: Any = _table(folder / name).get("eos_token_id")
        values = cast(list[Any], token_ids) if isinstance(token_ids, list) else [token_ids]
        ends |= {token_id for token_id in values if isinstance(token_id, int)}
    if eos := token_text(config.get("eos_token")):
        tokens = tokenizer.encode_spelled(eos)
        ends |= set(tokens) if len(tokens) == 1 else set()
    return frozenset(ends)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as transformers' filter writes it, without escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _table(path: Path) -> dict[str, Any]:
    table: Any = read_file(path, "JSON") if path.is_file() else {}
    return cast(dict[str, Any], table) if isinstance(table, dict) else {}
