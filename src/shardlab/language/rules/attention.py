"""Rules of attention over cut sequences (Liu et al. 2023, arXiv 2310.01889, section 3; Llama 3, arXiv 2407.21783,
section 3.3.2).

Queries *meet* chunks of keys and values. The result is complete when they have met, each once, all slices of the
sequence up to their own last one, since later ones are masked. In the backward pass a chunk's gradient is complete when
all queries from its own first slice on have met it. Until then the value is a term over the index `key`.
"""

from __future__ import annotations

from functools import lru_cache

from shardlab.common.errors import About, Refused, about_layer
from shardlab.language.rules.kinds import KIND_NOUNS, ONE, Factor, Kind, bits, numbered
from shardlab.language.rules.refusals import given_clause, other_tokens_refusal, require_kind
from shardlab.language.rules.spec import KEY, Form, Space, Spec, Term, cells_text, form_of

# named once: on Python 3.11 an enum's member is ten times as slow to look up as a global
ACTIVATION, GRAD_ACTIVATION = Kind.ACTIVATION, Kind.GRAD_ACTIVATION
QUERIES, KEYS_VALUES = Kind.QUERIES, Kind.KEYS_VALUES
GRAD_QUERIES, GRAD_KEYS_VALUES = Kind.GRAD_QUERIES, Kind.GRAD_KEYS_VALUES


def attend(layer: int, queries: Spec, keys_values: Spec) -> Spec:
    """Return the attention of queries to keys and values: activation `layer + 1`, or a term of it.

    Raises:
        Refused: if layer, heads or microbatches differ, or if all keys are masked.
    """
    op = about_layer("attend", layer)
    q_slices, k_slices = _require_pair(op, layer, queries, keys_values)
    needs = needed_slices(ACTIVATION, q_slices, queries.form.space)
    form = _form(queries.form, ACTIVATION, layer + 1, k_slices & needs, needs)
    return Spec(form, queries.cells, queries.joined)


def attend_backward(
    layer: int, queries: Spec, keys_values: Spec, attention_output: Spec, gradient: Spec
) -> tuple[Spec, Spec]:
    """Return the terms of two gradients: of the queries, and of the keys and values.

    Raises:
        Refused: as `attend` does, and if `attention_output` or its gradient is incomplete or belongs to other queries.
    """
    op = about_layer("attend_backward", layer)
    q_slices, k_slices = _require_pair(op, layer, queries, keys_values)
    for spec, kind in ((attention_output, ACTIVATION), (gradient, GRAD_ACTIVATION)):
        _require_input(op, spec, kind, layer + 1, queries)
        if spec.cells != queries.cells:
            spec_text, query_text = (cells_text(cells, spec.form.space) for cells in (spec.cells, queries.cells))
            raise other_tokens_refusal(op, KIND_NOUNS[kind], spec_text, "queries", query_text)
    space = queries.form.space
    of_queries, of_keys = needed_slices(GRAD_QUERIES, q_slices, space), needed_slices(GRAD_KEYS_VALUES, k_slices, space)
    return (
        Spec(
            _form(queries.form, GRAD_QUERIES, layer, k_slices & of_queries, of_queries, gradient.form.factor),
            queries.cells,
            queries.joined,
        ),
        Spec(
            _form(keys_values.form, GRAD_KEYS_VALUES, layer, q_slices & of_keys, of_keys, gradient.form.factor),
            keys_values.cells,
            keys_values.joined,
        ),
    )


def work(queries: Spec, keys_values: Spec) -> float:
    """Return the work of attention of these queries to these keys and values, relative to causal attention of one
    whole sequence.

    A slice of queries attends to all of an earlier slice, to half of itself, and to nothing of a later one.
    """
    space = queries.form.space
    (batch, q_slices), (_, k_slices) = (split_cells(spec.cells, space.sequence) for spec in (queries, keys_values))
    pairs = sum((1.0 if key < query else 0.5) for query in bits(q_slices) for key in bits(k_slices) if key <= query)
    return batch.bit_count() * pairs / (space.sequence**2 / 2)


def needed_slices(kind: Kind, slices: int, space: Space) -> int:
    """Return the slices of the sequence that a value must meet to be complete, as a bit set.

    A value of queries must meet the keys and values up to its own last slice; a gradient of keys and values must meet
    the queries from its own first slice on.

    Args:
        slices: bit set of the slices that the value holds.
    """
    if kind is GRAD_KEYS_VALUES:
        return (1 << space.sequence) - (slices & -slices)
    return (1 << slices.bit_length()) - 1


def record_met_slices(spec: Spec, kv_done: int) -> Spec:
    """Return the spec of a value that has met these slices. It is complete once it has met all slices that it needs."""
    form, cells, joined = spec
    _, slices = split_cells(cells, form.space.sequence)
    return Spec(_with_met_slices(form, slices, kv_done), cells, joined)


@lru_cache(maxsize=1 << 12)
def split_cells(cells: int, sequence: int) -> tuple[int, int]:
    """Return two bit sets: the microbatches of some cells, and the slices that each has (-1: not all have the same)."""
    full = (1 << sequence) - 1
    microbatches, slices = 0, 0
    for cell in bits(cells):
        microbatches |= 1 << cell // sequence
    for m in bits(microbatches):
        slices_of_m = cells >> m * sequence & full
        if slices and slices_of_m != slices:
            return microbatches, -1
        slices = slices_of_m
    return microbatches, slices


def incomplete_refusal(op: About, noun: str, spec: Spec) -> Refused:
    """Return the refusal of a value that has met only some of the slices that it needs."""
    term, space = spec.form.term, spec.form.space
    assert term is not None
    _, slices = split_cells(spec.cells, space.sequence)
    missing = needed_slices(spec.form.kind, slices, space) & ~term.bits
    other = "queries" if spec.form.kind is GRAD_KEYS_VALUES else "keys and values"
    lacks = f"{given_clause(noun, spec)}; the {other} of {numbered('slice', missing)} of the sequence are missing in it"
    return Refused("missing terms", op, lacks, "attend to these as well, and add the parts", missing=bits(missing))


@lru_cache(maxsize=1 << 14)
def _with_met_slices(form: Form, slices: int, kv_done: int) -> Form:
    """Return the form of a value with these slices after it has met slices `kv_done`."""
    assert form.term is not None
    complete = needed_slices(form.kind, slices, form.space) & ~kv_done == 0
    return form.but(term=None if complete else form.term._replace(bits=kv_done))


@lru_cache(maxsize=1 << 14)
def _form(like: Form, kind: Kind, layer: int, kv_done: int, needs: int, factor: Factor = ONE) -> Form:
    term = Term(KEY, kv_done, merged=kind is ACTIVATION) if needs & ~kv_done else None
    return form_of(kind, layer, like.step, like.space, slices=like.slices, term=term, factor=factor)


def _require_pair(op: About, layer: int, queries: Spec, keys_values: Spec) -> tuple[int, int]:
    """Require that queries and keys belong together, and return the slices of each.

    They must have the same microbatches, and some of the keys must not be masked.
    """
    _require_input(op, queries, QUERIES, layer, queries)
    _require_input(op, keys_values, KEYS_VALUES, layer, queries)
    space = queries.form.space
    (batch, q_slices), (k_batch, k_slices) = (
        split_cells(spec.cells, space.sequence) for spec in (queries, keys_values)
    )
    if batch != k_batch or queries.step != keys_values.step:
        remedy = "give both of the same microbatches and step"
        raise Refused("other tokens", op, f"{queries} cannot meet {keys_values}", remedy)
    for spec, slices in ((queries, q_slices), (keys_values, k_slices)):
        if slices < 0:
            raise Refused("other tokens", op, f"{spec} was given", "give the same slices of each microbatch")
    if not k_slices & needed_slices(ACTIVATION, q_slices, space):
        fault = f"all of {keys_values} comes after {queries}, which do not see it"
        raise Refused("masked keys", op, fault, "leave this op out")
    return q_slices, k_slices


def _require_input(op: About, spec: Spec, kind: Kind, layer: int, queries: Spec) -> None:
    form = spec.form
    noun = KIND_NOUNS[kind]
    require_kind(op, noun, spec, kind)
    if form.layer != layer:
        raise Refused("wrong layer", op, given_clause(noun, spec), f"this op reads {kind.value}[{layer}], give that")
    if form.term is not None:
        raise incomplete_refusal(op, noun, spec)
    if form.slices != queries.form.slices or form.step != queries.form.step:
        remedy = "give the same heads of queries, keys and values, of one step"
        raise Refused("other pieces", op, f"{given_clause(noun, spec)} and the queries {queries}", remedy)
