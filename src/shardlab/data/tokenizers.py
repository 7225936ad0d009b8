"""Tokenizers that need no library: bytes and characters; and what every tokenizer is."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, cast

import numpy as np
from numpy.typing import NDArray

from shardlab.data.documents import decoded
from shardlab.errors import UserError


class Tokenizer(ABC):
    """Text to tokens and back.

    Attributes:
        kind: its name in a manifest.
        vocab_size: how many tokens it knows.
        end: the token that ends a document; None: it has none.
    """

    kind: ClassVar[str]
    vocab_size: int
    end: int | None = None

    @abstractmethod
    def encode(self, texts: Sequence[bytes]) -> list[NDArray[np.int64]]:
        """The tokens of each text.

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
        """The text of some tokens, which may begin and end within a character."""

    def count_bytes(self, tokens: NDArray[np.integer]) -> int:
        """Bytes of the text of some tokens; the token that ends a document stands for none."""
        return len(self.decode(tokens if self.end is None else tokens[tokens != self.end]))

    def files(self) -> dict[str, bytes]:
        """What it takes to make it again: names and contents of files."""
        return {}


class ByteTokenizer(Tokenizer):
    """Every byte is a token: any file can be read, and nothing has to be kept."""

    kind = "bytes"
    vocab_size = 256

    def encode(self, texts: Sequence[bytes]) -> list[NDArray[np.int64]]:
        return [np.frombuffer(text, np.uint8).astype(np.int64) for text in texts]

    def decode(self, tokens: NDArray[np.integer]) -> bytes:
        return np.minimum(tokens, 255).astype(np.uint8).tobytes()  # a model may have a larger vocabulary


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

    def files(self) -> dict[str, bytes]:
        return {self.FILE: json.dumps(self.characters, ensure_ascii=True).encode()}
