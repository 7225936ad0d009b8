"""Packed tables: what is packed is unpacked."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from shardlab.draw.viewer.columns import Columns, Numbering, decode, encode


@given(st.lists(st.integers(0, 255)), st.lists(st.integers(-(2**31), 2**31 - 1)), st.lists(st.floats(allow_nan=False)))
def test_columns_of_any_length_come_back(small: list[int], whole: list[int], real: list[float]) -> None:
    columns = Columns()
    columns.add("small", "u8", small)
    columns.add("whole", "i32", whole)
    columns.add("real", "f64", real)
    header, decoded = decode(encode(columns.pack({"title": "ä </script>"})))
    assert decoded == {"small": small, "whole": whole, "real": real}
    assert header["title"] == "ä </script>"
    assert all(offset % 8 == 0 for _, offset, _ in header["columns"].values())


def test_a_missing_time_is_not_a_number() -> None:
    columns = Columns()
    columns.add("start", "f64", [1.0, math.nan])
    _, decoded = decode(encode(columns.pack({})))
    assert decoded["start"][0] == 1.0
    assert math.isnan(decoded["start"][1])


def test_equal_items_have_one_number() -> None:
    numbering = Numbering[str]()
    assert [numbering(item) for item in "abacb"] == [0, 1, 0, 2, 1]
    assert numbering.items == ["a", "b", "c"]
