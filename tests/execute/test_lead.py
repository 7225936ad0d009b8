"""What may be sent before it is received: a few messages, or a few MiB of smaller ones, and never more."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardlab.execute.lead import BYTES, MESSAGES, MessageLead
from shardlab.execute.shared_memory import LETTERS, SMALLEST


@given(st.lists(st.integers(0, 2 * BYTES), max_size=40) | st.lists(st.integers(0, BYTES // 10), max_size=40))
def test_all_but_the_last_few_must_be_wanted(sizes: list[int]) -> None:
    lead, before = MessageLead(), 0
    for sent, _ in enumerate(sizes, 1):
        wanted = lead.count(sizes[sent - 1])
        ahead = [max(size, SMALLEST) for size in sizes[wanted:sent]]
        assert len(ahead) <= MESSAGES or sum(ahead) <= BYTES
        more = [max(size, SMALLEST) for size in sizes[max(0, wanted - 1) : sent]]
        assert wanted == before or (len(more) > MESSAGES and sum(more) > BYTES), (
            "it is held back no more than it must be"
        )
        assert wanted >= before
        before = wanted


def test_small_messages_never_fill_the_ring_of_letters() -> None:
    lead = MessageLead()
    wanted = [lead.count(0) for _ in range(LETTERS)]
    assert max(sent - count for sent, count in enumerate(wanted, 1)) == BYTES // SMALLEST < LETTERS
