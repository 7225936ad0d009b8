"""What is live when an op starts: before its own result is stored, and with what is on its way."""

from __future__ import annotations

from dataclasses import replace

from shardlab.language import Kind, Mesh, OpKind, Rank, Sizes, trace
from shardlab.models import GPT
from shardlab.simulate.timeline.memory import memory_in_bytes
from shardlab.strategies import STRATEGIES, Plan
from shardlab.train.job import Job
from tests.simulate.timeline.programs import prefetching, recomputing, reductions_at_once
from tests.simulate.timeline.runs import ROWS, SQUARE, event, events, run


def test_an_ops_memory_is_before_its_own_result_is_stored() -> None:
    timeline = run(STRATEGIES["single"].program, 1, 2, 4)
    first, second = events(timeline, OpKind.FORWARD)
    assert first.memory == 4 * SQUARE + 4 * ROWS
    assert second.memory == first.memory + 4 * ROWS


def test_results_of_communication_count_from_issue() -> None:
    timeline = run(prefetching, 4, 3, 4)
    own_bytes = 3 * 2 * SQUARE // 4 + ROWS
    assert [e.memory for e in events(timeline, OpKind.ALL_GATHER)] == [
        own_bytes,
        own_bytes + SQUARE,
        own_bytes + 2 * SQUARE,
    ]
    assert event(timeline, OpKind.FORWARD, 0).memory == own_bytes + 3 * SQUARE


def test_a_value_read_by_a_communication_stays_until_it_is_awaited() -> None:
    timeline = run(reductions_at_once, 2, 2, 2)
    first_memory = event(timeline, OpKind.ALL_REDUCE, 0).memory
    assert event(timeline, OpKind.ALL_REDUCE, 1).memory == first_memory + SQUARE
    # layer 0 has been awaited: its own gradient is gone, the sum and both of layer 1's are live
    assert event(timeline, OpKind.UPDATE, 0).memory == first_memory + 2 * SQUARE - SQUARE


def test_a_value_never_stored_lives_until_its_op_ends() -> None:
    timeline = run(STRATEGIES["fsdp"].program, 4, 2, 4)
    gather = next(e for e in events(timeline, OpKind.ALL_GATHER) if e.layer == 0)
    forward = event(timeline, OpKind.FORWARD, 0)
    assert forward.memory == gather.memory + SQUARE
    next_gather = next(e for e in events(timeline, OpKind.ALL_GATHER) if e.layer == 1)
    assert next_gather.memory == gather.memory + ROWS


def test_an_update_works_in_place() -> None:
    timeline = run(STRATEGIES["single"].program, 1, 2, 4)
    first, second = events(timeline, OpKind.UPDATE)
    assert second.memory == first.memory - SQUARE  # the first gradient is gone, nothing else has changed


def test_a_sharded_value_takes_its_share() -> None:
    timeline = run(STRATEGIES["fsdp"].program, 4, 1, 4)
    assert events(timeline, OpKind.ALL_GATHER)[0].memory == 2 * SQUARE // 4 + ROWS


SAVED = replace(Sizes.puzzle(2), saved=(1000, 7))
"""Elements that autograd keeps for one microbatch of each layer."""


def test_what_autograd_saves_counts_between_forward_and_backward() -> None:
    plain, saving = (run(STRATEGIES["single"].program, 1, sizes, 4) for sizes in (2, SAVED))
    extra = {(e.kind, e.layer): e.memory - p.memory for e, p in zip(saving.events[0], plain.events[0], strict=True)}
    assert extra[OpKind.FORWARD, 0] == 0
    assert extra[OpKind.FORWARD, 1] == 4 * 1000
    assert extra[OpKind.BACKWARD, 1] == 4 * 1007
    assert extra[OpKind.BACKWARD, 0] == 4 * 1000
    assert extra[OpKind.UPDATE, 0] == 0


def test_recomputation_saves_what_autograd_would_keep() -> None:
    plain, saving = (run(recomputing, 1, sizes, 4) for sizes in (2, SAVED))
    extra = {(e.kind, e.layer): e.memory - p.memory for e, p in zip(saving.events[0], plain.events[0], strict=True)}
    assert extra[OpKind.BACKWARD, 1] == 4 * 7
    assert extra[OpKind.RECOMPUTE, 0] == 0
    assert extra[OpKind.BACKWARD, 0] == 4 * 1000


def test_what_autograd_saves_goes_with_its_activation() -> None:
    async def looks_first(rank: Rank) -> None:
        """A forward whose result is thrown away before the step proper."""
        rank.weights[0], rank.opt_states[0] = rank.load_weights(0)
        rank.activations["look"] = rank.load_batch(rank.microbatches)
        rank.activations["seen"] = rank.forward(0, rank.activations["look"], rank.weights[0])
        del rank.activations["look"], rank.activations["seen"]
        rank.activations[0] = rank.load_batch(rank.microbatches)
        grad = rank.loss(rank.forward(0, rank.activations[0], rank.weights[0]))
        grad_weight, _ = rank.backward(0, rank.activations.pop(0), grad, rank.weights[0])
        rank.weights[0], rank.opt_states[0] = rank.update(0, grad_weight, rank.weights[0], rank.opt_states[0])

    timeline = run(looks_first, 1, replace(Sizes.puzzle(1), saved=(1000,)), 2)
    first, second = events(timeline, OpKind.FORWARD)
    assert first.memory == second.memory == 2 * SQUARE + 2 * ROWS


def test_a_gradient_that_backward_adds_to_an_older_one_takes_no_room() -> None:
    timeline = run(STRATEGIES["grad-accum"].program, 1, 1, 3)
    assert [event.memory for event in events(timeline, OpKind.ADD)] == [3 * SQUARE + ROWS] * 2
    assert [event.memory for event in events(timeline, OpKind.UPDATE)] == [3 * SQUARE]


def test_a_residual_that_autograd_keeps_counts_once_until_it_is_sent() -> None:
    """The last block's first stream, and the one that the first stage sends, on the ranks of two stages."""
    plan = Plan(Mesh(pp=2, tp=2), sequence_parallel=True)
    job = Job(plan, 4, 1, GPT(layers=2, hidden_size=64, heads=4, seq_len=64), 2)
    traced = job.checked()
    sizes = traced.program.sizes
    residual_bytes = 4 * 2 * 64 * 64 // 2  # bytes of two sequences, cut in two
    once, twice = (memory_in_bytes(traced, kept_sizes) for kept_sizes in (sizes, replace(sizes, saves_residual=())))
    for tape, specs, counted_once, counted_twice in zip(traced.program.tapes, traced.specs, once, twice, strict=True):
        live, residuals = set[int](), set[int]()
        for at, op in enumerate(tape):
            assert counted_twice.before_ops[at] - counted_once.before_ops[at] == residual_bytes * len(live), (
                at,
                str(op),
            )
            if op.kind is OpKind.FORWARD:
                live |= {number for number in op.outputs if specs[number].kind is Kind.RESIDUAL}
            elif op.kind in (OpKind.SEND, OpKind.FREE):
                live -= {*op.inputs}
            residuals |= live
        assert len(residuals) == 2


HALVES = replace(Sizes.puzzle(2), saved=(1000, 7), saved_for_weight=(300, 2))


async def halves(rank: Rank) -> None:
    """One device; the weights' halves of the backward pass come last."""
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l)
    rank.activations[0] = rank.load_batch(rank.microbatches)
    for l in rank.layers:
        rank.activations[l + 1] = rank.forward(l, rank.activations[l], rank.weights[l])
    rank.grad_activations[2] = rank.loss(rank.activations.pop(2))
    for l in reversed(rank.layers):
        rank.grad_activations[l] = rank.backward_input(
            l, rank.activations[l], rank.grad_activations[l + 1], rank.weights[l]
        )
    for l in reversed(rank.layers):
        gradient = rank.backward_weight(l, rank.activations.pop(l), rank.grad_activations.pop(l + 1))
        rank.weights[l], rank.opt_states[l] = rank.update(l, gradient, rank.weights[l], rank.opt_states[l])


def test_what_is_kept_for_the_weights_half_counts_between_the_halves() -> None:
    plain, saving = (run(halves, 1, sizes, 4) for sizes in (2, HALVES))
    extra = {(e.kind, e.layer): e.memory - p.memory for e, p in zip(saving.events[0], plain.events[0], strict=True)}
    assert extra[OpKind.BACKWARD_INPUT, 1] == 4 * 1007
    assert extra[OpKind.BACKWARD_INPUT, 0] == 4 * (1000 + 2), (
        "of the last layer only what its weight's half needs is left"
    )
    assert extra[OpKind.BACKWARD_WEIGHT, 1] == 4 * (300 + 2)
    assert extra[OpKind.BACKWARD_WEIGHT, 0] == 4 * 300
    assert extra[OpKind.UPDATE, 0] == 0


def test_what_is_kept_for_the_weights_half_goes_with_its_activation() -> None:
    async def half_of_it_thrown_away(rank: Rank) -> None:
        rank.weights[0], rank.opt_states[0] = rank.load_weights(0)
        for key in ("look", 0):
            rank.activations[key] = rank.load_batch(rank.microbatches)
            rank.grad_activations[1] = rank.loss(rank.forward(0, rank.activations[key], rank.weights[0]))
            rank.backward_input(0, rank.activations[key], rank.grad_activations[1], rank.weights[0])
            if key == "look":
                del rank.activations[key], rank.grad_activations[1]
        gradient = rank.backward_weight(0, rank.activations.pop(0), rank.grad_activations.pop(1))
        rank.weights[0], rank.opt_states[0] = rank.update(0, gradient, rank.weights[0], rank.opt_states[0])

    sizes = replace(Sizes.puzzle(1), saved=(1000,), saved_for_weight=(300,))
    first, second = events(run(half_of_it_thrown_away, 1, sizes, 2), OpKind.BACKWARD_INPUT)
    assert second.memory == first.memory


def test_the_gradient_of_the_tokens_is_freed_at_once_if_no_op_uses_it() -> None:
    async def in_variables(rank: Rank) -> None:
        w, o = rank.load_weights(0)
        total = None
        for m in rank.microbatches:
            batch = rank.load_batch([m])
            gradient = rank.loss(rank.forward(0, batch, w))
            grad_weight, gradient = rank.backward(0, batch, gradient, w)
            total = grad_weight if total is None else total + grad_weight
        assert total is not None
        rank.weights[0], rank.opt_states[0] = rank.update(0, total, w, o)

    tape = trace(in_variables, 1, 1, 3).tapes[0]
    backwards = [(at, op.outputs[1]) for at, op in enumerate(tape) if op.kind is OpKind.BACKWARD]
    assert len(backwards) == 3
    for at, gradient in backwards:
        assert (tape[at + 1].kind, tape[at + 1].inputs) == (OpKind.FREE, (gradient,))
        assert sum(gradient in op.inputs for op in tape) == 1
    timeline = run(in_variables, 1, 1, 3)
    assert timeline.peak_memory == run(in_variables, 1, 1, 2).peak_memory


def test_a_weights_half_adds_to_an_older_gradient_without_room_of_its_own() -> None:
    async def accumulates(rank: Rank) -> None:
        rank.weights[0], rank.opt_states[0] = rank.load_weights(0)
        for m in rank.microbatches:
            rank.activations[0] = rank.load_batch([m])
            rank.grad_activations[1] = rank.loss(rank.forward(0, rank.activations[0], rank.weights[0]))
            rank.grad_activations[0] = rank.backward_input(
                0, rank.activations[0], rank.grad_activations[1], rank.weights[0]
            )
            new = rank.backward_weight(0, rank.activations.pop(0), rank.grad_activations.pop(1))
            del rank.grad_activations[0]
            rank.grad_weights[0] = rank.grad_weights[0] + new if m else new
        rank.weights[0], rank.opt_states[0] = rank.update(
            0, rank.grad_weights.pop(0), rank.weights[0], rank.opt_states[0]
        )

    assert [event.memory for event in events(run(accumulates, 1, 1, 3), OpKind.ADD)] == [3 * SQUARE] * 2


def test_an_update_of_a_slice_ends_the_whole_weight_and_a_gather_brings_it_back() -> None:
    async def zero_1(rank: Rank) -> None:
        rank.weights[0] = rank.load_weight(0)
        rank.opt_states[0] = rank.load_opt_state(0, rank.index, rank.world)
        rank.activations[0] = rank.load_batch(rank.share())
        gradient = rank.loss(rank.forward(0, rank.activations[0], rank.weights[0]))
        rank.grad_weights[0], _ = rank.backward(0, rank.activations.pop(0), gradient, rank.weights[0])
        total = await rank.all_reduce(rank.grad_weights.pop(0))
        new, rank.opt_states[0] = rank.update(0, total, rank.weights[0], rank.opt_states[0])
        rank.weights[0] = await rank.all_gather(new)

    timeline = run(zero_1, 4, 1, 4)
    update_memory = event(timeline, OpKind.UPDATE, 0).memory
    gather = event(timeline, OpKind.ALL_GATHER, 0)
    assert update_memory - gather.memory == SQUARE - SQUARE // 4 + SQUARE, (
        "the old weight but its slice, and the gradient"
    )


def test_one_value_under_two_keys_counts_once() -> None:
    async def twice_named(rank: Rank) -> None:
        await STRATEGIES["single"].program(rank)
        rank.weights["again"] = rank.weights[0]

    assert run(twice_named, 1, 2, 4).peak_memory == run(STRATEGIES["single"].program, 1, 2, 4).peak_memory
