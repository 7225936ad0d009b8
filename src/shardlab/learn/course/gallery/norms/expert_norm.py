"""Bug 114: the norm leaves out the experts of other ranks.

With expert parallelism and tensor parallelism together, Megatron-LM computed the
gradient norm without some of the experts. Clipping was then weaker than configured.

    rank 0: dense layers (copies) + expert 0
    rank 1: dense layers (copies) + expert 1
    norm  = dense layers, once    + expert 0 + expert 1

The program has one layer of experts, on two ranks; dense layers have a copy on both.
Find the bug and mend it.
"""

from shardlab.language import Mesh, Rank, Sizes, Value
from shardlab.learn.course.exercise import Exercise, Goals, Mistake
from shardlab.learn.course.techniques import clips


async def expert_norm(rank: Rank) -> None:
    parts = {l: rank.world if rank.signatures[l].sliced else 1 for l in rank.layers}
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l, rank.index % parts[l], parts[l])

    x, inputs, residual = rank.load_batch(rank.share()), list[Value](), list[Value]()
    for l in rank.layers:
        if parts[l] > 1:  # experts: tokens go to the ranks that have theirs, and come back
            inputs.append(await rank.all_to_all(x))
            x = await rank.all_to_all(rank.forward(l, inputs[l], rank.weights[l]))
        else:
            inputs.append(x)
            x, *residual = rank.forward(l, (x, *residual), rank.weights[l])
    gradient = rank.loss(x)

    gradients: dict[int, Value] = {}

    residual = []
    for l in reversed(rank.layers):
        if parts[l] > 1:
            gradient = await rank.all_to_all(gradient)
            grad_weight, gradient = rank.backward(l, inputs[l], gradient, rank.weights[l])
            gradient = await rank.all_to_all(gradient)
        else:
            grad_weight, gradient, *residual = rank.backward(l, inputs[l], (gradient, *residual), rank.weights[l])

            grad_weight = await rank.all_reduce(grad_weight)
        gradients[l] = grad_weight

    dense = [rank.norm(l, gradients[l]) for l in rank.layers if parts[l] == 1]
    experts = [rank.norm(l, gradients[l]) for l in rank.layers if parts[l] > 1]
    # BEGIN SOLUTION
    norm = sum([*dense, *[await rank.all_reduce(squares) for squares in experts]])
    # START
    # norm = sum([*dense, *experts])
    # END SOLUTION
    assert isinstance(norm, Value)
    for l, gradient in gradients.items():
        rank.weights[l], rank.opt_states[l] = rank.update(l, gradient, rank.weights[l], rank.opt_states[l], norm)


# END OF THE EXERCISE

EXERCISE = Exercise(
    number=114,
    name="expert_norm",
    title="The norm leaves out the experts of other ranks",
    goals=Goals("NVIDIA/Megatron-LM#5916"),
    mesh=Mesh(ep=2),
    layers=Sizes.mixture(1),
    microbatches=2,
    seen_in="NVIDIA/Megatron-LM#5916",
    techniques=(clips("{found} does not clip; give every update the norm."),),
    mistakes=(
        Mistake(
            "other ranks' experts are not counted",
            (
                "norm = sum([*dense, *[await rank.all_reduce(squares) for squares in experts]])",
                "norm = sum([*dense, *experts])",
            ),
            "the norm given lacks",
            "which experts does a rank know, and which belong to the model?",
        ),
    ),
    hints=(
        "The norm must be the same on all ranks. Is it?",
        "Dense layers are copies and count once. Experts differ from rank to rank.",
        "All-reduce the squares of the experts, and add those of the dense layers as they are.",
    ),
)
