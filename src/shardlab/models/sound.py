"""What the primitives of a model must say so that its rules follow: refusals for models that users write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardlab.errors import UserError
from shardlab.models.primitive import Primitive, Step
from shardlab.models.run import Run
from shardlab.rules.compose import ORDER


def want_sound(steps: Sequence[Step]) -> None:
    """Refuse primitives that do not fit together.

    Args:
        steps: of a whole model, in order.

    Raises:
        UserError: for a tensor that nobody made or that has other indices, and for what a primitive leaves out.
    """
    made = {"x": ("the text", "")}
    owned: set[tuple[int, str]] = set()
    for step in steps:
        primitive, name = step.primitive, type(step.primitive).__name__
        where = f"{step.place}: {name}"
        try:
            reads, makes = primitive.reads, primitive.makes
        except (KeyError, ValueError, IndexError) as error:
            raise UserError(f"{where} has the einsum {primitive.einsum!r}, which cannot be read: {error!r}") from None
        for tensor, indices in reads.items():
            if tensor not in made:
                raise UserError(
                    f"{where} reads {tensor}, which nothing before it makes; there are {', '.join(sorted(made))}"
                )
            maker, theirs = made[tensor]
            if indices and indices != theirs:
                raise UserError(
                    f"{where} reads {tensor}({indices}), but {maker} made {tensor}({theirs}); they must be the same"
                )
        made |= {tensor: (name, indices) for tensor, indices in makes.items()}
        _want_said(where, primitive)
        for parameter in primitive.parameters():
            if (step.block, parameter.name) in owned:
                raise UserError(
                    f"{where} has a parameter {parameter.name}, and block {step.block} has one of that name; give it "
                    "another name"
                )
            owned.add((step.block, parameter.name))


def _want_said(where: str, primitive: Primitive) -> None:
    """Refuse what does not fit a primitive's own einsum."""
    tensors = [*primitive.reads, *primitive.makes]
    for tensor in (*primitive.keeps(), *primitive.keeps_for_weight(), *primitive.gradients_for_weight()):
        if tensor not in tensors:
            raise UserError(f"{where} keeps {tensor}, which it neither reads nor makes; it has {', '.join(tensors)}")
    if primitive.made_again and (primitive.parameters() or len(primitive.makes) > 1):
        raise UserError(f"{where} says made_again, but has parameters or makes several tensors; leave it out")
    for tensor in primitive.makes:
        try:
            primitive.shape(tensor, 1)
        except AssertionError:
            raise UserError(
                f"{where} makes {tensor}, but does not say how many features it has; define features(tensor)"
            ) from None
    for parameter in primitive.parameters():
        if len(parameter.indices) != len(parameter.shape):
            raise UserError(
                f"{where}: {parameter.name} has the shape {parameter.shape} and the indices {parameter.indices}; give "
                "an index for each dim"
            )


def want_carried(layers: Sequence[Run]) -> None:
    """Refuse a tensor that one layer makes and another reads, where its name is none of those that are carried.

    Raises:
        UserError: for the first of them.
    """
    for run in layers:
        for tensor in run.inputs:
            if tensor not in ORDER:
                raise UserError(
                    f"{run.steps[0].place} reads {tensor}, which is made in an earlier layer, where the model is cut "
                    f"so; only {', '.join(ORDER)} go from layer to layer: read {tensor} where it is made"
                )


def want_cuttable(steps: Sequence[Step], pieces: Mapping[str, int]) -> None:
    """Refuse parameters that every slice of a layer would have whole: their gradients would be parts of a sum.

    Args:
        steps: of a model that is cut.
        pieces: into how many pieces each index is cut.

    Raises:
        UserError: for the first of them.
    """
    for step in steps:
        for index in cut_indices(step.primitive, {index for index, count in pieces.items() if count > 1}):
            for parameter in step.primitive.parameters():
                if index not in parameter.indices:
                    raise UserError(
                        f"{step.place}: {parameter.name} has no index {index}, along which "
                        f"{type(step.primitive).__name__} is cut into {pieces[index]} slices, each with a copy of it; "
                        "give it to a primitive of its own after these, or do not cut this model"
                    )


def cut_indices(primitive: Primitive, among: set[str]) -> set[str]:
    """The indices of a primitive along which it may be cut."""
    node = primitive.node
    tensors = [*node.reads.values(), *node.makes.values(), *node.weights.values()]
    return {index for indices in tensors for index in indices.split()} & among - node.whole - node.deals


def opens(primitive: Primitive, among: set[str]) -> bool:
    """Whether slices of a primitive read one tensor together: its gradient is a sum over them."""
    cut = cut_indices(primitive, among)
    return any(indices and not cut <= {*indices.split()} for indices in primitive.reads.values())


def closes(primitive: Primitive, among: set[str]) -> bool:
    """Whether what slices of a primitive make must be summed."""
    cut = cut_indices(primitive, among)
    return any(not cut <= {*indices.split()} for indices in primitive.makes.values())
