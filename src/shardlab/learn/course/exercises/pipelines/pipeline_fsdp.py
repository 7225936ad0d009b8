"""Exercise 16: a pipeline of sharded stages.

    mesh: 4 stages (pp) x 4 pipelines (dp_shard)

               stage 0     stage 1     stage 2     stage 3
               layer 0     layer 1     layer 2     layer 3
    pipeline 0   0 ---------> 4 --------> 8 --------> 12     microbatch 0
    pipeline 1   1 ---------> 5 --------> 9 --------> 13     microbatch 1
    pipeline 2   2 ---------> 6 --------> 10 -------> 14     microbatch 2
    pipeline 3   3 ---------> 7 --------> 11 -------> 15     microbatch 3
                 gather layer 0 and reduce its gradient
                 along this column, dp_shard

This combines two independent ideas. Along `pp` a rank is a stage: it receives
activations and sends them on. Along `dp_shard` the four ranks of a stage are FSDP: each
keeps a quarter of the stage's weight, gradient and optimizer state, and the weight is
whole only while a pass computes with it.

A pipeline rank waits a lot, and its links are idle then. So start the gather *before*
you wait for the activation, and await it after: it costs no time. Free the whole weight
after the pass. It is gathered again for the backward pass, in the same way.

    rank.coordinate("pp")              the stage of this rank
    rank.group("pp").ranks             the ranks of its pipeline, in order
    rank.share("dp_shard")             the microbatches of its pipeline
    rank.stage_layers("pp")            its layers

In the LLM Training Puzzles, this task has sixteen shards of every layer, so all ranks
join each gather. On a mesh, only the four ranks of a stage do.
"""

from fractions import Fraction

from shardlab.language import Kind, Mesh, OpKind, Rank
from shardlab.learn.course.exercise import Exercise, Goals, Mistake
from shardlab.learn.course.techniques import computes_at_most, gathers_for_each_pass, loads_at_most, uses


async def pipeline_fsdp(rank: Rank) -> None:
    stage, pipeline = rank.coordinate("pp"), rank.group("pp").ranks
    is_first, is_last = stage == 0, stage == len(pipeline) - 1
    (l,) = rank.stage_layers("pp")  # one layer on each stage
    (m,) = rank.share("dp_shard")  # one microbatch for each pipeline
    # BEGIN SOLUTION
    rank.weights[l], rank.opt_states[l] = rank.load_weights(l, shard=rank.coordinate("dp_shard"), of=rank.mesh.dp_shard)

    gather = rank.all_gather(rank.weights[l], axis="dp_shard")
    if is_first:
        rank.activations[l] = rank.load_batch([m])
    else:
        rank.activations[l] = await rank.recv(source=pipeline[stage - 1])
    rank.weights["full"] = await gather
    rank.activations[l + 1] = rank.forward(l, rank.activations[l], rank.weights.pop("full"))
    if not is_last:
        await rank.send(rank.activations.pop(l + 1), to=pipeline[stage + 1])

    gather = rank.all_gather(rank.weights[l], axis="dp_shard")
    if is_last:
        rank.grad_activations[l + 1] = rank.loss(rank.activations.pop(l + 1))
    else:
        rank.grad_activations[l + 1] = await rank.recv(source=pipeline[stage + 1])
    rank.weights["full"] = await gather
    # START
    # rank.weights[l], rank.opt_states[l] = rank.load_weights(l)  # the whole layer
    #
    # if is_first:
    #     rank.activations[l] = rank.load_batch([m])
    # else:
    #     rank.activations[l] = await rank.recv(source=pipeline[stage - 1])
    # rank.activations[l + 1] = rank.forward(l, rank.activations[l], rank.weights[l])
    # if not is_last:
    #     await rank.send(rank.activations.pop(l + 1), to=pipeline[stage + 1])
    #
    # if is_last:
    #     rank.grad_activations[l + 1] = rank.loss(rank.activations.pop(l + 1))
    # else:
    #     rank.grad_activations[l + 1] = await rank.recv(source=pipeline[stage + 1])
    # rank.weights["full"] = rank.weights[l]
    # END SOLUTION
    grad_weight, rank.grad_activations[l] = rank.backward(
        l, rank.activations.pop(l), rank.grad_activations.pop(l + 1), rank.weights.pop("full")
    )
    if not is_first:
        await rank.send(rank.grad_activations.pop(l), to=pipeline[stage - 1])

    # BEGIN SOLUTION
    gradient = await rank.reduce_scatter(grad_weight, axis="dp_shard")
    # START
    # gradient = grad_weight
    # END SOLUTION
    rank.weights[l], rank.opt_states[l] = rank.update(l, gradient, rank.weights[l], rank.opt_states[l])


# END OF THE EXERCISE

EXERCISE = Exercise(
    number=16,
    name="pipeline_fsdp",
    title="A pipeline of sharded stages",
    goals=Goals("the reference solution", time=14.24, memory=655_360, sent=851_968),
    mesh=Mesh(pp=4, dp_shard=4),
    layers=4,
    microbatches=4,
    puzzle="pipeline_fsdp",
    techniques=(
        computes_at_most(1, "a rank computes {found} layers; its stage has 1."),
        loads_at_most(Kind.WEIGHT, Fraction(1, 4), "a rank keeps {found} of its layer's weight, not 1/4."),
        uses(OpKind.REDUCE_SCATTER, "no rank reduce-scatters gradients.", of=Kind.GRAD_WEIGHT),
        gathers_for_each_pass(
            "{found} stays whole while the rank waits for the gradient; free it after the pass, and gather it again."
        ),
    ),
    mistakes=(
        Mistake(
            "the weight is gathered after the wait",
            (
                '    gather = rank.all_gather(rank.weights[l], axis="dp_shard")\n    if is_first:\n'
                "        rank.activations[l] = rank.load_batch([m])\n    else:\n"
                "        rank.activations[l] = await rank.recv(source=pipeline[stage - 1])\n",
                "    if is_first:\n"
                "        rank.activations[l] = rank.load_batch([m])\n    else:\n"
                "        rank.activations[l] = await rank.recv(source=pipeline[stage - 1])\n"
                '    gather = rank.all_gather(rank.weights[l], axis="dp_shard")\n',
            ),
            "too slow",
            "the wait for an activation and that for a weight can overlap. And a collective that starts before a send "
            "delays the message: for which of the two does another rank wait?",
        ),
        Mistake(
            "the gradient is not reduced",
            ('await rank.reduce_scatter(grad_weight, axis="dp_shard")', "grad_weight"),
            "microbatches .* missing",
            "the gradient is whole and of one pipeline only; the shard's owner needs its part, of all pipelines.",
        ),
        Mistake(
            "gathered over all ranks",
            (
                '    gather = rank.all_gather(rank.weights[l], axis="dp_shard")\n    if is_first:',
                "    gather = rank.all_gather(rank.weights[l])\n    if is_first:",
            ),
            "on (world|pp): rank",
            "ranks of other stages have other layers. Along which axis are the ranks of one stage? Without an axis, "
            "all sixteen meet.",
        ),
        Mistake(
            "the shard is counted along the pipeline",
            ('shard=rank.coordinate("dp_shard")', 'shard=rank.coordinate("pp")'),
            "would come from",
            "which ranks share one layer: those of a pipeline, or those of a stage?",
        ),
        Mistake(
            "the whole weight stays",
            (
                'rank.forward(l, rank.activations[l], rank.weights.pop("full"))',
                'rank.forward(l, rank.activations[l], rank.weights["full"])',
            ),
            "too much memory.*gathered weights|stays whole",
            "between the two passes a rank waits for a long time. What does it hold meanwhile?",
        ),
        Mistake(
            "the neighbour is taken by number",
            ("to=pipeline[stage + 1])", "to=rank.index + 1)"),
            "deadlock",
            "rank 0's neighbour in its pipeline is rank 4, not rank 1.",
        ),
    ),
    hints=(
        'Write exercise 9 for one layer, with `axis="dp_shard"`, around the messages of exercise 13.',
        "Load a quarter of the layer. Before each of the two waits, start a gather; after it, await the whole weight, "
        "and `pop` it in the pass.",
        '`gather = rank.all_gather(rank.weights[l], axis="dp_shard")`, the receive, `rank.weights["full"] = await '
        'gather`, the pass with `rank.weights.pop("full")`. Before the update, `reduce_scatter` along `dp_shard`.',
    ),
)
