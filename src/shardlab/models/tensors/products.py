"""Products with weights, whose gradients are made beside autograd.

Autograd goes through a product to its input alone. When the gradient of what the product made arrives, the gradients of
its parameters are added right where they are wanted: autograd would make each in memory of its own first. And the
input, which only the weight's gradient reads, is not kept where it can be made again of what is kept anyway: the
output of an activation function, which is the largest tensor of a block.
"""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlab.models.primitive import LARGE
from shardlab.models.tensors import onednn

Again = Callable[[], tuple[Tensor, ...]]
"""Makes a tensor again, bit for bit, as the first of what a primitive makes."""

AddGradients = Callable[[Tensor, Tensor, Sequence[Tensor]], None]
"""Adds the gradients of a product's parameters, given that of its output, its input, and where each is added."""


class Product:
    """One product of a graph.

    Attributes:
        parameters: the leaves that it multiplies with or adds.
        input: what it read, until that is no longer wanted; or what makes it again.
        gradient: of its output, between the halves of a backward pass.
    """

    __slots__ = ("_add", "_all", "_output", "gradient", "input", "parameters")

    def __init__(self, all: Products, output: int, parameters: Sequence[Tensor], add: AddGradients) -> None:
        self._all, self._output, self._add = all, output, add
        self.parameters = parameters
        self.input: Tensor | Again | None = None
        self.gradient: Tensor | None = None

    def arrive(self, gradients: tuple[Tensor | None, ...]) -> None:
        """A pre-hook of the node of its output: add its parameters' gradients, or get ready to do so later."""
        given, gradient = self.input, gradients[self._output]
        if gradient is None or given is None:
            return
        self.input, self.gradient = given if isinstance(given, Tensor) else given()[0], gradient
        if self._all.waiting is None:
            self.finish()
        else:
            self._all.waiting.append(self)

    def finish(self) -> None:
        """Add its parameters' gradients, and keep nothing."""
        given, gradient, rooms = self.input, self.gradient, self._all.rooms
        assert isinstance(given, Tensor), "its output's gradient has come"
        assert gradient is not None
        self.input = self.gradient = None
        self._add(gradient, given, [rooms[id(parameter)] for parameter in self.parameters])


class Products:
    """The products of a graph.

    Args:
        small: whether those with small weights are among them: where the backward pass comes in halves, so that
            autograd need not be asked for each again.

    Attributes:
        watched: ids of the parameters whose gradients are made here.
        rooms: where gradients are added, by the id of the parameter.
        waiting: products whose gradients have come and whose parameters' gradients are made later; None while these are
            made at once.
    """

    def __init__(self, *, small: bool = False) -> None:
        self._least = 0 if small else LARGE
        self.watched: set[int] = set()
        self.rooms: dict[int, Tensor] = {}
        self.waiting: list[Product] | None = None

    def takes(self, weight: Tensor) -> bool:
        """Whether the gradient of a product's weight is to be made here."""
        return weight.numel() >= self._least

    def add_to(self, leaves: Sequence[Tensor], rooms: Sequence[Tensor]) -> None:
        """From now on gradients of these leaves are added to these tensors."""
        if self.watched:
            self.rooms = dict(zip(map(id, leaves), rooms, strict=True))

    def watch(
        self, made: Tensor, read: Tensor, again: Again | None, parameters: Sequence[Tensor], add: AddGradients
    ) -> None:
        """Make the gradients of some parameters when that of `made` arrives.

        Args:
            made: what was made of them.
            read: what they were multiplied by.
            again: makes that again (None: it is kept).
            parameters: the leaves.
            add: adds their gradients.
        """
        node = made.grad_fn
        assert node is not None, "its input has a gradient"
        product = Product(self, made.output_nr, parameters, add)
        product.input = read.detach() if again is None else again
        self.watched.update(map(id, parameters))
        node.register_prehook(product.arrive)

    def finish(self) -> None:
        """Make the parameters' gradients that wait."""
        waiting, self.waiting = self.waiting or [], None
        with torch.no_grad():
            for product in waiting:
                product.finish()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, products: Products | None, again: Again | None) -> Tensor:
    """A linear map of `x` (..., inputs), to (..., outputs).

    Args:
        products: those of the graph (None: autograd makes all gradients).
        again: makes `x` again (None: it is kept).
    """
    if not torch.is_grad_enabled():
        return onednn.linear_forward(x, weight, bias)  # to the bit what a pass that keeps its graph makes
    if products is None or not products.takes(weight):
        return F.linear(x, weight, bias)
    made = onednn.linear(x, weight, bias)
    products.watch(made, x, again, (weight,) if bias is None else (weight, bias), _add_linear)
    return made


def _add_linear(gradient: Tensor, x: Tensor, rooms: Sequence[Tensor]) -> None:
    gradient = gradient.flatten(0, -2)
    add_product(rooms[0], gradient.T, x.flatten(0, -2))
    for room in rooms[1:]:
        add_rows(room, gradient)


def add_rows(room: Tensor, rows: Tensor) -> None:
    """Add the sum of a matrix's rows to a vector: as a product, which needs a third of the time of a sum."""
    if room.dtype == rows.dtype and rows.dtype.itemsize > 2:  # products of short numbers may add in those
        room.addmv_(rows.T, rows.new_ones(len(rows)))
    else:
        room.add_(rows.sum(0))


def add_product(room: Tensor, a: Tensor, b: Tensor) -> None:
    """Add the product of two matrices, or of two lots of matrices, to a tensor, which may be of other numbers."""
    if room.dtype != a.dtype:
        room.add_(a @ b)
    elif room.dim() == 2:
        room.addmm_(a, b)
    else:
        room.baddbmm_(a, b)
