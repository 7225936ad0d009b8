"""Amounts with a unit."""

from __future__ import annotations

import pytest

from shardlab.cli.amounts import read_bytes, read_tokens
from shardlab.program import UserError


@pytest.mark.parametrize(
    ("text", "bytes"),
    [("72GiB", 72 * 2**30), ("80 GB", 80e9), ("1.5tib", 1.5 * 2**40), ("5e9B", 5e9), ("1KiB", 1024), ("1kb", 1000)],
)
def test_bytes_have_a_unit(text: str, bytes: float) -> None:
    assert read_bytes(text, "--memory") == bytes


@pytest.mark.parametrize("text", ["72", "5e9", "0.5", "0", " 72 "])
def test_bytes_without_a_unit_are_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"has no unit; write .*GiB, "):
        read_bytes(text, "--memory")


@pytest.mark.parametrize("text", ["", "much", "-5GiB", "0GiB", "5GiBs", "nan", "infGiB"])
def test_what_is_no_amount_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="give bytes above 0 with their unit, such as 72GiB or 80GB"):
        read_bytes(text, "--memory")


def test_tokens_are_counted_without_a_unit() -> None:
    assert read_tokens("4194304", "--tokens-per-step") == read_tokens("4M", "--tokens-per-step")
