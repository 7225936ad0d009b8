"""Tokenizers of byte pairs: GPT-2's by tiktoken, any of Hugging Face's `tokenizer.json`, and training one."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from shardlab.data.documents import decoded
from shardlab.data.extra import library
from shardlab.data.special_tokens import END, begin_of, end_of, special_tokens
from shardlab.data.tokenizers import NOTHING, Tokenizer
from shardlab.errors import UserError

BESIDE = (
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "generation_config.json"),
    *("chat_template.jinja", "tokenizer.model", "vocab.json", "merges.txt"),
)
"""Files beside a tokenizer.json that go where it goes."""

GPT2_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
GPT2_FILES = {
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}
"""SHA-256 of GPT-2's files, as in tiktoken_ext/openai_public.py of tiktoken 0.14."""

GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
"""Where GPT-2 cuts a text into words; tiktoken's `r50k_pat_str`."""


class Gpt2(Tokenizer):
    """GPT-2's tokenizer.

    Args:
        files: its two files, by name.
    """

    kind = "gpt2"

    def __init__(self, files: dict[str, bytes]) -> None:
        tiktoken = library("tiktoken", "the tokenizer gpt2")
        self._files = files
        ranks = _ranks(files)
        self.end = len(ranks)
        self.vocab_size = len(ranks) + 1
        self._encoding = tiktoken.Encoding(
            "gpt2", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={END: self.end}
        )

    @classmethod
    def find(cls) -> Gpt2:
        """GPT-2's tokenizer by the files that tiktoken keeps, under tiktoken's names or their own; nothing is fetched.

        Raises:
            UserError: they are not there, or are other files.
        """
        folder = os.environ.get("TIKTOKEN_CACHE_DIR") or os.environ.get("DATA_GYM_CACHE_DIR")
        cache = Path(folder) if folder else Path(tempfile.gettempdir(), "data-gym-cache")
        found: dict[str, bytes] = {}
        for name, wanted in GPT2_FILES.items():
            places = (cache / hashlib.sha1((GPT2_URL + name).encode()).hexdigest(), cache / name)
            file = next((place for place in places if place.is_file()), None)
            if file is None:
                raise UserError(
                    f"the tokenizer gpt2 needs two files that are not in {cache}; fetch {GPT2_URL}vocab.bpe and "
                    f"{GPT2_URL}encoder.json into a folder, and set TIKTOKEN_CACHE_DIR to that folder"
                )
            found[name] = file.read_bytes()
            if hashlib.sha256(found[name]).hexdigest() != wanted:
                raise UserError(f"{file} is not GPT-2's {name} (its checksum differs); fetch {GPT2_URL}{name} again")
        return cls(found)

    def encode(self, texts: Sequence[bytes]) -> list[NDArray[np.int64]]:
        found: list[list[int]] = self._encoding.encode_ordinary_batch([decoded(text) for text in texts])
        return [np.array(tokens, np.int64) for tokens in found]

    def decode(self, tokens: NDArray[np.integer]) -> bytes:
        return self._encoding.decode_bytes(np.minimum(tokens, self.vocab_size - 1).tolist())

    def meanings(self) -> list[bytes]:
        return [*(self._encoding.decode_single_token_bytes(token) for token in range(self.end or 0)), END.encode()]

    def files(self) -> dict[str, bytes]:
        return self._files


def _ranks(files: dict[str, bytes]) -> dict[bytes, int]:
    """Byte pairs with their ranks, by tiktoken's own reader."""
    load = library("tiktoken.load", "the tokenizer gpt2")
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            Path(folder, name).write_bytes(content)
        before = os.environ.get("TIKTOKEN_CACHE_DIR")
        os.environ["TIKTOKEN_CACHE_DIR"] = ""  # or it would copy the files into its cache
        try:
            return load.data_gym_to_mergeable_bpe_ranks(*(str(Path(folder, name)) for name in GPT2_FILES))
        finally:
            del os.environ["TIKTOKEN_CACHE_DIR"]
            if before is not None:
                os.environ["TIKTOKEN_CACHE_DIR"] = before


class HuggingFace(Tokenizer):
    """A tokenizer of Hugging Face's library `tokenizers`.

    Args:
        content: of its file, a `tokenizer.json`.
        name: what an error calls it.
        beside: files that lie beside it, by name; tokenizer_config.json says which tokens begin and end a document.
        end: the token that ends a document, if something else says which; None: the files say it.

    Raises:
        UserError: for a file that is none.
    """

    kind = "tokenizer.json"

    def __init__(
        self,
        content: bytes,
        name: str = "tokenizer.json",
        beside: Mapping[str, bytes] | None = None,
        end: int | None = None,
    ) -> None:
        tokenizers = library("tokenizers", "a tokenizer.json")
        self._content, self._name, self._beside = content, name, dict(beside or {})
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode())
        except Exception as error:  # the library raises nothing more special
            raise UserError(f"{name} is not a tokenizer of Hugging Face ({error}); give a whole one") from None
        self._tokenizer.encode_special_tokens = True  # a text that spells one out is text
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        parts: dict[str, Any] = json.loads(content)
        config = special_tokens(self._beside)
        self._add_tokens(config.added)
        added: dict[int, Any] = self._tokenizer.get_added_tokens_decoder()
        self.added = frozenset(added)
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(vocabulary.values(), default=-1)
        self.begin = begin_of(parts.get("post_processor"), config, vocabulary)
        special = {each.content for each in added.values() if each.special}
        self.end = end if end is not None else end_of(config, vocabulary, special)
        self._decoders = _kinds(parts.get("decoder"))
        self._letters = {letter: byte for byte, letter in enumerate(letters())}
        model: dict[str, Any] = parts["model"]
        self._unknown: int | None = model.get("unk_id", vocabulary.get(model.get("unk_token") or ""))
        self._drops = "merges" in model and self._unknown is None and not self._letters.keys() <= vocabulary.keys()
        self._spellings: dict[int, str] = {}
        self._known: dict[str, bool] = {}

    def _add_tokens(self, added: Mapping[int, str]) -> None:
        """Add the tokens that only the files beside it have, as transformers does, where their numbers come next."""
        tokenizers = library("tokenizers", "a tokenizer.json")
        for number, token in sorted(added.items()):
            if number == self._tokenizer.get_vocab_size(with_added_tokens=True):
                self._tokenizer.add_tokens([tokenizers.AddedToken(token, normalized=False, special=True)])

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> HuggingFace:
        """Byte pairs of some texts, of bytes as GPT-2's: any text can be encoded, and comes back as it was.

        Args:
            vocab_size: the most tokens: all 256 bytes, the token that ends a document, and merged pairs.
        """
        tokenizers = library("tokenizers", "--train-bpe")
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocab_size,
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=[END],
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
        return cls(tokenizer.to_str().encode())

    def encode(self, texts: Sequence[bytes]) -> list[NDArray[np.int64]]:
        words = [decoded(text) for text in texts]
        try:
            found: list[Any] = self._tokenizer.encode_batch_fast(words, add_special_tokens=False)
        except Exception as error:  # as above
            raise UserError(
                f"{self._name} cannot encode this text ({error}); take a tokenizer that fits it, or --train-bpe"
            ) from None
        return [np.array(each.ids, np.int64) for each in found]

    def encode_spelled(self, text: str) -> list[int]:
        self._tokenizer.encode_special_tokens = False
        try:
            return super().encode_spelled(text)
        finally:
            self._tokenizer.encode_special_tokens = True

    def decode(self, tokens: NDArray[np.integer]) -> bytes:
        spelled = [spelling for token in tokens.tolist() if (spelling := self._spelled(token))]
        decoder = self._tokenizer.decoder
        return _bytes_of(" ".join(spelled) if decoder is None else decoder.decode(spelled))

    def token(self, number: int) -> str:
        """A token as it stands in the file."""
        return self._tokenizer.id_to_token(number) or ""

    def _spelled(self, token: int) -> str:
        """A token as its decoder takes it, but that bytes of a character's part go through it one by one.

        The library's own decoders make U+FFFD of them.
        """
        if (found := self._spellings.get(token)) is not None:
            return found
        word = self.token(token)
        if "ByteFallback" in self._decoders and BYTE_TOKEN.fullmatch(word):
            word = _kept_apart(bytes([int(word[3:5], 16)]))
        elif "ByteLevel" in self._decoders and all(letter in self._letters for letter in word):
            text = bytes(self._letters[letter] for letter in word)
            word = word if text.isascii() else _kept_apart(text)
        self._spellings[token] = word
        return word

    def lost(self, text: bytes, tokens: NDArray[np.integer]) -> Mapping[str, int]:
        if self._unknown is not None:
            count = int((tokens == self._unknown).sum())
            return {self._spelled(self._unknown): count} if count else NOTHING
        if not self._drops:
            return NOTHING
        return {each: count for each, count in Counter(decoded(text)).items() if not self._knows(each)}

    def _knows(self, character: str) -> bool:
        """Whether a character has a token; a tokenizer may take spaces for mere ends of words."""
        if character not in self._known:
            there = character.isspace() or bool(self._tokenizer.encode(character, add_special_tokens=False).ids)
            self._known[character] = there
        return self._known[character]

    def meanings(self) -> list[bytes]:
        found: list[bytes] = []
        for token in range(self.vocab_size):
            word = self._spelled(token)
            whole = "ByteLevel" in self._decoders and all(letter in self._letters for letter in word)
            found.append(bytes(self._letters[letter] for letter in word) if whole else _bytes_of(word))
        return found

    def files(self) -> dict[str, bytes]:
        return {
            "tokenizer.json": self._content,
            **{name: self._beside[name] for name in BESIDE if name in self._beside},
        }


BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
"""A token of a byte, where a character has no token of its own (SentencePiece's byte_fallback)."""

APART = 0x10F000
"""Bytes from 128 on are letters of a plane for private use from here on, while a decoder of characters handles them."""

_ESCAPES = {APART + byte: 0xDC00 + byte for byte in range(128, 256)}


def _kept_apart(text: bytes) -> str:
    """Bytes as letters that no decoder changes; those below 128 are characters already."""
    return "".join(chr(byte if byte < 128 else APART + byte) for byte in text)


def _bytes_of(text: str) -> bytes:
    """Bytes of a text, some of which are letters that were kept apart."""
    return text.translate(_ESCAPES).encode(errors="surrogateescape")


def _kinds(part: Any) -> frozenset[str]:
    """The kinds of a decoder and of those that it consists of."""
    if not isinstance(part, dict):
        return frozenset()
    table = cast(dict[str, Any], part)
    return frozenset({table.get("type", "")}).union(*map(_kinds, table.get("decoders", ())))


def read_tokenizer(path: Path, config: Mapping[str, Any] | None = None) -> HuggingFace:
    """The tokenizer in a `tokenizer.json`, with the files that lie beside it.

    Args:
        config: of the model that it belongs to, where config.json is not beside it.

    Raises:
        UserError: for what is none.
    """
    try:
        content = path.read_bytes()
        json.loads(content)
        beside = [path.parent / name for name in (*BESIDE, "config.json")]
        files = {each.name: each.read_bytes() for each in beside if each.is_file()}
    except OSError as error:
        raise UserError(f"the tokenizer {path} cannot be read ({error.strerror}); give a tokenizer.json") from None
    except ValueError as error:
        raise UserError(f"the tokenizer {path} is not JSON ({error}); give a whole tokenizer.json") from None
    if config:
        files["config.json"] = json.dumps(dict(config)).encode()
    return HuggingFace(content, str(path), files)


def letters() -> list[str]:
    """GPT-2's letters for bytes, in their order: a byte's own where it has one that shows, else the next from 256 on.

    As `bytes_to_unicode` in github.com/openai/gpt-2, src/encoder.py.
    """
    shown = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte if byte in shown else next(others)) for byte in range(256)]
