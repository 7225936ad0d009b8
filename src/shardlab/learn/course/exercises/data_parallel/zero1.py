"""Exercise 6: ZeRO-1. A quarter of the optimizer state, for the same traffic.

            each of 4 ranks keeps            and sends, for each layer
   DDP      |WWWW|  |GGGG|  |OOOO|           all-reduce of G:        6/4 |G|
   ZeRO-1   |WWWW|  |GGGG|  |O   |           reduce-scatter of G:    3/4 |G|
                                             all-gather of new W:    3/4 |W|

   G --> reduce-scatter --> slice r of the sum --+
                            slice r of O       --+-> update -> slice r of W, gathered
                            W                  --+

In DDP every rank makes the same update with the same optimizer state. ZeRO-1
(Rajbhandari et al. 2020, arXiv 1910.02054) lets rank r update only slice r, with slice
r of the state and of the summed gradient. The new slices are then gathered, since the
next step computes with whole weights. An all-reduce is a reduce-scatter and an
all-gather, so as much is sent as before. With Adam in mixed precision, the optimizer
state is 12 of the 16 bytes that DDP keeps of each parameter (section 3.1).

New here:

    rank.load_weight(l)                       the weight alone
    rank.load_opt_state(l, shard=i, of=n)     slice i of n of the optimizer state
    await rank.reduce_scatter(dw)             slice r of the sum, on rank r
    await rank.all_gather(slice)              the slices of all ranks side by side

`rank.update` updates the slice that the optimizer state covers. You may pass
a gradient and a weight that contain more than that slice; you get back the slice.
"""

from fractions import Fraction

from shardlab.language import Kind, Mesh, OpKind, Rank
from shardlab.learn.course.exercise import Exercise, Goals, Mistake
from shardlab.learn.course.techniques import avoids, loads_at_least, loads_at_most


async def zero1(rank: Rank) -> None:
    last = len(rank.layers)
    for l in rank.layers:
        # BEGIN SOLUTION
        rank.weights[l] = rank.load_weight(l)
        rank.opt_states[l] = rank.load_opt_state(l, shard=rank.index, of=rank.world)
        # START
        # rank.weights[l], rank.opt_states[l] = rank.load_weights(l)
        # END SOLUTION
    rank.activations[0] = rank.load_batch(rank.share())

    for l in rank.layers:
        rank.activations[l + 1] = rank.forward(l, rank.activations[l], rank.weights[l])
    rank.grad_activations[last] = rank.loss(rank.activations.pop(last))
    for l in reversed(rank.layers):
        rank.grad_weights[l], rank.grad_activations[l] = rank.backward(
            l, rank.activations.pop(l), rank.grad_activations.pop(l + 1), rank.weights[l]
        )

    for l in rank.layers:
        # BEGIN SOLUTION
        gradient = await rank.reduce_scatter(rank.grad_weights.pop(l))
        new_slice, rank.opt_states[l] = rank.update(l, gradient, rank.weights.pop(l), rank.opt_states[l])
        rank.weights[l] = await rank.all_gather(new_slice)
        # START
        # gradient = await rank.all_reduce(rank.grad_weights.pop(l))
        # rank.weights[l], rank.opt_states[l] = rank.update(l, gradient, rank.weights[l], rank.opt_states[l])
        # END SOLUTION


# END OF THE EXERCISE

EXERCISE = Exercise(
    number=6,
    name="zero1",
    title="ZeRO-1: a shard of the optimizer state",
    goals=Goals("the reference solution", time=14.84, memory=2_490_368, sent=1_572_864),
    mesh=Mesh(dp_shard=4),
    techniques=(
        loads_at_least(Kind.WEIGHT, Fraction(1), "a rank keeps {found} of a layer's weight; ZeRO-1 keeps it whole."),
        loads_at_most(Kind.OPT_STATE, Fraction(1, 4), "a rank keeps {found} of a layer's optimizer state, not 1/4."),
        avoids(
            frozenset({OpKind.ALL_REDUCE}),
            "{found} gives every rank the whole sum; each rank updates one slice only.",
            of=Kind.GRAD_WEIGHT,
        ),
    ),
    mistakes=(
        Mistake(
            "every rank keeps the whole optimizer state",
            ("rank.load_opt_state(l, shard=rank.index, of=rank.world)", "rank.load_opt_state(l)"),
            "update.*but the optimizer state holds all",
            "a rank needs the state of what it updates. Which slice is that?",
        ),
        Mistake(
            "the gradients are all-reduced",
            (
                "gradient = await rank.reduce_scatter(rank.grad_weights.pop(l))",
                "gradient = rank.slice(await rank.all_reduce(rank.grad_weights.pop(l)), rank.index, rank.world)",
            ),
            "gives every rank the whole sum",
            "three quarters of that sum are thrown away. Which collective sums and leaves each rank its slice?",
        ),
        Mistake(
            "the new slices are not gathered",
            ("rank.weights[l] = await rank.all_gather(new_slice)", "rank.weights[l] = new_slice"),
            r"ends without the updated weights\[0\]",
            "the step loaded whole weights, so it must end with whole weights. Who has the other slices?",
        ),
        Mistake(
            "every rank keeps the same shard",
            ("shard=rank.index, of=rank.world", "shard=0, of=rank.world"),
            "optimizer state holds slice 0 of 4",
            "each slice of a layer is updated by one rank. Which one is this rank's?",
        ),
        Mistake(
            "the old weights are gathered",
            ("rank.all_gather(new_slice)", "rank.all_gather(rank.slice(rank.weights[l], rank.index, rank.world))"),
            r"weights\[0\] does not exist",
            "the next step needs updated weights. What did the update return?",
        ),
    ),
    hints=(
        "Compare what one rank's update reads with what the rank has: which part of the summed gradient does it need?",
        "Load whole weights but one shard of the optimizer state. Reduce-scatter the gradient, update with it, and "
        "gather the slices that the updates return.",
        "`gradient = await rank.reduce_scatter(rank.grad_weights.pop(l))`, then `new_slice, rank.opt_states[l] = "
        "rank.update(l, gradient, rank.weights.pop(l), rank.opt_states[l])`, then `rank.weights[l] = await "
        "rank.all_gather(new_slice)`.",
    ),
)
