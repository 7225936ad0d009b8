"""Small files of Hugging Face's library `tokenizers`, one of each kind that models have."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportMissingTypeStubs=false
# tokenizers leaves its annotations out.

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

LLAMA2 = ("<unk>", "<s>", "</s>")


def byte_level(special: Sequence[str] = ("<|endoftext|>",), first: bool = False) -> Any:
    """The kind of GPT-2 and Llama 3, without merges: each byte is a token; special tokens come first or last."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*special, *letters] if first else letters
    tokenizer: Any = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return tokenizer


def byte_fallback(words: Iterable[str], *, bos: bool = False) -> Any:
    """The kind of Llama 2: a word's first piece begins with a space, unknown characters are bytes, and the decoder
    drops the first space of a text.
    """
    vocabulary = {token: number for number, token in enumerate(LLAMA2)}
    vocabulary |= {f"<0x{byte:02X}>": len(LLAMA2) + byte for byte in range(256)}
    words, merges = list(words), list[tuple[str, str]]()
    for letter in sorted({letter for word in words for letter in word} | {"▁"}):
        vocabulary.setdefault(letter, len(vocabulary))
    for word in words:
        piece = "▁"
        for letter in word:
            if piece + letter not in vocabulary:
                merges.append((piece, letter))
                vocabulary[piece + letter] = len(vocabulary)
            piece += letter
    tokenizer: Any = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in LLAMA2])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
        )
    return tokenizer


def metaspace(texts: Sequence[str]) -> Any:
    """The kind of T5: pieces of a unigram model, in which a space is a character of the next word."""
    tokenizer: Any = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(
        texts, trainers.UnigramTrainer(vocab_size=60, special_tokens=["<unk>", "</s>"], unk_token="<unk>")
    )
    return tokenizer


def words(known_words: Sequence[str], *, unknown: str | None = "<unk>") -> Any:
    """Whole words, with <s> before every text."""
    vocabulary = {word: number for number, word in enumerate(("<s>", "</s>", "<unk>", *known_words))}
    tokenizer: Any = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token=unknown or "[none]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>", "</s>", "<unk>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 0)]
    )
    return tokenizer


def dropping(letters: str) -> Any:
    """Merges without an unknown token and without bytes: characters outside the alphabet are dropped."""
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    tokenizer: Any = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer


def of_transformers(name: str) -> Any:
    """Return a class of `transformers` by its name.

    An import statement would make pyright read all models of that library, and every collection of
    tests would import it.
    """
    return getattr(import_module("transformers"), name)
