"""Tokenizers that need no library: bytes and characters; and what every tokenizer is."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, cast

import numpy as np
from numpy.typing import NDArray

from shardlab.data.documents import decoded
from shardlab.errors import UserError

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
