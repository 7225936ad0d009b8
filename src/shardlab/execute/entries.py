"""Where matrices enter a layer's graph: there its backward pass is cut into an input half and a weight half.

These are the matrices that no product multiplies by, such as an embedding: products are cut by themselves
(`shardlab.models.tensors.products`). The input half catches the gradients that arrive at every node they feed; the
weight half goes from these nodes to the parameters alone (Qi et al. 2023, arXiv 2401.10241, fig. 1: W needs the
layer's input and the gradient of its output, and nobody waits for it).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge


@dataclass
class Entry:
    """A node that the input's path goes through and parameters feed.

    Attributes:
        node: of autograd's graph.
        leaves: places of the parameters that enter here.
        caught: the gradients that arrived, by the node's output.
    """

    node: Node
    leaves: list[int]
    caught: dict[int, Tensor] = field(default_factory=dict[int, Tensor])

    def catch(self, gradients: tuple[Tensor | None, ...]) -> None:
        """A pre-hook of the node: keep what arrives."""
        self.caught = {output: gradient for output, gradient in enumerate(gradients) if gradient is not None}


def entries(nodes: Sequence[Node], start: GradientEdge, leaves: Mapping[int, Tensor]) -> tuple[list[Entry], list[int]]:
    """The nodes where parameters meet the path from where the layer starts to its outputs, with the places of each.

    Parameters that meet it at several nodes are not among them; their places come beside.

    Args:
        nodes: of the layer's graph, each after those that it feeds its gradients to (`ordered`).
        start: where the layer starts.
        leaves: the parameters, by place.
    """
    parameters = {get_gradient_edge(leaf).node: place for place, leaf in leaves.items()}
    on_path = {start.node}
    fed_by: dict[Node, set[int]] = {}
    found: list[Entry] = []
    for node in nodes:
        below = [after for after, _ in node.next_functions if after is not None]
        if any(after in on_path for after in below):
            on_path.add(node)
        mine = {parameters[node]} if node in parameters else set[int]()
        fed_by[node] = mine.union(*(fed_by[after] for after in below if after not in on_path))
        if node in on_path and fed_by[node]:
            found.append(Entry(node, sorted(fed_by[node])))
    times = Counter(place for entry in found for place in entry.leaves)
    for entry in found:
        entry.leaves = [place for place in entry.leaves if times[place] == 1]
    return [entry for entry in found if entry.leaves], [place for place, met in times.items() if met > 1]


def deepest(nodes: Sequence[Node], leaves: Iterable[Tensor]) -> GradientEdge:
    """The node farthest from the outputs that parameters feed: the embedding, in a layer that reads tokens."""
    parameters = {get_gradient_edge(leaf).node for leaf in leaves}
    depth: dict[Node, int] = defaultdict(int)
    found = nodes[-1]
    for node in reversed(nodes):
        for after, _ in node.next_functions:
            if after is not None:
                depth[after] = max(depth[after], depth[node] + 1)
                if after in parameters and depth[node] > depth[found]:
                    found = node
    return GradientEdge(found, 0)


def ordered(outputs: Sequence[GradientEdge]) -> list[Node]:
    """All nodes of a graph, each after those that it points to."""
    ordered: dict[Node, None] = {}
    stack = [output.node for output in outputs]
    while stack:
        node = stack[-1]
        waiting = [after for after, _ in node.next_functions if after is not None and after not in ordered]
        if waiting:
            stack.extend(waiting)
        else:
            ordered[stack.pop()] = None
    return list(ordered)
