"""Bug 118: activations and gradients change places.

With two pipeline ranks and two stages on each, the next rank and the previous rank are
the same rank. Both an activation and a gradient then travel in the same direction at
the same time, and Megatron-LM received them in another order than they were sent.

    rank 0 sends     gradient of microbatch 0,  activation of microbatch 1
    rank 1 receives  activation of microbatch 1,  gradient of microbatch 0

Messages between two ranks arrive in the order in which they were sent. In the program,
layer l is on rank l % 2. Microbatch 1 goes forward while microbatch 0 goes backward.
Find the bug and mend it.
"""

from shardlab.language import Mesh, Rank, Value
from shardlab.learn.course.exercise import Exercise, Goals, Mistake


async def swapped_messages(rank: Rank) -> None:
    own_layers = [l for l in rank.layers if l % 2 == rank.index]
    for l in own_layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l)
    other = 1 - rank.index
    x: dict[tuple[int, int], Value] = {}  # (layer, microbatch) -> the layer's input
    g: dict[tuple[int, int], Value] = {}  # (layer, microbatch) -> the gradient of the layer's output

    async def receive(store: dict[tuple[int, int], Value], name: str, l: int, m: int) -> None:
        layer = l if name == "activations" else l + 1
        store[l, m] = await rank.recv(source=other, expect=(name, layer, m))

    def forward(l: int, m: int) -> Value:
        return rank.forward(l, x[l, m], rank.weights[l])

    def backward(l: int, m: int) -> Value:
        grad_weight, gradient = rank.backward(l, x[l, m], g[l, m], rank.weights[l])
        rank.accumulate(grad_weight)
        return gradient

    if rank.index == 0:
        for m in (0, 1):
            x[0, m] = rank.load_batch([m])
        await rank.send(forward(0, 0), to=other)
        await receive(x, "activations", 2, 0)
        await rank.send(forward(2, 0), to=other)
        await rank.send(forward(0, 1), to=other)
        await receive(g, "grad_activations", 2, 0)
        await receive(x, "activations", 2, 1)
        await rank.send(backward(2, 0), to=other)
        await rank.send(forward(2, 1), to=other)
        await receive(g, "grad_activations", 0, 0)
        backward(0, 0)
        await receive(g, "grad_activations", 2, 1)
        await rank.send(backward(2, 1), to=other)
        await receive(g, "grad_activations", 0, 1)
        backward(0, 1)
    else:
        await receive(x, "activations", 1, 0)
        await rank.send(forward(1, 0), to=other)
        await receive(x, "activations", 3, 0)
        g[3, 0] = rank.loss(forward(3, 0))
        await receive(x, "activations", 1, 1)
        await rank.send(backward(3, 0), to=other)
        await rank.send(forward(1, 1), to=other)
        # BEGIN SOLUTION
        await receive(g, "grad_activations", 1, 0)
        await receive(x, "activations", 3, 1)
        # START
        # await receive(x, "activations", 3, 1)
        # await receive(g, "grad_activations", 1, 0)
        # END SOLUTION
        await rank.send(backward(1, 0), to=other)
        g[3, 1] = rank.loss(forward(3, 1))
        await rank.send(backward(3, 1), to=other)
        await receive(g, "grad_activations", 1, 1)
        await rank.send(backward(1, 1), to=other)
    for l in own_layers:
        gradient = rank.grad_weights.pop(l)
        rank.weights[l], rank.opt_states[l] = rank.update(l, gradient, rank.weights[l], rank.opt_states[l])


# END OF THE EXERCISE

EXERCISE = Exercise(
    number=118,
    name="swapped_messages",
    title="Activations and gradients change places",
    goals=Goals("NVIDIA/Megatron-LM#1451"),
    mesh=Mesh(pp=2),
    layers=4,
    microbatches=2,
    seen_in="NVIDIA/Megatron-LM#1451",
    mistakes=(
        Mistake(
            "messages are received in another order",
            (
                ('        await receive(g, "grad_activations", 1, 0)\n        await receive(x, "activations", 3, 1)\n'),
                ('        await receive(x, "activations", 3, 1)\n        await receive(g, "grad_activations", 1, 0)\n'),
            ),
            r"expected activations",
            "in which order does rank 0 send these two messages?",
        ),
    ),
    hints=(
        "The refusal says which message was expected and which one came.",
        "Rank 0 sends the gradient of microbatch 0 before the activation of microbatch 1.",
        "Receive the gradient first.",
    ),
)
