"""The verbs that compute: what each puts on the tape, and what each refuses."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from shardlab.language import Mesh, OpKind, Rank, Refused, Sizes, Strategy, Value, trace
from shardlab.language.rules.spec import Space
from tests.language.tapes import alone, live_at_end, refusal, refused, sentence, together, words
from tests.support.passing import gradients
from tests.support.refusing import ExpectedRefusal, refusal_by, refuses, require_refusal


def prepare_gradient(rank: Rank, *, save: bool = True) -> None:
    """One layer's weight, and one microbatch up to the gradient of its output."""
    rank.weights[0], rank.opt_states[0] = rank.load_weights(0)
    rank.activations[0] = rank.load_batch([0])
    rank.grad_activations[1] = rank.loss(rank.forward(0, rank.activations[0], rank.weights[0], save=save))


def test_the_halves_put_exactly_their_own_ops_on_the_tape() -> None:
    def lines(rank: Rank) -> None:
        prepare_gradient(rank)
        rank.backward_input(0, rank.activations[0], rank.grad_activations[1], rank.weights[0])
        gradient = rank.backward_weight(0, rank.activations.pop(0), rank.grad_activations.pop(1))
        rank.weights[0], rank.opt_states[0] = rank.update(0, gradient, rank.weights[0], rank.opt_states[0])

    assert alone(lines, layers=1, microbatches=1) == [
        "load_weight -> 0",
        "load_opt_state -> 1",
        "load_batch -> 2",
        "forward 2 0 -> 3 4",
        "loss 3 -> 5",
        "free 3",
        "backward_input 2 5 0 4 -> 6 7",
        "free 6",
        "backward_weight 2 5 7 -> 8",
        "free 2",
        "free 5",
        "update 8 0 1 -> 9 10",
        "free 8",
    ]


def test_values_for_the_weights_half_end_with_the_activation() -> None:
    """Nothing frees it by itself: the tape has no FREE of it."""

    def lines(rank: Rank) -> None:
        prepare_gradient(rank)
        rank.backward_input(0, rank.activations[0], rank.grad_activations[1], rank.weights[0])
        del rank.activations[0]

    tape = alone(lines, layers=1)
    assert "backward_input 2 5 0 4 -> 6 7" in tape
    assert "free 2" in tape
    assert not {"free 4", "free 7"} & set(tape)


def test_the_first_half_recomputes_what_was_not_saved() -> None:
    def lines(rank: Rank) -> None:
        prepare_gradient(rank, save=False)
        rank.backward_input(0, rank.activations[0], rank.grad_activations[1], rank.weights[0])
        rank.backward_weight(0, rank.activations[0], rank.grad_activations[1])

    passes = [word for word in alone(lines, layers=1) if word.split()[0] in {"recompute", "backward_input"}]
    assert passes == ["recompute 2 0 -> 5", "backward_input 2 4 0 5 -> 6 7"]


def test_the_weight_may_be_freed_between_the_halves() -> None:
    async def strategy(rank: Rank) -> None:
        rank.weights[0] = rank.load_weight(0, rank.index, 2)
        full = rank.weights["full"] = await rank.all_gather(rank.weights[0])
        rank.activations[0] = rank.load_batch([0])
        rank.grad_activations[1] = rank.loss(rank.forward(0, rank.activations[0], full))
        rank.backward_input(0, rank.activations[0], rank.grad_activations[1], full)
        del rank.weights["full"]
        rank.backward_weight(0, rank.activations.pop(0), rank.grad_activations.pop(1))

    for tape in trace(strategy, 2, 1, 2).tapes:
        free, half = [
            next(at for at, op in enumerate(tape) if op.kind is kind and op.inputs[0] == read)
            for kind, read in ((OpKind.FREE, 1), (OpKind.BACKWARD_WEIGHT, 2))
        ]
        assert free < half


@pytest.mark.parametrize("first_pass", ["nothing", "backward", "backward_weight"])
def test_the_weights_half_wants_an_input_half_of_its_own(first_pass: str) -> None:
    def lines(rank: Rank) -> None:
        prepare_gradient(rank)
        inputs = rank.activations[0], rank.grad_activations[1]
        if first_pass == "backward":
            rank.backward(0, *inputs, rank.weights[0])
        if first_pass == "backward_weight":
            rank.backward_input(0, *inputs, rank.weights[0])
            rank.backward_weight(0, *inputs)
        rank.backward_weight(0, *inputs)

    refused(lines, "no forward", layers=1, layer=0)


def test_an_activation_popped_for_the_first_half_lives_until_the_second() -> None:
    def lines(rank: Rank) -> None:
        prepare_gradient(rank)
        batch = rank.activations.pop(0)
        rank.backward_input(0, batch, rank.grad_activations[1], rank.weights[0])
        rank.backward_weight(0, batch, rank.grad_activations[1])
        assert not batch.alive

    alone(lines, layers=1)


def test_a_gradient_popped_for_the_first_half_lives_until_the_second() -> None:
    def lines(rank: Rank) -> None:
        prepare_gradient(rank)
        gradient = rank.grad_activations.pop(1)
        rank.backward_input(0, rank.activations[0], gradient, rank.weights[0])
        rank.backward_weight(0, rank.activations[0], gradient)
        assert not gradient.alive

    alone(lines, layers=1)


def test_the_weights_half_wants_the_gradient_of_its_own_microbatch() -> None:
    def lines(rank: Rank) -> None:
        prepare_gradient(rank)
        rank.backward_input(0, rank.activations[0], rank.grad_activations[1], rank.weights[0])
        rank.activations["other"] = rank.load_batch([1])
        other = rank.loss(rank.forward(0, rank.activations["other"], rank.weights[0]))
        rank.backward_weight(0, rank.activations[0], other)

    refused(lines, "other tokens", layer=0, layers=1)


@pytest.mark.parametrize("layer", [-1, 1, 7])
@pytest.mark.parametrize("verb", ["backward_input", "backward_weight", "norm"])
def test_a_half_or_a_norm_of_a_layer_that_does_not_exist_is_refused(verb: str, layer: int) -> None:
    def lines(rank: Rank) -> None:
        value = rank.load_batch([0])
        getattr(rank, verb)(layer, *(value,) * {"backward_input": 3, "backward_weight": 2, "norm": 1}[verb])

    assert sentence(refused(lines, "unknown layer", layers=1))


HALVES = Sizes.half_blocks(1)
"""Bodies 0, 2, 4, 6 and norms 1, 3, 5."""


def prepare(rank: Rank) -> None:
    """One microbatch, up to the first norm's branch."""
    for l in rank.layers:
        rank.weights[l] = rank.load_weight(l)
    rank.activations[0] = rank.load_batch([0])
    rank.activations[1] = rank.forward(0, rank.activations[0], rank.weights[0])


def to_the_loss(rank: Rank) -> None:
    """On to the gradient of the last norm's output."""
    prepare(rank)
    residual: list[Value] = []
    for l in (1, 3, 5):
        inputs = rank.activations[l], *residual
        rank.activations[l + 1], *residual = rank.forward(l, inputs, rank.weights[l])
        rank.activations[l + 2] = rank.forward(l + 1, rank.activations[l + 1], rank.weights[l + 1])
    gradient = rank.loss(rank.activations.pop(7))
    _, rank.grad_activations[6] = rank.backward(6, rank.activations[6], gradient, rank.weights[6])


def norms_of(lines: Callable[[Rank], object]) -> list[str]:
    """The tape's entries from the first norm on."""
    tape = alone(lines, HALVES, 1)
    return tape[tape.index("forward 7 0 -> 8 9") + 1 :]


def test_a_norm_reads_branch_weight_and_residual_and_hands_a_residual_on() -> None:
    def lines(rank: Rank) -> None:
        to_the_loss(rank)
        gradients = (rank.grad_activations[6],)
        _, rank.grad_activations[5], rank.grad_residuals[5] = rank.backward(
            5, rank.activations[5], gradients, rank.weights[5]
        )

    norms = norms_of(lines)
    assert norms[0] == "forward 8 1 -> 10 11 12", "(branch, weight) to (normalised, residual, saved)"
    assert "forward 13 3 11 -> 15 16 17" in norms, "(branch, weight, residual) to (normalised, residual, saved)"
    assert "forward 18 5 16 -> 20 21" in norms, "(branch, weight, residual) to (normalised, saved)"
    assert "backward 18 26 5 21 -> 27 28 29" in norms, "(weight's, branch's, residual's)"


def test_a_norms_backward_has_two_halves() -> None:
    def lines(rank: Rank) -> None:
        to_the_loss(rank)
        gradients = (rank.grad_activations[6],)
        rank.grad_activations[5], rank.grad_residuals[5] = rank.backward_input(
            5, rank.activations[5], gradients, rank.weights[5]
        )
        rank.grad_weights[5] = rank.backward_weight(5, rank.activations[5], rank.grad_activations[6])

    tape = norms_of(lines)
    assert "backward_input 18 26 5 21 -> 27 28 29" in tape
    assert "backward_weight 18 26 29 -> 30" in tape


def forward_of_a_norm(rank: Rank) -> None:
    prepare(rank)
    rank.forward(1, rank.activations[1], rank.weights[1])


def norm_of_a_body(rank: Rank) -> None:
    prepare(rank)
    rank.forward(0, (rank.activations[0], rank.activations[1]), rank.weights[0])


def backward_of_a_norm(rank: Rank) -> None:
    to_the_loss(rank)
    rank.backward(5, rank.activations[5], rank.grad_activations[6], rank.weights[5])


def half_of_a_norm(rank: Rank) -> None:
    """The residual's gradient would be lost."""
    to_the_loss(rank)
    rank.backward_input(5, rank.activations[5], rank.grad_activations[6], rank.weights[5])


def backward_norm_of_a_body(rank: Rank) -> None:
    to_the_loss(rank)
    gradient = rank.grad_activations[6]
    rank.backward(4, rank.activations[4], (gradient, gradient), rank.weights[4])


def backward_without_forward(rank: Rank) -> None:
    to_the_loss(rank)
    for _ in range(2):
        rank.backward(5, rank.activations[5], (rank.grad_activations[6],), rank.weights[5])


def no_residual(rank: Rank) -> None:
    to_the_loss(rank)
    rank.forward(3, (rank.activations[3],), rank.weights[3])


def no_such_layer(rank: Rank) -> None:
    prepare(rank)
    rank.forward(7, (rank.activations[1],), rank.weights[1])


def stats_of_whole_logits(rank: Rank) -> None:
    to_the_loss(rank)
    rank.loss_stats(rank.forward(6, rank.activations[6], rank.weights[6]))


def loss_with_something_more(rank: Rank) -> None:
    to_the_loss(rank)
    rank.loss(rank.forward(6, rank.activations[6], rank.weights[6]), rank.activations[6])


REFUSED: list[tuple[Callable[[Rank], None], ExpectedRefusal]] = [
    (forward_of_a_norm, refusal_by("wrong number", layer=1)),
    (norm_of_a_body, refusal_by("wrong number", layer=0)),
    (backward_of_a_norm, refusal_by("wrong number", layer=5)),
    (backward_norm_of_a_body, refusal_by("wrong number", layer=4)),
    (half_of_a_norm, refusal_by("wrong number", layer=5)),
    (backward_without_forward, refusal_by("no forward", layer=5)),
    (no_residual, refusal_by("wrong number", layer=3)),
    (no_such_layer, refusal_by("unknown layer")),
    (stats_of_whole_logits, refusal_by("other pieces", layer=7)),
    (loss_with_something_more, refusal_by("wrong number", layer=7)),
]


@pytest.mark.parametrize(("lines", "words"), REFUSED)
def test_values_that_do_not_fit_a_layers_kind_are_refused(
    lines: Callable[[Rank], None], words: ExpectedRefusal
) -> None:
    with refuses(words):
        alone(lines, HALVES, 1)


def test_a_backward_pass_by_another_slice_than_the_forward_pass_is_refused() -> None:
    async def swapped(rank: Rank) -> None:
        for l in rank.layers:
            rank.weights[l] = rank.load_weight(l) if l % 2 else rank.load_weight(l, rank.index, 2)
        rank.weights["theirs"] = rank.load_weight(4, 1 - rank.index, 2)
        rank.activations[0] = rank.load_batch([0])
        branch = await rank.all_reduce(rank.forward(0, rank.activations[0], rank.weights[0]), axis="tp")
        residual: list[Value] = []
        for l in (1, 3, 5):
            rank.activations[l] = branch
            rank.activations[l + 1], *residual = rank.forward(l, (branch, *residual), rank.weights[l])
            branch = rank.forward(l + 1, rank.activations[l + 1], rank.weights[l + 1])
            branch = branch if l == 5 else await rank.all_reduce(branch, axis="tp")
        rank.activations[7] = branch
        stats = await rank.all_gather(rank.loss_stats(rank.activations[7]), axis="tp")
        gradient = rank.loss(rank.activations[7], stats)
        _, terms = rank.backward(6, rank.activations[6], gradient, rank.weights[6])
        gradient = await rank.all_reduce(terms, axis="tp")
        _, rank.grad_activations[5], _ = rank.backward(5, rank.activations[5], (gradient,), rank.weights[5])
        rank.backward(4, rank.activations[4], rank.grad_activations[5], rank.weights["theirs"])

    with pytest.raises(Refused) as caught:
        trace(swapped, Mesh(tp=2), HALVES, 1)
    require_refusal(caught.value, "other forward", layer=4)


# The norm of the gradient: each layer's part, their sum over layers and ranks, and the update that takes it.


def keep_gradients(rank: Rank, microbatches: range) -> None:
    """Every layer's, of some microbatches, in rank.grad_weights."""
    for l, gradient in gradients(rank, microbatches):
        rank.grad_weights[l] = gradient


async def reduced(rank: Rank) -> None:
    keep_gradients(rank, rank.share())
    for l in rank.layers:
        rank.grad_weights[l] = await rank.all_reduce(rank.grad_weights[l])


def update(rank: Rank, norm: Value) -> None:
    for l in rank.layers:
        result = rank.update(l, rank.grad_weights.pop(l), rank.weights[l], rank.opt_states[l], norm)
        rank.weights[l], rank.opt_states[l] = result


async def clips(rank: Rank) -> None:
    """Replicas: each rank has the whole norm itself."""
    await reduced(rank)
    rank.scalars["norm"] = rank.norm(0, rank.grad_weights[0]) + rank.norm(1, rank.grad_weights[1])
    update(rank, rank.scalars["norm"])


async def clips_by_slices(rank: Rank) -> None:
    """Each rank has the squares of its slices; their sum is all-reduced."""
    keep_gradients(rank, rank.share())
    for l in rank.layers:
        rank.grad_weights["slice", l] = await rank.reduce_scatter(rank.grad_weights[l])
    part = rank.norm(0, rank.grad_weights["slice", 0]) + rank.norm(1, rank.grad_weights["slice", 1])
    rank.scalars["norm"] = await rank.all_reduce(part)
    for l in rank.layers:
        rank.grad_weights[l] = await rank.all_gather(rank.grad_weights["slice", l])
    update(rank, rank.scalars["norm"])


@pytest.mark.parametrize("strategy", [clips, clips_by_slices])
def test_a_norm_is_an_op_and_the_updates_fourth_input(strategy: Strategy) -> None:
    for tape in trace(strategy, 2, 2, 2).tapes:
        updates = [op for op in tape if op.kind is OpKind.UPDATE]
        (norm,) = {op.inputs[3] for op in updates}
        assert len(updates) == sum(op.kind is OpKind.NORM for op in tape) == 2
        assert norm in {number for op in tape for number in op.outputs}


@pytest.mark.parametrize("strategy", [clips, clips_by_slices])
def test_no_scalar_outlives_the_step(strategy: Strategy) -> None:
    program = trace(strategy, 2, 2, 2)
    for rank, tape in enumerate(program.tapes):
        assert live_at_end(program, rank) == {n for op in tape if op.kind is OpKind.UPDATE for n in op.outputs}


def test_a_scalar_never_stored_lives_until_the_update_that_takes_it() -> None:
    async def strategy(rank: Rank) -> None:
        keep_gradients(rank, rank.microbatches)
        update(rank, rank.norm(0, rank.grad_weights[0]))

    (tape,) = together(strategy, ranks=1, layers=1)
    norm = next(at for at, word in enumerate(tape) if word.startswith("norm"))
    number = tape[norm].split()[-1]
    assert tape[norm + 1].startswith("update")
    assert f"free {number}" in tape[norm + 2 : norm + 4]


def test_a_scalar_travels_by_message() -> None:
    async def strategy(rank: Rank) -> None:
        await reduced(rank)
        if rank.index == 0:
            rank.scalars[0] = rank.norm(0, rank.grad_weights[0])
            await rank.send(rank.scalars[0], to=1)
        else:
            rank.scalars[0] = await rank.recv(source=0, expect=("scalars", 0, None))
        update(rank, rank.scalars[0])

    for tape in trace(strategy, 2, 1, 2).tapes:
        assert "update" in [word.split()[0] for word in words(tape)]


def test_the_norm_of_an_unfinished_gradient_is_refused() -> None:
    async def strategy(rank: Rank) -> None:
        keep_gradients(rank, rank.share())
        rank.norm(0, rank.grad_weights[0])

    error = refusal(strategy)
    assert sentence(error)
    require_refusal(error, "missing microbatches", layer=0, missing=(1,))


def test_a_norm_that_lacks_a_layer_is_refused() -> None:
    async def strategy(rank: Rank) -> None:
        await reduced(rank)
        update(rank, rank.norm(1, rank.grad_weights[1]))

    require_refusal(refusal(strategy), "partial norm", layer=0, missing=(0,))


def test_a_norm_that_lacks_the_other_ranks_slices_is_refused() -> None:
    async def strategy(rank: Rank) -> None:
        keep_gradients(rank, rank.share())
        rank.grad_weights["slice"] = await rank.reduce_scatter(rank.grad_weights[0])
        update(rank, rank.norm(0, rank.grad_weights["slice"]))

    require_refusal(refusal(strategy, layers=1), "partial norm", layer=0, missing=(0,))


def test_replicas_squares_must_not_be_added_up() -> None:
    async def strategy(rank: Rank) -> None:
        await reduced(rank)
        await rank.all_reduce(rank.norm(0, rank.grad_weights[0]))

    require_refusal(refusal(strategy), "counted twice", doubled=(0,))


def test_a_layers_squares_count_once() -> None:
    async def strategy(rank: Rank) -> None:
        await reduced(rank)
        part = rank.scalars[0] = rank.norm(0, rank.grad_weights[0])
        part + rank.norm(0, rank.grad_weights[0])

    require_refusal(refusal(strategy), "counted twice", doubled=(0,))


@pytest.mark.parametrize("verb", ["all_gather", "reduce_scatter"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_scalars_are_reduced_and_nothing_else(verb: str, ranks: int) -> None:
    async def strategy(rank: Rank) -> None:
        keep_gradients(rank, rank.share())
        rank.grad_weights["slice"] = await rank.reduce_scatter(rank.grad_weights[0])
        await getattr(rank, verb)(rank.norm(0, rank.grad_weights["slice"]))

    require_refusal(refusal(strategy, ranks), "wrong kind")


def test_a_scalar_belongs_into_its_own_store() -> None:
    async def strategy(rank: Rank) -> None:
        await reduced(rank)
        rank.grad_weights["norm"] = rank.norm(0, rank.grad_weights[0])

    require_refusal(refusal(strategy), "wrong store")


def test_a_gradient_is_no_norm() -> None:
    async def strategy(rank: Rank) -> None:
        await reduced(rank)
        update(rank, rank.grad_weights[1])

    with refuses("wrong kind", layer=0):
        trace(strategy, 2, 2, 2)


# Programs with experts: what is wrong with them is refused at their line.


def traced(program: Callable[[Rank], Awaitable[object]]) -> None:
    async def strategy(rank: Rank) -> None:
        await program(rank)

    trace(strategy, Mesh(ep=2), 1, 2)


async def dispatched(rank: Rank) -> Value:
    rank.weights[0] = rank.load_weight(0)
    tokens = rank.load_batch([rank.index])
    buffers, rank.residuals[2] = rank.forward(0, (tokens,), rank.weights[0])
    return buffers


async def with_anothers_experts(rank: Rank) -> None:
    x = await rank.all_to_all(await dispatched(rank), axis="ep")
    rank.forward(1, x, rank.load_weight(1, 1 - rank.index, 2))


async def without_exchange(rank: Rank) -> None:
    rank.forward(1, await dispatched(rank), rank.load_weight(1, rank.index, 2))


async def without_return(rank: Rank) -> None:
    x = await rank.all_to_all(await dispatched(rank), axis="ep")
    results = rank.forward(1, x, rank.load_weight(1, rank.index, 2))
    rank.forward(2, (results, rank.residuals[2]), rank.load_weight(2))


async def without_residual(rank: Rank) -> None:
    x = await rank.all_to_all(await dispatched(rank), axis="ep")
    results = await rank.all_to_all(rank.forward(1, x, rank.load_weight(1, rank.index, 2)), axis="ep")
    rank.forward(2, (results,), rank.load_weight(2))


async def with_the_wrong_verb(rank: Rank) -> None:
    rank.forward(0, rank.load_batch([rank.index]), rank.load_weight(0))


async def backward_with_the_wrong_verb(rank: Rank) -> None:
    """The last dense layer takes a residual as well; one gradient is given, and of two that are made one is lost."""
    x = await rank.all_to_all(await dispatched(rank), axis="ep")
    results = await rank.all_to_all(rank.forward(1, x, rank.load_weight(1, rank.index, 2)), axis="ep")
    rank.activations[2], rank.weights[2] = results, rank.load_weight(2)
    (logits,) = rank.forward(2, (results, rank.residuals[2]), rank.weights[2])
    rank.backward(2, rank.activations[2], rank.loss(logits), rank.weights[2])


async def with_a_sum(rank: Rank) -> None:
    x = await rank.all_to_all(await dispatched(rank), axis="ep")
    await rank.all_reduce(rank.forward(1, x, rank.load_weight(1, rank.index, 2)), axis="ep")


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (
            with_anothers_experts,
            refusal_by("other pieces", layer=1),
        ),
        (without_exchange, refusal_by("other pieces", layer=1)),
        (
            without_return,
            refusal_by("missing pieces", layer=2, missing=(0,)),
        ),
        (without_residual, refusal_by("wrong number", layer=2)),
        (with_the_wrong_verb, refusal_by("wrong number", layer=0)),
        (
            backward_with_the_wrong_verb,
            refusal_by("wrong number", layer=2),
        ),
        (with_a_sum, refusal_by("no term", layer=2)),
    ],
)
def test_mistakes_of_programs_are_refused_at_their_line(
    program: Callable[[Rank], Awaitable[object]], expected: ExpectedRefusal
) -> None:
    with refuses(expected):
        traced(program)


def test_only_experts_are_counted_in_slices() -> None:
    sizes = Sizes.mixture(1)
    assert sizes.space(Mesh(ep=4), 2) == Space(2, 1, (("expert", 4),))
    assert [layer.cut for layer in sizes.signatures] == [(), ("expert",), ()]
    assert [layer.carries for layer in sizes.signatures] == [True, False, True]
