"""Bug 113: a shared weight counts twice in the norm.

The shared matrix of embedding and head has a copy on the first and one on the last
stage. Both copies have the same, summed gradient. Megatron-FSDP v2 counted it on both
stages, so the norm was too large, and gradients were clipped too much. In its own test,
the norm comes out as 40 instead of 28.3.

    stage 0: norm of embedding + layers     the same gradient
    stage 1: norm of layers + head          a second time

The program is a pipeline of two stages with a tied head. Find the bug and mend it.
"""

from shardlab.language import Mesh, Rank, Sizes, Value
from shardlab.learn.course.exercise import Exercise, Goals, Mistake
from shardlab.learn.course.techniques import clips


async def shared_norm(rank: Rank) -> None:
    layers = rank.layers[:4] if rank.index == 0 else rank.layers[4:]
    for l in {rank.weight_of(l) for l in layers}:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l)

    other = 1 - rank.index
    residual = list[Value]()
    if rank.index == 0:
        x = rank.load_batch(rank.microbatches)
    else:
        x, residual = await rank.recv(source=other), [await rank.recv(source=other)]
    inputs: dict[int, Value] = {}
    for l in layers:
        inputs[l], weight = x, rank.weights[rank.weight_of(l)]
        if len(rank.signatures[l].inputs) + len(rank.signatures[l].outputs) == 2:
            x = rank.forward(l, x, weight)
        else:  # a norm, which also reads or makes the residual
            x, *residual = rank.forward(l, (x, *residual), weight)

    if rank.index == 0:
        await rank.send(x, to=other)
        await rank.send(residual[0], to=other)
        gradient, residual = await rank.recv(source=other), [await rank.recv(source=other)]
    else:
        gradient, residual = rank.loss(x), []
    gradients: dict[int, Value] = {}
    for l in reversed(layers):
        weight = rank.weights[rank.weight_of(l)]
        if len(rank.signatures[l].inputs) + len(rank.signatures[l].outputs) == 2:
            gradients[l], gradient = rank.backward(l, inputs[l], gradient, weight)
        else:
            gradients[l], gradient, *residual = rank.backward(l, inputs[l], (gradient, *residual), weight)
    if rank.index == 1:
        await rank.send(gradient, to=other)
        await rank.send(residual[0], to=other)
    tied_gradient = gradients.pop(0 if rank.index == 0 else rank.layers[-1])

    gradients[0] = await rank.all_reduce(tied_gradient)

    # BEGIN SOLUTION
    counted_layers = [l for l in gradients if l or rank.index == 0]
    # START
    # counted_layers = list(gradients)
    # END SOLUTION
    squares = sum(rank.norm(l, gradients[l]) for l in counted_layers)
    assert isinstance(squares, Value)
    norm = await rank.all_reduce(squares)
    for l, gradient in gradients.items():
        rank.weights[l], rank.opt_states[l] = rank.update(l, gradient, rank.weights[l], rank.opt_states[l], norm)


# END OF THE EXERCISE

EXERCISE = Exercise(
    number=113,
    name="shared_norm",
    title="A shared weight counts twice in the norm",
    goals=Goals("NVIDIA/Megatron-LM#7227"),
    mesh=Mesh(pp=2),
    layers=Sizes.half_blocks(1, tied=True),
    microbatches=2,
    seen_in="NVIDIA/Megatron-LM#7227",
    techniques=(clips("{found} does not clip; give every update the norm."),),
    mistakes=(
        Mistake(
            "both copies are counted",
            ("counted_layers = [l for l in gradients if l or rank.index == 0]", "counted_layers = list(gradients)"),
            r"counts once",
            "which gradient do both stages add to the norm?",
        ),
    ),
    hints=(
        "Which layers does each stage count, and which of them do both have?",
        "After the all-reduce, the gradient of the shared matrix is the same on both stages.",
        "Let only the first stage count layer 0.",
    ),
)
