"""Layers of a program are told as what they are in the model."""

from __future__ import annotations

from shardlab.models import GPT, Model, MoE, cut


def places(model: Model) -> list[str]:
    return [model.place(layer) for layer in range(model.layers)]


def test_whole_blocks_are_numbered() -> None:
    assert places(GPT(layers=2)) == ["block 0", "block 1"]


def test_half_blocks_are_told_by_block_and_part() -> None:
    assert places(cut(GPT(layers=1))) == [
        "embedding",
        "norm of block 0, attention",
        "block 0, attention",
        "norm of block 0, feed-forward",
        "block 0, feed-forward",
        "norm of head",
        "head",
    ]


def test_an_attention_that_is_cut_in_two_has_two_places() -> None:
    told = places(cut(GPT(layers=1), attention_apart=True))
    assert told[2:4] == ["block 0, attention's queries, keys and values", "block 0, attention's output"]


def test_experts_lie_between_what_is_dense() -> None:
    assert places(cut(MoE(layers=1))) == ["block 0, attention", "block 0, experts", "head"]
