"""Bug 112: each pipeline stage clips by its own norm.

Gradients are clipped by the norm of the whole model's gradient. In a pipeline, a rank
has the gradients of its own stage. torchtitan called `clip_grad_norm_` on each rank,
which knows nothing of the other stages: every stage was clipped by a norm of its own,
and the direction of the step changed.

    stage 0: |g0|^2 + |g1|^2  \\
    stage 1: |g2|^2 + |g3|^2  -- sum over the stages = the norm that clips

The program is a pipeline of two stages with two layers each. Find the bug and mend it.
"""

from shardlab.language import Mesh, Rank, Value
from shardlab.learn.course.exercise import Exercise, Goals, Mistake
from shardlab.learn.course.techniques import clips


async def stage_norm(rank: Rank) -> None:
    stage = rank.stage_layers()
    first, end = stage[0], stage[-1] + 1
    for l in stage:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l)

    x = rank.load_batch(rank.microbatches) if rank.index == 0 else await rank.recv(source=0)
    inputs: dict[int, Value] = {}
    for l in stage:
        inputs[l] = x
        x = rank.forward(l, x, rank.weights[l])
    if rank.index == 0:
        await rank.send(x, to=1)
        gradient = await rank.recv(source=1)
    else:
        gradient = rank.loss(x)
    gradients: dict[int, Value] = {}
    for l in reversed(range(first, end)):
        gradients[l], gradient = rank.backward(l, inputs[l], gradient, rank.weights[l])
    if rank.index == 1:
        await rank.send(gradient, to=0)

    squares = sum(rank.norm(l, gradients[l]) for l in stage)
    assert isinstance(squares, Value)
    # BEGIN SOLUTION
    norm = await rank.all_reduce(squares)
    # START
    # norm = squares
    # END SOLUTION
    for l in stage:
        rank.weights[l], rank.opt_states[l] = rank.update(l, gradients[l], rank.weights[l], rank.opt_states[l], norm)


# END OF THE EXERCISE

EXERCISE = Exercise(
    number=112,
    name="stage_norm",
    title="Each pipeline stage clips by its own norm",
    goals=Goals("pytorch/torchtitan#596"),
    mesh=Mesh(pp=2),
    layers=4,
    microbatches=2,
    seen_in="pytorch/torchtitan#596",
    techniques=(clips("{found} does not clip; give every update the norm."),),
    mistakes=(
        Mistake(
            "the norm is of one stage",
            ("norm = await rank.all_reduce(squares)", "norm = squares"),
            "the norm given",
            "which layers' gradients are in this norm?",
        ),
    ),
    hints=(
        "The norm has to cover the whole model. Which layers does a rank know?",
        "`rank.norm` makes sums of squares, which can be added over ranks.",
        "All-reduce the sum of squares over the stages before the updates.",
    ),
)
