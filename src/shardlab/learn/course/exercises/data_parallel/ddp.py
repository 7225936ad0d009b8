"""Exercise 2: data parallelism. Four ranks, one model, a quarter of the batch each.

     rank 0         rank 1         rank 2         rank 3
  microbatch 0   microbatch 1   microbatch 2   microbatch 3
   F F L B B      F F L B B      F F L B B      F F L B B
       g0             g1             g2             g3       of one microbatch each
       +--------------+-- all-reduce --+------------+
    g0+1+2+3       g0+1+2+3       g0+1+2+3       g0+1+2+3    of the whole batch
     update         update         update         update     the same on every rank

Every rank keeps all weights and computes the microbatch with its own number. Its
gradients are then a quarter of what an update needs. An all-reduce sums the gradients
of all ranks and gives every rank the sum. So all ranks make the same update, and their
copies of the weights stay equal. This is torch's DistributedDataParallel, without its
overlap, which is exercise 3.

All ranks run this one function. New here:

    rank.index, rank.world     the number of this rank, and how many ranks there are
    rank.share()               the microbatches of this rank; here it is one
    await rank.all_reduce(g)   the sum of all ranks' g; every rank must call it

A verb that communicates starts at once and returns a handle; `await` waits for its
result. Gradients are already shares of the batch's mean: sum them, never average them.

The number of layers differs from exercise to exercise; `len(rank.layers)` is 2 here.
From here on, goals leave room for `rank.grad_activations[0]`, unless a loop over
microbatches deletes it.

The start below is correct, but each rank computes the whole batch, as if it were
alone.
"""

from fractions import Fraction

from shardlab.language import Kind, Mesh, OpKind, Rank
from shardlab.learn.course.exercise import Exercise, Goals, Mistake
from shardlab.learn.course.techniques import loads_at_most, uses


async def ddp(rank: Rank) -> None:
    last = len(rank.layers)
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l)
    # BEGIN SOLUTION
    rank.activations[0] = rank.load_batch(rank.share())
    # START
    # rank.activations[0] = rank.load_batch(rank.microbatches)  # too much for one of four ranks
    # END SOLUTION

    for l in rank.layers:
        rank.activations[l + 1] = rank.forward(l, rank.activations[l], rank.weights[l])
    rank.grad_activations[last] = rank.loss(rank.activations.pop(last))
    for l in reversed(rank.layers):
        rank.grad_weights[l], rank.grad_activations[l] = rank.backward(
            l, rank.activations.pop(l), rank.grad_activations.pop(l + 1), rank.weights[l]
        )

    for l in rank.layers:
        # BEGIN SOLUTION
        gradient = await rank.all_reduce(rank.grad_weights.pop(l))
        rank.weights[l], rank.opt_states[l] = rank.update(l, gradient, rank.weights[l], rank.opt_states[l])
        # START
        # # Sum the gradient over the ranks first.
        # rank.weights[l], rank.opt_states[l] = rank.update(
        #     l, rank.grad_weights.pop(l), rank.weights[l], rank.opt_states[l]
        # )
        # END SOLUTION


# END OF THE EXERCISE

EXERCISE = Exercise(
    number=2,
    name="ddp",
    title="Data parallelism",
    goals=Goals("the reference solution", time=7.72, memory=1_703_936, sent=786_432),
    mesh=Mesh(dp_shard=4),
    layers=2,
    microbatches=4,
    puzzle="ddp",
    techniques=(
        uses(OpKind.ALL_REDUCE, "no rank all-reduces gradients; this exercise asks for it.", of=Kind.GRAD_WEIGHT),
        loads_at_most(Kind.WEIGHT, Fraction(1), "a rank loads more than one copy of a layer."),
    ),
    mistakes=(
        Mistake(
            "the gradients are not reduced",
            ("await rank.all_reduce(rank.grad_weights.pop(l))", "rank.grad_weights.pop(l)"),
            r"update.*: microbatches .* missing",
            "this gradient has seen the microbatch of one rank only. Which call sums it with those of the others?",
        ),
        Mistake(
            "every rank computes the whole batch",
            ("rank.load_batch(rank.share())", "rank.load_batch(rank.microbatches)"),
            r"all_reduce.*(twice|more than once)",
            "each microbatch may be in the sum once. Which of them does each rank load, and how often is its gradient "
            "summed?",
        ),
        Mistake(
            "the gradients stay beside their sums",
            ("rank.all_reduce(rank.grad_weights.pop(l))", "rank.all_reduce(rank.grad_weights[l])"),
            "too much memory.*gradients",
            "a rank's own gradient has its last use in the reduction. Is it gone afterwards?",
        ),
        Mistake(
            "the weights are reduced",
            (
                "gradient = await rank.all_reduce(rank.grad_weights.pop(l))",
                "gradient, rank.weights[l] = rank.grad_weights.pop(l), await rank.all_reduce(rank.weights[l])",
            ),
            r"all_reduce\(weights",
            "the weights are equal on all ranks already. Which values differ from rank to rank?",
        ),
    ),
    hints=(
        "Which microbatches does rank 2 load? The four ranks together must load each of them once.",
        "`rank.share()` deals the microbatches out. After the backward passes, each rank has the gradients of its own "
        "microbatch only, and one collective makes the sum of them.",
        "Before each update: `gradient = await rank.all_reduce(rank.grad_weights.pop(l))`, and update with `gradient`.",
    ),
)
