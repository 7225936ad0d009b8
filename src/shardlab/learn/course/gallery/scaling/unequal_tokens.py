"""Bug 110: ranks with few tokens count as much as others.

torchtitan divided each rank's loss by that rank's own number of valid tokens, and
averaged the gradients over the ranks. If padding or prompts are masked, ranks have
different numbers of valid tokens, and a token on a rank with few of them counts more.

    rank 0: 100 tokens, weight 1/2 -> 1/200 each
    rank 1:  10 tokens, weight 1/2 -> 1/20 each      wanted: 1/110 each

In Shardlab a gradient is its tokens' share of the step's mean. `rank.tokens(...)` is
the number of valid tokens, known when a step runs. The program turns the share into the
mean over the rank's own tokens, as torchtitan did. Find the bug and mend it.
"""

from shardlab.language import Mesh, Rank
from shardlab.learn.course.exercise import Exercise, Goals, Mistake


async def unequal_tokens(rank: Rank) -> None:
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l)
    inputs = [rank.load_batch(rank.share())]
    for l in rank.layers:
        inputs.append(rank.forward(l, inputs[l], rank.weights[l]))
    gradient = rank.loss(inputs.pop())

    for l in reversed(rank.layers):
        grad_weight, gradient = rank.backward(l, inputs.pop(), gradient, rank.weights[l])
        # BEGIN SOLUTION
        total = await rank.all_reduce(grad_weight)
        # START
        # own_mean = rank.scale(grad_weight, rank.tokens() / rank.tokens(rank.share()))
        # total = await rank.all_reduce(own_mean, reduction="mean")
        # END SOLUTION
        rank.weights[l], rank.opt_states[l] = rank.update(l, total, rank.weights[l], rank.opt_states[l])


# END OF THE EXERCISE

EXERCISE = Exercise(
    number=110,
    name="unequal_tokens",
    title="Ranks with few tokens count as much as others",
    goals=Goals("pytorch/torchtitan#2206"),
    mesh=Mesh(dp_shard=2),
    layers=2,
    microbatches=2,
    seen_in="pytorch/torchtitan#2206",
    mistakes=(
        Mistake(
            "means of unequal numbers of tokens are averaged",
            (
                "        total = await rank.all_reduce(grad_weight)\n",
                (
                    "        own_mean = rank.scale(grad_weight, rank.tokens() / rank.tokens(rank.share()))\n"
                    '        total = await rank.all_reduce(own_mean, reduction="mean")\n'
                ),
            ),
            r"times",
            "is the mean of two means the mean of all, if one has ten times the tokens?",
        ),
    ),
    hints=(
        "By which number of tokens does each rank divide, and by which should it?",
        "The gradient is a share of the mean over all tokens of the step already.",
        "Leave the scaling out, and sum: `await rank.all_reduce(grad_weight)`.",
    ),
)
