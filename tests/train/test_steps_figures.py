"""Figures of a step."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from shardlab.models import GPT, MLP, MoE, find_model
from shardlab.train.data import ByteTokenizer, Corpus, Documents
from shardlab.train.data.stream import SequenceStream, TokenRun
from shardlab.train.data.tokenizers import HuggingFace
from shardlab.train.steps import bits_per_byte, bytes_per_token, flops_per_token, mean_min_max, peak_memory, speeds
from tests.support import tokenizer_files


def test_a_straggler_is_seen_in_the_spread() -> None:
    figures = mean_min_max([[1.0, 3.0], [0.1, 0.3], [0.2, 0.2], [8.0, 8.0]])
    assert (figures["dt"], figures["dt_min"], figures["dt_max"]) == (2.0, 1.0, 3.0)
    assert (figures["dtb_min"], figures["memory_max"]) == (pytest.approx(0.2), 8.0)


def test_flops_of_a_token_are_nanogpts() -> None:
    """estimate_mfu of nanoGPT's model.py: 6 N + 12 L H Q T with its own N, 123,653,376 for GPT-2."""
    assert flops_per_token(find_model("gpt2")) == 6 * 123_653_376 + 12 * 12 * 768 * 1024


def test_of_experts_those_count_that_a_token_is_sent_to() -> None:
    few, many = MoE(layers=2, experts=4, top_k=2), MoE(layers=2, experts=8, top_k=2)
    router = 2 * 4 * few.hidden_size
    assert flops_per_token(many) - flops_per_token(few) == pytest.approx(6 * router)


def test_a_model_without_attention_pays_for_none() -> None:
    model = MLP(layers=2)
    assert flops_per_token(model) <= 6 * model.parameter_count


def test_mfu_is_of_all_devices_and_unknown_without_a_peak_or_beyond_it() -> None:
    model = GPT()
    reached = 16 * model.seq_len * flops_per_token(model)
    figures = speeds(model, 8, 0.5, 2, 2 * reached)
    assert (figures["sps"], figures["sps_per_gpu"], figures["mfu"]) == (16, 8, pytest.approx(0.5))
    assert speeds(model, 8, 0.5, 2, None)["mfu"] is None
    assert speeds(model, 8, 0.5, 2, reached / 1.01)["mfu"] is None, "then the peak is none"


def test_a_loss_of_ln_256_is_eight_bits_of_a_byte() -> None:
    assert bits_per_byte(math.log(256), 1) == pytest.approx(8)
    assert bits_per_byte(math.log(256), 4) == pytest.approx(2)


def test_memory_is_that_of_a_process_with_torch() -> None:
    assert 2**26 < peak_memory(torch.device("cpu")) < 2**40


def test_bytes_of_a_token_are_those_of_the_text_that_was_encoded() -> None:
    """Without the first token of each document, which is not predicted, and with what a tokenizer drops."""
    letters = HuggingFace(tokenizer_files.dropping("abcdefgh ").to_str().encode())
    corpus = Corpus.encode(Documents(["abö"] * 40), letters, seq_len=4)
    assert bytes_per_token(corpus) == pytest.approx(3 / 2)
    assert bytes_per_token(Corpus.from_text(b"abc" * 100, 8)) == 1


def test_bytes_of_a_token_are_a_mean_over_the_shares_of_the_sources() -> None:
    runs = [TokenRun(np.zeros(11, np.uint8), sizes=np.array([11 * n])) for n in (1, 3)]
    stream = SequenceStream(tuple(runs), (3, 1))
    ratios = [1.0, (33 - 1) / 10]
    corpus = Corpus(stream, stream, ByteTokenizer(), ())
    assert bytes_per_token(corpus) == pytest.approx((3 * ratios[0] + ratios[1]) / 4)


def test_tokens_whose_text_nobody_counted_are_decoded_together() -> None:
    tokenizer = HuggingFace(tokenizer_files.byte_fallback(["is", "it"]).to_str().encode())
    (tokens,) = tokenizer.encode(["is it 漢".encode()])
    stream = SequenceStream((TokenRun(tokens.astype(np.uint16)),))
    assert bytes_per_token(Corpus(stream, stream, tokenizer, ())) == len("is it 漢".encode()) / len(tokens)
