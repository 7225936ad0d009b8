"""Exercise 0: one rank, in the least memory.

                 layer 0               layer 1
   forward   x0 -- W0 --> x1       x1 -- W1 --> x2 --> loss
   backward  dx0 <-- x0, W0, dx1   dx1 <-- x1, W1, dx2 <--+    dx: gradient of x
                 dW0                   dW1                     dW: gradient of W
   update    W0, O0 <-- dW0        W1, O1 <-- dW1              O: optimizer state

A program of Shardlab says what one rank does in one optimizer step. It works with
values that have no data yet, so it can be checked before anything runs. The rank keeps
values in stores, which work like dicts, with keys of your choice:

    rank.weights, rank.opt_states, rank.activations, rank.grad_activations,
    rank.grad_weights

A value is freed when its last key is removed: by `del store[key]`, by a new value under
that key, or by `store.pop(key)`, which returns the value for its last use. The verbs:

    w, o = rank.load_weights(l)              weight and optimizer state of layer l
    x = rank.load_batch(rank.microbatches)   activation 0: the input, of the whole batch
    y = rank.forward(l, x, w)                activation l + 1, from activation l
    dy = rank.loss(y)                        gradient of the last activation
    dw, dx = rank.backward(l, x, dy, w)      x: the input of forward; dy: gradient of y
    w, o = rank.update(l, dw, w, o)          new weight and state; the old are freed

Memory is counted in elements when each op starts. A weight, its gradient and its
optimizer state have 262,144 each, an activation of the batch and its gradient 524,288.
Time is counted in forward passes of one microbatch through one layer. The batch has
four microbatches, a backward pass takes twice as long, and an update takes 0.2.

The start below trains correctly, but frees nothing. Free each activation, and each
gradient of an activation, with its last use.
"""

from shardlab.language import Kind, Mesh, Rank
from shardlab.learn.course.exercise import Exercise, Goals, Mistake
from shardlab.learn.course.techniques import frees_after_last_use


async def one_rank(rank: Rank) -> None:
    last = len(rank.layers)
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l)
    rank.activations[0] = rank.load_batch(rank.microbatches)

    for l in rank.layers:
        rank.activations[l + 1] = rank.forward(l, rank.activations[l], rank.weights[l])
    # BEGIN SOLUTION
    rank.grad_activations[last] = rank.loss(rank.activations.pop(last))
    # START
    # rank.grad_activations[last] = rank.loss(rank.activations[last])
    # END SOLUTION

    for l in reversed(rank.layers):
        # BEGIN SOLUTION
        rank.grad_weights[l], rank.grad_activations[l] = rank.backward(
            l, rank.activations.pop(l), rank.grad_activations.pop(l + 1), rank.weights[l]
        )
    del rank.grad_activations[0]  # the gradient of the input, which nothing needs
    # START
    #     rank.grad_weights[l], rank.grad_activations[l] = rank.backward(
    #         l, rank.activations[l], rank.grad_activations[l + 1], rank.weights[l]
    #     )
    # END SOLUTION

    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.update(
            l, rank.grad_weights.pop(l), rank.weights[l], rank.opt_states[l]
        )


# END OF THE EXERCISE

EXERCISE = Exercise(
    number=0,
    name="one_rank",
    title="One rank, in the least memory",
    goals=Goals("the reference solution", time=24.4, memory=2_621_440, sent=0),
    mesh=Mesh(),
    layers=2,
    microbatches=4,
    puzzle="standard",
    techniques=(
        frees_after_last_use(Kind.ACTIVATION, "{found} stays in memory after its last use."),
        frees_after_last_use(Kind.GRAD_ACTIVATION, "{found} stays in memory after its last use."),
    ),
    mistakes=(
        Mistake(
            "the loss is left out",
            ("rank.loss(rank.activations.pop(last))", "rank.activations.pop(last)"),
            r"grad_activations\[2\] was given activations\[2\]",
            "the first backward pass reads a gradient of the output. Which verb makes it from the output?",
        ),
        Mistake(
            "the output stays after the loss",
            ("rank.loss(rank.activations.pop(last))", "rank.loss(rank.activations[last])"),
            r"^activations\[2\] stays",
            "only the loss reads the output of the last layer. Does it have to stay in its store?",
        ),
        Mistake(
            "activations stay after the backward pass",
            ("rank.activations.pop(l), rank.grad", "rank.activations[l], rank.grad"),
            r"^activations\[[01]\] stays",
            "layer l's input is read by its forward and its backward pass, and by nothing after that.",
        ),
        Mistake(
            "gradients of activations stay",
            ("rank.grad_activations.pop(l + 1)", "rank.grad_activations[l + 1]"),
            r"^grad_activations\[[12]\] stays",
            "the gradient of layer l's output is read by layer l's backward pass alone.",
        ),
        Mistake(
            "the gradient of the input stays",
            ("    del rank.grad_activations[0]  # the gradient of the input, which nothing needs\n", ""),
            r"^grad_activations\[0\] stays",
            "no layer lies below layer 0. What keeps the gradient of its input?",
        ),
        Mistake(
            "layers go backward in forward order",
            ("for l in reversed(rank.layers):", "for l in rank.layers:"),
            r"grad_activations\[1\] does not exist; the store has",
            "layer l's backward pass reads the gradient that layer l + 1 makes. Which layer comes first?",
        ),
        Mistake(
            "a layer is not updated",
            (
                "    for l in rank.layers:\n        rank.weights[l], rank.opt_states[l] = rank.update(",
                "    for l in rank.layers[1:]:\n        rank.weights[l], rank.opt_states[l] = rank.update(",
            ),
            r"weights\[0\] is loaded here and never updated",
            "every layer takes its step exactly once. Which layer does the last loop leave out?",
        ),
    ),
    hints=(
        "`store[key]` reads a value and keeps it. `store.pop(key)` reads it for the last time.",
        "For each activation, find the last line that reads it: x2 in the loss, x1 and x0 in the backward passes.",
        "Pop the output in the loss, and both `activations[l]` and `grad_activations[l + 1]` in the backward pass. "
        "Nothing reads `grad_activations[0]`: delete it after the loop.",
    ),
)
