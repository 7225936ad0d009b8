"""Exercise 14: GPipe, a pipeline of microbatches.

              time ->
    rank 0    F0 F1 F2 F3                   B0 B1 B2 B3 U
    rank 1       F0 F1 F2 F3             B0 B1 B2 B3 U
    rank 2          F0 F1 F2 F3       B0 B1 B2 B3 U
    rank 3             F0 F1 F2 F3 L B0 B1 B2 B3 U      Fm: pass of microbatch m

Cut the batch into microbatches, and stage 1 works on microbatch 0 while stage 0 works
on microbatch 1. With m microbatches on p ranks the step takes m + p - 1 passes each
way, of which a rank computes m: the rest, (p - 1) / (m + p - 1) of the time, is the
*bubble* (Huang et al. 2019, arXiv 1811.06965, section 2.3). Here it is 3/7, in the last
exercise it was 3/4.

The price is memory: all microbatches go forward before the first comes back, so a rank
keeps the activations of all of them.

A rank runs the forward passes of all microbatches, then their backward passes, in the
same order. Gradients of several microbatches are added up, and there is one update.

    rank.load_batch([m])           microbatch m alone
    rank.activations[l, m]         keys are free: here a layer and a microbatch
    rank.accumulate(dw)            add dw to rank.grad_weights of its layer

The start is the solution of exercise 13.
"""

from shardlab.language import Kind, Mesh, Rank
from shardlab.learn.course.exercise import Exercise, Goals, Mistake
from shardlab.learn.course.techniques import computes_at_most, microbatches_each, no_collective_of


async def gpipe(rank: Rank) -> None:
    stage = rank.stage_layers()
    first, end = stage[0], stage[-1] + 1
    is_first, is_last = rank.index == 0, rank.index == rank.world - 1
    for l in stage:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l)

    # BEGIN SOLUTION
    for m in rank.microbatches:
        if is_first:
            rank.activations[first, m] = rank.load_batch([m])
        else:
            rank.activations[first, m] = await rank.recv(source=rank.index - 1)
        for l in stage:
            rank.activations[l + 1, m] = rank.forward(l, rank.activations[l, m], rank.weights[l])
        if not is_last:
            await rank.send(rank.activations.pop((end, m)), to=rank.index + 1)

    for m in rank.microbatches:
        if is_last:
            gradient = rank.loss(rank.activations.pop((end, m)))
        else:
            gradient = await rank.recv(source=rank.index + 1)
        for l in reversed(stage):
            grad_weight, gradient = rank.backward(l, rank.activations.pop((l, m)), gradient, rank.weights[l])
            rank.accumulate(grad_weight)
        if not is_first:
            await rank.send(gradient, to=rank.index - 1)
    # START
    # if is_first:
    #     rank.activations[first] = rank.load_batch(rank.microbatches)
    # else:
    #     rank.activations[first] = await rank.recv(source=rank.index - 1)
    # for l in stage:
    #     rank.activations[l + 1] = rank.forward(l, rank.activations[l], rank.weights[l])
    # if is_last:
    #     gradient = rank.loss(rank.activations.pop(end))
    # else:
    #     await rank.send(rank.activations.pop(end), to=rank.index + 1)
    #     gradient = await rank.recv(source=rank.index + 1)
    # for l in reversed(stage):
    #     grad_weight, gradient = rank.backward(l, rank.activations.pop(l), gradient, rank.weights[l])
    #     rank.accumulate(grad_weight)
    # if not is_first:
    #     await rank.send(gradient, to=rank.index - 1)
    # END SOLUTION

    for l in stage:
        rank.weights[l], rank.opt_states[l] = rank.update(
            l, rank.grad_weights.pop(l), rank.weights[l], rank.opt_states[l]
        )


# END OF THE EXERCISE

EXERCISE = Exercise(
    number=14,
    name="gpipe",
    title="GPipe, a pipeline of microbatches",
    goals=Goals("the reference solution", time=44.8, memory=2_883_584, sent=1_048_576),
    mesh=Mesh(pp=4),
    layers=8,
    microbatches=4,
    puzzle="gpipe",
    techniques=(
        computes_at_most(2, "a rank computes {found} layers; its stage has 2."),
        no_collective_of(Kind.WEIGHT, "{found} moves weights; in a pipeline every weight stays where it is."),
        microbatches_each(1, "a forward pass takes {found} microbatches at once, so the ranks take turns."),
    ),
    mistakes=(
        Mistake(
            "a microbatch comes back before the next one goes forward",
            ("\n    for m in rank.microbatches:\n        if is_last:", "\n        if is_last:"),
            r"too slow: time 1\d\d",
            "a rank sends a microbatch up and stands still until it is back. What could it do meanwhile?",
        ),
        Mistake(
            "the gradients are not added up",
            ("            rank.accumulate(grad_weight)\n", "            rank.grad_weights[l] = grad_weight\n"),
            "microbatches 0-2 are missing",
            "the update needs the gradient of all microbatches, and this is that of the last one. Has it replaced the "
            "others, or has no other been backward?",
        ),
        Mistake(
            "the backward passes take the microbatches in reverse",
            (
                "    for m in rank.microbatches:\n        if is_last:",
                "    for m in reversed(rank.microbatches) if is_first else rank.microbatches:\n        if is_last:",
            ),
            r"of microbatch \d and the gradient of microbatch \d",
            "messages between two ranks keep their order. In which order does the rank above send its gradients?",
        ),
        Mistake(
            "the activations at the border are kept",
            ("rank.send(rank.activations.pop((end, m)), to", "rank.send(rank.activations[end, m], to"),
            r"too much memory.*: activations\[2\]",
            "no later line of this rank reads the activation that it has sent.",
        ),
        Mistake(
            "an update for each microbatch",
            (
                "            await rank.send(gradient, to=rank.index - 1)\n\n    for l in stage:\n",
                "            await rank.send(gradient, to=rank.index - 1)\n        for l in stage:\n"
                "            rank.weights[l], rank.opt_states[l] = rank.update(\n"
                "                l, rank.grad_weights[l], rank.weights[l], rank.opt_states[l]\n            )\n"
                "    for l in stage:\n",
            ),
            "microbatches 1-3 are missing",
            "a step makes one update, with the gradient of the whole batch. Has this rank computed all microbatches "
            "before it?",
        ),
        Mistake(
            "the key has no microbatch",
            (
                "activations[first, m] = await rank.recv",
                "activations[first] = await rank.recv",
            ),
            r"activations\[.*\] does not exist",
            "compare the key with those under which values were stored. Two microbatches with one key replace each "
            "other, so the microbatch is a part of the key.",
        ),
    ),
    hints=(
        "Two loops over the microbatches: one sends activations up, one sends gradients down.",
        "Give every activation the microbatch in its key. The second loop begins with the loss on the last rank, and "
        "with a gradient from above on the others.",
        "`for m in rank.microbatches:` receive or load `activations[first, m]`, forward, send `activations.pop((end, "
        "m))`. Then again `for m in rank.microbatches:` the loss or a receive, backward with `accumulate`, and a send.",
    ),
)
