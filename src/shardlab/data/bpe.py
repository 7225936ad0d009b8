"""Tokenizers of byte pairs: GPT-2's by tiktoken, any of Hugging Face's `tokenizer.json`, and training one."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardlab.data.documents import decoded
from shardlab.data.extra import library
from shardlab.data.tokenizers import Tokenizer
from shardlab.errors import UserError

END = "<|endoftext|>"

ENDS = (END, "<|end_of_text|>", "</s>", "<eos>")
"""Names of the token that ends a document: GPT-2's and ours, Llama 3's, Llama 2's, Gemma's."""

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

    Raises:
        UserError: for a file that is none.
    """

    kind = "tokenizer.json"

    def __init__(self, content: bytes, name: str = "tokenizer.json") -> None:
        tokenizers = library("tokenizers", "a tokenizer.json")
        self._content, self._name = content, name
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode())
        except Exception as error:  # the library raises nothing more special
            raise UserError(f"{name} is not a tokenizer of Hugging Face ({error}); give a whole one") from None
        self._tokenizer.encode_special_tokens = True  # a text that spells one out is text
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(vocabulary.values(), default=-1)
        self.end = next((vocabulary[end] for end in ENDS if end in vocabulary), None)

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
        return self._tokenizer.decode(tokens.tolist(), skip_special_tokens=False).encode()

    def files(self) -> dict[str, bytes]:
        return {"tokenizer.json": self._content}


def read_tokenizer(path: Path) -> HuggingFace:
    """The tokenizer in a user's `tokenizer.json`.

    Raises:
        UserError: for what is none.
    """
    try:
        content = path.read_bytes()
        json.loads(content)
    except OSError as error:
        raise UserError(f"--tokenizer {path} cannot be read ({error.strerror}); give a tokenizer.json") from None
    except ValueError as error:
        raise UserError(f"--tokenizer {path} is not JSON ({error}); give a whole tokenizer.json") from None
    return HuggingFace(content, str(path))
