"""Tokenizers that need no library: bytes and characters; and what every tokenizer is."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from shardlab.common.errors import UserError
from shardlab.train.data.documents import decoded, library

NOTHING: Mapping[str, int] = {}
"""What a tokenizer loses that has a token for everything."""


class Tokenizer(ABC):
    """Text to tokens and back.

    Attributes:
        kind: its name in a manifest.
        vocab_size: how many tokens it knows.
        begin: tokens that begin every document and every prompt.
        end: the token that ends a document; None: it has none.
        added: tokens that were added to its vocabulary, such as special ones.
    """

    kind: ClassVar[str]
    vocab_size: int
    begin: tuple[int, ...] = ()
    end: int | None = None
    added: frozenset[int] = frozenset()

    @abstractmethod
    def encode(self, texts: Sequence[bytes]) -> list[NDArray[np.int64]]:
        """The tokens of each text, without those that begin and end a document.

        Raises:
            UserError: for a text that it has no tokens for.
        """

    def encode_spelled(self, text: str) -> list[int]:
        """The tokens of a text that spells out special tokens, if the tokenizer has any.

        Raises:
            UserError: as `encode` does.
        """
        return self.encode([text.encode(errors="surrogateescape")])[0].tolist()

    @abstractmethod
    def decode(self, tokens: NDArray[np.integer]) -> bytes:
        """The bytes that tokens stand for together; they may begin and end within a character.

        The text of two runs is not the text of their tokens in one run: many tokenizers drop a space where a text
        begins. `decoded_parts` decodes tokens as they come.
        """

    def lost(self, text: bytes, tokens: NDArray[np.integer]) -> Mapping[str, int]:
        """How often each character of a text, or word, has no token: it is dropped, or becomes an unknown token.

        Args:
            text: in UTF-8.
            tokens: of this text.
        """
        return NOTHING

    @abstractmethod
    def meanings(self) -> list[bytes]:
        """What each token stands for, whatever is around it."""

    def count_bytes(self, tokens: NDArray[np.integer]) -> int:
        """Bytes of the text of a document's tokens; those that begin and end it stand for none."""
        marks = [*self.begin, *([] if self.end is None else [self.end])]
        return len(self.decode(tokens[~np.isin(tokens, marks)] if marks else tokens))

    def files(self) -> dict[str, bytes]:
        """What it takes to make it again, and what goes along with it: names and contents of files."""
        return {}


def decoded_parts(tokens: Iterable[int], tokenizer: Tokenizer, before: Sequence[int] = ()) -> Iterator[bytes]:
    """What each token adds to the text of those before it, in bytes: joined, they are the text of the whole run.

    Each token is decoded in a run that begins with the last one that was more than space, since a run's beginning may
    be decoded in another way.

    Args:
        before: tokens that came earlier, whose text is left out.
    """
    run = list(before)
    known = tokenizer.decode(np.array(run, np.int64)) if run else b""
    for token in tokens:
        run.append(token)
        text = tokenizer.decode(np.array(run, np.int64))
        part = text[len(known) :]
        if part.strip():
            run, text = [token], tokenizer.decode(np.array([token], np.int64))
        known = text
        yield part


def same(a: Tokenizer, b: Tokenizer) -> bool:
    """Whether tokens of two tokenizers mean the same text, up to tokens that were added to one of them."""
    if a.kind == b.kind and a.files() == b.files():
        return True
    few, many = sorted((a, b), key=lambda each: each.vocab_size)
    shared, beyond = few.vocab_size, range(few.vocab_size, many.vocab_size)
    return many.added.issuperset(beyond) and few.meanings() == many.meanings()[:shared]


class ByteTokenizer(Tokenizer):
    """Every byte is a token: any file can be read, and nothing has to be kept."""

    kind = "bytes"
    vocab_size = 256

    def encode(self, texts: Sequence[bytes]) -> list[NDArray[np.int64]]:
        return [np.frombuffer(text, np.uint8).astype(np.int64) for text in texts]

    def decode(self, tokens: NDArray[np.integer]) -> bytes:
        return np.minimum(tokens, 255).astype(np.uint8).tobytes()  # a model may have a larger vocabulary

    def meanings(self) -> list[bytes]:
        return [bytes([byte]) for byte in range(256)]


class Characters(Tokenizer):
    """Every character is a token; the vocabulary is the text's own, in the order of code points.

    Args:
        characters: all of them, ascending.
    """

    kind = "chars"
    FILE = "vocabulary.json"

    def __init__(self, characters: Iterable[str]) -> None:
        self.characters = list(characters)
        self.vocab_size = len(self.characters)
        self._codes = np.array([ord(character) for character in self.characters], np.uint32)

    @classmethod
    def of(cls, texts: Iterable[str]) -> Characters:
        """The characters that occur."""
        found: set[str] = set()
        for text in texts:
            found.update(text)
        return cls(sorted(found))

    @classmethod
    def read(cls, files: dict[str, bytes]) -> Characters:
        """Made again from its file.

        Raises:
            UserError: when the file is no list of characters.
        """
        found: Any = json.loads(files[cls.FILE])
        characters = cast(list[Any], found if isinstance(found, list) else [None])
        if not all(isinstance(each, str) and len(each) == 1 for each in characters):
            raise UserError(f"{cls.FILE} is no list of characters; copy the folder that it belongs to anew")
        return cls(characters)

    def encode(self, texts: Sequence[bytes]) -> list[NDArray[np.int64]]:
        return [self._encode(text) for text in texts]

    def _encode(self, text: bytes) -> NDArray[np.int64]:
        codes = np.frombuffer(decoded(text).encode("utf-32-le"), np.uint32)
        tokens = np.searchsorted(self._codes, codes)
        unknown = codes[self._codes[np.minimum(tokens, self.vocab_size - 1)] != codes]
        if unknown.size:
            raise UserError(
                f"the character {chr(int(unknown[0]))!r} is not among the {self.vocab_size} characters of the "
                "vocabulary; leave it out, or train on data with a vocabulary that has it"
            )
        return tokens

    def decode(self, tokens: NDArray[np.integer]) -> bytes:
        return self._codes[np.minimum(tokens, self.vocab_size - 1)].tobytes().decode("utf-32-le").encode()

    def meanings(self) -> list[bytes]:
        return [character.encode() for character in self.characters]

    def files(self) -> dict[str, bytes]:
        return {self.FILE: json.dumps(self.characters, ensure_ascii=True).encode()}


# Tokenizers of byte pairs: GPT-2's by tiktoken, any of Hugging Face's `tokenizer.json`, and training one.


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


# A tokenizer as files of Hugging Face's, whose library then gives the same tokens and knows which ends a document.


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


# Which tokens begin and end a text: as files beside a tokenizer say, its post-processor, or at last their names.


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
