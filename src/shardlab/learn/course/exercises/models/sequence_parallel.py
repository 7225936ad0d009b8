"""Exercise 21: tensor parallelism, then sequence parallelism.

    tensor parallel     x ==== norm ==== x --- body, half the matrix --- + ==== x
                        whole on both ranks    a term of the sum    all-reduce

    sequence parallel   x/2 -- norm -- x/2 = all-gather = body --- reduce-scatter -- x/2
                        own tokens                       whole x, own half of the matrix

Tensor parallelism cuts the matrices of attention and MLP, the *bodies* (Shoeybi et al.
2019, arXiv 1909.08053). Each rank's result is one term of a sum, which an all-reduce
computes. But all ranks compute the same norms between the bodies, and each rank keeps
all their activations.

An all-reduce is a reduce-scatter and an all-gather. Put the norm between these two, and
each rank normalizes its own tokens only, for the same bytes sent (Korthikanti et al.
2022, arXiv 2205.05198, section 4.2.2). Backward, each collective becomes the other one.

There is a trap. Before, all ranks had the same gradient of a norm's weight. Now each
has that of its own tokens. In https://github.com/NVIDIA/Megatron-LM/issues/1446 a user
found that the gradients of the last LayerNorm differed from rank to rank just before
the optimizer's step. Such a run does not crash: the copies of one weight drift apart.

    rank.signatures[l].sliced              whether layer l is a body; others are norms
    rank.reduce_scatter(terms, axis="tp")  sums; this rank keeps its part of the tokens
    rank.all_gather(x, axis="tp")          all tokens

The model has an embedding, one block of attention and MLP, and a head, and a norm
before each of the last three. The start is tensor parallel. Keep the input of a body
for its backward pass in `rank.activations["full", l]`.
"""

from shardlab.language import Kind, Mesh, OpKind, Rank, Sizes, Value
from shardlab.learn.course.exercise import Exercise, Goals, Mistake
from shardlab.learn.course.techniques import avoids


async def sequence_parallel(rank: Rank) -> None:
    last = rank.layers[-1]
    for l in rank.layers:
        cut = (rank.index, rank.world) if rank.signatures[l].sliced else (0, 1)
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l, *cut)
    rank.activations[0] = rank.load_batch(rank.microbatches)

    residual: list[Value] = []
    for l in rank.layers:
        if rank.signatures[l].sliced:
            # BEGIN SOLUTION
            x = rank.activations.pop(l)
            rank.activations["full", l] = await rank.all_gather(x, axis="tp") if l else x
            terms = rank.forward(l, rank.activations["full", l], rank.weights[l])
            rank.activations[l + 1] = await rank.reduce_scatter(terms, axis="tp") if l < last else terms
            # START
            # rank.activations["full", l] = rank.activations.pop(l)
            # terms = rank.forward(l, rank.activations["full", l], rank.weights[l])
            # rank.activations[l + 1] = await rank.all_reduce(terms, axis="tp") if l < last else terms
            # END SOLUTION
        else:
            inputs = rank.activations[l], *residual
            rank.activations[l + 1], *residual = rank.forward(l, inputs, rank.weights[l])

    stats = await rank.all_gather(rank.loss_stats(rank.activations[last + 1]), axis="tp")
    gradient = rank.loss(rank.activations.pop(last + 1), stats)  # for this rank's slice of the vocabulary
    residual = []
    for l in reversed(rank.layers):
        if rank.signatures[l].sliced:
            # BEGIN SOLUTION
            if l < last:
                gradient = await rank.all_gather(gradient, axis="tp")
            rank.grad_weights[l], terms = rank.backward(l, rank.activations.pop(("full", l)), gradient, rank.weights[l])
            gradient = await rank.reduce_scatter(terms, axis="tp") if l else terms
            # START
            # rank.grad_weights[l], terms = rank.backward(
            #     l, rank.activations.pop(("full", l)), gradient, rank.weights[l]
            # )
            # gradient = await rank.all_reduce(terms, axis="tp") if l else terms
            # END SOLUTION
        else:
            rank.grad_weights[l], gradient, *residual = rank.backward(
                l, rank.activations.pop(l), (gradient, *residual), rank.weights[l]
            )

    for l in rank.layers:
        # BEGIN SOLUTION
        if not rank.signatures[l].sliced:
            rank.grad_weights[l] = await rank.all_reduce(rank.grad_weights.pop(l), axis="tp")
        # END SOLUTION
        rank.weights[l], rank.opt_states[l] = rank.update(
            l, rank.grad_weights.pop(l), rank.weights[l], rank.opt_states[l]
        )


# END OF THE EXERCISE

EXERCISE = Exercise(
    number=21,
    name="sequence_parallel",
    title="Tensor parallelism, then sequence parallelism",
    goals=Goals("the reference solution", time=4.345834, memory=2_627_584, sent=1_575_936),
    mesh=Mesh(tp=2),
    layers=Sizes.half_blocks(1),
    microbatches=2,
    techniques=(
        avoids(
            frozenset({OpKind.ALL_REDUCE}),
            "{found} sums activations whole; let each rank keep its own tokens.",
            of=Kind.ACTIVATION,
        ),
    ),
    mistakes=(
        Mistake(
            "the gradients of the norms are not reduced",
            (
                "        if not rank.signatures[l].sliced:\n"
                '            rank.grad_weights[l] = await rank.all_reduce(rank.grad_weights.pop(l), axis="tp")\n',
                "",
            ),
            "sequence slice .* missing from grad_weights",
            "a norm has seen this rank's tokens only. Its weight is whole on both ranks, its gradient is not.",
        ),
        Mistake(
            "all gradients are reduced",
            (
                "        if not rank.signatures[l].sliced:\n            rank.grad_weights[l] = ",
                "        if l >= 0:\n            rank.grad_weights[l] = ",
            ),
            r"all_reduce\(grad_weights.*sum equal slices",
            "a body has seen all tokens, in this rank's slice of its matrix. The other rank has another slice.",
        ),
        Mistake(
            "a body reads its own tokens only",
            ('await rank.all_gather(x, axis="tp") if l else x', "x"),
            "wants whole sequences",
            "the terms of a sum must be of the same tokens, so each body reads all of them.",
        ),
        Mistake(
            "the gradient is not gathered",
            ('            if l < last:\n                gradient = await rank.all_gather(gradient, axis="tp")\n', ""),
            "activation is of microbatches .* and the gradient of sequence slice",
            "forward, a reduce-scatter left each rank its own tokens. What undoes it on the way back?",
        ),
        Mistake(
            "the gradient is summed whole",
            (
                'gradient = await rank.reduce_scatter(terms, axis="tp") if l else terms',
                'gradient = await rank.all_reduce(terms, axis="tp") if l else terms',
            ),
            "activation is of sequence slice .* and the gradient of microbatches",
            "the norm has normalized this rank's tokens, and takes the gradient of just these.",
        ),
        Mistake(
            "the terms are not summed",
            (
                'await rank.reduce_scatter(terms, axis="tp") if l < last else terms',
                "rank.slice(terms, rank.index, rank.world) if l < last else terms",
            ),
            "the term of",
            "each rank has one term of every token's activation. Which collective sums them and deals out the tokens?",
        ),
    ),
    hints=(
        "Four lines communicate activations or their gradients: two in the forward pass, two in the backward pass.",
        "A body gathers its input and reduce-scatters its terms, in both directions. The embedding has all tokens "
        "already, and the gradient of the head's output is no activation of the sequence.",
        "Forward: `all_gather` the input of each body but the first, `reduce_scatter` the terms of each but the last. "
        "Backward the same, the other way round. Then `all_reduce` the gradients of the norms.",
    ),
)
