"""Text of sizes, amounts and numbers, and printable text of models."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.common.text import (
    REPLACEMENT,
    counted,
    line_breaks,
    listed,
    parse_bytes,
    parse_size,
    parse_tokens,
    printable,
    size_text,
    sizes_between,
    wrap_words,
)
from shardlab.language import UserError


def test_nothing_that_a_terminal_would_obey_is_left() -> None:
    assert printable("a\x1b[31m\x00\x07\r\x7f\x85b") == "a" + REPLACEMENT + "[31m" + REPLACEMENT * 5 + "b"


def test_lines_tabs_and_letters_of_any_script_stay() -> None:
    assert printable("é\tß\n漢字 \U0001f600") == "é\tß\n漢字 \U0001f600"


# Sizes are read as people write them.


@pytest.mark.parametrize(
    ("text", "size"),
    [("1KB", 1024), ("64MB", 64 << 20), ("64 mib", 64 << 20), ("1.5k", 1536), ("7", 7), ("7B", 7), ("2GB", 2 << 30)],
)
def test_a_size_is_a_number_and_a_unit(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "KB", "1 KX", "-1KB", "1e3", "ten", "1KBs"])
def test_invalid_sizes_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="is not a size; write a number and a unit, such as 1KB, 512 or 64MB"):
        parse_size(text)


def test_a_part_of_a_byte_is_refused() -> None:
    with pytest.raises(UserError, match=r"'0.3' is 0.3 bytes; give a whole number"):
        parse_size("0.3")


@given(st.integers(0, 40), st.sampled_from([1, 3, 5, 9]))
def test_written_tables_are_read_again(power: int, factor: int) -> None:
    assert parse_size(size_text(factor << power)) == factor << power


def test_sizes_go_up_by_the_factor_to_the_largest() -> None:
    assert sizes_between(1024, 4096) == [1024, 2048, 4096]
    assert sizes_between(1024, 5000, 4) == [1024, 4096]
    assert sizes_between(8, 8) == [8]


@given(st.integers(4, 1 << 20), st.integers(0, 24), st.integers(2, 8))
def test_no_size_is_beyond_the_ends_and_none_is_missing(smallest: int, steps: int, factor: int) -> None:
    largest = smallest * factor**steps
    sizes = sizes_between(smallest, largest, factor)
    assert (sizes[0], sizes[-1], len(sizes)) == (smallest, largest, steps + 1)


def test_ends_that_hold_nothing_are_refused() -> None:
    with pytest.raises(UserError, match="is less than the smallest"):
        sizes_between(2048, 1024)
    with pytest.raises(UserError, match="give 4 or more"):
        sizes_between(1, 1024)
    with pytest.raises(UserError, match="give 2 or more"):
        sizes_between(4, 1024, 1)


# Amounts with a unit.


@pytest.mark.parametrize(
    ("text", "bytes"),
    [("72GiB", 72 * 2**30), ("80 GB", 80e9), ("1.5tib", 1.5 * 2**40), ("5e9B", 5e9), ("1KiB", 1024), ("1kb", 1000)],
)
def test_bytes_have_a_unit(text: str, bytes: float) -> None:
    assert parse_bytes(text, "--memory") == bytes


@pytest.mark.parametrize("text", ["72", "5e9", "0.5", "0", " 72 "])
def test_bytes_without_a_unit_are_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"has no unit; write .*GiB, "):
        parse_bytes(text, "--memory")


@pytest.mark.parametrize("text", ["", "much", "-5GiB", "0GiB", "5GiBs", "nan", "infGiB"])
def test_invalid_amounts_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="give bytes above 0 with their unit, such as 72GiB or 80GB"):
        parse_bytes(text, "--memory")


def test_tokens_are_counted_without_a_unit() -> None:
    assert parse_tokens("4194304", "--tokens-per-step") == parse_tokens("4M", "--tokens-per-step")


@given(st.sets(st.integers(0, 60)))
def test_listed_names_every_number_once_and_no_other(numbers: set[int]) -> None:
    text = listed(sorted(numbers))
    listed_numbers: list[int] = []
    for run in text.split(", ") if numbers else []:
        first, _, last = run.partition("-")
        listed_numbers.extend(range(int(first), int(last or first) + 1))
    assert listed_numbers == sorted(numbers)
    assert numbers or text == "none"


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([], "none"), ([4], "4"), ([0, 1], "0-1"), ([0, 1, 2, 3, 7], "0-3, 7"), ([0, 2, 3, 5], "0, 2-3, 5")],
)
def test_listed_writes_runs_as_a_reader_does(numbers: list[int], text: str) -> None:
    assert listed(numbers) == text


def test_one_is_singular_and_all_else_plural() -> None:
    assert [counted(n, "rank") for n in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]
    assert counted(1, "microbatch") == "1 microbatch"
    assert counted(2, "microbatch") == "2 microbatches"


# Long lines are broken between words only.


def test_a_path_or_an_option_is_never_broken() -> None:
    text = "go on with: shardlab train --resume /data/a-user/runs/fsdp-1 --validate-every 100"
    assert wrap_words(text, 40).split("\n") == [
        "go on with: shardlab train --resume",
        "/data/a-user/runs/fsdp-1",
        "--validate-every 100",
    ]
    assert wrap_words("in /a/path/that/is/longer/than/a/line it is", 20).split("\n")[1].startswith("/a/path/that/is/lo")


def test_lines_that_fit_stay_as_they_are() -> None:
    text = "  two  blanks \n\n\tand a tab\n"
    assert wrap_words(text, 40) == text


@given(st.text(alphabet="ab-/ \n", max_size=60), st.integers(1, 12))
def test_no_line_is_too_long_unless_it_is_one_word(text: str, width: int) -> None:
    wrapped = wrap_words(text, width)
    assert wrapped.split() == text.split()
    for line in wrapped.split("\n"):
        assert len(line.rstrip()) <= width or len(line.split()) == 1
    assert all(line_breaks(line, width) == [] for line in wrapped.split("\n"))
