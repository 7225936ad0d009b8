"""Exercise 13: a pipeline, without microbatches.

              time ->
    rank 0    F0 F1                                     B1 B0 U
    rank 1          F2 F3                         B3 B2 U
    rank 2                F4 F5             B5 B4 U
    rank 3                      F6 F7 L B7 B6 U
                  ->    ->    ->      <-    <-    <-
                  activation 2, 4, 6  gradient of activation 6, 4, 2

A model that does not fit on one device can be cut between its layers. Each rank keeps a
stage: some consecutive layers, with their weights, gradients and optimizer states. Only
the activation at the border travels up, and its gradient travels down. No weight is
ever sent, and no rank needs the gradients of another one, so there is no collective.

The price is in the figure: at any time three of four ranks stand still. With p ranks
each of them computes for 1/p of the step, whatever its speed. The next exercise fills
the gaps.

Layer l maps activation l to activation l + 1. A rank with the layers 2 and 3 receives
activation 2, sends activation 4, receives the gradient of activation 4 and sends that
of activation 2. New here:

    rank.stage_layers()                    the layers of this rank
    await rank.send(value, to=r)           send a value to rank r
    value = await rank.recv(source=r)      the next value that rank r sends here

In the start each rank computes the right layers, but no rank sends or receives.
"""

from shardlab.language import Kind, Mesh, Rank
from shardlab.learn.course.exercise import Exercise, Goals, Mistake
from shardlab.learn.course.techniques import computes_at_most, no_collective_of


async def pipeline(rank: Rank) -> None:
    stage = rank.stage_layers()
    first, end = stage[0], stage[-1] + 1  # the activations at the borders of the stage
    is_first, is_last = rank.index == 0, rank.index == rank.world - 1
    for l in stage:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l)

    # BEGIN SOLUTION
    if is_first:
        rank.activations[first] = rank.load_batch(rank.microbatches)
    else:
        rank.activations[first] = await rank.recv(source=rank.index - 1)
    # START
    # rank.activations[first] = rank.load_batch(rank.microbatches)  # right for the first stage only
    # END SOLUTION
    for l in stage:
        rank.activations[l + 1] = rank.forward(l, rank.activations[l], rank.weights[l])

    # BEGIN SOLUTION
    if is_last:
        rank.grad_activations[end] = rank.loss(rank.activations.pop(end))
    else:
        await rank.send(rank.activations.pop(end), to=rank.index + 1)
        rank.grad_activations[end] = await rank.recv(source=rank.index + 1)
    # START
    # rank.grad_activations[end] = rank.loss(rank.activations.pop(end))  # right for the last stage only
    # END SOLUTION
    for l in reversed(stage):
        rank.grad_weights[l], rank.grad_activations[l] = rank.backward(
            l, rank.activations.pop(l), rank.grad_activations.pop(l + 1), rank.weights[l]
        )
    # BEGIN SOLUTION
    if not is_first:
        await rank.send(rank.grad_activations.pop(first), to=rank.index - 1)
    # END SOLUTION

    for l in stage:
        rank.weights[l], rank.opt_states[l] = rank.update(
            l, rank.grad_weights.pop(l), rank.weights[l], rank.opt_states[l]
        )


# END OF THE EXERCISE

EXERCISE = Exercise(
    number=13,
    name="pipeline",
    title="A pipeline, without microbatches",
    goals=Goals("the reference solution", time=100.84, memory=2_621_440, sent=1_048_576),
    mesh=Mesh(pp=4),
    layers=8,
    microbatches=4,
    puzzle="pipeline",
    techniques=(
        computes_at_most(2, "a rank computes {found} layers; its stage has 2."),
        no_collective_of(Kind.WEIGHT, "{found} moves weights; in a pipeline every weight stays where it is."),
    ),
    mistakes=(
        Mistake(
            "every rank loads the batch",
            ("    else:\n        rank.activations[first] = await rank.recv(source=rank.index - 1)\n", ""),
            r"rank 1, .*activations\[2\] does not exist|load_batch",
            "the batch is activation 0. Which activation does this stage begin with, and who has it?",
        ),
        Mistake(
            "every rank computes a loss",
            (
                "    if is_last:\n        rank.grad_activations[end] = rank.loss(rank.activations.pop(end))\n"
                "    else:\n        await rank.send(rank.activations.pop(end), to=rank.index + 1)\n"
                "        rank.grad_activations[end] = await rank.recv(source=rank.index + 1)\n",
                "    rank.grad_activations[end] = rank.loss(rank.activations.pop(end))\n",
            ),
            "loss: the activation given",
            "only the last rank has the last activation. What does each of the others do with its own, and wait for?",
        ),
        Mistake(
            "the gradient is not sent",
            (
                "    if not is_first:\n        await rank.send(rank.grad_activations.pop(first), to=rank.index - 1)\n",
                "",
            ),
            "rank 0 waits in recv from rank 1.*ended without it",
            "the stage below has sent its activation and waits for the gradient of it.",
        ),
        Mistake(
            "the gradient is sent to the rank above",
            (
                "rank.grad_activations.pop(first), to=rank.index - 1",
                "rank.grad_activations.pop(first), to=rank.index + 1",
            ),
            r"send to rank (4|-1)",
            "the first rank has nobody below it, and the last one nobody above. Activations travel up, and gradients "
            "down to the rank that made the activation.",
        ),
        Mistake(
            "the activation of the wrong border is sent",
            ("rank.send(rank.activations.pop(end), to", "rank.send(rank.activations[first], to"),
            r"forward\(layer 2\): the activation given",
            "a stage begins with the activation that the last layer of the stage below makes. Does that rank send it, "
            "and does this one begin with it?",
        ),
        Mistake(
            "the gradient is received before the activation is sent",
            (
                "        await rank.send(rank.activations.pop(end), to=rank.index + 1)\n"
                "        rank.grad_activations[end] = await rank.recv(source=rank.index + 1)\n",
                "        rank.grad_activations[end] = await rank.recv(source=rank.index + 1)\n"
                "        await rank.send(rank.activations.pop(end), to=rank.index + 1)\n",
            ),
            "deadlock",
            "each rank waits for another one. Can the next rank have this gradient before it has the activation?",
        ),
        Mistake(
            "every activation is kept",
            ("rank.send(rank.activations.pop(end), to", "rank.send(rank.activations[end], to"),
            "too much memory.*activations",
            "no later line of this rank reads the activation that it has sent. `pop` takes it out of its store.",
        ),
    ),
    hints=(
        "Follow activation 4: which layer makes it, and which layer reads it? Both ends of that message are in your "
        "program, since all ranks run it.",
        "All but the first rank receive activation `first` from the rank below; all but the last rank send activation "
        "`after` up and receive its gradient. At the end, all but the first send the gradient of activation `first` "
        "down.",
        "After the forward passes: `if is_last:` the loss; `else:` `await rank.send(rank.activations.pop(end), "
        "to=rank.index + 1)` and `rank.grad_activations[end] = await rank.recv(source=rank.index + 1)`.",
    ),
)
