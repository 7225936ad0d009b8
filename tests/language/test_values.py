"""Lifetimes of values by the keys of the program's stores, and deadlocks in words."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.language import OpKind, Rank, Value, World, trace
from shardlab.language.values import Wait, deadlock_sentence
from tests.language.tapes import alone, live_at_end, refusal, refused
from tests.support.refusing import require_refusal

LOAD = "load_batch -> 0"


def test_a_value_dies_with_its_key() -> None:
    def lines(rank: Rank) -> None:
        rank.activations[0] = rank.load_batch([0])
        del rank.activations[0]
        rank.load_weights(0)

    assert alone(lines) == [LOAD, "free 0", "load_weight -> 1", "load_opt_state -> 2", "free 1", "free 2"]


def test_two_keys_name_one_value_and_it_dies_with_the_last() -> None:
    def lines(rank: Rank) -> None:
        rank.activations["a"] = rank.activations["b"] = rank.load_batch([0])
        del rank.activations["a"]
        assert rank.activations["b"].alive
        rank.load_batch([1])
        del rank.activations["b"]
        rank.load_weights(0)

    loads = ["load_weight -> 2", "load_opt_state -> 3"]
    assert alone(lines) == [LOAD, "load_batch -> 1", "free 0", *loads, "free 1", "free 2", "free 3"]


class Unprinted:
    """A key that nobody may print."""

    def __repr__(self) -> str:
        raise AssertionError("printed")


def test_asking_whether_a_key_is_there_prints_no_keys() -> None:
    def lines(rank: Rank) -> None:
        rank.weights[Unprinted()], rank.opt_states[0] = rank.load_weights(0)
        assert Unprinted() not in rank.weights
        assert 0 in rank.opt_states

    assert alone(lines) == ["load_weight -> 0", "load_opt_state -> 1", "free 0", "free 1"]


def test_overwriting_a_key_frees_what_it_named() -> None:
    def lines(rank: Rank) -> None:
        rank.activations[0] = rank.load_batch([0])
        rank.activations[0] = rank.load_batch([1])

    assert alone(lines) == [LOAD, "load_batch -> 1", "free 0", "free 1"]


def test_storing_a_value_again_under_its_own_key_changes_nothing() -> None:
    def lines(rank: Rank) -> None:
        rank.activations[0] = rank.load_batch([0])
        rank.activations[0] = rank.activations[0]
        assert rank.activations[0].alive
        del rank.activations[0]
        assert not len(rank.activations)

    assert alone(lines) == [LOAD, "free 0"]


def test_an_overwritten_value_lives_on_under_its_other_key() -> None:
    def lines(rank: Rank) -> None:
        rank.activations["a"] = rank.activations["b"] = rank.load_batch([0])
        rank.activations["a"] = rank.load_batch([1])
        assert rank.activations["b"].alive

    assert alone(lines) == [LOAD, "load_batch -> 1", "free 0", "free 1"]


def test_a_value_never_stored_lives_until_the_op_that_uses_it_ends() -> None:
    def lines(rank: Rank) -> None:
        weight, _ = rank.load_weights(0)
        batch = rank.load_batch([0])
        rank.load_batch([1])
        rank.activations[1] = rank.forward(0, batch, weight)
        rank.load_batch([1])

    tape = alone(lines)
    at = tape.index("forward 2 0 -> 4 5")
    assert sorted(tape[at + 1 : at + 3]) == ["free 0", "free 2"]
    assert tape[at + 3] == "load_batch -> 6"


def test_pop_gives_a_value_for_one_last_use() -> None:
    def lines(rank: Rank) -> None:
        rank.weights[0], rank.opt_states[0] = rank.load_weights(0)
        rank.activations[0] = rank.load_batch([0])
        rank.activations[1] = rank.forward(0, rank.activations.pop(0), rank.weights[0])
        assert 0 not in rank.activations

    assert alone(lines)[2:5] == ["load_batch -> 2", "forward 2 0 -> 3 4", "free 2"]


def test_pop_of_a_key_of_several_parts_without_parentheses_asks_for_a_tuple() -> None:
    def lines(rank: Rank) -> None:
        rank.activations[0, 1] = rank.load_batch([1])
        rank.activations.pop(0, 1)

    error = refused(lines, "unknown key", rank=0, op=1)
    assert "is one tuple, write pop((0, 1))" in str(error)


def test_pop_of_one_of_two_keys_is_not_the_last_use() -> None:
    def lines(rank: Rank) -> None:
        weight = rank.load_weights(0)[0]
        rank.weights[0] = weight
        rank.activations["a"] = rank.activations["b"] = rank.load_batch([0])
        rank.forward(0, rank.activations.pop("a"), weight)
        assert rank.activations["b"].alive

    assert "free 2" not in alone(lines)[: alone(lines).index("forward 2 0 -> 3 4") + 2]


def test_a_popped_value_may_be_stored_again() -> None:
    def lines(rank: Rank) -> None:
        rank.weights[0] = rank.load_weights(0)[0]
        rank.activations["a"] = rank.load_batch([0])
        rank.activations["b"] = rank.activations.pop("a")
        rank.forward(0, rank.activations["b"], rank.weights[0])
        assert rank.activations["b"].alive

    alone(lines)


def test_a_value_used_twice_by_one_op_is_freed_once() -> None:
    async def strategy(rank: Rank) -> None:
        weight = rank.load_weights(0)[0]
        first, second = rank.all_gather(weight, axis="tp"), rank.all_gather(weight, axis="tp")
        await second
        await first

    tape = trace(strategy, 1, 1, 1).tapes[0]
    freed = [op.inputs[0] for op in tape if op.kind.value == "free"]
    assert sorted(freed) == sorted(set(freed)) == [0, 1, 2, 3]


# Values without a key.


def test_a_popped_value_in_a_variable_lives_until_its_last_use() -> None:
    def lines(rank: Rank) -> None:
        rank.weights[0] = rank.load_weights(0)[0]
        rank.activations[0] = rank.load_batch([0])
        batch = rank.activations.pop(0)
        rank.forward(0, batch, rank.weights[0], save=False)
        rank.forward(0, batch, rank.weights[0], save=False)

    assert alone(lines)[2:6] == ["load_batch -> 2", "forward 2 0 -> 3", "forward 2 0 -> 4", "free 2"]


def test_a_value_may_be_stored_after_a_use() -> None:
    def lines(rank: Rank) -> None:
        rank.weights[0] = rank.load_weights(0)[0]
        batch = rank.load_batch([0])
        rank.forward(0, batch, rank.weights[0], save=False)
        rank.activations[0] = batch
        assert batch.alive

    assert "free 2" not in alone(lines)[:4]


def test_a_value_that_is_used_again_in_a_batch_of_messages_is_freed_after_it() -> None:
    async def strategy(rank: Rank) -> None:
        weight = rank.load_weight(0)
        batch = rank.load_batch([0])
        rank.forward(0, batch, weight, save=False)
        with rank.batch_p2p():
            send, receive = rank.send(weight, to=1 - rank.index), rank.recv(source=1 - rank.index)
        await send
        await receive

    for tape in trace(strategy, 2, 1, 1).tapes:
        (free,) = (at for at, op in enumerate(tape) if op.kind is OpKind.FREE and op.inputs == (0,))
        batch = [at for at, op in enumerate(tape) if op.batch == 0]
        assert len(batch) == 2
        assert free > batch[-1]


@given(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=2), max_size=12))
def test_a_value_in_a_list_is_freed_once_right_after_its_last_use(uses: list[list[int]]) -> None:
    async def strategy(rank: Rank) -> None:
        gradients = [rank.zero_gradient(0) for _ in range(5)]
        for numbers in uses:
            for number in numbers:
                rank.cast(gradients[number])
            rank.add(gradients[numbers[0]], gradients[numbers[-1]])

    (tape,) = trace(strategy, 1, 1, 1).tapes
    for value in range(5):
        (free,) = (at for at, op in enumerate(tape) if op.kind is OpKind.FREE and op.inputs == (value,))
        reads = [at for at, op in enumerate(tape) if op.kind is not OpKind.FREE and value in op.inputs]
        last = reads[-1] if reads else max(at for at, op in enumerate(tape) if op.kind is not OpKind.FREE)
        assert free > last
        assert all(op.kind is OpKind.FREE for op in tape[last + 1 : free])


def test_a_refused_op_after_a_moved_free_is_found_at_its_own_line() -> None:
    def lines(rank: Rank) -> None:
        rank.weights[0] = rank.load_weights(0)[0]
        batch = rank.load_batch([0])
        rank.forward(0, batch, rank.weights[0], save=False)
        rank.forward(0, batch, rank.weights[0], save=False)
        rank.load_weight(0)

    error = refused(lines, "loaded twice", layer=0)
    assert (error.rank, error.op) == (0, 6)


# Refused uses.


def test_a_value_whose_last_key_was_deleted_cannot_be_used() -> None:
    def lines(rank: Rank) -> None:
        batch = rank.activations[0] = rank.load_batch([0])
        del rank.activations[0]
        rank.loss(batch)

    refused(lines, "freed")


def step_of_one_layer(rank: Rank) -> tuple[Value, Value]:
    """(gradient of the weight, input) of layer 0 of 1, all kept in the stores."""
    rank.weights[0], rank.opt_states[0] = rank.load_weights(0)
    rank.activations[0] = rank.load_batch(rank.microbatches)
    rank.activations[1] = rank.forward(0, rank.activations[0], rank.weights[0])
    rank.grad_activations[1] = rank.loss(rank.activations[1])
    rank.grad_weights[0], _ = rank.backward(0, rank.activations[0], rank.grad_activations[1], rank.weights[0])
    return rank.grad_weights[0], rank.activations[0]


@pytest.mark.parametrize("key", ["kept", "overwritten", "popped"])
def test_a_weight_that_an_update_replaced_cannot_be_used(key: str) -> None:
    def lines(rank: Rank) -> None:
        gradient, batch = step_of_one_layer(rank)
        weight = rank.weights.pop(0) if key == "popped" else rank.weights[0]
        update = rank.update(0, gradient, weight, rank.opt_states[0])
        if key == "overwritten":
            rank.weights[0], rank.opt_states[0] = update
        rank.forward(0, batch, weight)

    refused(lines, "replaced", layer=0, layers=1)


def test_a_dead_value_cannot_be_stored() -> None:
    def lines(rank: Rank) -> None:
        batch = rank.activations[0] = rank.load_batch([0])
        del rank.activations[0]
        rank.activations[1] = batch

    refused(lines, "freed")


def test_a_value_belongs_into_the_store_of_its_kind() -> None:
    def lines(rank: Rank) -> None:
        rank.weights[3] = rank.load_batch([0])

    refused(lines, "wrong store")


def test_a_handle_cannot_be_stored_unawaited() -> None:
    async def strategy(rank: Rank) -> None:
        rank.weights[0] = rank.load_weights(0, shard=rank.index, of=2)[0]
        rank.weights["full"] = rank.all_gather(rank.weights[0])  # pyright: ignore[reportArgumentType]

    require_refusal(refusal(strategy), "not awaited", op=3)


@pytest.mark.parametrize("thing", [None, 3, "weights", [1]])
def test_only_values_can_be_stored_and_computed_on(thing: object) -> None:
    def storing(rank: Rank) -> None:
        rank.weights[0] = thing  # pyright: ignore[reportArgumentType]

    def computing(rank: Rank) -> None:
        rank.loss(thing)  # pyright: ignore[reportArgumentType]

    refused(storing, "no value")
    refused(computing, "no value")


def test_a_value_of_another_rank_can_be_neither_stored_nor_used() -> None:
    shared: list[Value] = []

    async def storing(rank: Rank) -> None:
        shared.append(rank.load_batch([0]))
        rank.activations[0] = shared[0]

    async def computing(rank: Rank) -> None:
        rank.weights[0] = rank.load_weights(0)[0]
        rank.forward(0, shared[0], rank.weights[0])

    require_refusal(refusal(storing), "another rank's value", rank=1, op=1)
    require_refusal(refusal(computing), "another rank's value", rank=0, op=2, layer=0)


def test_a_missing_key_names_the_keys_there_are() -> None:
    def lines(rank: Rank) -> None:
        rank.activations[0] = rank.load_batch([0])
        rank.activations[0, 1] = rank.load_batch([1])
        rank.activations[0, 2]

    error = refused(lines, "unknown key")
    assert isinstance(error, KeyError)
    assert (error.rank, error.op) == (0, 2)
    refused(lambda rank: rank.weights.pop(1), "unknown key")
    refused(lambda rank: rank.weights.__delitem__(1), "unknown key")


def test_a_store_is_a_mapping() -> None:
    def lines(rank: Rank) -> None:
        assert rank.weights.get(0) is None
        assert 0 not in rank.weights
        rank.weights[0], rank.weights["b"] = rank.load_weights(0)[0], rank.load_weights(1)[0]
        assert list(rank.weights) == [0, "b"]
        assert len(rank.weights) == 2
        assert [value.spec.layer for value in rank.weights.values()] == [0, 1]
        rank.weights.clear()
        assert not rank.weights

    tape = alone(lines)
    assert tape[4:6] in (["free 0", "free 2"], ["free 2", "free 0"])


def test_a_value_knows_its_size_and_says_what_it_is() -> None:
    def lines(rank: Rank) -> None:
        weight = rank.weights[0] = rank.load_weights(0, shard=1, of=4)[0]
        batch = rank.activations[0] = rank.load_batch([0, 1])
        assert (weight.elements, weight.bytes) == (512 * 512 // 4, 512 * 512)
        assert (batch.elements, batch.bytes) == (2 * 512 * 256, 8 * 512 * 256)
        assert repr(weight) == "<weights[0] (shard 1 of 4) on rank 0, 65536 elements>"
        assert "weights[0] (shard 1 of 4)" in repr(rank.weights)
        del rank.activations[0]
        assert repr(batch) == "<activations[0] (microbatches 0-1) on rank 0, 262144 elements, freed>"

    alone(lines)


# Any sequence of store operations: what lives on the tape is what the keys name.


@dataclass
class Book:
    """Contents of one store, in plain dictionaries."""

    keyed: dict[int, int] = field(default_factory=dict[int, int])
    loose: set[int] = field(default_factory=set[int])
    """Made or popped, and not used since."""


Step = tuple[str, int, int]
steps = st.lists(
    st.tuples(
        st.sampled_from(["make", "alias", "overwrite", "delete", "pop", "use"]), st.integers(0, 4), st.integers(0, 4)
    ),
    max_size=30,
)


@given(steps)
def test_the_values_that_live_are_those_that_keys_name(todo: list[Step]) -> None:
    world = World(1, 1, 1)
    rank = world.ranks[0]
    rank.weights[0] = rank.load_weights(0)[0]
    base = {0, 1}
    book = Book()
    for action, a, b in todo:
        if action in {"make", "overwrite"}:
            value = rank.load_batch([0])
            if action == "overwrite":
                rank.activations[a] = value
                book.keyed[a] = value.number
            else:
                book.loose.add(value.number)
        elif a in book.keyed:
            number = book.keyed[a]
            if action == "alias":
                rank.activations[b] = rank.activations[a]
                book.keyed[b] = number
            elif action == "delete":
                del rank.activations[a]
                del book.keyed[a]
            elif action == "pop":
                assert rank.activations.pop(a).number == number
                del book.keyed[a]
                if number not in book.keyed.values():
                    book.loose.add(number)
            else:
                rank.forward(0, rank.activations[a], rank.weights[0], save=False)
                book.loose.add(rank.ops[-1].outputs[0])
        live: set[int] = set()
        for op in rank.ops:
            live |= set(op.outputs)
            live -= set(op.inputs) if op.kind.value == "free" else set()
        assert live == base | set(book.keyed.values()) | book.loose
        assert {key: value.number for key, value in rank.activations.items()} == book.keyed
        assert all(value.alive for value in rank.activations.values())
    program = world.finish()
    freed = [op.inputs[0] for op in program.tapes[0] if op.kind.value == "free"]
    assert len(freed) == len(set(freed))
    assert not live_at_end(program, 0)


def test_a_cycle_is_named_whole() -> None:
    waits = {0: Wait("a for rank 2", [2]), 1: Wait("b for rank 0", [0]), 2: Wait("c for rank 1", [1])}
    assert deadlock_sentence(waits) == (
        "deadlock: rank 0 waits in a for rank 2; rank 2 waits in c for rank 1; rank 1 waits in b for rank 0."
    )


def test_ranks_on_the_way_to_a_cycle_are_counted_not_listed() -> None:
    waits = {0: Wait("a", [1]), 1: Wait("b", [2]), 2: Wait("c", [1])}
    assert deadlock_sentence(waits) == "deadlock: rank 1 waits in b; rank 2 waits in c (1 more rank waits behind them)."


def test_several_ranks_behind_are_counted_in_the_plural() -> None:
    waits = {0: Wait("a", [1]), 1: Wait("b", [0]), 2: Wait("c", [0]), 3: Wait("d", [2])}
    assert deadlock_sentence(waits) == "deadlock: rank 0 waits in a; rank 1 waits in b (2 more ranks wait behind them)."


def test_a_chain_ends_at_the_rank_that_has_ended() -> None:
    waits = {0: Wait("a", [1]), 1: Wait("b", [3])}
    assert deadlock_sentence(waits) == "deadlock: rank 0 waits in a; rank 1 waits in b; rank 3 has ended without it."


def test_a_blocker_that_has_ended_is_the_cause_before_one_that_waits() -> None:
    waits = {0: Wait("a", [1, 2]), 1: Wait("b", [0])}
    assert deadlock_sentence(waits) == (
        "deadlock: rank 0 waits in a; rank 2 has ended without it (1 more rank waits behind them)."
    )


def test_a_rank_may_wait_for_itself() -> None:
    assert deadlock_sentence({4: Wait("a", [4])}) == "deadlock: rank 4 waits in a."


@given(st.dictionaries(st.integers(0, 9), st.integers(0, 9), min_size=1))
def test_every_waiting_rank_is_shown_or_counted_and_the_links_follow(blocker: dict[int, int]) -> None:
    text = deadlock_sentence({rank: Wait(f"w{rank} for {to}", [to]) for rank, to in blocker.items()})
    body, _, hidden = text.removeprefix("deadlock: ").removesuffix(".").partition(" (")
    sentences = body.split("; ")
    end = sentences.pop() if sentences[-1].endswith("has ended without it") else None
    ranks = [int(sentence.split()[1]) for sentence in sentences]
    assert len(set(ranks)) == len(ranks)
    assert all(blocker[a] == b for a, b in itertools.pairwise(ranks))
    assert len(ranks) + (int(hidden.split()[0]) if hidden else 0) == len(blocker)
    if end is None:
        assert blocker[ranks[-1]] == ranks[0], "a cycle closes"
    else:
        assert blocker[ranks[-1]] == int(end.split()[1]) not in blocker
