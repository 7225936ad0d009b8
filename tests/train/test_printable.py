"""What a model made up can be shown."""

from __future__ import annotations

from shardlab.train.printable import REPLACEMENT, printable


def test_nothing_that_a_terminal_would_obey_is_left() -> None:
    assert printable("a\x1b[31m\x00\x07\r\x7f\x85b") == "a" + REPLACEMENT + "[31m" + REPLACEMENT * 5 + "b"


def test_lines_tabs_and_letters_of_any_script_stay() -> None:
    assert printable("é\tß\n漢字 \U0001f600") == "é\tß\n漢字 \U0001f600"
