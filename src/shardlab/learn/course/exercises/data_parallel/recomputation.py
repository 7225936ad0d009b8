"""Exercise 11: recomputation. Activations that are computed twice instead of kept.

   9 layers in 3 segments        x0 F0 F1 F2 x3 F3 F4 F5 x6 F6 F7 F8 loss
   kept after the forward pass   x0          x3          x6
                                                          |
   backward of layers 6-8                                 F6 F7 then B8 B7 B6
   backward of layers 3-5                    F3 F4 then B5 B4 B3
   backward of layers 0-2        F0 F1 then B2 B1 B0

A backward pass needs its layer's input. Keeping the inputs of all L layers takes memory
in proportion to L. Instead, keep only the input of each segment: its checkpoint. When
the backward pass comes to a segment, compute its other inputs again from the checkpoint
and use them at once. With segments of sqrt(L) layers, about 2 sqrt(L) activations are
alive, at the price of one more forward pass (Chen et al. 2016, arXiv 1604.06174). A
backward pass costs twice a forward pass, so a step takes at most a third longer. This
is torch.utils.checkpoint; Megatron-LM calls it full recomputation.

Nothing is new here: call `rank.forward` a second time, and keep an activation in its
store only as long as it is needed. Pop the input of a forward pass that reads it for
the last time. The last layer of a segment need not run again: no op reads its output.

The step below updates each layer right after its backward pass, so that gradients take
little memory. The goals leave room for 3 checkpoints and 2 more inputs, and for the
time of 6 more forward passes.
"""

from shardlab.language import Kind, Mesh, Rank
from shardlab.learn.course.exercise import Exercise, Goals, Mistake
from shardlab.learn.course.techniques import computes_again, frees_after_last_use, live_at_most

SEGMENT = 3


async def recomputation(rank: Rank) -> None:
    last = len(rank.layers)
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l)
    rank.activations[0] = rank.load_batch(rank.microbatches)

    # BEGIN SOLUTION
    for l in rank.layers:
        is_checkpoint = l % SEGMENT == 0
        x = rank.activations[l] if is_checkpoint else rank.activations.pop(l)
        rank.activations[l + 1] = rank.forward(l, x, rank.weights[l])
    rank.grad_activations[last] = rank.loss(rank.activations.pop(last))

    for first in reversed(range(0, last, SEGMENT)):
        segment = range(first, first + SEGMENT)
        for l in segment[:-1]:
            rank.activations[l + 1] = rank.forward(l, rank.activations[l], rank.weights[l])
        for l in reversed(segment):
            grad_weight, rank.grad_activations[l] = rank.backward(
                l, rank.activations.pop(l), rank.grad_activations.pop(l + 1), rank.weights[l]
            )
            rank.weights[l], rank.opt_states[l] = rank.update(l, grad_weight, rank.weights[l], rank.opt_states[l])
    # START
    # for l in rank.layers:
    #     rank.activations[l + 1] = rank.forward(l, rank.activations[l], rank.weights[l])
    # rank.grad_activations[last] = rank.loss(rank.activations.pop(last))
    #
    # for l in reversed(rank.layers):
    #     grad_weight, rank.grad_activations[l] = rank.backward(
    #         l, rank.activations.pop(l), rank.grad_activations.pop(l + 1), rank.weights[l]
    #     )
    #     rank.weights[l], rank.opt_states[l] = rank.update(l, grad_weight, rank.weights[l], rank.opt_states[l])
    # END SOLUTION
    del rank.grad_activations[0]


# END OF THE EXERCISE

ACTIVATION = 4 * 256 * 512
"""Number of elements of an activation of the whole batch."""

EXERCISE = Exercise(
    number=11,
    name="recomputation",
    title="Recomputation",
    goals=Goals("the reference solution", time=145.8, memory=7_864_320, sent=0),
    mesh=Mesh(),
    layers=9,
    techniques=(
        computes_again("no layer is computed a second time; all its inputs are kept."),
        live_at_most(
            Kind.ACTIVATION,
            5 * ACTIVATION,
            "{found} elements of activations are alive at once; 3 checkpoints and 2 more inputs are 2,621,440.",
        ),
        frees_after_last_use(Kind.ACTIVATION, "{found} stays in memory after its last use."),
    ),
    mistakes=(
        Mistake(
            "the forward pass keeps every input",
            (
                "        is_checkpoint = l % SEGMENT == 0\n"
                "        x = rank.activations[l] if is_checkpoint else rank.activations.pop(l)\n"
                "        rank.activations[l + 1] = rank.forward(l, x, rank.weights[l])\n",
                "        rank.activations[l + 1] = rank.forward(l, rank.activations[l], rank.weights[l])\n",
            ),
            "^5,242,880",
            "what is computed again need not be kept. Which inputs does the forward pass have to leave?",
        ),
        Mistake(
            "every layer starts again from its checkpoint",
            (
                "        for l in segment[:-1]:\n"
                "            rank.activations[l + 1] = rank.forward(l, rank.activations[l], rank.weights[l])\n"
                "        for l in reversed(segment):\n",
                "        for l in reversed(segment):\n"
                "            for k in range(first, l):\n"
                "                x = rank.activations[k] if k == first else rank.activations.pop(k)\n"
                "                rank.activations[k + 1] = rank.forward(k, x, rank.weights[k])\n",
            ),
            "^too slow[^;]*$",
            "layer 6 is computed once for each layer above it in its segment. How often is often enough?",
        ),
        Mistake(
            "the last layer of a segment runs again",
            ("for l in segment[:-1]:", "for l in segment:"),
            "^3,145,728",
            "which of these does a later op still read? In the first pass only checkpoints have to stay, and a "
            "segment's last layer need not run again.",
        ),
        Mistake(
            "checkpoints stay after their segment",
            (
                "l, rank.activations.pop(l), rank.grad_activations.pop(l + 1)",
                "l, rank.activations.pop(l) if l % SEGMENT else rank.activations[l], rank.grad_activations.pop(l + 1)",
            ),
            r"^activations\[6\] stays",
            "the backward pass of a segment's first layer is the last op that reads its checkpoint.",
        ),
        Mistake(
            "the segments go backward in forward order",
            ("for first in reversed(range(0, last, SEGMENT)):", "for first in range(0, last, SEGMENT):"),
            r"grad_activations\[\d\] does not exist",
            "a backward pass needs the gradient of its layer's output. Which segment has one after the loss, and which "
            "layer in it?",
        ),
    ),
    hints=(
        "Which activations does the forward pass need once it is through? None; only the backward pass does. Keep "
        "those from which the others can be computed.",
        "Forward: pop the input of a layer unless the layer is the first of a segment. Backward, for each segment from "
        "the last: run its layers but the last forward again, then all of them backward.",
        "`for first in reversed(range(0, last, SEGMENT))`: `for l in range(first, first + SEGMENT - 1)` forward with "
        "`rank.activations[l]`, then `for l in reversed(range(first, first + SEGMENT))` backward with "
        "`rank.activations.pop(l)`.",
    ),
)
