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
    made: Any = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(each, special=True) for each in special])
    return made


def byte_fallback(words: Iterable[str], *, bos: bool = False) -> Any:
    """The kind of Llama 2: a word's first piece begins with a space, unknown characters are bytes, and the decoder
    drops the first space of a text.
    """
    vocabulary = {each: number for number, each in enumerate(LLAMA2)}
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
    made: Any = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(parts)
    made.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in LLAMA2])
    if bos:
        made.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
        )
    return made


def metaspace(texts: Sequence[str]) -> Any:
    """The kind of T5: pieces of a unigram model, in which a space is a character of the next word."""
    made: Any = Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    made.train_from_iterator(
        texts, trainers.UnigramTrainer(vocab_size=60, special_tokens=["<unk>", "</s>"], unk_token="<unk>")
    )
    return made


def words(known: Sequence[str], *, unknown: str | None = "<unk>") -> Any:
    """Whole words, with <s> before every text."""
    vocabulary = {word: number for number, word in enumerate(("<s>", "</s>", "<unk>", *known))}
    made: Any = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token=unknown or "[none]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["<s>", "</s>", "<unk>"])
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 0)]
    )
    return made


def dropping(letters: str) -> Any:
    """Merges without an unknown token and without bytes: characters outside the alphabet are dropped."""
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    made: Any = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.decoder = decoders.Fuse()
    made.add_special_tokens(["<|endoftext|>"])
    return made


def of_transformers(name: str) -> Any:
    """Return a class of `transformers` by its name.

    An import statement would make pyright read all models of that library, and every collection of
    tests would import it.
    """
    return getattr(import_module("transformers"), name)
