"""Rules of layers: the outputs of a layer's passes, as tables from forms to forms.

`rules_of` returns the `Rules` of a program, with one `LayerRules` for each layer. A rule looks up the forms of its
inputs. On a miss it derives the result from the layer's nodes (`layer_graph`) and stores it. Then it checks the cells
with one operation on integers. So even a program of a million ops derives few results.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from shardlab.common.errors import About, Refused, about_layer
from shardlab.common.text import counted, listed
from shardlab.language.rules import attention, layer_graph, optimizer_step
from shardlab.language.rules.kinds import (
    INDICES,
    KIND_NOUNS,
    ONE,
    WHOLE,
    Factor,
    Holds,
    Kind,
    bits,
    numbered,
    piece_noun,
)
from shardlab.language.rules.layer_graph import Extent, Layer, Mismatch, Port
from shardlab.language.rules.refusals import SAME_FACTOR_REMEDY, given_clause, other_tokens_refusal, require_kind
from shardlab.language.rules.spec import (
    KEY,
    Form,
    Space,
    Spec,
    Term,
    cells_text,
    count_terms,
    flat_of_pieces,
    flat_slices,
    form_of,
    missing_text,
    new_spec,
    pieces_of_flat,
    whole_sequences,
)

GRADIENT_OF = {
    Kind.ACTIVATION: Kind.GRAD_ACTIVATION,
    Kind.RESIDUAL: Kind.GRAD_RESIDUAL,
    Kind.ROUTING: Kind.GRAD_ROUTING,
    Kind.QUERIES: Kind.GRAD_QUERIES,
    Kind.KEYS_VALUES: Kind.GRAD_KEYS_VALUES,
}
"""Kind of the gradient of each kind of activation."""

_REDUCE_TERMS = (
    "put all together first: reduce the terms over the ranks that have them (all_reduce, or reduce_scatter along the "
    "sequence)"
)

_TAKES_OWN = (
    "this {layer} layer's {index}s read only the same {index}s of it",
    "give this rank's part of the previous layer's output, ungathered, or gather the weight",
)
_TAKES_OWN_OF = {
    "expert": (
        "experts compute only on their own buffers",
        "exchange the buffers by all_to_all, and give the weight of the slice that arrived",
    )
}
"""Fact and remedy for the indices to which `_TAKES_OWN` does not apply."""


class ForwardResult(NamedTuple):
    """Result of a forward pass: the forms of the outputs, and of the value that the layer saves."""

    outputs: tuple[Form, ...]
    saved_form: Form


class BackwardResult(NamedTuple):
    """Result of a backward pass.

    Attributes:
        weight: form of the weight's gradient.
        spread: factor from the bit set of the cells to the bit set of the weight's gradient, in which each use of the
            weight and each term that is summed has a copy of the cells' bits.
        inputs: forms of the inputs' gradients.
        saved_form: form of the value that the forward pass must have saved.
        half_form: form of the value that the first half of the pass leaves for the second, with the gradients' factor.
    """

    weight: Form
    spread: int
    inputs: tuple[Form, ...]
    saved_form: Form
    half_form: Form


class Rules:
    """Rules of a program.

    Attributes:
        space: the numbers of pieces into which the program's values are divided.
        layers: each layer's rules.
        directed: by layer, the largest number of pieces into which its parameters can be cut without cutting a matrix.
            Only for layers with matrices that the optimizer updates whole.
        indices: the indices along which values may be cut, by kind and layer.
    """

    def __init__(self, layers: Sequence[Layer], space: Space, directed: Iterable[int] = ()) -> None:
        self.space = space
        stacked = {index for index, properties in INDICES.items() if properties.stacked}
        self.directed = {l: math.prod(space.count(i) for i in layers[l].cut if i in stacked) for l in directed}
        self.layers = [LayerRules(layer, space) for layer in layers]
        self._updates: dict[tuple[int | Form, ...], tuple[Spec, Spec]] = {}
        self._attended: dict[tuple[int | Form, ...], Form] = {}
        self._attended_back: dict[tuple[int | Form, ...], tuple[Form, Form]] = {}
        self.indices: dict[tuple[Kind, int], tuple[str, ...]] = {}
        names = {index for index, _ in space.pieces}
        for layer in layers:
            for port in (*layer.inputs, *layer.outputs):
                tensors = [tensors for node in layer.nodes for tensors in (node.reads, node.makes)]
                port_indices = {index for indices in tensors for index in indices.get(port.tensor, "").split()}
                if cut_indices := tuple(sorted(port_indices & names)):
                    self.indices[port.kind, port.layer] = self.indices[GRADIENT_OF[port.kind], port.layer] = cut_indices

    def update(self, layer: int, inputs: Sequence[Spec], trained: int) -> tuple[Spec, Spec]:
        """Return the new weight and optimizer state of an update.

        Args:
            inputs: (gradient, weight, optimizer state[, norm][, direction]).
            trained: bit set of the trained layers known so far; a norm must cover all of them.

        Raises:
            Refused: as `optimizer_step.update` does.
        """
        key = (trained, *[spec[0] for spec in inputs])
        new_specs = self._updates.get(key)
        if new_specs is None or new_specs[0][0].layer != layer or inputs[0][1] != optimizer_step.full_sum(inputs[0][0]):
            gradient, weight, opt_state, *others = inputs
            norm, direction = optimizer_step.norm_and_direction(others)
            new_specs = self._updates[key] = optimizer_step.update(
                layer,
                gradient,
                weight,
                opt_state,
                norm,
                direction,
                trained=Holds(trained, len(self.layers)),
                pieces=self.directed.get(layer),
            )
        return new_specs

    def direction(self, layer: int, inputs: Sequence[Spec], trained: int) -> Spec:
        """Return the direction of an update.

        Args:
            inputs: (gradient, optimizer state[, norm]).
            trained: as for `update`.

        Raises:
            Refused: as `optimizer_step.direction` does.
        """
        parameters = Holds(trained, len(self.layers))
        return optimizer_step.direction(layer, *inputs, trained=parameters, pieces=self.directed.get(layer))

    def attend(self, layer: int, queries: Spec, keys_values: Spec) -> Spec:
        """Return the result of `attention.attend`, from a table if the forms are known.

        Raises:
            Refused: as `attention.attend` does.
        """
        form, cells, joined = queries
        (batch, q_slices), (k_batch, k_slices) = self._split(cells, keys_values[1])
        key = (layer, form, keys_values[0], q_slices, k_slices)
        output_form = self._attended.get(key) if batch == k_batch else None
        if output_form is None:
            output_form = self._attended[key] = attention.attend(layer, queries, keys_values)[0]
        return new_spec(Spec, (output_form, cells, joined))

    def attend_backward(
        self, layer: int, queries: Spec, keys_values: Spec, attention_output: Spec, gradient: Spec
    ) -> tuple[Spec, Spec]:
        """Return the results of `attention.attend_backward`, from a table if the forms are known.

        Raises:
            Refused: as `attention.attend_backward` does.
        """
        (form, cells, joined), (keys_form, keys_cells, keys_joined) = queries, keys_values
        (batch, q_slices), (k_batch, k_slices) = self._split(cells, keys_cells)
        key = (layer, form, keys_form, attention_output[0], gradient[0], q_slices, k_slices)
        same_tokens = batch == k_batch and attention_output[1] == cells == gradient[1]
        grad_forms = self._attended_back.get(key) if same_tokens else None
        if grad_forms is None:
            grads = attention.attend_backward(layer, queries, keys_values, attention_output, gradient)
            grad_forms = self._attended_back[key] = grads[0][0], grads[1][0]
        return new_spec(Spec, (grad_forms[0], cells, joined)), new_spec(Spec, (grad_forms[1], keys_cells, keys_joined))

    def _split(self, cells: int, keys_cells: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return (microbatches, slices of each microbatch) twice: of the queries, and of the keys and values."""
        sequence = self.space.sequence
        return attention.split_cells(cells, sequence), attention.split_cells(keys_cells, sequence)


@lru_cache(maxsize=64)
def rules_of(layers: tuple[Layer, ...], space: Space, directed: frozenset[int] = frozenset()) -> Rules:
    """Return the rules of a model's layers. They are cached, so that programs of one shape share their tables."""
    return Rules(layers, space, directed)


class LayerRules:
    """Rules of one layer."""

    def __init__(self, layer: Layer, space: Space) -> None:
        self.layer = layer
        self.space = space
        self.mixes_tokens = layer.mixes_tokens and space.sequence > 1
        self._forward: dict[tuple[object, ...], ForwardResult] = {}
        self._backward: dict[tuple[Form, ...], BackwardResult] = {}
        self._backward_weight: dict[tuple[Form, ...], BackwardResult] = {}

    def forward(
        self, inputs: Sequence[Spec], weight: Spec, op: str = "forward", part: Holds | None = None
    ) -> tuple[list[Spec], Spec]:
        """Return the layer's outputs, and the value that it saves for the backward pass.

        Args:
            inputs, weight: the specs of the layer's inputs and of its weight.
            op: name of the op, for messages.
            part: the part of the output to compute, for a layer that may compute some pieces of an index only (None:
                all pieces).

        Raises:
            Refused: if the values are not the layer's, do not fit, or are incomplete.
        """
        form, cells, joined = first = inputs[0]
        key: tuple[object, ...] = (weight[0], form) if len(inputs) == 1 else (weight[0], *[spec[0] for spec in inputs])
        if part is not None:
            key += (part,)
        result = self._forward.get(key)
        if result is None:
            result = self._forward[key] = self._derive_forward(self._about(op), inputs, weight, part)
        if self.mixes_tokens and not whole_sequences(cells, self.space):
            self._refuse_cut(op, first)
        for other in inputs[1:]:
            if other[1] != cells:
                self._refuse_other_cells(op, other, first)
        specs: list[Spec] = []
        for output in result[0]:  # no comprehension, which is a call on Python 3.11
            specs.append(new_spec(Spec, (output, cells, joined)))
        return specs, new_spec(Spec, (result[1], cells, ()))

    def backward(
        self, first: Spec, gradients: Sequence[Spec], weight: Spec, op: str = "backward"
    ) -> tuple[list[Spec], BackwardResult]:
        """Return the gradients of the weight and of the inputs, and the forms of all results of the pass.

        Args:
            first: the first of the layer's inputs.
            gradients: the gradients of its outputs, in their order.

        Raises:
            Refused: if the values are not the layer's, do not fit, or are incomplete.
        """
        form, cells, joined = first
        if len(gradients) == 1:
            key: tuple[Form, ...] = (weight[0], form, gradients[0][0])
        else:
            key = (weight[0], form, *[gradient[0] for gradient in gradients])
        result = self._backward.get(key)
        if result is None:
            about = self._about(op)
            cut = self._weight_pieces(about, weight, first) | self._dealt_pieces(gradients)
            result = self._derive_backward(about, first, gradients, weight.form.holds, cut, weight, whole_pass=True)
            self._backward[key] = result
        if self.mixes_tokens and not whole_sequences(cells, self.space):
            self._refuse_cut(op, first)
        for gradient in gradients:
            if gradient[1] != cells:
                self._refuse_other_cells(op, gradient, first)
        specs = [new_spec(Spec, (result[0], cells * result[1], ()))]
        for grad_form in result[2]:
            specs.append(new_spec(Spec, (grad_form, cells, joined)))
        return specs, result

    def backward_weight(self, first: Spec, gradients: Sequence[Spec], half: Spec) -> Spec:
        """Return the gradient of the weight alone.

        Args:
            half: the value that the first half of the backward pass left for the second.

        Raises:
            Refused: if the values are not the layer's, do not fit, or are incomplete.
        """
        op, cells = "backward_weight", first[1]
        key = (half[0], first[0], *[gradient[0] for gradient in gradients])
        result = self._backward_weight.get(key)
        if result is None:
            about, cut = self._about(op), dict(half.form.slices)
            holds = flat_of_pieces(cut, self.layer.cut, self.space)
            cut |= self._dealt_pieces(gradients)
            result = self._derive_backward(about, first, gradients, holds, cut, None, whole_pass=False)
            if result[0].factor is not half[0].factor:
                fault = f"{gradients[0]} was given, but the first half was given a gradient times {half[0].factor}"
                raise Refused("other factors", about, fault, "give both halves the same gradient")
            self._backward_weight[key] = result
        for gradient in gradients:
            if gradient[1] != cells:
                self._refuse_other_cells(op, gradient, first)
        return new_spec(Spec, (result[0], cells * result[1], ()))

    @property
    def layer_number(self) -> int:
        return self.layer.inputs[0].layer

    def _about(self, op: str) -> About:
        return about_layer(op, self.layer_number)

    def _derive_forward(self, op: About, inputs: Sequence[Spec], weight: Spec, part: Holds | None) -> ForwardResult:
        self._require_count(op, inputs, [(port.kind, port.layer) for port in self.layer.inputs], "reads")
        for spec, port in zip(inputs, self.layer.inputs, strict=True):
            self._require_port(op, spec, port, port.kind)
        step = inputs[0].step
        self._require_step(op, inputs, step)
        cut = self._weight_pieces(op, weight, inputs[0]) | self._part_pieces(op, part)
        input_extents = {
            port.tensor: Extent(dict(spec.form.slices)) for spec, port in zip(inputs, self.layer.inputs, strict=True)
        }
        try:
            extents = layer_graph.forward(self.layer, input_extents, cut, self.space)
        except Mismatch as mismatch:
            raise self._refusal(op, mismatch, inputs, (), weight) from None
        outputs = [self._form(port.kind, port.layer, step, extents[port.tensor]) for port in self.layer.outputs]
        return ForwardResult(tuple(outputs), self._saved_form(cut, step))

    def _saved_form(self, cut: dict[str, int], step: int) -> Form:
        """Return the form of the value that a layer saves in a pass with these pieces of its weight."""
        slices = layer_graph.sorted_slices(
            {index: mask for index, mask in cut.items() if index not in self.layer.deals}
        )
        return form_of(Kind.SAVED, self.layer_number, step, self.space, slices=slices, term=self._dealt_term(cut))

    def _part_pieces(self, op: About, part: Holds | None) -> dict[str, int]:
        """Return the pieces of the dealt index (see `Node.deals`) that belong to a part.

        Raises:
            Refused: for a part of a layer without such an index, and for pieces that do not divide.
        """
        if part is None:
            return {}
        if not self.layer.deals:
            fault = f"part {part} was asked for, but this {self.layer.name} layer makes its output whole"
            raise Refused("unknown slice", op, fault, "ask for no part")
        (index,) = self.layer.deals
        count = self.space.count(index)
        if count % part.of:
            fault = f"part {part} was asked for, but the layer has {counted(count, piece_noun(index))}"
            raise Refused("does not divide", op, fault, "ask for a number of parts that divides them")
        return {index: part.refined(count).mask} if part.of > 1 else {}

    def _dealt_pieces(self, gradients: Sequence[Spec]) -> dict[str, int]:
        """Return the pieces of a dealt index that the forward pass computed. Its output's grad has the same."""
        return {index: mask for grad in gradients[:1] for index, mask in grad.form.slices if index in self.layer.deals}

    def _dealt_term(self, cut: dict[str, int]) -> Term | None:
        """Return the term of a sum that results from computing some pieces of a dealt index."""
        return next((Term((index,), mask) for index, mask in cut.items() if index in self.layer.deals), None)

    def _derive_backward(
        self,
        op: About,
        first: Spec,
        gradients: Sequence[Spec],
        holds: Holds,
        cut: dict[str, int],
        weight: Spec | None,
        *,
        whole_pass: bool,
    ) -> BackwardResult:
        ports, outputs = self.layer.inputs, self.layer.outputs
        expected = [(GRADIENT_OF[port.kind], port.layer) for port in outputs]
        self._require_count(op, gradients, expected if whole_pass else expected[:1], "is given")
        self._require_port(op, first, ports[0], ports[0].kind)
        term = self._dealt_term(cut)
        for gradient, port in zip(gradients, self.layer.outputs, strict=False):
            self._require_port(op, gradient, port, GRADIENT_OF[port.kind], term if port.kind is Kind.ROUTING else None)
        self._require_step(op, gradients, first.step)
        factor = gradients[0].form.factor
        if any(gradient.form.factor is not factor for gradient in gradients):
            raise Refused("other factors", op, f"{' and '.join(map(str, gradients))} were given", SAME_FACTOR_REMEDY)
        input_extents = {port.tensor: Extent({}) for port in ports} | {ports[0].tensor: Extent(dict(first.form.slices))}
        output_extents = {
            port.tensor: Extent(dict(gradient.form.slices))
            for port, gradient in zip(self.layer.outputs, gradients, strict=False)
        }
        output_extents |= {port.tensor: Extent({}, term) for port in self.layer.outputs if port.kind is Kind.ROUTING}
        try:
            extents = layer_graph.forward(self.layer, input_extents, cut, self.space)
            grads, weight_term = layer_graph.backward(self.layer, extents, output_extents, cut, self.space)
        except Mismatch as mismatch:
            raise self._refusal(op, mismatch, [first], gradients, weight) from None
        step, layer = first.step, self.layer
        sums = tuple((index, self.space.count(index)) for index in weight_term.indices) if weight_term else ()
        weight_form = form_of(Kind.GRAD_WEIGHT, layer.weight, step, self.space, holds, sums=sums, factor=factor)
        inputs = [self._form(GRADIENT_OF[port.kind], port.layer, step, grads[port.tensor], factor) for port in ports]
        saved_form = self._saved_form(cut, step)
        uses = self.space.uses if layer.weight == 0 else 1
        terms = bits(weight_term.bits) if weight_term else (0,)
        spread = sum(1 << (number * uses + layer.use) * self.space.cells for number in terms)
        half = saved_form.but(kind=Kind.SAVED_FOR_WEIGHT, factor=factor)
        return BackwardResult(weight_form, spread, tuple(inputs), saved_form, half)

    def _form(self, kind: Kind, layer: int, step: int, extent: Extent, factor: Factor = ONE) -> Form:
        slices = layer_graph.sorted_slices(extent.slices)
        return form_of(kind, layer, step, self.space, WHOLE, slices, extent.term, factor=factor)

    def _weight_pieces(self, op: About, weight: Spec, first: Spec) -> dict[str, int]:
        """Return, for each index along which the weight is cut, the pieces that it has.

        Raises:
            Refused: for the weight of another layer or step, or one that does not consist of whole slices.
        """
        owner, form = self.layer.weight, weight.form
        fault = f"the weight given is {weight}"
        require_kind(op, "weight", weight, Kind.WEIGHT)
        if form.layer != owner:
            raise Refused(
                "wrong layer", op, fault, f"layer {self.layer_number} computes with weights[{owner}], give that"
            )
        if form.step != first.step:
            was = f"of optimizer step {form.step}, but the batch belongs to step {first.step}; it was already updated"
            raise Refused("stale weight", op, f"{fault}, {was}", "compute with the weight from before its update")
        if form.holds.complete:
            return {}
        of = flat_slices(self.layer.cut, self.space)
        holds = form.holds if of % form.holds.of == 0 else form.holds.simplified()
        if of == 1:
            missing = ~form.holds.mask & (1 << form.holds.of) - 1
            lacks = missing_text("slice", missing, f" of {form.holds.of}")
            fault = f"the weight given is partial, {weight}; {lacks}"
            remedy = "gather the whole layer first (all_gather)"
            raise Refused("partial weight", op, fault, remedy, missing=bits(missing))
        cut = None if of % holds.of else pieces_of_flat(holds.refined(of), self.layer.cut, self.space)
        if cut is None:
            fault = f"{fault}, which is not made of whole slices of {of}"
            raise Refused("part of a slice", op, fault, "gather a slice first")
        return cut

    def _require_port(self, op: About, spec: Spec, port: Port, kind: Kind, term: Term | None = None) -> None:
        """Refuse a value that does not belong to a port or is incomplete. With `term`, the value must be that term."""
        form = spec.form
        require_kind(op, KIND_NOUNS[kind], spec, kind)
        fault = given_clause(KIND_NOUNS[kind], spec)
        if form.layer != port.layer:
            number, expected = self.layer_number, f"{kind.value}[{port.layer}]"
            reads = "reads" if op.text.startswith(("forward", "recompute")) else "was fed"
            remedy = f"layer {number} {reads} {expected}, give that"
            if kind in GRADIENT_OF.values():
                remedy = f"give {expected}, that of what layer {number} made"
            raise Refused("wrong layer", op, fault, remedy)
        if term is not None and form.term != term:
            remedy = f"give that of {listed(bits(term.bits))} alone, as was dealt"
            raise Refused("other pieces", op, fault, remedy)
        if form.term is not None and term is None:
            if form.term.indices == KEY:
                raise attention.incomplete_refusal(op, KIND_NOUNS[kind], spec)
            missing = ~form.term.bits & (1 << count_terms(form, form.term)) - 1
            lacks = missing_text(" x ".join(map(piece_noun, form.term.indices)), missing)
            raise Refused("missing terms", op, f"{fault}; {lacks}", _REDUCE_TERMS, missing=bits(missing))

    def _require_count(self, op: About, specs: Sequence[Spec], expected: Sequence[tuple[Kind, int]], verb: str) -> None:
        """Refuse a wrong number of inputs or gradients."""
        if len(specs) == len(expected):
            return
        names = " and ".join(f"{kind.value}[{layer}]" for kind, layer in expected)
        fault = f"{len(specs)} values were given"
        if len(specs) < len(expected):
            fault = f"the {KIND_NOUNS[expected[len(specs)][0]]} is missing"
        end = " alone, give that" if len(expected) == 1 else ", give these"
        remedy = f"this {self.layer.name} layer {verb} {names}{end}"
        raise Refused("wrong number", op, fault, remedy)

    def _require_step(self, op: About, specs: Sequence[Spec], step: int) -> None:
        for spec in specs:
            if spec.step != step:
                raise Refused("wrong step", op, f"{spec} was given with values of step {step}", "give all of one step")

    def _refusal(
        self, op: About, mismatch: Mismatch, inputs: Sequence[Spec], gradients: Sequence[Spec], weight: Spec | None
    ) -> Refused:
        """Return the refusal of a mismatch, which names the values that the layer got."""
        specs, ports = (gradients, self.layer.outputs) if mismatch.of_gradient else (inputs, self.layer.inputs)
        spec = next(spec for spec, port in zip(specs, ports, strict=False) if port.tensor == mismatch.tensor)
        index, word = mismatch.index, KIND_NOUNS[spec.kind]
        fault = given_clause(word, spec)
        if mismatch.expected is None:
            assert mismatch.actual is not None
            missing = self.space.full(index) & ~mismatch.actual
            fault, index_row = f"{fault}; {missing_text(piece_noun(index), missing)}", INDICES[index]
            remedy_of_one = f"give it to the layer that takes it with the same {index_row.piece} of the weight"
            first = "put all together first" if index_row.gathered or index_row.stacked else remedy_of_one
            return Refused("missing pieces", op, fault, f"{first}: {index_row.together}", missing=bits(missing))
        expected = numbered(piece_noun(index), mismatch.expected)
        if mismatch.of_gradient:
            remedy = f"give {expected} of {self.space.count(index)} alone, as the weight has"
            return Refused("other pieces", op, fault, remedy)
        if weight is not None:
            fault += f" and the weight {weight}"
        reason, remedy = _TAKES_OWN_OF.get(index, _TAKES_OWN)
        fault += f"; {reason.format(layer=self.layer.name, index=piece_noun(index))}"
        return Refused("other pieces", op, fault, remedy)

    def _refuse_cut(self, op: str, spec: Spec) -> None:
        fault = f"{spec} was given; this layer wants whole sequences"
        raise Refused("cut sequences", self._about(op), fault, "gather their slices first")

    def _refuse_other_cells(self, op: str, other: Spec, first: Spec) -> None:
        mine, theirs = cells_text(first.cells, self.space), cells_text(other.cells, self.space)
        raise other_tokens_refusal(self._about(op), KIND_NOUNS[first.kind], mine, KIND_NOUNS[other.kind], theirs)
