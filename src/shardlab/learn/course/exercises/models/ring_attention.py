"""Exercise 23: ring attention with causal balance.

    a sequence in 8 slices on 4 ranks; a mark: the queries of a row meet these keys

       0 1 2 3 4 5 6 7
    0  x                      consecutive            early and late
    1  x x                    rank 0: 0 1   3        rank 0: 0 7   9
    2  x x x                  rank 1: 2 3   7        rank 1: 1 6   9
    3  x x x x                rank 2: 4 5  11        rank 2: 2 5   9
    4  x x x x x              rank 3: 6 7  15        rank 3: 3 4   9
    5  x x x x x x
    6  x x x x x x x          all wait for rank 3    all have the same work
    7  x x x x x x x x

A long sequence is cut over ranks: context parallelism. Queries stay where they are;
keys and values travel around a ring. In each hop a rank passes on the block that it has
and attends to it meanwhile, so the messages hide behind the compute (Liu et al. 2023,
arXiv 2310.01889, section 3). The partial results are merged with their softmax
denominators; here that is `+`.

A token attends only to tokens before it. With consecutive slices the last rank has
almost five times the work of the first, and all wait for it. Give each rank an early
slice and a late one instead (Llama 3, arXiv 2407.21783, section 3.3.2).

The start has consecutive slices, and gathers all keys and values before it attends.
Write the balanced slices and the ring of the forward pass; the backward pass is given.

    rank.load_batch(microbatches, slices)      the tokens of these slices
    rank.attend(l, queries, block)             a partial result; add these with +
    rank.exchange(block, to=r, source=s)       a handle: await it after attending
"""

from dataclasses import replace

from shardlab.language import Kind, Mesh, OpKind, Rank, Sizes, Value
from shardlab.learn.course.exercise import Exercise, Goals, Mistake
from shardlab.learn.course.techniques import avoids, hidden


def slices(rank: Rank) -> list[int]:
    """Return the numbers of this rank's two slices of a sequence, which has 2 * world slices."""
    # BEGIN SOLUTION
    return [rank.index, 2 * rank.world - 1 - rank.index]
    # START
    # return [2 * rank.index, 2 * rank.index + 1]
    # END SOLUTION


async def attention(rank: Rank, l: int) -> Value:
    """Return the attention of this rank's queries to the keys and values of all ranks."""
    queries = rank.queries[l]
    # BEGIN SOLUTION
    next_rank, previous_rank = (rank.index + 1) % rank.world, (rank.index - 1) % rank.world
    block = rank.keys_values[l]
    transfer = rank.exchange(block, to=next_rank, source=previous_rank)
    result = rank.attend(l, queries, block)
    for hop in range(1, rank.world):
        block = await transfer
        if hop < rank.world - 1:
            transfer = rank.exchange(block, to=next_rank, source=previous_rank)
        result = result + rank.attend(l, queries, block)
    return result
    # START
    # rank.keys_values["all"] = await rank.all_gather(rank.keys_values[l], axis="cp")
    # return rank.attend(l, queries, rank.keys_values.pop("all"))
    # END SOLUTION


async def attention_backward(rank: Rank, l: int, result: Value, gradient: Value) -> tuple[Value, Value]:
    """Return the gradients of this rank's queries, and of its keys and values.

    The gradient of a block travels one hop behind the block, and each rank adds its part.
    """
    next_rank, previous_rank = (rank.index + 1) % rank.world, (rank.index - 1) % rank.world
    block = rank.keys_values[l]
    transfer = rank.exchange(block, to=next_rank, source=previous_rank)
    grad_queries, grad_block = rank.attend_backward(l, rank.queries[l], block, result, gradient)
    grad_transfer = rank.exchange(grad_block, to=next_rank, source=previous_rank)
    for hop in range(1, rank.world):
        block = await transfer
        if hop < rank.world - 1:
            transfer = rank.exchange(block, to=next_rank, source=previous_rank)
        grad_part, grad_block = rank.attend_backward(l, rank.queries[l], block, result, gradient)
        grad_queries = grad_queries + grad_part
        grad_transfer = rank.exchange(await grad_transfer + grad_block, to=next_rank, source=previous_rank)
    return grad_queries, await grad_transfer


async def ring_attention(rank: Rank) -> None:
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l)
    rank.activations[0] = rank.load_batch(rank.microbatches, slices(rank))
    residual: list[Value] = []
    for l in rank.layers:
        x = rank.activations[l]
        if rank.signatures[l].projects:  # to queries, keys and values
            rank.queries[l], rank.keys_values[l] = rank.forward(l, (x,), rank.weights[l])
            rank.activations[l + 1] = await attention(rank, l)
        elif rank.signatures[l].carries:  # a norm, with the residual stream
            rank.activations[l + 1], *residual = rank.forward(l, (x, *residual), rank.weights[l])
        else:
            rank.activations[l + 1] = rank.forward(l, x, rank.weights[l])

    gradient = rank.loss(rank.activations.pop(len(rank.layers)))
    residual = []
    for l in reversed(rank.layers):
        x = rank.activations[l]
        if rank.signatures[l].projects:
            rank.grad_activations[l + 1] = gradient
            gradients = await attention_backward(rank, l, rank.activations[l + 1], gradient)
            del rank.queries[l], rank.keys_values[l], rank.activations[l + 1], rank.grad_activations[l + 1]
            rank.grad_weights[l], gradient = rank.backward(l, x, gradients, rank.weights[l])
        elif rank.signatures[l].carries:
            rank.grad_weights[l], gradient, *residual = rank.backward(l, x, (gradient, *residual), rank.weights[l])
        else:
            rank.grad_weights[l], gradient = rank.backward(l, x, gradient, rank.weights[l])
        if not (l and rank.signatures[l - 1].projects):  # the backward pass of attention reads its result
            del rank.activations[l]
    for l in rank.layers:
        total = await rank.all_reduce(rank.grad_weights.pop(l), axis="cp")
        rank.weights[l], rank.opt_states[l] = rank.update(l, total, rank.weights[l], rank.opt_states[l])


# END OF THE EXERCISE

TIMES = 16
SHORT = Sizes.context_blocks(1)
LONG = replace(
    SHORT,
    activations=tuple(TIMES * elements for elements in SHORT.activations),
    residual=TIMES * SHORT.residual,
    stats=TIMES * SHORT.stats,
    queries=TIMES * SHORT.queries,
    keys_values=TIMES * SHORT.keys_values,
    flops=tuple(TIMES * flops for flops in SHORT.flops),
    attend_flops=TIMES**2 * SHORT.attend_flops,
)
"""One block of the puzzles' model, with sequences that are 16 times as long: 4,096 tokens."""

EXERCISE = Exercise(
    number=23,
    name="ring_attention",
    title="Ring attention with causal balance",
    goals=Goals("the reference solution", time=1.712514, memory=13_634_048, sent=12_060_160),
    mesh=Mesh(cp=4),
    layers=LONG,
    microbatches=1,
    techniques=(
        avoids(
            frozenset({OpKind.ALL_GATHER}),
            "{found} gathers all keys and values at once; pass them around a ring.",
            of=Kind.KEYS_VALUES,
        ),
        hidden(
            frozenset({OpKind.RECV}),
            "{found} blocks of keys and values arrive while a rank attends; let all but one do so.",
            of=Kind.KEYS_VALUES,
            behind=frozenset({OpKind.ATTEND, OpKind.ATTEND_BACKWARD}),
        ),
    ),
    mistakes=(
        Mistake(
            "consecutive slices",
            ("[rank.index, 2 * rank.world - 1 - rank.index]", "[2 * rank.index, 2 * rank.index + 1]"),
            "comes after queries",
            "count the marks in the rows of each rank. Whom do the others wait for?",
        ),
        Mistake(
            "the next hop starts after attending",
            (
                "        block = await transfer\n        if hop < rank.world - 1:\n"
                "            transfer = rank.exchange(block, to=next_rank, source=previous_rank)\n"
                "        result = result + rank.attend(l, queries, block)\n",
                '        rank.keys_values["block"] = await transfer\n'
                '        result = result + rank.attend(l, queries, rank.keys_values["block"])\n'
                "        if hop < rank.world - 1:\n"
                '            transfer = rank.exchange(rank.keys_values["block"], to=next_rank, source=previous_rank)\n',
            ),
            "blocks of keys and values arrive",
            "pass the block on before you attend to it: the message then takes no time.",
        ),
        Mistake(
            "one hop too few",
            (
                "        result = result + rank.attend(l, queries, block)\n",
                "        result = result + rank.attend(l, queries, block) if hop > 1 else result\n",
            ),
            "are missing in it",
            "each query must meet every block once.",
        ),
        Mistake(
            "the own block goes around",
            (
                "            transfer = rank.exchange(block, to=next_rank, source=previous_rank)\n        result",
                "            transfer = rank.exchange(rank.keys_values[l], to=next_rank, source=previous_rank)\n"
                "        result",
            ),
            "counted twice",
            "if every rank sends its own block in each hop, its neighbour sees the same one again. Send on what came.",
        ),
        Mistake(
            "stripes",
            ("[rank.index, 2 * rank.world - 1 - rank.index]", "[rank.index, rank.world + rank.index]"),
            "too slow",
            "better than consecutive slices, but rank 3 still has later slices than all others.",
        ),
    ),
    hints=(
        "There are 8 slices. If a rank has slice 0, which other one makes its work equal to that of the others?",
        "Rank r takes slices r and 2n - 1 - r. In the ring, n - 1 hops bring n - 1 other blocks; each hop is started "
        "before the attention that hides it.",
        "`transfer = rank.exchange(block, ...)`, `result = rank.attend(l, queries, block)`. Then in each hop: `block = "
        "await transfer`, the next exchange unless it is the last hop, and `result = result + rank.attend(...)`.",
    ),
)
