"""Tokenizers: bytes, characters, GPT-2's, and any `tokenizer.json` of Hugging Face's library.

Read `Tokenizer`, the interface, first. `ByteTokenizer` and `Characters` need no library. `Gpt2` uses tiktoken, and
`HuggingFace` uses tokenizers; both libraries are loaded only when they are needed. `export_tokenizer` turns any of them
into files for Hugging Face's library. The last section finds the tokens that begin and end a text.
"""

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
from shardlab.train.data.documents import decode_utf8, import_extra

NO_LOSSES: Mapping[str, int] = {}
"""Lost characters of a tokenizer that has a token for everything: none."""


class Tokenizer(ABC):
    """Mapping of text to tokens and back.

    Attributes:
        kind: name of this class of tokenizers in a manifest.
        vocab_size: number of tokens.
        begin: tokens that begin every document and every prompt.
        end: token that ends a document (None: there is none).
        added: tokens that were added to the vocabulary, such as special tokens.
    """

    kind: ClassVar[str]
    vocab_size: int
    begin: tuple[int, ...] = ()
    end: int | None = None
    added: frozenset[int] = frozenset()

    @abstractmethod
    def encode(self, texts: Sequence[bytes]) -> list[NDArray[np.int64]]:
        """Return the tokens of each text, without those that begin and end a document.

        Raises:
            UserError: if a text cannot be encoded.
        """

    def encode_spelled(self, text: str) -> list[int]:
        """Return the tokens of a text in which special tokens may be spelled out.

        Raises:
            UserError: if the text cannot be encoded.
        """
        return self.encode([text.encode(errors="surrogateescape")])[0].tolist()

    @abstractmethod
    def decode(self, tokens: NDArray[np.integer]) -> bytes:
        """Return the text of consecutive tokens as bytes. It may begin and end within a character.

        decode(a) + decode(b) can differ from decode(a + b), since many tokenizers drop a space at the beginning of a
        text. `decode_incrementally` decodes tokens one by one.
        """

    def count_lost(self, text: bytes, tokens: NDArray[np.integer]) -> Mapping[str, int]:
        """Count the characters or words of a text that have no token: they are dropped, or become an unknown token.

        Args:
            text: the text, in UTF-8.
            tokens: the tokens of this text.
        """
        return NO_LOSSES

    @abstractmethod
    def token_texts(self) -> list[bytes]:
        """Return the text of each token of the vocabulary."""

    def count_bytes(self, tokens: NDArray[np.integer]) -> int:
        """Count the bytes of text of a document's tokens. Tokens that begin and end the document have none."""
        marks = [*self.begin, *([] if self.end is None else [self.end])]
        return len(self.decode(tokens[~np.isin(tokens, marks)] if marks else tokens))

    def files(self) -> dict[str, bytes]:
        """Return the contents of files by name: files from which the tokenizer is restored, and companion files."""
        return {}


def decode_incrementally(tokens: Iterable[int], tokenizer: Tokenizer, prefix: Sequence[int] = ()) -> Iterator[bytes]:
    """Yield the bytes that each token adds to the text of the tokens before it.

    Each token is decoded together with the tokens before it, back to the last one that is not only space, because
    tokenizers decode the first token of a text differently.

    Args:
        tokens: the tokens, as they arrive.
        tokenizer: tokenizer that decodes them.
        prefix: earlier tokens, whose text is not yielded.
    """
    run = list(prefix)
    previous_text = tokenizer.decode(np.array(run, np.int64)) if run else b""
    for token in tokens:
        run.append(token)
        text = tokenizer.decode(np.array(run, np.int64))
        part = text[len(previous_text) :]
        if part.strip():
            run, text = [token], tokenizer.decode(np.array([token], np.int64))
        previous_text = text
        yield part


def same_tokens(a: Tokenizer, b: Tokenizer) -> bool:
    """Return whether two tokenizers have the same text for each token, except for added tokens."""
    if a.kind == b.kind and a.files() == b.files():
        return True
    smaller, larger = sorted((a, b), key=lambda tokenizer: tokenizer.vocab_size)
    shared, extra_tokens = smaller.vocab_size, range(smaller.vocab_size, larger.vocab_size)
    return larger.added.issuperset(extra_tokens) and smaller.token_texts() == larger.token_texts()[:shared]


class ByteTokenizer(Tokenizer):
    """Tokenizer in which every byte is a token. It encodes any file, and needs no files."""

    kind = "bytes"
    vocab_size = 256

    def encode(self, texts: Sequence[bytes]) -> list[NDArray[np.int64]]:
        return [np.frombuffer(text, np.uint8).astype(np.int64) for text in texts]

    def decode(self, tokens: NDArray[np.integer]) -> bytes:
        return np.minimum(tokens, 255).astype(np.uint8).tobytes()  # a model may have a larger vocabulary

    def token_texts(self) -> list[bytes]:
        return [bytes([byte]) for byte in range(256)]


class Characters(Tokenizer):
    """Tokenizer in which every character is a token. The vocabulary has the characters of a text, by code point.

    Args:
        characters: the vocabulary, ascending.
    """

    kind = "chars"
    FILE = "vocabulary.json"

    def __init__(self, characters: Iterable[str]) -> None:
        self.characters = list(characters)
        self.vocab_size = len(self.characters)
        self._codes = np.array([ord(character) for character in self.characters], np.uint32)

    @classmethod
    def from_texts(cls, texts: Iterable[str]) -> Characters:
        """Create the tokenizer with the characters that occur in some texts."""
        characters: set[str] = set()
        for text in texts:
            characters.update(text)
        return cls(sorted(characters))

    @classmethod
    def read(cls, files: dict[str, bytes]) -> Characters:
        """Restore the tokenizer from its file.

        Raises:
            UserError: if the file is not a list of characters.
        """
        content: Any = json.loads(files[cls.FILE])
        characters = cast(list[Any], content if isinstance(content, list) else [None])
        if not all(isinstance(character, str) and len(character) == 1 for character in characters):
            raise UserError(f"{cls.FILE} is not a list of characters; copy its folder again")
        return cls(characters)

    def encode(self, texts: Sequence[bytes]) -> list[NDArray[np.int64]]:
        return [self._encode(text) for text in texts]

    def decode(self, tokens: NDArray[np.integer]) -> bytes:
        return self._codes[np.minimum(tokens, self.vocab_size - 1)].tobytes().decode("utf-32-le").encode()

    def token_texts(self) -> list[bytes]:
        return [character.encode() for character in self.characters]

    def files(self) -> dict[str, bytes]:
        return {self.FILE: json.dumps(self.characters, ensure_ascii=True).encode()}

    def _encode(self, text: bytes) -> NDArray[np.int64]:
        codes = np.frombuffer(decode_utf8(text).encode("utf-32-le"), np.uint32)
        tokens = np.searchsorted(self._codes, codes)
        unknown = codes[self._codes[np.minimum(tokens, self.vocab_size - 1)] != codes]
        if unknown.size:
            raise UserError(
                f"the character {chr(int(unknown[0]))!r} is not among the {self.vocab_size} characters of the "
                "vocabulary; leave it out, or train on data with a vocabulary that has it"
            )
        return tokens


COMPANIONS = (
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "generation_config.json"),
    *("chat_template.jinja", "tokenizer.model", "vocab.json", "merges.txt"),
)
"""Files that belong to a tokenizer.json and are copied with it."""

GPT2_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
GPT2_FILES = {
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}
"""SHA-256 of GPT-2's files, as in tiktoken_ext/openai_public.py of tiktoken 0.14."""

GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
"""Pattern by which GPT-2 splits a text into words; tiktoken's `r50k_pat_str`."""


class Gpt2(Tokenizer):
    """GPT-2's tokenizer.

    Args:
        files: contents of its two files, by name.
    """

    kind = "gpt2"

    def __init__(self, files: dict[str, bytes]) -> None:
        tiktoken = import_extra("tiktoken", "the tokenizer gpt2")
        self._files = files
        ranks = _load_ranks(files)
        self.end = len(ranks)
        self.vocab_size = len(ranks) + 1
        self._encoding = tiktoken.Encoding(
            "gpt2", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={END: self.end}
        )

    @classmethod
    def find(cls) -> Gpt2:
        """Find GPT-2's files in the cache of tiktoken, under tiktoken's names or their own. Nothing is downloaded.

        Raises:
            UserError: if they are missing, or are other files.
        """
        folder = os.environ.get("TIKTOKEN_CACHE_DIR") or os.environ.get("DATA_GYM_CACHE_DIR")
        cache = Path(folder) if folder else Path(tempfile.gettempdir(), "data-gym-cache")
        contents: dict[str, bytes] = {}
        for name, sha256 in GPT2_FILES.items():
            paths = (cache / hashlib.sha1((GPT2_URL + name).encode()).hexdigest(), cache / name)
            file = next((path for path in paths if path.is_file()), None)
            if file is None:
                raise UserError(
                    f"the tokenizer gpt2 needs two files that are not in {cache}; fetch {GPT2_URL}vocab.bpe and "
                    f"{GPT2_URL}encoder.json into a folder, and set TIKTOKEN_CACHE_DIR to that folder"
                )
            contents[name] = file.read_bytes()
            if hashlib.sha256(contents[name]).hexdigest() != sha256:
                raise UserError(f"{file} is not GPT-2's {name} (its checksum differs); fetch {GPT2_URL}{name} again")
        return cls(contents)

    def encode(self, texts: Sequence[bytes]) -> list[NDArray[np.int64]]:
        token_lists: list[list[int]] = self._encoding.encode_ordinary_batch([decode_utf8(text) for text in texts])
        return [np.array(tokens, np.int64) for tokens in token_lists]

    def decode(self, tokens: NDArray[np.integer]) -> bytes:
        return self._encoding.decode_bytes(np.minimum(tokens, self.vocab_size - 1).tolist())

    def token_texts(self) -> list[bytes]:
        return [*(self._encoding.decode_single_token_bytes(token) for token in range(self.end or 0)), END.encode()]

    def files(self) -> dict[str, bytes]:
        return self._files


class HuggingFace(Tokenizer):
    """Tokenizer of Hugging Face's library `tokenizers`.

    Args:
        content: content of a `tokenizer.json`.
        name: name of the tokenizer in error messages.
        companions: contents of files beside it, by name; tokenizer_config.json names the tokens that begin and end a
            document.
        end: token that ends a document (None: as the files say).

    Raises:
        UserError: if the file is not a tokenizer.
    """

    kind = "tokenizer.json"

    def __init__(
        self,
        content: bytes,
        name: str = "tokenizer.json",
        companions: Mapping[str, bytes] | None = None,
        end: int | None = None,
    ) -> None:
        tokenizers = import_extra("tokenizers", "a tokenizer.json")
        self._content, self._name, self._companions = content, name, dict(companions or {})
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode())
        except Exception as error:  # the library raises no more specific exception
            raise UserError(f"{name} is not a tokenizer of Hugging Face ({error}); give a complete file") from None
        self._tokenizer.encode_special_tokens = True  # a text that spells a special token is encoded as text
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        parts: dict[str, Any] = json.loads(content)
        config = read_special_tokens(self._companions)
        self._add_tokens(config.added)
        added: dict[int, Any] = self._tokenizer.get_added_tokens_decoder()
        self.added = frozenset(added)
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(vocabulary.values(), default=-1)
        self.begin = find_begin_tokens(parts.get("post_processor"), config, vocabulary)
        special = {token.content for token in added.values() if token.special}
        self.end = end if end is not None else find_end_token(config, vocabulary, special)
        self._decoders = _decoder_types(parts.get("decoder"))
        self._letters = {character: byte for byte, character in enumerate(byte_letters())}
        model: dict[str, Any] = parts["model"]
        self._unknown: int | None = model.get("unk_id", vocabulary.get(model.get("unk_token") or ""))
        self._drops = "merges" in model and self._unknown is None and not self._letters.keys() <= vocabulary.keys()
        self._spellings: dict[int, str] = {}
        self._has_token: dict[str, bool] = {}

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> HuggingFace:
        """Train byte pair encoding on some texts. As in GPT-2, it merges bytes, so it encodes any text without loss.

        Args:
            texts: the training texts.
            vocab_size: largest size of the vocabulary: all 256 bytes, the end token, and merged pairs.
        """
        tokenizers = import_extra("tokenizers", "--train-bpe")
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
        words = [decode_utf8(text) for text in texts]
        try:
            encodings: list[Any] = self._tokenizer.encode_batch_fast(words, add_special_tokens=False)
        except Exception as error:  # as above
            raise UserError(
                f"{self._name} cannot encode this text ({error}); use another tokenizer, or --train-bpe"
            ) from None
        return [np.array(encoding.ids, np.int64) for encoding in encodings]

    def encode_spelled(self, text: str) -> list[int]:
        self._tokenizer.encode_special_tokens = False
        try:
            return super().encode_spelled(text)
        finally:
            self._tokenizer.encode_special_tokens = True

    def decode(self, tokens: NDArray[np.integer]) -> bytes:
        spelled = [spelling for token in tokens.tolist() if (spelling := self._spelled(token))]
        decoder = self._tokenizer.decoder
        return _unescape_bytes(" ".join(spelled) if decoder is None else decoder.decode(spelled))

    def token(self, number: int) -> str:
        """Return a token as tokenizer.json spells it; empty if there is none with this number."""
        return self._tokenizer.id_to_token(number) or ""

    def count_lost(self, text: bytes, tokens: NDArray[np.integer]) -> Mapping[str, int]:
        if self._unknown is not None:
            count = int((tokens == self._unknown).sum())
            return {self._spelled(self._unknown): count} if count else NO_LOSSES
        if not self._drops:
            return NO_LOSSES
        return {
            character: count for character, count in Counter(decode_utf8(text)).items() if not self._knows(character)
        }

    def token_texts(self) -> list[bytes]:
        texts: list[bytes] = []
        for token in range(self.vocab_size):
            word = self._spelled(token)
            whole = "ByteLevel" in self._decoders and all(character in self._letters for character in word)
            texts.append(bytes(self._letters[character] for character in word) if whole else _unescape_bytes(word))
        return texts

    def files(self) -> dict[str, bytes]:
        return {
            "tokenizer.json": self._content,
            **{name: self._companions[name] for name in COMPANIONS if name in self._companions},
        }

    def _add_tokens(self, added: Mapping[int, str]) -> None:
        """Add the tokens that only companion files have, if their numbers continue the vocabulary's.

        transformers does so, too.
        """
        tokenizers = import_extra("tokenizers", "a tokenizer.json")
        for number, token in sorted(added.items()):
            if number == self._tokenizer.get_vocab_size(with_added_tokens=True):
                self._tokenizer.add_tokens([tokenizers.AddedToken(token, normalized=False, special=True)])

    def _spelled(self, token: int) -> str:
        """Return the spelling of a token that the decoder gets. Bytes that may be a part of a character are escaped.

        Otherwise the decoders of the library would turn such bytes into U+FFFD.
        """
        if (spelling := self._spellings.get(token)) is not None:
            return spelling
        word = self.token(token)
        if "ByteFallback" in self._decoders and BYTE_TOKEN.fullmatch(word):
            word = _escape_bytes(bytes([int(word[3:5], 16)]))
        elif "ByteLevel" in self._decoders and all(character in self._letters for character in word):
            text = bytes(self._letters[character] for character in word)
            word = word if text.isascii() else _escape_bytes(text)
        self._spellings[token] = word
        return word

    def _knows(self, character: str) -> bool:
        """Return whether a character has a token. Spaces do: some tokenizers encode them only after a word."""
        if character not in self._has_token:
            has_token = character.isspace() or bool(self._tokenizer.encode(character, add_special_tokens=False).ids)
            self._has_token[character] = has_token
        return self._has_token[character]


BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
"""Pattern of byte tokens, which encode the bytes of characters without a token (SentencePiece's byte_fallback)."""

ESCAPE_BASE = 0x10F000
"""Base of private code points. While a decoder works on a text, ESCAPE_BASE + b stands for a byte b from 128 to 255."""

_ESCAPES = {ESCAPE_BASE + byte: 0xDC00 + byte for byte in range(128, 256)}


def read_tokenizer(path: Path, config: Mapping[str, Any] | None = None) -> HuggingFace:
    """Read a `tokenizer.json` and its companion files.

    Args:
        path: the file.
        config: configuration of the tokenizer's model, if its folder has no config.json.

    Raises:
        UserError: if it is not a tokenizer.
    """
    try:
        content = path.read_bytes()
        json.loads(content)
        companions = [path.parent / name for name in (*COMPANIONS, "config.json")]
        files = {companion.name: companion.read_bytes() for companion in companions if companion.is_file()}
    except OSError as error:
        raise UserError(f"the tokenizer {path} cannot be read ({error.strerror}); give a tokenizer.json") from None
    except ValueError as error:
        raise UserError(f"the tokenizer {path} is not JSON ({error}); give a complete tokenizer.json") from None
    if config:
        files["config.json"] = json.dumps(dict(config)).encode()
    return HuggingFace(content, str(path), files)


def byte_letters() -> list[str]:
    """Return GPT-2's letter for each byte: the byte's own character if it is visible, else the next one from 256 on.

    As `bytes_to_unicode` in github.com/openai/gpt-2, src/encoder.py.
    """
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte if byte in visible else next(others)) for byte in range(256)]


CONFIG = "tokenizer_config.json"


def export_tokenizer(tokenizer: Tokenizer) -> dict[str, bytes]:
    """Return the files of a tokenizer for Hugging Face's library, by name. The library then gives the same tokens.

    Files that the tokenizer already has in that format are kept. If none of them names the token that ends a text,
    tokenizer_config.json and generation_config.json are added.
    """
    match tokenizer:
        case ByteTokenizer():
            # byte pair encoding without any pair: every byte is a token, with GPT-2's letter for it
            vocabulary = {symbol: byte for byte, symbol in enumerate(byte_letters())}
            return _files(_byte_level(words=False), _byte_level(words=False), _bpe(vocabulary, []))
        case Characters():
            split = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False}
            vocabulary = {character: token for token, character in enumerate(tokenizer.characters)}
            # "[UNK]" is not in the vocabulary, so that an unknown token raises an error.
            model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"}
            return _files(split, {"type": "Fuse"}, model)
        case Gpt2():
            vocabulary: dict[str, int] = json.loads(tokenizer.files()["encoder.json"])
            lines = tokenizer.files()["vocab.bpe"].decode().splitlines()[1:]  # the first line gives the version
            merges = [line.split(" ") for line in lines if line]
            part = _byte_level(words=True)
            return _files(part, part, _bpe(vocabulary, merges), {END: vocabulary[END]}) | _end_files({}, tokenizer, END)
        case HuggingFace():
            config: dict[str, Any] = json.loads(tokenizer.files().get(CONFIG, b"{}"))
            name = None if tokenizer.end is None else tokenizer.token(tokenizer.end)
            return tokenizer.files() | _end_files(config, tokenizer, name)
        case _:
            return {}


DEFAULT_CONFIG: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}


END = "<|endoftext|>"

END_NAMES = (END, "<|end_of_text|>", "</s>", "<eos>", "<\uff5cend▁of▁sentence\uff5c>")
"""Usual names of the token that ends a document: GPT-2's and Shardlab's, Llama 3's, Llama 2's, Gemma's and
DeepSeek's. `find_end_token` prefers special tokens, since Gemma's vocabulary also has the HTML tag </s>."""


class SpecialTokens(NamedTuple):
    """Special tokens according to the companion files of a tokenizer.

    Attributes:
        roles: text of each token by its role, such as eos_token.
        added: text of each token that is listed with its number, by number.
        adds_begin: whether bos_token begins every text (None: decided by the post-processor).
        end: number of the token that ends a text, from the model's configuration.
    """

    roles: dict[str, str]
    added: dict[int, str]
    adds_begin: bool | None
    end: int | None


def read_special_tokens(files: Mapping[str, bytes]) -> SpecialTokens:
    """Read the special tokens from companion files, given by name. Other files are ignored.

    Raises:
        UserError: if a file is not JSON.
    """
    names = ("added_tokens.json", "special_tokens_map.json", "tokenizer_config.json", "config.json")
    added, roles, config, *models = (_table(files, name) for name in (*names, "generation_config.json"))
    texts = {role: token_text(token) for role, token in (roles | config).items() if role.endswith("_token")}
    added_tokens = cast(dict[str, Any], config.get("added_tokens_decoder") or {})
    numbers = {number: token for token, number in added.items()}
    numbers |= {int(number): token_text(token) for number, token in added_tokens.items()}
    ids = (token_id for model in models for token_id in _as_list(model.get("eos_token_id")))
    end = next((token_id for token_id in ids if isinstance(token_id, int)), None)
    adds: Any = config.get("add_bos_token")
    return SpecialTokens({role: text for role, text in texts.items() if text}, numbers, adds, end)


def token_text(token: Any) -> str:
    """Return the text of a special token, which some files store in a table."""
    text: Any = cast(dict[str, Any], token).get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


def find_begin_tokens(post_processor: Any, config: SpecialTokens, vocabulary: Mapping[str, int]) -> tuple[int, ...]:
    """Return the tokens that begin a text. Companion files take precedence over the post-processor."""
    if config.adds_begin is not None:
        first = vocabulary.get(config.roles.get("bos_token", ""))
        return (first,) if config.adds_begin and first is not None else ()
    match post_processor:
        case {"type": "Sequence", "processors": [*parts]}:
            return tuple(token for part in parts for token in find_begin_tokens(part, config, vocabulary))
        case {"type": "TemplateProcessing", "single": [*pieces], "special_tokens": {**special}}:
            special_pieces = takewhile(lambda piece: "SpecialToken" in piece, pieces)
            ids: list[list[int]] = [cast(Any, special)[piece["SpecialToken"]["id"]]["ids"] for piece in special_pieces]
            return tuple(token for token_ids in ids for token in token_ids)
        case {"type": "BertProcessing" | "RobertaProcessing", "cls": [_, int(token)]}:
            return (token,)
        case _:
            return ()


def find_end_token(config: SpecialTokens, vocabulary: Mapping[str, int], special: set[str]) -> int | None:
    """Return the token that ends a document: the one in companion files, or else one with a usual name.

    Among the usual names, special tokens come first.
    """
    if (end_token := vocabulary.get(config.roles.get("eos_token", ""))) is not None:
        return end_token
    if config.end in vocabulary.values():
        return config.end
    names = [*(name for name in END_NAMES if name in special), *END_NAMES]
    return next((vocabulary[name] for name in names if name in vocabulary), None)


def _load_ranks(files: dict[str, bytes]) -> dict[bytes, int]:
    """Return the rank of each token's bytes, as tiktoken reads them from GPT-2's files. Lower ranks merge first."""
    load = import_extra("tiktoken.load", "the tokenizer gpt2")
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            Path(folder, name).write_bytes(content)
        old_folder = os.environ.get("TIKTOKEN_CACHE_DIR")
        os.environ["TIKTOKEN_CACHE_DIR"] = ""  # keeps tiktoken from copying the files into its cache
        try:
            return load.data_gym_to_mergeable_bpe_ranks(*(str(Path(folder, name)) for name in GPT2_FILES))
        finally:
            del os.environ["TIKTOKEN_CACHE_DIR"]
            if old_folder is not None:
                os.environ["TIKTOKEN_CACHE_DIR"] = old_folder


def _escape_bytes(text: bytes) -> str:
    """Convert bytes to characters that no decoder changes. Bytes below 128 are ASCII characters already."""
    return "".join(chr(byte if byte < 128 else ESCAPE_BASE + byte) for byte in text)


def _unescape_bytes(text: str) -> bytes:
    """Convert a text with escaped bytes to bytes."""
    return text.translate(_ESCAPES).encode(errors="surrogateescape")


def _decoder_types(part: Any) -> frozenset[str]:
    """Return the types of a decoder and of its parts."""
    if not isinstance(part, dict):
        return frozenset()
    table = cast(dict[str, Any], part)
    return frozenset({table.get("type", "")}).union(*map(_decoder_types, table.get("decoders", ())))


def _byte_level(*, words: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": words}


def _bpe(vocabulary: dict[str, int], merges: list[list[str]]) -> dict[str, Any]:
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
        CONFIG: _json(DEFAULT_CONFIG),
    }


def _end_files(config: dict[str, Any], tokenizer: Tokenizer, name: str | None) -> dict[str, bytes]:
    """Return the files that name the token which ends a text, unless the tokenizer's own files name it."""
    own_files = tokenizer.files()
    if name is None:
        return {} if CONFIG in own_files else {CONFIG: _json(DEFAULT_CONFIG)}
    files: dict[str, bytes] = {}
    if not config.get("eos_token"):
        files[CONFIG] = _json(DEFAULT_CONFIG | config | {"eos_token": name})
    if "generation_config.json" not in own_files:
        files["generation_config.json"] = _json({"eos_token_id": tokenizer.end})
    return files


def _json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()


def _table(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    try:
        table: Any = json.loads(files.get(name, b"{}"))
    except ValueError as error:
        raise UserError(f"{name} beside the tokenizer is not JSON ({error}); copy the folder again") from None
    return cast(dict[str, Any], table) if isinstance(table, dict) else {}


def _as_list(value: Any) -> list[Any]:
    return cast(list[Any], value) if isinstance(value, list) else [value]
