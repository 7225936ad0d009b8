"""Exercise 1: gradient accumulation. The same batch in less memory.

   the whole batch    F0 F1 L B1 B0                              each op: 4 microbatches
   at once                    |  |
                              dW1, dW0 ----------------------------------> U0 U1

   one microbatch     F0 F1 L B1 B0   F0 F1 L B1 B0   ...        each op: 1 microbatch
   after the other            |  |            |  |
                              dW1, dW0   +    dW1, dW0   +   ... -------> U0 U1

Gradients are sums over microbatches. So a rank can run forward and backward for one
microbatch, add its weights' gradients to those of the microbatches before it, and start
with the next one in the same memory. Only the sums stay. The results are those of the
whole batch, and the step takes the same time. On a GPU it may be slower, since small
kernels use it less well.

New here:

    rank.microbatches          the numbers 0, 1, 2, 3
    rank.load_batch([m])       the input of microbatch m alone
    rank.accumulate(dw)        add dw to rank.grad_weights[l], or store it if that is
                               empty; dw knows its layer l

Each microbatch's loss is weighted by its share of the batch's tokens, so gradients are
added and never divided. An update must see every microbatch exactly once.
"""

from shardlab.language import Kind, Mesh, Rank
from shardlab.learn.course.exercise import Exercise, Goals, Mistake
from shardlab.learn.course.techniques import frees_after_last_use, microbatches_each


async def grad_accum(rank: Rank) -> None:
    last = len(rank.layers)
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l)

    # BEGIN SOLUTION
    for m in rank.microbatches:
        rank.activations[0] = rank.load_batch([m])
        for l in rank.layers:
            rank.activations[l + 1] = rank.forward(l, rank.activations[l], rank.weights[l])
        rank.grad_activations[last] = rank.loss(rank.activations.pop(last))
        for l in reversed(rank.layers):
            grad_weight, rank.grad_activations[l] = rank.backward(
                l, rank.activations.pop(l), rank.grad_activations.pop(l + 1), rank.weights[l]
            )
            rank.accumulate(grad_weight)
        del rank.grad_activations[0]
    # START
    # # The whole batch at once: split it into its microbatches.
    # rank.activations[0] = rank.load_batch(rank.microbatches)
    # for l in rank.layers:
    #     rank.activations[l + 1] = rank.forward(l, rank.activations[l], rank.weights[l])
    # rank.grad_activations[last] = rank.loss(rank.activations.pop(last))
    # for l in reversed(rank.layers):
    #     rank.grad_weights[l], rank.grad_activations[l] = rank.backward(
    #         l, rank.activations.pop(l), rank.grad_activations.pop(l + 1), rank.weights[l]
    #     )
    # del rank.grad_activations[0]
    # END SOLUTION

    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.update(
            l, rank.grad_weights.pop(l), rank.weights[l], rank.opt_states[l]
        )


# END OF THE EXERCISE

EXERCISE = Exercise(
    number=1,
    name="grad_accum",
    title="Gradient accumulation",
    goals=Goals("the reference solution", time=24.4, memory=1_966_080, sent=0),
    mesh=Mesh(),
    layers=2,
    microbatches=4,
    puzzle="grad_accum",
    techniques=(
        microbatches_each(1, "a forward pass computes {found} microbatches at once; compute one."),
        frees_after_last_use(Kind.ACTIVATION, "{found} stays in memory after its last use."),
        frees_after_last_use(Kind.GRAD_ACTIVATION, "{found} stays in memory after its last use."),
    ),
    mistakes=(
        Mistake(
            "two microbatches run at once",
            (
                "    for m in rank.microbatches:\n        rank.activations[0] = rank.load_batch([m])",
                "    for m in (0, 2):\n        rank.activations[0] = rank.load_batch([m, m + 1])",
            ),
            "computes 2 microbatches at once",
            "the memory of activations grows with the microbatches that are under way. How few can a pass compute?",
        ),
        Mistake(
            "a new gradient replaces the sum",
            ("rank.accumulate(grad_weight)", "rank.grad_weights[l] = grad_weight"),
            r"update.*: microbatches 0-2 are missing",
            "the update sees the last microbatch only. What happened to the gradients of those before it?",
        ),
        Mistake(
            "each microbatch takes a step of its own",
            (
                "            rank.accumulate(grad_weight)\n",
                "            rank.weights[l], rank.opt_states[l] = rank.update(\n"
                "                l, grad_weight, rank.weights[l], rank.opt_states[l]\n"
                "            )\n",
            ),
            r"update.*: microbatches 1-3 are missing",
            "one optimizer step is taken for the whole batch. Where does the update have to stand?",
        ),
        Mistake(
            "a microbatch is computed twice",
            ("for m in rank.microbatches:", "for m in (0, 1, 2, 3, 3):"),
            "twice",
            "the sum may contain each microbatch once. Which numbers does the loop go through?",
        ),
        Mistake(
            "the gradient of the input stays",
            ("        del rank.grad_activations[0]\n", ""),
            r"grad_activations\[0\] stays",
            "nothing reads the gradient of the input, but it stays while the next microbatch runs.",
        ),
        Mistake(
            "activations stay until the next microbatch",
            ("rank.activations.pop(l), rank.grad", "rank.activations[l], rank.grad"),
            r"^activations\[[01]\] stays",
            "an input of a layer has its last use in that layer's backward pass. Is it gone afterwards?",
        ),
    ),
    hints=(
        "What has to stay when a microbatch has gone forward and backward? Its weights' gradients, and nothing else.",
        "Put a loop `for m in rank.microbatches:` around everything from the loading of the batch to the last "
        "backward pass. The updates stay behind the loop.",
        "In the loop: `rank.load_batch([m])`, forward, loss, backward with `grad_weight, rank.grad_activations[l] = "
        "...`, then `rank.accumulate(grad_weight)`; at its end `del rank.grad_activations[0]`.",
    ),
)
