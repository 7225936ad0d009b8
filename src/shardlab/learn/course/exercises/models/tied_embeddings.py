"""Exercise 22: tied embeddings on two stages, or which reduction comes first.

                      dp_shard 0                  dp_shard 1
    stage 0   rank 0: embedding E, layer 1    rank 1: embedding E, layer 1
    stage 1   rank 2: layer 2, head E         rank 3: layer 2, head E

The head computes with the weight of the embedding. In a pipeline both ends keep a copy
of it, and the gradient is a sum over the two uses (along `pp`) and over the
microbatches (along `dp_shard`). Optimizer states are sharded as in exercise 6 (ZeRO-1):
a rank updates its half of each layer, then the halves are gathered.

A sum can be computed in any order. You can all-reduce the whole gradient along `pp`
first, and reduce-scatter it after. Or reduce-scatter first, and all-reduce the halves
along `pp`: that sends half as much over the slow links between the stages.

But the second order is right only if both stages give the *same half* to the ranks that
meet. In https://github.com/NVIDIA/Megatron-LM/issues/844 a distributed optimizer
sharded one flat buffer for each stage. The embedding is the first weight in one of them
and the head the last in the other, so different ranks owned them, and the all-reduce
added a finished sum to an unfinished one. Nothing crashed; the gradients were wrong.

In the start, stage 1 owns its halves in the opposite order. Mend that, and send as
little as possible. New here:

    rank.weight_of(l)               the layer whose weight layer l uses: 0 for the head
    rank.accumulate(dw)             adds to grad_weights[0] for the head as well
    rank.all_reduce(g, axis="pp")   for `g` of layer 0, which both stages have
"""

from dataclasses import replace
from fractions import Fraction

from shardlab.language import Kind, Mesh, Rank, Sizes
from shardlab.learn.course.exercise import Exercise, Goals, Mistake
from shardlab.learn.course.techniques import computes_at_most, loads_at_most


async def tied_embeddings(rank: Rank) -> None:
    stage, column = rank.coordinate("pp"), rank.group("pp").ranks  # the ranks of this rank's pipeline
    layers = rank.stage_layers("pp")
    # BEGIN SOLUTION
    half = rank.coordinate("dp_shard")
    # START
    # half = rank.coordinate("dp_shard") if stage == 0 else 1 - rank.coordinate("dp_shard")
    # END SOLUTION
    weights = sorted({rank.weight_of(l) for l in layers})
    shared_layers = {0} & {rank.weight_of(rank.layers[-1])}  # the embedding, if the model is tied
    for l in weights:
        rank.weights[l] = rank.load_weight(l)
        rank.opt_states[l] = rank.load_opt_state(l, shard=half, of=2)

    first, end = layers[0], layers[-1] + 1
    for m in rank.share("dp_shard"):
        if stage == 0:
            rank.activations[first, m] = rank.load_batch([m])
        else:
            rank.activations[first, m] = await rank.recv(source=column[0])
        for l in layers:
            rank.activations[l + 1, m] = rank.forward(l, rank.activations[l, m], rank.weights[rank.weight_of(l)])
        if stage == 0:
            await rank.send(rank.activations.pop((end, m)), to=column[1])

    for m in rank.share("dp_shard"):
        if stage == 0:
            gradient = await rank.recv(source=column[1])
        else:
            gradient = rank.loss(rank.activations.pop((end, m)))
        for l in reversed(layers):
            weight = rank.weights[rank.weight_of(l)]
            grad_weight, gradient = rank.backward(l, rank.activations.pop((l, m)), gradient, weight)
            rank.accumulate(grad_weight)
        if stage == 1:
            await rank.send(gradient, to=column[0])

    for l in weights:
        # BEGIN SOLUTION
        gradient = await rank.reduce_scatter(rank.grad_weights.pop(l), axis="dp_shard")
        if l in shared_layers:
            gradient = await rank.all_reduce(gradient, axis="pp")
        # START
        # gradient = rank.grad_weights.pop(l)
        # if l in shared_layers:
        #     gradient = await rank.all_reduce(gradient, axis="pp")
        # gradient = await rank.reduce_scatter(gradient, axis="dp_shard")
        # END SOLUTION
        new_slice, rank.opt_states[l] = rank.update(l, gradient, rank.weights.pop(l), rank.opt_states[l])
        rank.weights[l] = await rank.all_gather(new_slice, axis="dp_shard")


# END OF THE EXERCISE

WHOLE = Sizes.puzzle(4)
TIED = replace(
    WHOLE,
    tied=True,
    weights=(*WHOLE.weights[:-1], 0),
    opt_states=(*WHOLE.opt_states[:-1], 0),
    flops=WHOLE.forward_flops,
    signatures=(*WHOLE.signatures[:-1], replace(WHOLE.signatures[-1], weight=0, use=1)),
)
"""The puzzles' model of four layers, the last of which computes with the weight of the first."""

EXERCISE = Exercise(
    number=22,
    name="tied_embeddings",
    title="Tied embeddings on two stages",
    goals=Goals("the reference solution", time=20.086667, memory=1_835_008, sent=917_504),
    mesh=Mesh(pp=2, dp_shard=2),
    layers=TIED,
    microbatches=4,
    techniques=(
        computes_at_most(2, "a rank computes {found} layers; its stage has 2."),
        loads_at_most(Kind.OPT_STATE, Fraction(1, 2), "a rank keeps {found} of a layer's optimizer state, not 1/2."),
    ),
    mistakes=(
        Mistake(
            "the stages own different halves",
            (
                '    half = rank.coordinate("dp_shard")\n',
                '    half = rank.coordinate("dp_shard") if stage == 0 else 1 - rank.coordinate("dp_shard")\n',
            ),
            "gradient holds slices?",
            "the reduce-scatter gives half i to rank i along the axis. Of which half does "
            "this rank have the optimizer state?",
        ),
        Mistake(
            "the uses are not summed",
            ('        if l in shared_layers:\n            gradient = await rank.all_reduce(gradient, axis="pp")\n', ""),
            "as the embedding are missing|as the head are missing",
            "one weight, two uses: the embedding's gradient is on stage 0 and the head's on stage 1.",
        ),
        Mistake(
            "the whole gradient crosses the stages",
            (
                '        gradient = await rank.reduce_scatter(rank.grad_weights.pop(l), axis="dp_shard")\n'
                '        if l in shared_layers:\n            gradient = await rank.all_reduce(gradient, axis="pp")\n',
                "        gradient = rank.grad_weights.pop(l)\n"
                '        if l in shared_layers:\n            gradient = await rank.all_reduce(gradient, axis="pp")\n'
                '        gradient = await rank.reduce_scatter(gradient, axis="dp_shard")\n',
            ),
            "too much is sent",
            "this is right, but each rank updates half of the weight. Which half of the gradient does it need?",
        ),
        Mistake(
            "every layer is reduced along the pipeline",
            (
                "        if l in shared_layers:\n            gradient = await",
                "        if l in weights:\n            gradient = await",
            ),
            r"all_reduce\(grad_weights\[[12]\]",
            "layers 1 and 2 are on one stage each; nobody meets this rank there.",
        ),
        Mistake(
            "the head's weight is loaded for itself",
            ("weights = sorted({rank.weight_of(l) for l in layers})", "weights = sorted(layers)"),
            "tied to the embedding",
            "the head has no weight of its own.",
        ),
    ),
    hints=(
        "Write down, for each of the four ranks, which half of E it has an optimizer state of.",
        "Give half i to coordinate i along `dp_shard` on both stages. Then the two ranks of a pipeline have the same "
        "half, and can sum it along `pp`.",
        '`half = rank.coordinate("dp_shard")`. First `reduce_scatter(..., axis="dp_shard")`, then for the shared layer '
        '`all_reduce(gradient, axis="pp")`.',
    ),
)
