"""Exercise 5: an all-reduce from messages.

   Each gradient is cut into 4 chunks. Rank r sends to r + 1 and receives from r - 1.

   round 1   rank 0          rank 1          rank 2          rank 3
   hop 0     sends chunk 0   sends chunk 1   sends chunk 2   sends chunk 3
   hop 1     sends chunk 3   sends chunk 0   sends chunk 1   sends chunk 2
   hop 2     sends chunk 2   sends chunk 3   sends chunk 0   sends chunk 1
   after it  chunk 1 is      chunk 2 is      chunk 3 is      chunk 0 is     summed

   round 2   the summed chunks go around the same way, and each rank keeps a copy

In round 1 a rank adds each arriving chunk to its own chunk, and passes the sum on.
After n - 1 hops each rank has one chunk that is summed over all ranks: a
reduce-scatter. In round 2 the summed chunks go around: an all-gather. In total a rank
sends 2 (n - 1)/n of the gradient, and no algorithm needs less (Patarasuk and Yuan
2009). NCCL's rings do the same.

New here:

    rank.slice(v, i, n)        slice i of n equal slices of a value
    a + b                      the sum of two gradients
    await rank.exchange(v, to=r, source=s)
                               send v to rank r and receive what rank s sends, together
    rank.concatenate(values)   slices side by side; each knows its place

Both start at once: if every rank first awaited its send, none would receive.
Slices may be kept under any key, such as `rank.grad_weights[l, i]`.

Write `reduce_gradient`, without a collective.
"""

from shardlab.language import Kind, Mesh, OpKind, Rank, Value
from shardlab.language.ops import COLLECTIVES
from shardlab.learn.course.exercise import Exercise, Goals, Mistake
from shardlab.learn.course.techniques import avoids, runs_on, uses


async def ring_all_reduce(rank: Rank) -> None:
    last = len(rank.layers)
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l)
    rank.activations[0] = rank.load_batch(rank.share())

    for l in rank.layers:
        rank.activations[l + 1] = rank.forward(l, rank.activations[l], rank.weights[l])
    rank.grad_activations[last] = rank.loss(rank.activations.pop(last))
    for l in reversed(rank.layers):
        rank.grad_weights[l], rank.grad_activations[l] = rank.backward(
            l, rank.activations.pop(l), rank.grad_activations.pop(l + 1), rank.weights[l]
        )
    for l in rank.layers:
        total = await reduce_gradient(rank, l)
        rank.weights[l], rank.opt_states[l] = rank.update(l, total, rank.weights[l], rank.opt_states[l])


async def reduce_gradient(rank: Rank, l: int) -> Value:
    """Return the sum of all ranks' gradients of layer l."""
    # BEGIN SOLUTION
    chunks, n, me = rank.grad_weights, rank.world, rank.index
    for i in range(n):
        chunks[l, i] = rank.slice(chunks[l], i, n)
    del chunks[l]
    for hop in range(n - 1):
        give, add = (me - hop) % n, (me - hop - 1) % n
        chunks[l, add] += await rank.exchange(chunks.pop((l, give)), to=(me + 1) % n, source=(me - 1) % n)
    for hop in range(n - 1):
        give, keep = (me + 1 - hop) % n, (me - hop) % n
        chunks[l, keep] = await rank.exchange(chunks[l, give], to=(me + 1) % n, source=(me - 1) % n)
    return rank.concatenate(chunks.pop((l, i)) for i in range(n))
    # START
    # return await rank.all_reduce(rank.grad_weights.pop(l))  # write this with messages
    # END SOLUTION


# END OF THE EXERCISE

EXERCISE = Exercise(
    number=5,
    name="ring_all_reduce",
    title="An all-reduce from messages",
    goals=Goals("the reference solution", time=7.72, memory=1_769_472, sent=786_432),
    mesh=Mesh(dp_shard=4),
    layers=2,
    techniques=(
        avoids(COLLECTIVES, "{found} is a collective; this exercise asks for messages."),
        uses(OpKind.SEND, "no rank sends gradients.", of=Kind.GRAD_WEIGHT),
        runs_on("gloo", "{found}"),
    ),
    mistakes=(
        Mistake(
            "whole gradients go around",
            (
                "    chunks, n, me = rank.grad_weights, rank.world, rank.index\n",
                "    chunks, n, me = rank.grad_weights, rank.world, rank.index\n"
                "    chunks[l, 'passing'] = chunks[l]\n"
                "    for _ in range(n - 1):\n"
                "        chunks[l, 'passing'] = await rank.exchange(\n"
                "            chunks.pop((l, 'passing')), to=(me + 1) % n, source=(me - 1) % n\n"
                "        )\n"
                "        chunks[l] += chunks[l, 'passing']\n"
                "    del chunks[l, 'passing']\n"
                "    return chunks.pop(l)\n",
            ),
            "too much is sent: 1,572,864",
            "each rank sends whole gradients n - 1 times. How much does it send if it passes on chunks?",
        ),
        Mistake(
            "the second round is missing",
            (
                "    for hop in range(n - 1):\n        give, keep = (me + 1 - hop) % n, (me - hop) % n\n"
                "        chunks[l, keep] = await rank.exchange(chunks[l, give], to=(me + 1) % n, source=(me - 1) % n)\n"
                "    return rank.concatenate(chunks.pop((l, i)) for i in range(n))",
                "    return rank.concatenate(chunks.pop(key) for key in list(chunks) if isinstance(key, tuple))",
            ),
            r"update.*the gradient holds slice . of 4",
            "after the first round each rank has the sum of one chunk only. How do the others get it?",
        ),
        Mistake(
            "the first round has a hop too many",
            ("    for hop in range(n - 1):\n        give, add", "    for hop in range(n):\n        give, add"),
            r"grad_weights\[\(0, .\)\] does not exist",
            "a chunk visits n ranks with n - 1 hops. Which one is complete on this rank then, and which has it given "
            "away?",
        ),
        Mistake(
            "ranks receive from the neighbour to which they send",
            (
                "chunks.pop((l, give)), to=(me + 1) % n, source=(me - 1) % n)",
                "chunks.pop((l, give)), to=(me + 1) % n, source=(me + 1) % n)",
            ),
            r"deadlock.*waits in recv",
            "on a ring, a rank sends to one neighbour and receives from the other. To whom does its source send?",
        ),
        Mistake(
            "the wrong chunk is added",
            ("give, add = (me - hop) % n, (me - hop - 1) % n", "give, add = (me - hop) % n, (me - hop - 2) % n"),
            r"add\(.*gave slice ",
            "a rank must add what arrives to its own chunk of the same number. Which number did its neighbour send?",
        ),
        Mistake(
            "a rank awaits its send before it receives",
            (
                "chunks[l, add] += await rank.exchange(chunks.pop((l, give)), to=(me + 1) % n, source=(me - 1) % n)\n",
                "await rank.send(chunks.pop((l, give)), to=(me + 1) % n)\n"
                "        chunks[l, add] += await rank.recv(source=(me - 1) % n)\n",
            ),
            "can hang",
            "on gloo and NCCL a send waits for its receive. If every rank sends first, who receives?",
        ),
    ),
    hints=(
        "Follow chunk 0 in the figure: rank 0 sends it in hop 0, rank 1 adds its own and sends it in hop 1. Which "
        "chunk does rank r send in hop h, and to which of its chunks does it add what arrives?",
        "Round 1: in hop h, rank r gives chunk r - h and adds what arrives to chunk r - h - 1, all modulo n. Round 2 "
        "begins with chunk r + 1, which round 1 completed: in hop h, rank r gives chunk r + 1 - h and keeps r - h.",
        "Slice into `rank.grad_weights[l, i]` and delete `rank.grad_weights[l]`. Each hop is `await rank.exchange(..., "
        "to=(rank.index + 1) % n, source=(rank.index - 1) % n)`; pop what you give in round 1, keep it in round 2. "
        "At the end, concatenate the popped chunks.",
    ),
)
