"""Ops that tracing adds by itself: WAIT and FREE, and the end of the step."""

from __future__ import annotations

import pytest

from shardlab.check import check
from shardlab.language import OpKind, Rank, Refused, trace
from shardlab.strategies import STRATEGIES
from tests.language.tapes import alone, live_at_end, refused, together, words


def test_awaiting_puts_one_wait_on_the_tape_however_often_it_is_done() -> None:
    async def strategy(rank: Rank) -> None:
        rank.weights[0] = rank.load_weights(0, shard=rank.index, of=2)[0]
        handle = rank.all_gather(rank.weights[0])
        rank.weights["full"] = await handle
        assert await handle is rank.weights["full"]
        rank.load_batch([0])

    for tape in together(strategy):
        assert tape[2:5] == ["all_gather 0 h0 -> 2", "wait h0", "load_batch -> 3"]


def test_a_value_in_flight_stays_live_until_its_wait() -> None:
    async def strategy(rank: Rank) -> None:
        handle = rank.all_gather(rank.load_weights(0, shard=rank.index, of=2)[0])
        rank.load_batch([0])
        rank.weights[0] = await handle
        rank.load_batch([1])

    for tape in together(strategy):
        assert tape[2:7] == ["all_gather 0 h0 -> 2", "load_batch -> 3", "wait h0", "free 0", "load_batch -> 4"]


def test_an_op_that_uses_a_value_in_flight_does_not_free_it() -> None:
    async def strategy(rank: Rank) -> None:
        rank.weights[0] = rank.load_weights(0)[0]
        batch = rank.load_batch([rank.index])
        handle = rank.all_gather(batch)
        rank.activations[1] = rank.forward(0, batch, rank.weights[0])
        rank.load_batch([0])
        await handle

    for tape in together(strategy):
        assert tape[4:8] == ["forward 2 0 -> 4 5", "load_batch -> 6", "wait h0", "free 2"]


def test_a_value_read_twice_lives_until_the_second_wait() -> None:
    async def strategy(rank: Rank) -> None:
        shard = rank.load_weights(0, shard=rank.index, of=2)[0]
        first, second = rank.all_gather(shard), rank.all_gather(shard)
        rank.weights["b"] = await second
        rank.weights["a"] = await first

    for tape in together(strategy):
        assert tape[4:7] == ["wait h1", "wait h0", "free 0"]


def test_del_of_a_value_in_flight_waits_first() -> None:
    async def strategy(rank: Rank) -> None:
        rank.weights[0] = rank.load_weights(0, shard=rank.index, of=2)[0]
        handle = rank.all_gather(rank.weights[0])
        del rank.weights[0]
        rank.weights[0] = await handle

    for tape in together(strategy):
        assert tape[2:5] == ["all_gather 0 h0 -> 2", "wait h0", "free 0"]
        assert tape.count("wait h0") == 1


def test_overwriting_a_value_in_flight_waits_first() -> None:
    async def strategy(rank: Rank) -> None:
        rank.weights[0] = rank.load_weights(0, shard=rank.index, of=2)[0]
        rank.all_gather(rank.weights[0])
        rank.weights[0] = rank.load_weights(1)[0]

    for tape in together(strategy):
        assert tape[2:7] == ["all_gather 0 h0 -> 2", "load_weight -> 3", "load_opt_state -> 4", "wait h0", "free 0"]


def test_update_waits_for_what_still_reads_the_weight_and_the_state() -> None:
    async def strategy(rank: Rank) -> None:
        rank.weights[0], rank.opt_states[0] = rank.load_weights(0)
        batch = rank.activations[0] = rank.load_batch([rank.index])
        gradient = rank.loss(rank.forward(0, batch, rank.weights[0]))
        gradient, _ = rank.backward(0, batch, gradient, rank.weights[0])
        total = await rank.all_reduce(gradient)
        rank.all_gather(rank.weights[0], axis="tp")
        rank.all_gather(rank.opt_states[0], axis="tp")
        rank.weights[0], rank.opt_states[0] = rank.update(0, total, rank.weights[0], rank.opt_states[0])

    program = trace(strategy, 2, 1, 2)
    for rank in range(2):
        tape = [word.split()[0] for word in words(program.tapes[rank])]
        at = tape.index("update")
        assert tape[at - 4 : at + 2] == ["all_gather", "all_gather", "wait", "wait", "update", "free"]
        update = program.tapes[rank][at]
        assert set(update.inputs[1:]) == {0, 1}
        freed = {op.inputs[0] for op in program.tapes[rank] if op.kind is OpKind.FREE}
        assert not freed & {0, 1}, "the old weight and state end in the update"
        assert live_at_end(program, rank) == set(update.outputs)


def test_a_handle_never_awaited_is_awaited_at_the_steps_end() -> None:
    async def strategy(rank: Rank) -> None:
        rank.activations[0] = rank.load_batch([0])
        if rank.index == 0:
            rank.send(rank.activations[0], to=1)
        else:
            rank.recv(source=0)
        rank.load_batch([1])

    assert together(strategy) == [
        ["load_batch -> 0", "send 0 h0 to 1", "load_batch -> 1", "wait h0", "free 0", "free 1"],
        ["load_batch -> 0", "recv h0 from 0 -> 1", "load_batch -> 2", "wait h0", "free 0", "free 1", "free 2"],
    ]


def test_an_exchange_waits_for_both_sides() -> None:
    async def strategy(rank: Rank) -> None:
        other = 1 - rank.index
        value = rank.load_batch([rank.index])
        rank.activations[0] = await rank.exchange(value, to=other, source=other)

    for index, tape in enumerate(together(strategy)):
        other = 1 - index
        assert tape == [
            "load_batch -> 0",
            f"send 0 h0 to {other}",
            f"recv h1 from {other} -> 1",
            "wait h0",
            "free 0",
            "wait h1",
            "free 1",
        ]


def test_an_exchange_whose_value_was_deleted_does_not_wait_twice() -> None:
    async def strategy(rank: Rank) -> None:
        other = 1 - rank.index
        rank.activations[0] = rank.load_batch([rank.index])
        handle = rank.exchange(rank.activations[0], to=other, source=other)
        del rank.activations[0]
        rank.activations[0] = await handle

    for tape in together(strategy):
        assert [word for word in tape if word.startswith(("wait", "free"))] == [
            "wait h0",
            "free 0",
            "wait h1",
            "free 1",
        ]


def test_a_step_leaves_only_the_slices_that_were_loaded() -> None:
    def lines(rank: Rank) -> None:
        rank.weights[0], rank.opt_states[0] = rank.load_weights(0)
        rank.weights[1], rank.opt_states[1] = rank.load_weights(1)
        rank.activations[0] = rank.load_batch([0, 1])
        rank.activations[1] = rank.forward(0, rank.activations[0], rank.weights[0])
        rank.activations[2] = rank.forward(1, rank.activations[1], rank.weights[1])
        rank.grad_activations[2] = rank.loss(rank.activations[2])
        rank.grad_weights[1], rank.grad_activations[1] = rank.backward(
            1, rank.activations[1], rank.grad_activations[2], rank.weights[1]
        )
        rank.weights[1], rank.opt_states[1] = rank.update(1, rank.grad_weights[1], rank.weights[1], rank.opt_states[1])
        rank.weights["again"] = rank.weights[1]

    async def strategy(rank: Rank) -> None:
        lines(rank)

    program = trace(strategy, 1, 2, 2)
    updated = next(op for op in program.tapes[0] if op.kind is OpKind.UPDATE)
    assert live_at_end(program, 0) == set(updated.outputs)


@pytest.mark.parametrize("stored", ["weights", "opt_states"])
def test_an_updated_slice_that_no_store_keeps_is_refused_where_it_is_made(stored: str) -> None:
    async def strategy(rank: Rank) -> None:
        weight, state = rank.load_weights(0)
        batch = rank.activations[0] = rank.load_batch([0])
        rank.weights[0] = weight
        gradient = rank.loss(rank.forward(0, batch, weight))
        gradient, _ = rank.backward(0, batch, gradient, weight)
        new_weight, new_state = rank.update(0, gradient, weight, state)
        if stored == "weights":
            rank.weights[0] = new_weight
        else:
            rank.opt_states[0] = new_state

    missing = {"weights": "opt_states", "opt_states": "weights"}[stored]
    program = trace(strategy, 1, 1, 1)
    with pytest.raises(
        Refused, match=rf"the step ends without the updated {missing}\[0\], which is made here and not kept; keep"
    ) as refusal:
        check(program)
    assert refusal.value.op is not None
    assert program.tapes[0][refusal.value.op].kind is OpKind.UPDATE


def test_a_copy_gathered_after_the_update_is_freed_at_the_end() -> None:
    async def strategy(rank: Rank) -> None:
        rank.weights[0], rank.opt_states[0] = rank.load_weights(0, shard=rank.index, of=2)
        full = rank.weights["full"] = await rank.all_gather(rank.weights[0])
        batch = rank.activations[0] = rank.load_batch([rank.index])
        gradient = rank.loss(rank.forward(0, batch, full))
        gradient, _ = rank.backward(0, batch, gradient, full)
        reduced = await rank.reduce_scatter(gradient)
        rank.weights[0], rank.opt_states[0] = rank.update(0, reduced, rank.weights[0], rank.opt_states[0])
        rank.weights["full"] = await rank.all_gather(rank.weights[0])

    program = trace(strategy, 2, 1, 2)
    for rank, tape in enumerate(program.tapes):
        update = next(op for op in tape if op.kind is OpKind.UPDATE)
        assert live_at_end(program, rank) == set(update.outputs)


def test_a_gathered_copy_is_freed_at_the_end() -> None:
    async def strategy(rank: Rank) -> None:
        rank.weights[0] = rank.load_weights(0, shard=rank.index, of=2)[0]
        rank.weights["full"] = await rank.all_gather(rank.weights[0])

    for tape in together(strategy):
        assert tape[-3:] == ["free 0", "free 1", "free 2"]


@pytest.mark.parametrize("name", list(STRATEGIES))
def test_builtin_strategies_end_with_nothing_in_flight_and_their_slices_alone(name: str) -> None:
    entry = STRATEGIES[name]
    program = trace(entry.program, entry.mesh(entry.ranks), entry.puzzle(entry.ranks), 4)
    for tape, specs, rank in zip(program.tapes, check(program).specs, range(program.ranks), strict=True):
        issued = [op.handle for op in tape if op.handle >= 0 and op.kind is not OpKind.WAIT]
        waited = [op.handle for op in tape if op.kind is OpKind.WAIT]
        assert sorted(waited) == issued == list(range(len(issued)))
        initial = [specs[op.outputs[0]] for op in tape if op.kind in (OpKind.LOAD_WEIGHT, OpKind.LOAD_OPT_STATE)]
        final = [specs[number] for number in live_at_end(program, rank)]
        assert sorted(map(str, final)) == sorted(str(spec._replace(form=spec.form.but(step=1))) for spec in initial)


@pytest.mark.parametrize("name", list(STRATEGIES))
def test_nothing_is_read_before_it_is_made_or_after_it_is_freed(name: str) -> None:
    entry = STRATEGIES[name]
    for tape in trace(entry.program, entry.mesh(entry.ranks), entry.puzzle(entry.ranks), 8).tapes:
        live: set[int] = set()
        for op in tape:
            assert set(op.inputs) <= live, op
            assert not set(op.outputs) & live
            live |= set(op.outputs)
            live -= set(op.inputs) if op.kind is OpKind.FREE else set()
            live -= set(op.inputs[1:3]) if op.kind is OpKind.UPDATE else set()


def test_the_place_of_a_refusal_is_the_op_that_would_have_come_next() -> None:
    def lines(rank: Rank) -> None:
        rank.load_batch([0])
        rank.load_batch([1])
        rank.load_weights(7)

    error = refused(lines, "unknown layer", rank=0, op=2)
    assert (error.rank, error.op) == (0, 2)


def test_compute_verbs_put_exactly_their_own_op_on_the_tape() -> None:
    def lines(rank: Rank) -> None:
        rank.weights[0], rank.opt_states[0] = rank.load_weights(0)
        for m in rank.microbatches:
            rank.activations[0] = rank.load_batch([m])
            rank.activations[1] = rank.forward(0, rank.activations[0], rank.weights[0])
            rank.grad_activations[1] = rank.loss(rank.activations.pop(1))
            rank.grad_weights[m], rank.grad_activations[0] = rank.backward(
                0, rank.activations[0], rank.grad_activations.pop(1), rank.weights[0]
            )
        rank.grad_weights[0] = rank.grad_weights[0] + rank.grad_weights.pop(1)
        rank.weights[0], rank.opt_states[0] = rank.update(
            0, rank.grad_weights.pop(0), rank.weights[0], rank.opt_states[0]
        )

    assert alone(lines, layers=1) == [
        "load_weight -> 0",
        "load_opt_state -> 1",
        "load_batch -> 2",
        "forward 2 0 -> 3 4",
        "loss 3 -> 5",
        "free 3",
        "backward 2 5 0 4 -> 6 7",
        "free 5",
        "load_batch -> 8",
        "free 2",
        "forward 8 0 -> 9 10",
        "loss 9 -> 11",
        "free 9",
        "backward 8 11 0 10 -> 12 13",
        "free 11",
        "free 7",
        "add 6 12 -> 14",
        "free 12",
        "free 6",
        "update 14 0 1 -> 15 16",
        "free 14",
        "free 8",
        "free 13",
    ]
