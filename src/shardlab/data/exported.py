"""A tokenizer as files of Hugging Face's, whose library then gives the same tokens and knows which ends a document."""

from __future__ import annotations

import json
from typing import Any

from shardlab.data.bpe import Gpt2, HuggingFace, letters
from shardlab.data.special_tokens import END
from shardlab.data.tokenizers import ByteTokenizer, Characters, Tokenizer

CONFIG = "tokenizer_config.json"


def exported(tokenizer: Tokenizer) -> dict[str, bytes]:
    """The files of a tokenizer by name, in Hugging Face's form; files of that form that it has come along as they are.

    Where no file of its own says which token ends a text, tokenizer_config.json and generation_config.json do.
    """
    match tokenizer:
        case ByteTokenizer():
            # byte pairs without any pair: every byte stays what it is, under the letter that GPT-2 has for it
            vocabulary = {letter: byte for byte, letter in enumerate(letters())}
            return _files(_byte_level(words=False), _byte_level(words=False), _pairs(vocabulary, []))
        case Characters():
            each = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False}
            vocabulary = {character: token for token, character in enumerate(tokenizer.characters)}
            model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"}  # not in it: an unknown one raises
            return _files(each, {"type": "Fuse"}, model)
        case Gpt2():
            vocabulary: dict[str, int] = json.loads(tokenizer.files()["encoder.json"])
            lines = tokenizer.files()["vocab.bpe"].decode().splitlines()[1:]  # the first tells the version
            merges = [line.split(" ") for line in lines if line]
            part = _byte_level(words=True)
            return _files(part, part, _pairs(vocabulary, merges), {END: vocabulary[END]}) | _ended({}, tokenizer, END)
        case HuggingFace():
            config: dict[str, Any] = json.loads(tokenizer.files().get(CONFIG, b"{}"))
            name = None if tokenizer.end is None else tokenizer.token(tokenizer.end)
            return tokenizer.files() | _ended(config, tokenizer, name)
        case _:
            return {}


def _byte_level(*, words: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": words}


def _pairs(vocabulary: dict[str, int], merges: list[list[str]]) -> dict[str, Any]:
    return {"type": "BPE", "vocab": vocabulary, "merges": merges}


def _files(
    pre_tokenizer: dict[str, Any], decoder: dict[str, Any], model: dict[str, Any], special: dict[str, int] | None = None
) -> dict[str, bytes]:
    absent = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor"))
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": number, "content": name, **flags, "special": True} for name, number in (special or {}).items()]
    parts = {"pre_tokenizer": pre_tokenizer, "decoder": decoder, "model": model}
    return {
        "tokenizer.json": _json({"version": "1.0", "added_tokens": added, **absent, **parts}),
        CONFIG: _json(_CONFIG),
    }


_CONFIG: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}


def _ended(config: dict[str, Any], tokenizer: Tokenizer, name: str | None) -> dict[str, bytes]:
    """The files that say which token ends a text, unless a tokenizer's own files say it."""
    there = tokenizer.files()
    if name is None:
        return {} if CONFIG in there else {CONFIG: _json(_CONFIG)}
    files: dict[str, bytes] = {}
    if not config.get("eos_token"):
        files[CONFIG] = _json(_CONFIG | config | {"eos_token": name})
    if "generation_config.json" not in there:
        files["generation_config.json"] = _json({"eos_token_id": tokenizer.end})
    return files


def _json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()
