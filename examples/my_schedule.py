"""A pipeline schedule of one's own: each microbatch goes all the way up and down before the next one starts."""

from collections.abc import Iterator

from shardlab.strategies.schedules import Action, Backward, Forward


def one_at_a_time(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> Iterator[Action]:
    for i in range(microbatches):
        yield Forward(rank, i)
        yield Backward(rank, i)
