"""The forward and backward pass of a layer, or of several, with the graph that autograd keeps between them."""

from __future__ import annotations

from collections.abc import Generator, Sequence, Set
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from shardlab.execute.entries import Entry, deepest, entries, ordered
from shardlab.execute.saved import Saved
from shardlab.models import LayerLayout
from shardlab.models.tensors import Dropout, Products, Share, TensorLayer, views


class FlatWeight:
    """A layer's complete flat weights on the device, and its parameters, which view them."""

    def __init__(self, flat: Tensor, layout: LayerLayout) -> None:
        self.flat = flat
        self.views = views(layout, flat)

    @cached_property
    def leaves(self) -> list[Tensor]:
        """The parameters, as leaves of autograd's graphs."""
        return [view.detach().requires_grad_() for view in self.views]


class Graph:
    """Everything that is kept between the forward and the backward pass of a layer, or of neighbours (`go_on`)."""

    def __init__(
        self,
        layer: TensorLayer,
        inputs: Sequence[Tensor],
        weight: FlatWeight,
        share: Share,
        dropout: Dropout | None,
        saved: Saved | None = None,
        *,
        keeps_inputs: Sequence[bool] | None = None,
        in_halves: bool = False,
    ) -> None:
        """Run the layer on its inputs: the activation, and what is carried beside it.

        `saved` is what autograd saves into: for a weight that may be gathered again, or a backward pass in halves
        (`in_halves`) of which the second reads some. An input that autograd does not keep (`keeps_inputs`; None: it
        keeps all) is not kept either by the leaf that waits for its gradient.
        """
        self._saved, self._tied = saved, layer.tied
        self._leaves = [*weight.leaves]
        given = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
        self._inputs = [x for x in given if x.requires_grad]
        self._products = Products(small=in_halves)
        with nullcontext() if saved is None else saved_tensors_hooks(saved.pack, saved.unpack):
            made = layer.run(weight.leaves, given, share, dropout, products=self._products)
        self._outputs: Sequence[Tensor] = made
        for x, keeps in zip(given, keeps_inputs or (), strict=False):
            if not keeps and x.requires_grad:
                x.data = x.new_empty(1).expand(x.shape)
        self._edges: list[GradientEdge] = []
        self._entries: list[Entry] = []
        self._whole: dict[int, Tensor] = {}

    def go_on(self, layer: TensorLayer, weight: FlatWeight, share: Share, dropout: Dropout | None) -> None:
        """Run the next layer on what the last one made; the graph is that of both from now on."""
        assert self._saved is None, "of several layers autograd keeps what it wants"
        self._leaves += weight.leaves
        self._outputs = layer.run(weight.leaves, self._outputs, share, dropout, products=self._products)

    def take_outputs(self) -> list[Tensor]:
        """What the last layer made, to be taken once: the graph must not keep it alive."""
        outputs, self._outputs = self._outputs, ()
        self._edges = [get_gradient_edge(y) for y in outputs]
        return [y.detach() for y in outputs]

    def backward(self, gradients: Sequence[Tensor], flat: Tensor | None, into: Sequence[Tensor]) -> list[Tensor]:
        """Add the parameters' gradients to the views `into`; gives those of the inputs (none for tokens).

        `gradients` are those of the outputs, `flat` is the weight's buffer now, if it may have been gathered again.
        """
        if self._saved is not None:
            self._saved.flat = flat
        self._products.add_to(self._leaves, into)
        with _gradients_into(self._leaves, into):
            torch.autograd.backward(self._edges, gradients)  # leaves are all that it reaches, so it need not search
        made = [x.grad for x in self._inputs]
        return [gradient for gradient in made if gradient is not None]

    def backward_input(self, gradients: Sequence[Tensor], flat: Tensor, reads: Set[int] | None = None) -> list[Tensor]:
        """The inputs' gradients; keeps what the parameters' gradients are made of: what products have read and the
        gradients of what they made, and the gradients that arrive where other matrices enter the graph.

        Tokens have no gradient; in their place stands the first thing that is made of them. Gradients of vectors are
        not put off, since they are smaller than what they are made of; nor is that of a matrix that enters at several
        nodes beside products. If it is known which saved tensors `backward_weight` reads, only those stay.
        """
        if self._saved is not None:
            self._saved.flat = flat
        watched, leaves = self._products.watched, enumerate(self._leaves)
        others = {place: leaf for place, leaf in leaves if place in self._tied or id(leaf) not in watched}
        matrices = {place: leaf for place, leaf in others.items() if leaf.dim() > 1}
        nodes = ordered(self._edges) if matrices or not self._inputs else []
        starts = [get_gradient_edge(x) for x in self._inputs] or [deepest(nodes, others.values())]
        if matrices:
            self._entries, several = entries(nodes, starts[0], matrices)
            others = {place: leaf for place, leaf in others.items() if place not in matrices or place in several}
        self._products.waiting = []
        hooks = [entry.node.register_prehook(entry.catch) for entry in self._entries]
        wanted: Any = [*starts, *others.values()]  # torch takes both kinds together
        keeps = bool(self._entries)
        made = cast(
            "tuple[Tensor, ...]",
            torch.autograd.grad(self._edges, wanted, gradients, retain_graph=keeps, allow_unused=True),
        )
        whole = zip(others, cast("tuple[Tensor | None, ...]", made[len(starts) :]), strict=True)
        self._whole = {place: gradient for place, gradient in whole if gradient is not None}
        for hook in hooks:
            hook.remove()
        if not self._entries:
            reads, self._edges = set[int](), []
        if self._saved is not None and reads is not None:
            self._saved.keep_only(reads)
        if self._inputs:
            return list(made[: len(starts)])
        for entry in self._entries:
            if entry.node is starts[0].node:  # where the walk ended: no hook is called there
                entry.caught = {starts[0].output_nr: made[0]}
        return []

    def backward_weight(self, into: Sequence[Tensor]) -> Set[int]:
        """Add the parameters' gradients to the views `into`; gives the numbers of the saved tensors that it read."""
        if self._saved is not None:
            self._saved.flat = None
            self._saved.read.clear()
        self._products.add_to(self._leaves, into)
        self._products.finish()
        for place, gradient in self._whole.items():
            into[place].add_(gradient)
        for entry in self._entries:
            leaves = [self._leaves[place] for place in entry.leaves]
            edges = [GradientEdge(entry.node, output) for output in entry.caught]
            with _gradients_into(leaves, [into[place] for place in entry.leaves]):
                torch.autograd.backward(edges, list(entry.caught.values()), inputs=leaves)
        return set() if self._saved is None else self._saved.read


@contextmanager
def _gradients_into(leaves: Sequence[Tensor], into: Sequence[Tensor]) -> Generator[None, None, None]:
    """Autograd adds the leaves' gradients to these tensors; what is summed in other numbers is added afterwards."""
    adds = all(view.dtype == leaf.dtype for leaf, view in zip(leaves, into, strict=True))
    if adds:
        for leaf, view in zip(leaves, into, strict=True):
            leaf.grad = view
    yield
    for leaf, view in zip(leaves, into, strict=True):
        if not adds and leaf.grad is not None:
            view.add_(leaf.grad)
        leaf.grad = None
