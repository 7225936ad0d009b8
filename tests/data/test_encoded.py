"""Documents as tokens: what begins and ends each, and the bytes of the text that was encoded."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.data.bpe import HuggingFace
from shardlab.data.documents import Document, Documents
from shardlab.data.encoded import EncodedText, encoded_text, first_bytes, said_of
from shardlab.data.tokenizers import ByteTokenizer, Tokenizer
from shardlab.errors import UserError
from tests.support import tokenizer_files

LLAMA = HuggingFace(tokenizer_files.byte_fallback(["is", "it"], bos=True).to_str().encode())
BYTE_LEVEL = HuggingFace(tokenizer_files.byte_level().to_str().encode())
LETTERS = HuggingFace(tokenizer_files.dropping("abcdefgh ").to_str().encode())
BYTES = ByteTokenizer()


def documents_of(text: EncodedText) -> list[list[int]]:
    places = np.array(text.ends.tokens)[np.array(text.ends.documents)]
    return [each.tolist() for each in np.split(text.tokens, places[1:-1])]


def test_a_document_has_the_tokens_that_begin_and_end_it() -> None:
    text = encoded_text(Documents(["is it", "", "it"]), LLAMA)
    first, last = (LLAMA.encode([each])[0].tolist() for each in (b"is it", b"it"))
    assert documents_of(text) == [[1, *first, 2], [1, *last, 2]]


def test_tokens_are_taken_as_they_are_and_begin_anew_after_each_end() -> None:
    text = encoded_text(Documents([[5, 6, 2, 7, 2], np.array([8, 2, 9], np.uint16)]), LLAMA)
    assert documents_of(text) == [[5, 6, 2], [7, 2], [8, 2], [9]]


@pytest.mark.parametrize("tokens", [[3, 257], [-1, 3]])
def test_a_token_that_the_tokenizer_has_not_is_refused(tokens: list[int]) -> None:
    with pytest.raises(UserError, match=r"token (257|-1) is none of the 257 of the tokenizer \(tokenizer.json\)"):
        encoded_text(Documents([tokens], "mine"), BYTE_LEVEL)


@pytest.mark.parametrize("tokenizer", [BYTES, BYTE_LEVEL, LLAMA, LETTERS], ids=["bytes", "byte-level", "llama", "few"])
@given(documents=st.lists(st.text("abc €漢", max_size=12), min_size=1, max_size=8), data=st.data())
def test_bytes_are_those_of_the_text_wherever_it_is_cut(
    tokenizer: Tokenizer, documents: list[Document], data: st.DataObject
) -> None:
    text = encoded_text(Documents(documents), tokenizer)
    cut = data.draw(st.integers(0, len(text.tokens)))
    parts = [text.ends.part(text.tokens, *each, tokenizer) for each in ((0, cut), (cut, len(text.tokens)))]
    sizes = [0 if part.sizes is None else int(part.sizes.sum()) for part in parts]
    assert sum(sizes) == sum(len(str(each).encode()) for each in documents)
    assert all(part.sizes is not None and len(part.sizes) == part.documents for part in parts)
    whole = text.ends.part(text.tokens, 0, len(text.tokens), tokenizer)
    assert whole.sizes is not None
    if tokenizer is not LETTERS:  # each document has tokens
        assert whole.sizes.tolist() == [len(str(each).encode()) for each in documents if each] or not len(text.tokens)
        before = tokenizer.count_bytes(text.tokens[:cut])
        assert abs(before - sizes[0]) <= len(documents), "a decoder drops a space where a document begins"


def test_what_is_dropped_counts_as_text_and_is_said() -> None:
    text = encoded_text(Documents(["a bad öd", "öß"]), LETTERS)
    run = text.ends.part(text.tokens, 0, len(text.tokens), LETTERS)
    assert run.sizes is not None
    assert run.sizes.tolist() == [9, 4]
    assert text.lost == {"ö": 2, "ß": 1}
    assert said_of(text.lost) == (
        "the tokenizer has no token for 3 characters of the text, which are dropped ('ö', 'ß')"
    )
    assert said_of({"<unk>": 7}).endswith("7 words or characters of the text, which become '<unk>'")
    assert said_of(Counter()) == ""


def test_the_first_token_of_each_document_is_left_out() -> None:
    text = encoded_text(Documents(["漢字", "€", "a"]), BYTE_LEVEL)
    run = text.ends.part(text.tokens, 0, len(text.tokens), BYTE_LEVEL)
    assert first_bytes(run, BYTE_LEVEL) == 3
    begun = encoded_text(Documents(["is", "it"]), LLAMA)
    assert first_bytes(begun.ends.part(begun.tokens, 0, len(begun.tokens), LLAMA), LLAMA) == 0
