"""Exercise 20: a schedule that hangs without buffers.

     rank 1                              rank 2
     F2                                  B0
     send activation of 2 --->    <---   send gradient of 0        both wait here
     receive gradient of 0               receive activation of 2
     B0                                  F2

This is 1F1B by hand, and it is right: every value arrives, every gradient is complete.
On shared memory, or with small messages that some layer copies into a buffer, it runs.
On a cluster it hangs in the first steady pass.

A send is finished when its memory may be reused. If the value is copied into a buffer,
that is at once. Without a buffer, the send waits until the receiver takes the value: a
*rendezvous*. Then two neighbours that send to each other wait for each other. gloo
waits for the receive even for the smallest message; NCCL copies small ones and waits
for large ones, so a program that ran with a tiny model hangs with a real one.

Starting the sends and awaiting them later does not help on NCCL, which runs the
messages of a pair of ranks one at a time, in the order in which each rank has issued
them. A rank must issue its two messages *together*, so that neither comes first:

    value = await rank.exchange(mine, to=r, source=r)      torch: batch_isend_irecv

Megatron-LM's `send_forward_recv_backward` does the same. Only the two functions in
which neighbours meet are at fault.
"""

from shardlab.language import Mesh, Rank, Value
from shardlab.learn.course.exercise import Exercise, Goals, Mistake
from shardlab.learn.course.techniques import in_flight_at_most, runs_on


async def rendezvous(rank: Rank) -> None:
    (l,) = rank.stage_layers()  # one layer on each rank
    is_first, is_last = rank.index == 0, rank.index == rank.world - 1
    rank_below, rank_above = rank.index - 1, rank.index + 1
    rank.weights[l], rank.opt_states[l] = rank.load_weights(l)

    async def load(m: int) -> None:
        rank.activations[l, m] = rank.load_batch([m]) if is_first else await rank.recv(source=rank_below)

    def forward(m: int) -> Value:
        return rank.forward(l, rank.activations[l, m], rank.weights[l])

    def backward(m: int, gradient: Value) -> Value:
        grad_weight, grad_activation = rank.backward(l, rank.activations.pop((l, m)), gradient, rank.weights[l])
        rank.accumulate(grad_weight)
        return grad_activation

    # BEGIN SOLUTION
    async def meet_above(output: Value) -> Value:
        return await rank.exchange(output, to=rank_above, source=rank_above)

    async def meet_below(gradient: Value) -> Value:
        return await rank.exchange(gradient, to=rank_below, source=rank_below)

    # START
    # async def meet_above(output: Value) -> Value:
    #     await rank.send(output, to=rank_above)
    #     return await rank.recv(source=rank_above)
    #
    # async def meet_below(gradient: Value) -> Value:
    #     await rank.send(gradient, to=rank_below)
    #     return await rank.recv(source=rank_below)
    #
    # END SOLUTION
    count = len(rank.microbatches)
    warmup = min(rank.world - rank.index - 1, count)
    for m in range(warmup):
        await load(m)
        await rank.send(forward(m), to=rank_above)

    await load(warmup)
    for m in range(count - warmup):  # forward with microbatch warmup + m, backward with m
        output = forward(warmup + m)
        if is_last:
            gradient = rank.loss(output)
        else:
            gradient = await meet_above(output)
        gradient = backward(m, gradient)
        next_microbatch = warmup + m + 1
        if is_first:
            if next_microbatch < count:
                await load(next_microbatch)
        elif next_microbatch < count:
            rank.activations[l, next_microbatch] = await meet_below(gradient)
        else:
            await rank.send(gradient, to=rank_below)

    for m in range(count - warmup, count):
        gradient = backward(m, await rank.recv(source=rank_above))
        if not is_first:
            await rank.send(gradient, to=rank_below)

    rank.weights[l], rank.opt_states[l] = rank.update(l, rank.grad_weights.pop(l), rank.weights[l], rank.opt_states[l])


# END OF THE EXERCISE

EXERCISE = Exercise(
    number=20,
    name="rendezvous",
    title="A schedule that hangs without buffers",
    goals=Goals("the reference solution", time=37.0, memory=1_441_792, sent=2_097_152),
    mesh=Mesh(pp=4),
    layers=4,
    microbatches=8,
    techniques=(
        runs_on("gloo", "the program needs buffers: {found}"),
        runs_on("nccl", "the program hangs on NCCL: {found}"),
        in_flight_at_most((4, 3, 2, 1), "{found} microbatches in flight; rank r may have 4 - r."),
    ),
    mistakes=(
        Mistake(
            "both send first",
            (
                "        return await rank.exchange(output, to=rank_above, source=rank_above)\n\n"
                "    async def meet_below(gradient: Value) -> Value:\n"
                "        return await rank.exchange(gradient, to=rank_below, source=rank_below)\n",
                "        await rank.send(output, to=rank_above)\n        return await rank.recv(source=rank_above)\n\n"
                "    async def meet_below(gradient: Value) -> Value:\n"
                "        await rank.send(gradient, to=rank_below)\n        return await rank.recv(source=rank_below)\n",
            ),
            "needs buffers",
            "both neighbours wait until the other one receives. Let the two messages be issued together.",
        ),
        Mistake(
            "the sends are awaited later",
            (
                "        return await rank.exchange(output, to=rank_above, source=rank_above)\n\n"
                "    async def meet_below(gradient: Value) -> Value:\n"
                "        return await rank.exchange(gradient, to=rank_below, source=rank_below)\n",
                "        rank.activations['sent'] = output\n        handle = rank.send(output, to=rank_above)\n"
                "        gradient = await rank.recv(source=rank_above)\n        await handle\n"
                "        del rank.activations['sent']\n        return gradient\n\n"
                "    async def meet_below(gradient: Value) -> Value:\n"
                "        rank.grad_activations['sent'] = gradient\n"
                "        handle = rank.send(gradient, to=rank_below)\n"
                "        output = await rank.recv(source=rank_below)\n        await handle\n"
                "        del rank.grad_activations['sent']\n        return output\n",
            ),
            "hangs on NCCL",
            "NCCL runs the messages of two ranks in the order of their issue, and both have issued their send first.",
        ),
        Mistake(
            "the gradient is received before the activation is sent",
            (
                "        return await rank.exchange(output, to=rank_above, source=rank_above)\n",
                "        gradient = await rank.recv(source=rank_above)\n"
                "        await rank.send(output, to=rank_above)\n        return gradient\n",
            ),
            "too slow",
            "the rank above stands still, because the activation that it needs next lies here. Which is ready first?",
        ),
        Mistake(
            "the exchange names the wrong neighbour",
            ("to=rank_below, source=rank_below", "to=rank_below, source=rank_above"),
            "recv from rank 4",
            "the next activation comes from where the gradient goes to.",
        ),
        Mistake(
            "the gradient of the wrong microbatch",
            (
                "gradient = backward(m, gradient)\n        next_microbatch",
                "gradient = backward(warmup + m, gradient)\n        next_microbatch",
            ),
            r"of microbatch \d and the gradient of microbatch \d",
            "the rank above is `warmup` microbatches behind: whose gradient does it send?",
        ),
    ),
    hints=(
        "Which two ranks wait in the first refusal, and what has each of them sent to the other?",
        "After its forward pass rank r sends an activation up and receives a gradient; after its backward pass rank "
        "r + 1 sends a gradient down and receives an activation. It is the same pair of messages.",
        "`return await rank.exchange(output, to=rank_above, source=rank_above)`, and in the other function `return "
        "await rank.exchange(gradient, to=rank_below, source=rank_below)`.",
    ),
)
