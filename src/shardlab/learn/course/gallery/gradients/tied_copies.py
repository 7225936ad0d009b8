"""Bug 107: two copies of a tied embedding drift apart.

The embedding and the head of a GPT share one matrix. In a pipeline, the first stage has
a copy for the look-up, and the last stage has one for the logits. A user printed the
two during training with a pipeline, and they were no longer equal.

    stage 0: look-up  -> gradient of one use      |
    stage 1: logits   -> gradient of the other    |  the update wants both

Each stage has the gradient of its own use. Both copies need the sum of the two, or they
become two different matrices. The report shows that the copies differ, and not why. The
program shows the usual reason: nothing is summed between the stages. Find the bug and
mend it.
"""

from shardlab.language import Mesh, Rank, Sizes, Value
from shardlab.learn.course.exercise import Exercise, Goals, Mistake


async def tied_copies(rank: Rank) -> None:
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

    # BEGIN SOLUTION
    gradients[0] = await rank.all_reduce(tied_gradient)
    # START
    # gradients[0] = tied_gradient
    # END SOLUTION
    for l, gradient in gradients.items():
        rank.weights[l], rank.opt_states[l] = rank.update(l, gradient, rank.weights[l], rank.opt_states[l])


# END OF THE EXERCISE

EXERCISE = Exercise(
    number=107,
    name="tied_copies",
    title="Two copies of a tied embedding drift apart",
    goals=Goals("NVIDIA/Megatron-LM#656"),
    mesh=Mesh(pp=2),
    layers=Sizes.half_blocks(1, tied=True),
    microbatches=2,
    seen_in="NVIDIA/Megatron-LM#656",
    mistakes=(
        Mistake(
            "the two uses are not summed",
            ("gradients[0] = await rank.all_reduce(tied_gradient)", "gradients[0] = tied_gradient"),
            r"update.*missing",
            "the matrix is used twice. Where is the gradient of the other use?",
        ),
    ),
    hints=(
        "What does each stage compute with the shared matrix?",
        "Each stage has the gradient of one use, and both must make the same update.",
        "All-reduce `tied` over the two stages before the update.",
    ),
)
