"""Tokenizers of bytes and characters as files of Hugging Face's, whose library then gives the same tokens."""

from __future__ import annotations

import json
from typing import Any

from shardlab.data.tokenizers import ByteTokenizer, Characters, Tokenizer


def exported(tokenizer: Tokenizer) -> dict[str, bytes]:
    """The files of a tokenizer of bytes or characters, by name; of another kind none, for it has files of its own."""
    match tokenizer:
        case ByteTokenizer():
            # byte pairs without any pair: every byte stays what it is, under the letter that GPT-2 has for it
            part = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
            vocabulary = {letter: byte for byte, letter in enumerate(_letters())}
            return _files(part, part, {"type": "BPE", "vocab": vocabulary, "merges": []})
        case Characters():
            each = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False}
            vocabulary = {character: token for token, character in enumerate(tokenizer.characters)}
            model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"}  # not in it: an unknown one raises
            return _files(each, {"type": "Fuse"}, model)
        case _:
            return {}


def _files(pre_tokenizer: dict[str, Any], decoder: dict[str, Any], model: dict[str, Any]) -> dict[str, bytes]:
    absent = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor"))
    parts = {"pre_tokenizer": pre_tokenizer, "decoder": decoder, "model": model}
    tokenizer: dict[str, Any] = {"version": "1.0", "added_tokens": [], **absent, **parts}
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    written = {"tokenizer.json": tokenizer, "tokenizer_config.json": config}
    return {name: (json.dumps(content, indent=2) + "\n").encode() for name, content in written.items()}


def _letters() -> list[str]:
    """GPT-2's letters for bytes, in their order: a byte's own where it has one that shows, else the next from 256 on.

    As `bytes_to_unicode` in github.com/openai/gpt-2, src/encoder.py.
    """
    shown = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte if byte in shown else next(others)) for byte in range(256)]
