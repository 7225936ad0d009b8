"""The rules of toy models, and specs of their values in a few words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from shardlab.common.errors import Refused
from shardlab.language import Holds, Kind, Mesh, OpKind, Reduction, Sizes, Spec
from shardlab.language.collective_calls import Call, collective_results
from shardlab.language.rules.kinds import WHOLE
from shardlab.language.rules.layer_graph import Layer, LayerDefinition, Node, build_layers
from shardlab.language.rules.layer_rules import LayerRules, Rules, rules_of
from shardlab.language.rules.spec import Space, Term, form_of
from tests.support.refusing import ExpectedRefusal, refusal_of, require_refusal

Refusals = Mapping[str, tuple[Callable[[], object], ExpectedRefusal]]
"""By a name of what is wrong: a call, and how it is refused."""


@dataclass(frozen=True)
class ToyLayer:
    """A layer's rules, by what they say of values alone."""

    rules: LayerRules

    def forward(self, inputs: Sequence[Spec], weight: Spec) -> list[Spec]:
        return self.rules.forward(inputs, weight)[0]

    def backward(self, first: Spec, gradients: Sequence[Spec], weight: Spec) -> list[Spec]:
        return self.rules.backward(first, gradients, weight)[0]

    def backward_weight(self, first: Spec, gradients: Sequence[Spec], half: Spec) -> Spec:
        return self.rules.backward_weight(first, gradients, half)

    def saved(self, first: Spec, weight: Spec, kind: Kind = Kind.SAVED) -> Spec:
        """What autograd keeps of a layer of one input, or what is left of it between the halves."""
        _, spec = self.rules.forward([first], weight)
        return spec._replace(form=spec.form.but(kind=kind))


@dataclass(frozen=True)
class Toy:
    """A model of some sizes on a mesh, in which values are counted."""

    sizes: Sizes
    mesh: Mesh = field(default_factory=Mesh)
    microbatches: int = 4

    @cached_property
    def space(self) -> Space:
        return self.sizes.space(self.mesh, self.microbatches)

    @cached_property
    def rules(self) -> Rules:
        return rules_of(self.sizes.signatures, self.space)

    def layer(self, number: int) -> ToyLayer:
        return ToyLayer(self.rules.layers[number])

    def spec_of(
        self,
        kind: Kind,
        layer: int,
        cells: int = 0,
        holds: Holds = WHOLE,
        step: int = 0,
        *,
        slices: Mapping[str, int] | None = None,
        term: Term | None = None,
        reduction: Reduction = Reduction.SUM,
    ) -> Spec:
        pieces = tuple(sorted((slices or {}).items()))
        return Spec(form_of(kind, layer, step, self.space, holds, pieces, term, reduction=reduction), cells)

    def meet(self, kind: OpKind, *members: Spec, ranks: Sequence[int] = ()) -> list[Spec]:
        """What each member of a collective receives."""
        results = collective_results(Call(kind), members, ranks or range(len(members)), self.rules)
        return [spec for spec in results if spec is not None]


def matrices(sorts: Sequence[str]) -> tuple[Layer, ...]:
    """Layers that are one matrix each, cut along what it makes (`column`) or along what it reads (`row`)."""
    definitions: list[LayerDefinition] = []
    for l, sort in enumerate(sorts):
        source, result = ("width", "ffn") if l % 2 == 0 else ("ffn", "width")
        node = Node(sort, {"x": source}, {"x": result}, {"w": f"{result} {source}"}, takes_own=sort == "column")
        definitions.append((sort, [node], (result if sort == "column" else source,)))
    return build_layers(definitions)


def shard(n: int, of: int) -> Holds:
    return Holds(1 << n, of)


def is_refused(case: tuple[Callable[[], object], ExpectedRefusal]) -> Refused:
    """A call is refused so."""
    call, expected = case
    refused = refusal_of(call)
    require_refusal(refused, expected)
    return refused
