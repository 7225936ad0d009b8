"""What is written for nobody is dropped, and raises nothing."""

from __future__ import annotations

import os

from shardlab.train.streams import unbroken


def test_a_reader_that_has_gone_is_no_error_now_or_at_the_end() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as file:
        stream = unbroken(file)
        print("nobody reads this", file=stream, flush=True)
        print("nor this", file=stream)
        assert not stream.isatty()
