"""A layer with both passes written out: a list of calls that are prepared once, without a graph of autograd's."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

from torch import Tensor

from shardlab.models.run import Run
from shardlab.models.tensors.passes import Backward, BothPasses, Forward, Take, TensorPlaces, Weights, passes


class _Step(NamedTuple):
    """A primitive of a layer.

    Attributes:
        forward, backward: its passes.
        dropped: places of what nobody reads after its forward pass.
        freed: places of what nobody reads after its backward pass.
    """

    forward: Forward
    backward: Backward
    dropped: Sequence[int]
    freed: Sequence[int]


class WrittenLayer:
    """One layer of a model; it holds no tensor itself.

    Args:
        prepared: its primitives' passes.
        last: place of each tensor to the number of the last primitive that reads or makes it.
        inputs, outputs: places of what it is given and what it makes for others.
        tokens: of a sequence.
    """

    def __init__(
        self,
        prepared: Sequence[BothPasses],
        last: dict[int, int],
        inputs: Sequence[int],
        outputs: Sequence[int],
        tokens: int,
    ) -> None:
        self._tokens = tokens
        first_keeper: dict[int, int] = {}
        for number, each in enumerate(prepared):
            for place in each.keeps:
                first_keeper.setdefault(place, number)
        stay = {*first_keeper, *outputs}
        self._inputs, self._outputs, self._beyond = inputs, outputs, [None] * (len(last) - len(inputs))
        self._given_on = [place for place in outputs if place not in first_keeper]
        self._steps = [
            _Step(
                each.forward,
                each.backward,
                [place for place, seen in last.items() if seen == number and place not in stay],
                [place for place, keeper in first_keeper.items() if keeper == number],
            )
            for number, each in enumerate(prepared)
        ]

    def forward(self, inputs: Sequence[Tensor], weights: Weights) -> tuple[list[Tensor], list[Any]]:
        """The layer's outputs, and what its backward pass wants."""
        tensors: list[Any] = [*(x.flatten(0, 1) for x in inputs), *self._beyond]
        for forward, _, dropped, _ in self._steps:
            forward(tensors, weights)
            for place in dropped:
                tensors[place] = None
        made: list[Tensor] = [self._of_sequences(tensors[place]) for place in self._outputs]
        for place in self._given_on:
            tensors[place] = None
        return made, tensors

    def backward(self, kept: list[Any], given: Sequence[Tensor], weights: Weights, take: Take) -> list[Tensor | None]:
        """The inputs' gradients, of those of the outputs; none for tokens. Empties what was kept.

        A sum hands its gradient on: those that are given, taken and made may be the same tensor.
        """
        gradients: list[Any] = [None] * len(kept)
        for place, gradient in zip(self._outputs, given, strict=True):
            gradients[place] = gradient.flatten(0, 1)
        for _, backward, _, freed in reversed(self._steps):
            backward(kept, gradients, weights, take)
            for place in freed:
                kept[place] = None
        made: list[Tensor | None] = [gradients[place] for place in self._inputs]
        return [None if gradient is None else self._of_sequences(gradient) for gradient in made]

    def _of_sequences(self, x: Tensor) -> Tensor:
        """(rows x T, features) to (rows, T, features)."""
        return x.view(-1, self._tokens, x.shape[-1])


def written_layer(run: Run, names: Sequence[str]) -> WrittenLayer | None:
    """A layer's passes, if all of its primitives have some.

    Args:
        names: of its parameters, and of those that it borrows.
    """
    carried = (*run.carried_inputs.values(), *run.carried_outputs.values())
    if run.attend is not None or "vocab" in run.cut or any(len(each) > 1 for each in carried):
        return None
    at = TensorPlaces({name: place for place, name in enumerate(names)})
    inputs = [at.make(name) for name in (*run.inputs[:1], *chain(*run.carried_inputs.values()))]
    prepared: list[BothPasses] = []
    last = dict.fromkeys(inputs, 0)
    again = {made.step for made in run.made_again}
    for number, (primitive, _, _) in enumerate(run.steps):
        last |= {at.tensors[name]: number for name in primitive.reads}
        before = at.count
        own = type(primitive) in passes.registry  # a primitive that was made of another computes something else
        found = passes(primitive, at) if own else None
        if found is None:
            return None
        prepared.append(found)
        last |= dict.fromkeys(range(before, at.count), number)
        if number in again:
            at.again[at.tensors[next(iter(primitive.makes))]] = found.forward
    outputs = [at.tensors[name] for name in (*run.outputs[:1], *chain(*run.carried_outputs.values()))]
    return WrittenLayer(prepared, last, inputs, outputs, run.steps[0].primitive.tokens)
