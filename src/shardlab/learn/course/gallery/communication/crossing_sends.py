"""Bug 115: two pipeline ranks both send first.

A pipeline in torch got stuck on two nodes with four stages. Both ranks had a send
before their next receive, and a send waits until it is received. On one node it had
worked.

    rank 0:  send the output of stage 0   receive the input of stage 2
    rank 1:  send the output of stage 1   receive the input of stage 1
             each send waits for a receive that comes after the other's send

The program shows two ranks that pass slices of a weight to each other: each computes
with its own half of the batch and needs the other's half of the weight. It must run on
nccl. Find the bug and mend it.
"""

from shardlab.language import Mesh, Rank, Value
from shardlab.learn.course.exercise import Exercise, Goals, Mistake
from shardlab.learn.course.techniques import runs_on


async def crossing_sends(rank: Rank) -> None:
    other = 1 - rank.index
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l, rank.index, 2)

    inputs, weights = [rank.load_batch(rank.share())], dict[int, Value]()
    for l in rank.layers:
        # BEGIN SOLUTION
        other_half = await rank.exchange(rank.weights[l], to=other, source=other)
        # START
        # await rank.send(rank.weights[l], to=other)
        # other_half = await rank.recv(source=other)
        # END SOLUTION
        weights[l] = rank.concatenate([rank.weights[l], other_half])
        inputs.append(rank.forward(l, inputs[l], weights[l]))
    gradient = rank.loss(inputs.pop())
    for l in reversed(rank.layers):
        grad_weight, gradient = rank.backward(l, inputs.pop(), gradient, weights[l])
        part = await rank.reduce_scatter(grad_weight)
        rank.weights[l], rank.opt_states[l] = rank.update(l, part, rank.weights[l], rank.opt_states[l])


# END OF THE EXERCISE

EXERCISE = Exercise(
    number=115,
    name="crossing_sends",
    title="Two pipeline ranks both send first",
    goals=Goals("pytorch/pytorch#172668"),
    mesh=Mesh(dp_shard=2),
    layers=2,
    microbatches=2,
    seen_in="pytorch/pytorch#172668",
    techniques=(runs_on("nccl", "{found}"),),
    mistakes=(
        Mistake(
            "both ranks send first",
            (
                "        other_half = await rank.exchange(rank.weights[l], to=other, source=other)\n",
                (
                    "        await rank.send(rank.weights[l], to=other)\n"
                    "        other_half = await rank.recv(source=other)\n"
                ),
            ),
            r"can hang",
            "for what does each rank wait in its send?",
        ),
    ),
    hints=(
        "Who has to receive, so that rank 0's send ends? What does that rank do first?",
        "One rank could receive first. Or both do both at once.",
        "`await rank.exchange(value, to=other, source=other)` sends and receives as one operation.",
    ),
)
