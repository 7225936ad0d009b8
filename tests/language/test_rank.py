"""The verbs: what each puts on the tape, and what each refuses by its name."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from shardlab.common.files import read_file, require_regular_file
from shardlab.common.user_code import find_member, load_module, require_ops, trace_limits
from shardlab.language import ExpectedValue, Holds, Kind, Mesh, OpKind, Rank, Sizes, UserError, World, trace
from shardlab.language.values import Value
from shardlab.strategies import STRATEGIES
from tests.language.tapes import alone, refusal, refused, sentence, together
from tests.support.refusing import ExpectedRefusal, refusal_by, refuses, require_refusal


@pytest.mark.parametrize("layer", [-1, 2, 7])
@pytest.mark.parametrize("verb", ["load_weight", "load_opt_state", "forward", "backward", "update"])
def test_a_layer_that_does_not_exist_is_refused(verb: str, layer: int) -> None:
    def lines(rank: Rank) -> None:
        weight, state = rank.load_weights(0)
        arguments = {"forward": (weight, weight), "backward": (weight,) * 3, "update": (state,) * 3}
        getattr(rank, verb)(layer, *arguments.get(verb, ()))

    assert sentence(refused(lines, "unknown layer"))


@pytest.mark.parametrize(("shard", "of"), [(-1, 2), (2, 2), (0, 0), (5, 4)])
def test_a_shard_that_does_not_exist_is_refused(shard: int, of: int) -> None:
    refused(lambda rank: rank.load_weights(1, shard=shard, of=of), "unknown slice", layer=1)


def test_loading_a_slice_twice_is_refused_with_the_op_that_had_it() -> None:
    def lines(rank: Rank) -> None:
        rank.load_batch([0])
        rank.load_weights(1, shard=1, of=2)
        rank.load_weights(1, shard=0, of=2)
        rank.load_weights(0, shard=1, of=2)
        rank.load_weights(1, shard=1, of=2)

    refused(lines, "loaded twice", rank=0, op=7, layer=1)


@pytest.mark.parametrize("numbers", [[], [2], [-1], [0, 0], [0, 1, 2]])
def test_a_batch_is_some_of_the_steps_microbatches_each_once(numbers: list[int]) -> None:
    refused(lambda rank: rank.load_batch(numbers), "unknown microbatch")


def test_loads_say_on_the_tape_what_they_load() -> None:
    async def strategy(rank: Rank) -> None:
        rank.load_weights(1, shard=1, of=4)
        rank.load_batch(iter([2, 0]))

    weight, state, batch, *_ = trace(strategy, 1, 2, 3).tapes[0]
    assert (weight.kind, weight.layer, weight.holds) == (OpKind.LOAD_WEIGHT, 1, Holds(0b0010, 4))
    assert (state.kind, state.layer, state.holds) == (OpKind.LOAD_OPT_STATE, 1, Holds(0b0010, 4))
    assert (batch.kind, batch.layer, batch.holds) == (OpKind.LOAD_BATCH, 0, Holds(0b101, 3))


@pytest.mark.parametrize("peer", [-1, 2, 9])
def test_a_peer_outside_the_world_is_refused(peer: int) -> None:
    async def sends(rank: Rank) -> None:
        rank.send(rank.load_batch([0]), to=peer)

    async def receives(rank: Rank) -> None:
        rank.recv(source=peer)

    async def exchanges(rank: Rank) -> None:
        rank.exchange(rank.load_batch([0]), to=1 - rank.index, source=peer)

    require_refusal(refusal(sends), "unknown rank")
    require_refusal(refusal(receives), "unknown rank")
    require_refusal(refusal(exchanges), "unknown rank")


def test_a_rank_is_not_its_own_peer() -> None:
    async def sends(rank: Rank) -> None:
        rank.send(rank.load_batch([0]), to=rank.index)

    async def receives(rank: Rank) -> None:
        rank.recv(source=rank.index)

    require_refusal(refusal(sends), "unknown rank", rank=0, op=1)
    require_refusal(refusal(receives), "unknown rank", rank=0, op=0)


@pytest.mark.parametrize(
    ("expect", "expected"),
    [
        (("weight", 0, 0), refusal_by("wrong expectation")),
        (("saved", 0, 0), refusal_by("wrong expectation")),
        (("activations", 0, 2), refusal_by("unknown microbatch", layer=0)),
        (("activations", 0, [0, -1]), refusal_by("unknown microbatch", layer=0)),
    ],
)
def test_a_receive_cannot_expect_what_does_not_exist(expect: tuple[str, int, int], expected: ExpectedRefusal) -> None:
    async def strategy(rank: Rank) -> None:
        rank.recv(source=1 - rank.index, expect=expect)

    require_refusal(refusal(strategy), expected)


@pytest.mark.parametrize(
    ("expect", "message"),
    [
        (None, ExpectedValue(Kind.ACTIVATION, 0, 0b10)),
        (("activations", 0, 1), ExpectedValue(Kind.ACTIVATION, 0, 0b10)),
        (("activations", 0, [1]), ExpectedValue(Kind.ACTIVATION, 0, 0b10)),
    ],
)
def test_a_receive_says_on_the_tape_what_it_gets(expect: tuple[str, int, int] | None, message: ExpectedValue) -> None:
    async def strategy(rank: Rank) -> None:
        if rank.index == 0:
            await rank.send(rank.load_batch([1]), to=1)
        else:
            value = await rank.recv(source=0, expect=expect)
            assert value.spec.microbatches == 0b10

    receive = trace(strategy, 2, 1, 2).tapes[1][0]
    assert (receive.kind, receive.layer, receive.peer, receive.expect) == (OpKind.RECV, 0, 0, message)


@pytest.mark.parametrize("expect", [("activations", 0, 0), ("activations", 1, 1), ("grad_activations", 0, 1)])
def test_another_message_than_the_one_meant_is_refused_by_name(expect: tuple[str, int, int]) -> None:
    async def strategy(rank: Rank) -> None:
        if rank.index == 0:
            await rank.send(rank.load_batch([1]), to=1)
        else:
            await rank.recv(source=0, expect=expect)

    error = refusal(strategy)
    require_refusal(error, "other message")
    assert (error.rank, error.op) == (1, 0)


def test_messages_between_two_ranks_arrive_in_the_order_they_were_sent() -> None:
    async def strategy(rank: Rank) -> None:
        if rank.index == 0:
            for m in rank.microbatches:
                await rank.send(rank.load_batch([m]), to=1)
        else:
            handles = [rank.recv(source=0) for _ in rank.microbatches]
            values = [await handle for handle in reversed(handles)]
            assert [value.spec.microbatches for value in values] == [0b100, 0b10, 0b1]

    trace(strategy, 2, 1, 3)


def test_shares_and_stages_are_dealt_evenly_in_order() -> None:
    world = World(Mesh(pp=2, dp_shard=3), 4, 6)
    assert [list(rank.share("dp_shard")) for rank in world.ranks[:3]] == [[0, 1], [2, 3], [4, 5]]
    assert [list(rank.share()) for rank in world.ranks] == [[m] for m in range(6)]
    assert [list(rank.stage_layers("pp")) for rank in world.ranks] == [[0, 1]] * 3 + [[2, 3]] * 3
    assert [rank.coordinate("dp_shard") for rank in world.ranks] == [0, 1, 2] * 2
    assert world.ranks[4].group("dp_shard").ranks == (3, 4, 5)
    assert world.ranks[4].group().ranks == tuple(range(6))


def test_a_share_among_all_ranks_that_does_not_divide_is_refused_with_the_axes_and_its_line() -> None:
    world = World(Mesh(pp=2, dp_shard=3), 4, 3)
    with pytest.raises(
        UserError, match=r"among 6 ranks; .*, or name one of the axes pp, dp_shard \(.*test_rank\.py:\d+\)$"
    ):
        world.ranks[0].share()
    with pytest.raises(UserError, match=r"give a multiple of 2 microbatches \(.*:\d+\)$"):
        world.ranks[0].share("pp")


@pytest.mark.parametrize(
    ("ask", "sentence"),
    [
        (Rank.share, "5 microbatches do not divide among 2 ranks; give a multiple of 2 microbatches"),
        (Rank.stage_layers, "3 layers do not divide among 2 ranks; give a multiple of 2 layers"),
    ],
)
def test_numbers_that_do_not_divide_are_refused_in_one_sentence(ask: Callable[[Rank], object], sentence: str) -> None:
    async def strategy(rank: Rank) -> None:
        ask(rank)

    with pytest.raises(UserError, match=sentence):
        trace(strategy, 2, 3, 5)


@pytest.mark.parametrize("verb", ["group", "coordinate", "share", "stage_layers"])
def test_an_axis_that_does_not_exist_is_refused_where_it_is_named(verb: str) -> None:
    async def strategy(rank: Rank) -> None:
        rank.load_batch([0])
        getattr(rank, verb)("rows")

    with refuses("unknown axis", rank=0, op=1):
        trace(strategy, 2, 2, 2)


@pytest.mark.parametrize("save", [True, False])
def test_without_a_saved_graph_backward_recomputes(save: bool) -> None:
    def lines(rank: Rank) -> None:
        rank.weights[0] = rank.load_weights(0)[0]
        rank.activations[0] = rank.load_batch([0])
        output = rank.forward(0, rank.activations[0], rank.weights[0], save=save)
        rank.backward(0, rank.activations[0], rank.loss(output), rank.weights[0])

    passes = [word for word in alone(lines, layers=1) if word.split()[0] in {"forward", "recompute", "backward"}]
    assert passes == (
        ["forward 2 0 -> 3 4", "backward 2 5 0 4 -> 6 7"]
        if save
        else ["forward 2 0 -> 3", "recompute 2 0 -> 5", "backward 2 4 0 5 -> 6 7"]
    )


def test_a_second_backward_recomputes_what_the_first_one_used_up() -> None:
    def lines(rank: Rank) -> None:
        rank.weights[0] = rank.load_weights(0)[0]
        rank.activations[0] = rank.load_batch([0])
        rank.grad_activations[1] = rank.loss(rank.forward(0, rank.activations[0], rank.weights[0]))
        for _ in range(2):
            rank.backward(0, rank.activations[0], rank.grad_activations[1], rank.weights[0])

    assert [word.split()[0] for word in alone(lines, layers=1)].count("recompute") == 1


def test_an_exchange_puts_its_send_and_receive_into_one_batch() -> None:
    async def strategy(rank: Rank) -> None:
        other = 1 - rank.index
        for m in rank.microbatches:
            await rank.exchange(rank.load_batch([m]), to=other, source=other, expect=("activations", 0, m))
        if rank.index:
            await rank.recv(source=0)
        else:
            await rank.send(rank.load_batch([0]), to=1)

    for tape in trace(strategy, 2, 1, 2).tapes:
        messages = [op for op in tape if op.kind in {OpKind.SEND, OpKind.RECV}]
        assert [(op.kind.value, op.batch) for op in messages[:4]] == [
            ("send", 0),
            ("recv", 0),
            ("send", 1),
            ("recv", 1),
        ]
        assert messages[4].batch == -1


@pytest.mark.parametrize(
    ("verb", "pieces"), [("all_reduce", [3, 3]), ("reduce_scatter", [0b01, 0b10]), ("all_gather", [3, 3])]
)
def test_a_collective_gives_every_member_its_result(verb: str, pieces: list[int]) -> None:
    results: list[int] = []

    async def strategy(rank: Rank) -> None:
        shard = rank.load_weights(0, shard=rank.index, of=2)[0]
        full = rank.weights[0] = await rank.all_gather(shard)
        batch = rank.activations[0] = rank.load_batch([rank.index])
        gradient, _ = rank.backward(0, batch, rank.loss(rank.forward(0, batch, full)), full)
        value = gradient if verb != "all_gather" else (await rank.reduce_scatter(gradient))
        result = await getattr(rank, verb)(value, axis="dp_shard")
        assert result.spec.cells == 0b11
        results.append(result.spec.holds.refined(2).mask)

    program = trace(strategy, 2, 1, 2)
    assert sorted(results) == pieces
    for tape in program.tapes:
        op = next(op for op in reversed(tape) if op.kind.value == verb)
        assert str(op.group) == "dp_shard"
        assert op.layer == 0


def test_members_that_issue_other_collectives_are_refused_with_both() -> None:
    async def kinds(rank: Rank) -> None:
        value = rank.load_weights(0, shard=rank.index, of=2)[0]
        await (rank.all_gather(value) if rank.index else rank.all_reduce(value))

    async def layers(rank: Rank) -> None:
        await rank.all_gather(rank.load_weights(rank.index)[0])

    error = refusal(kinds)
    require_refusal(error, "other order", rank=1, op=2, layer=0)
    require_refusal(refusal(layers), "other order", layer=1)


def test_collectives_of_one_group_meet_in_the_order_of_issue() -> None:
    async def strategy(rank: Rank) -> None:
        handles = [rank.all_gather(rank.load_weights(l, shard=rank.index, of=2)[0]) for l in rank.layers]
        for l in reversed(rank.layers):
            assert (await handles[l]).spec.layer == l

    for tape in together(strategy, layers=3):
        assert [word for word in tape if word.startswith("wait")] == ["wait h2", "wait h1", "wait h0"]


def test_a_refusal_of_the_rules_carries_rank_and_op() -> None:
    async def strategy(rank: Rank) -> None:
        rank.weights[0] = rank.load_weights(0, shard=rank.index, of=2)[0]
        if rank.index == 1:
            rank.forward(0, rank.load_batch([0]), rank.weights[0])

    error = refusal(strategy)
    assert (error.rank, error.op) == (1, 3)
    require_refusal(error, "partial weight", rank=1, op=3, layer=0, missing=(0,))


CALLS: dict[str, Callable[[Rank, Value, Value], object]] = {
    "forward(layer 1)": lambda rank, bad, x: [rank.forward(layer, x, bad) for layer in [1]],
    "loss": lambda rank, bad, x: rank.loss(bad),
    "loss_stats": lambda rank, bad, x: rank.loss_stats(bad),
    "norm(layer 1)": lambda rank, bad, x: rank.norm(1, bad),
    "backward(layer 1)": lambda rank, bad, x: rank.backward(1, x, bad, x),
    "backward_input(layer 0)": lambda rank, bad, x: rank.backward_input(0, x, bad, x),
    "backward_weight(layer 1)": lambda rank, bad, x: rank.backward_weight(1, x, bad),
    "attend(layer 0)": lambda rank, bad, x: rank.attend(0, x, bad),
    "attend_backward(layer 1)": lambda rank, bad, x: rank.attend_backward(1, x, x, x, bad),
    "update(layer 1)": lambda rank, bad, x: rank.update(1, x, bad, x),
    "add": lambda rank, bad, x: x + bad,
    "scale": lambda rank, bad, x: rank.scale(bad, 2),
    "slice": lambda rank, bad, x: rank.slice(bad, 0, 2),
    "concatenate": lambda rank, bad, x: rank.concatenate([x, bad]),
    "all_reduce": lambda rank, bad, x: rank.all_reduce(bad),
    "broadcast": lambda rank, bad, x: rank.broadcast(bad, root=rank.index),
    "send": lambda rank, bad, x: rank.send(bad, to=1 - rank.index),
    "exchange": lambda rank, bad, x: rank.exchange(bad, to=1 - rank.index, source=1 - rank.index),
}


@pytest.mark.parametrize("verb", CALLS)
def test_a_verb_that_is_given_a_handle_is_named_with_its_layer(verb: str) -> None:
    async def strategy(rank: Rank) -> None:
        rank.weights[0] = rank.load_weight(0)
        rank.activations[0] = rank.load_batch(rank.share())
        handle = cast("Value", rank.all_gather(rank.weights[0]))
        CALLS[verb](rank, handle, rank.activations[0])

    require_refusal(refusal(strategy), "not awaited", rank=0, op=3)


# Each sentence about a request that cannot be met, once: of worlds, bounds and users' files.


async def of_two(rank: Rank, other: int) -> None: ...


def plain(rank: Rank) -> None: ...


async def shares(rank: Rank) -> None:
    rank.share()


def too_many() -> None:
    with trace_limits(ops=100):
        require_ops(2000, "passes")


REQUESTS: dict[str, Callable[[], object]] = {
    "--max-seconds-per-op: 0 is too little; give more than 0": lambda: trace_limits(seconds=0).__enter__(),
    "passes come to 2,000 ops or more, and at most 100 are traced; take fewer, or raise --max-ops if there is the time "
    "and the memory": too_many,
    "axis tp has 0 ranks; every axis of a mesh has at least 1": lambda: Mesh(tp=0),
    "axis 'dp' is not an axis of a mesh; the axes are pp, dp_replicate, dp_shard, cp, tp, ep": lambda: Mesh().group(
        0, "dp"
    ),
    "0 layers were asked for; give 1 or more": lambda: trace(shares, 1, 0, 1),
    "plain is not a strategy: write it as `async def plain(rank): ...`": lambda: trace(cast(Any, plain), 1, 1, 1),
    "of_two cannot be called with the rank alone: missing a required argument: 'other'": lambda: trace(
        cast(Any, of_two), 1, 1, 1
    ),
    "1 microbatch does not divide among 2 ranks; give a multiple of 2 microbatches": lambda: trace(shares, 2, 1, 1),
}


@pytest.mark.parametrize("sentence", REQUESTS)
def test_an_impossible_request_is_refused_in_a_sentence(sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        REQUESTS[sentence]()
    assert re.sub(r" \(.*test_rank\.py:\d+\)$", "", str(caught.value)) == sentence


def as_toml(path: Path) -> object:
    return read_file(path, "TOML")


def function_of(path: Path, name: str = "ddq") -> object:
    return find_member(load_module(path), path, name, ("function", "functions"), callable)


FILES: list[tuple[str, str, Callable[[Path], object]]] = [
    ("nowhere", "{path} does not exist; name a text file", require_regular_file),
    ("x" * 300, "{path} cannot be read (File name too long); name a text file that can", require_regular_file),
    ("folder", "{path} is a folder; name a text file", require_regular_file),
    (
        "pipe",
        "{path} is a pipe, but text is read from random places; write it to a file and name that",
        require_regular_file,
    ),
    ("nowhere", "{path} cannot be read: No such file or directory", as_toml),
    ("user.py", "{path} is not TOML: Expected '=' after a key in a key/value pair (at line 1, column 5)", as_toml),
    ("nowhere", "{path} is not a file; give path/to/file.py:NAME", load_module),
    ("broken.py", "{path}:2 cannot be run: ZeroDivisionError: division by zero", load_module),
    ("refuses.py", "{path}:3: axis tp has 0 ranks; every axis of a mesh has at least 1", load_module),
    ("user.py", "{path} has no function 'ddq'; did you mean ddp?", function_of),
    (
        "two.py",
        "say which function of {path}: {path}:NAME; its functions are: ddp, fsdp",
        lambda path: function_of(path, ""),
    ),
]
"""A file's name, the sentence about its path, and what is done with it."""


@pytest.mark.parametrize(("name", "sentence", "call"), FILES)
def test_an_unusable_file_is_refused_in_a_sentence(
    tmp_path: Path, name: str, sentence: str, call: Callable[[Path], object]
) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "user.py").write_text("def ddp(): ...\n")
    (tmp_path / "two.py").write_text("def ddp(): ...\ndef fsdp(): ...\n")
    (tmp_path / "broken.py").write_text("\n1 / 0\n")
    (tmp_path / "refuses.py").write_text("from shardlab.language import Mesh\n\nMesh(tp=0)\n")
    with pytest.raises(UserError) as caught:
        call(tmp_path / name)
    assert str(caught.value) == sentence.format(path=tmp_path / name)


# A head that is tied to the embedding, and updates of slices.


TIED = Sizes.half_blocks(1, tied=True)


def test_the_key_of_a_tied_head_names_the_embeddings_weight() -> None:
    def lines(rank: Rank) -> None:
        rank.weights[0] = rank.load_weight(0)
        assert rank.weights[rank.layers[-1]] is rank.weights[0]
        assert rank.layers[-1] not in rank.weights
        del rank.weights[0]
        with pytest.raises(KeyError):
            rank.weights[rank.layers[-1]]

    alone(lines, layers=TIED)


@pytest.mark.parametrize(("ranks", "muon", "gathers"), [(1, True, 0), (2, False, 0), (2, True, 4)])
def test_an_update_of_a_slice_gathers_directions_for_whole_matrices(ranks: int, muon: bool, gathers: int) -> None:
    sizes = replace(Sizes.puzzle(4), whole_matrices=muon)
    tape = trace(STRATEGIES["wsdp"].program, ranks, sizes, 2).tapes[0]
    assert sum(op.kind is OpKind.DIRECTION for op in tape) == gathers
    assert sum(op.kind is OpKind.ALL_GATHER for op in tape) == 2 * 4 + gathers
