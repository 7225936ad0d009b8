"""Collectives with a root, a barrier, and reductions: what each member receives, what is refused, what is traced."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.check import ChannelModel, check
from shardlab.common.errors import About
from shardlab.language import (
    Holds,
    Kind,
    Mesh,
    OpKind,
    Program,
    Rank,
    Reduction,
    Refused,
    Sizes,
    Spec,
    Strategy,
    World,
    trace,
)
from shardlab.language.collective_calls import Call, collective_results, require_valid_call
from shardlab.language.rules import arithmetic, optimizer_step
from shardlab.language.rules.kinds import WHOLE
from shardlab.language.rules.layer_rules import rules_of
from shardlab.language.rules.spec import Space, form_of
from tests.language.tapes import refusal, together
from tests.support.channel_judge import hangs
from tests.support.interpreter import judge
from tests.support.refusing import ExpectedRefusal, refusal_by, refuses, require_refusal

RANKS = (4, 5, 6)
SIX = 0b111111
"""All microbatches of the step."""
SPACE = Space(6)
RULES = rules_of(Sizes.puzzle(2).signatures, SPACE)
BROADCAST, SCATTER = Call(OpKind.BROADCAST, 5), Call(OpKind.SCATTER, 5)
GATHER, REDUCE = Call(OpKind.GATHER, 5), Call(OpKind.REDUCE, 5)


def weight(holds: Holds = WHOLE, step: int = 0) -> Spec:
    return Spec(form_of(Kind.WEIGHT, 1, step, SPACE, holds))


def opt_state() -> Spec:
    return Spec(form_of(Kind.OPT_STATE, 1, 0, SPACE))


def gradient(sums: int, holds: Holds = WHOLE) -> Spec:
    return Spec(form_of(Kind.GRAD_WEIGHT, 1, 0, SPACE, holds), sums)


def rows(cells: int, space: Space = SPACE) -> Spec:
    return Spec(form_of(Kind.ACTIVATION, 0, 0, space), cells)


def scalar(parts: int, reduction: Reduction = Reduction.SUM) -> Spec:
    return Spec(form_of(Kind.SCALAR, 0, 0, SPACE, Holds(parts, 4), reduction=reduction))


def shard(n: int, of: int = 3) -> Holds:
    return Holds(1 << n, of)


def by(reduction: Reduction, kind: OpKind = OpKind.ALL_REDUCE) -> Call:
    return Call(kind, 5 if kind is OpKind.REDUCE else -1, reduction)


def test_a_broadcast_is_the_roots_value_on_all_others() -> None:
    value = gradient(0b11, shard(1))
    assert collective_results(BROADCAST, [None, value, None], RANKS, RULES) == [value, None, value]


def test_scattered_parameters_are_cut_as_a_reduce_scatter_cuts_them() -> None:
    for value in (gradient(0b11), gradient(0b11, Holds(0b110, 3))):
        parts = [value._replace(cells=0b100), value, value._replace(cells=0)]
        scattered = collective_results(SCATTER, [None, value._replace(cells=0b111), None], RANKS, RULES)
        assert scattered == collective_results(Call(OpKind.REDUCE_SCATTER), parts, RANKS, RULES)


def test_scattered_batches_are_runs_of_whole_microbatches() -> None:
    assert collective_results(SCATTER, [None, rows(0b111111), None], RANKS, RULES) == [
        rows(0b000011),
        rows(0b001100),
        rows(0b110000),
    ]
    assert collective_results(SCATTER, [None, rows(0b101010), None], RANKS, RULES) == [
        rows(0b10),
        rows(0b1000),
        rows(0b100000),
    ]
    halves = rows(0b10_10_10, Space(3, 2))
    assert collective_results(SCATTER, [None, halves, None], RANKS, RULES) == [
        halves._replace(cells=1 << bit) for bit in (1, 3, 5)
    ]


@given(st.sampled_from(RANKS), st.integers(0, 2))
def test_a_gather_and_a_reduce_are_all_gather_and_all_reduce_on_the_root_alone(root: int, turn: int) -> None:
    pieces = [weight(shard((n + turn) % 3)) for n in range(3)]
    terms = [gradient(1 << (n + turn) % 3) for n in range(3)]
    for kind, everywhere, specs in (
        (OpKind.GATHER, OpKind.ALL_GATHER, pieces),
        (OpKind.REDUCE, OpKind.ALL_REDUCE, terms),
    ):
        whole, *_ = collective_results(Call(everywhere), specs, RANKS, RULES)
        received = collective_results(Call(kind, root), specs, RANKS, RULES)
        assert received == [whole if rank == root else None for rank in RANKS]


def test_scatter_and_then_gather_gives_the_value_back() -> None:
    value = weight()
    pieces = collective_results(SCATTER, [None, value, None], RANKS, RULES)
    assert collective_results(GATHER, pieces, RANKS, RULES)[1] == value


def test_a_barrier_brings_nothing() -> None:
    assert collective_results(Call(OpKind.BARRIER), [None] * 3, RANKS, RULES) == [None] * 3


@pytest.mark.parametrize("reduction", [Reduction.MEAN, Reduction.MIN, Reduction.MAX])
def test_replicas_reduced_are_what_they_were(reduction: Reduction) -> None:
    """Also gradients: what has summed the same is the same."""
    for value in (weight(step=1), gradient(0b111), gradient(0b101, shard(1)), scalar(0b1111)):
        assert collective_results(by(reduction), [value] * 3, RANKS, RULES) == [value] * 3
        assert collective_results(by(reduction, OpKind.REDUCE), [value] * 3, RANKS, RULES) == [None, value, None]


def test_a_mean_of_different_scalars_covers_all_their_parts_and_is_no_norm() -> None:
    parts = [scalar(0b0011), scalar(0b0110), scalar(0b1000)]
    (largest, *_) = collective_results(by(Reduction.MAX), parts, RANKS, RULES)
    assert largest is not None
    assert largest == scalar(0b1111, Reduction.MAX)
    assert str(largest) == "scalars (the max of several ranks')"
    assert largest.microbatches == 0
    with refuses("no sum of squares", layer=1):
        optimizer_step.update(1, gradient(SIX), weight(), opt_state(), largest)
    with refuses("no sum of squares"):
        arithmetic.add(About("add"), [scalar(0b1), largest], ["one", "other"])
    assert collective_results(by(Reduction.MAX), [largest, scalar(0b1), largest], RANKS, RULES) == [largest] * 3


REFUSALS: dict[str, tuple[Callable[[], object], ExpectedRefusal]] = {
    "the mean of gradients, updated with": (
        lambda: optimizer_step.update(
            1,
            collective_results(by(Reduction.MEAN), [gradient(3), gradient(12), gradient(48)], RANKS, RULES)[0]
            or gradient(0),
            Spec(form_of(Kind.WEIGHT, 1, 0, RULES.space)),
            Spec(form_of(Kind.OPT_STATE, 1, 0, RULES.space)),
        ),
        refusal_by("scaled gradient", layer=1),
    ),
    "the least gradient": (
        lambda: collective_results(
            by(Reduction.MIN, OpKind.REDUCE), [gradient(1), gradient(1), gradient(4)], RANKS, RULES
        ),
        refusal_by("replicas differ", layer=1),
    ),
    "the mean of other weights": (
        lambda: collective_results(by(Reduction.MEAN), [weight(), weight(), weight(step=1)], RANKS, RULES),
        refusal_by("replicas differ", layer=1),
    ),
    "the mean of activations": (
        lambda: collective_results(by(Reduction.MEAN), [rows(1)] * 3, RANKS, RULES),
        refusal_by("wrong kind", layer=0),
    ),
    "the mean of means": (
        lambda: collective_results(
            by(Reduction.MEAN), [scalar(1, Reduction.MEAN), scalar(2, Reduction.MEAN), scalar(4)], RANKS, RULES
        ),
        refusal_by("other values"),
    ),
    "the max of minima": (
        lambda: collective_results(by(Reduction.MAX), [scalar(1, Reduction.MIN), scalar(2), scalar(4)], RANKS, RULES),
        refusal_by("other values"),
    ),
    "overlapping pieces": (
        lambda: collective_results(GATHER, [weight(shard(0)), weight(shard(0)), weight(shard(1))], RANKS, RULES),
        refusal_by("pieces overlap", layer=1, doubled=(0,)),
    ),
    "microbatches twice": (
        lambda: collective_results(REDUCE, [gradient(1), gradient(2), gradient(2)], RANKS, RULES),
        refusal_by("counted twice", layer=1, doubled=(1,)),
    ),
    "a scalar gathered": (
        lambda: collective_results(GATHER, [scalar(1), scalar(2), scalar(4)], RANKS, RULES),
        refusal_by("wrong kind"),
    ),
    "a scalar scattered": (
        lambda: collective_results(SCATTER, [None, scalar(1), None], RANKS, RULES),
        refusal_by("wrong kind"),
    ),
    "four microbatches among three": (
        lambda: collective_results(SCATTER, [None, rows(0b1111), None], RANKS, RULES),
        refusal_by("does not divide", layer=0),
    ),
    "a root outside": (
        lambda: require_valid_call(Call(OpKind.REDUCE, 3), RANKS),
        refusal_by("wrong root"),
    ),
    "a root too many": (lambda: require_valid_call(Call(OpKind.BARRIER, 4), RANKS), refusal_by("wrong root")),
    "a gather by max": (
        lambda: require_valid_call(Call(OpKind.GATHER, 4, Reduction.MAX), RANKS),
        refusal_by("no reduction"),
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_mistakes_are_refused_in_a_sentence(name: str) -> None:
    call, words = REFUSALS[name]
    with refuses(words):
        call()


# Traced.


def test_each_rooted_verb_stands_on_the_tape_with_what_its_rank_gives_and_receives() -> None:
    async def program(rank: Rank) -> None:
        root = rank.index == 1
        whole = rank.load_weight(0) if root else None
        rank.weights["all"] = await rank.broadcast(whole, root=1)
        rank.weights["mine"] = await rank.scatter(rank.weights["all"] if root else None, root=1)
        assert (await rank.gather(rank.weights["mine"], root=1) is None) == (not root)
        await rank.barrier()

    assert together(program) == [
        [
            *("broadcast h0 -> 0", "wait h0", "scatter h1 -> 1", "wait h1", "gather 1 h2", "wait h2"),
            *("barrier h3", "wait h3", "free 0", "free 1"),
        ],
        [
            *("load_weight -> 0", "broadcast 0 h0", "wait h0", "scatter 0 h1 -> 1", "wait h1"),
            *("gather 1 h2 -> 2", "wait h2", "barrier h3", "wait h3", "free 0", "free 1", "free 2"),
        ],
    ]


def test_a_broadcast_gives_the_root_its_own_value_back_even_if_no_key_names_it() -> None:
    async def program(rank: Rank) -> None:
        value = rank.load_weight(0) if rank.index == 0 else None
        received = await rank.broadcast(value, root=0)
        assert (received is value) == (rank.index == 0)
        rank.weights["kept"] = received

    world = World(2, 1, 1)
    world.run(program)
    assert [rank.weights["kept"].spec for rank in world.ranks] == [Spec(form_of(Kind.WEIGHT, 0, 0, Space(1)))] * 2


def test_a_value_from_the_root_gets_its_spec_on_arrival() -> None:
    async def program(rank: Rank) -> None:
        batch = rank.load_batch(rank.microbatches) if rank.index == 2 else None
        rank.activations[0] = await rank.scatter(batch, root=2, axis="dp_shard")

    world = World(Mesh(dp_replicate=2, dp_shard=2), 1, 4)
    with refuses("wrong root"):
        world.run(program)

    async def on_each_axis(rank: Rank) -> None:
        root = rank.group("dp_shard").ranks[0]
        batch = rank.load_batch(rank.microbatches) if rank.index == root else None
        rank.activations[0] = await rank.scatter(batch, root=root, axis="dp_shard")

    world = World(Mesh(dp_replicate=2, dp_shard=2), 1, 4)
    program_ = world.run(on_each_axis)
    (op,) = [op for op in program_.tapes[3] if op.kind is OpKind.SCATTER]
    assert (op.root, op.layer, str(op.expect)) == (2, 0, "activations[0] of microbatches 2-3")


@pytest.mark.parametrize(
    ("value", "verb", "options", "words"),
    [
        ("all", "broadcast", {"root": 0}, refusal_by("wrong root")),
        ("none", "scatter", {"root": 0}, refusal_by("wrong root")),
        ("all", "gather", {"root": 2}, refusal_by("wrong root")),
        ("none", "reduce", {"root": 0}, refusal_by("no value")),
        (
            "all",
            "reduce",
            {"root": 0, "reduction": "avg"},
            refusal_by("no reduction"),
        ),
        ("all", "all_reduce", {"reduction": "median"}, refusal_by("no reduction")),
        (
            "root",
            "broadcast",
            {"root": 0, "expect": ("weights", 1, None)},
            refusal_by("other message", layer=1),
        ),
        ("root", "broadcast", {"root": 0, "expect": ("fish", 1, None)}, refusal_by("wrong expectation")),
    ],
)
def test_a_call_that_is_wrong_is_refused_at_its_line(
    value: str, verb: str, options: dict[str, object], words: ExpectedRefusal
) -> None:
    async def program(rank: Rank) -> None:
        gives = value == "all" or (value == "root" and rank.index == 0)
        await getattr(rank, verb)(rank.load_weight(0) if gives else None, **options)

    require_refusal(refusal(program), words)


def test_members_must_agree_on_root_and_reduction() -> None:
    async def roots(rank: Rank) -> None:
        await rank.gather(rank.load_weight(0, rank.index, 2), root=rank.index)

    async def reductions(rank: Rank) -> None:
        await rank.all_reduce(rank.load_weight(0), reduction="min" if rank.index else "max")

    require_refusal(refusal(roots), "other order", layer=0)
    require_refusal(refusal(reductions), "other order", layer=0)


def test_a_barrier_that_one_rank_leaves_out_is_a_deadlock_that_names_it() -> None:
    async def program(rank: Rank) -> None:
        if rank.index:
            await rank.barrier()

    assert refusal(program).given == "rank 1 waits in barrier on world for rank 0; rank 0 has ended without it"


# Messages that are issued together: what stands on the tape, what is waited for, and what is refused.


def swap(call: Callable[[Rank], object] = lambda rank: None) -> Strategy:
    """Two ranks exchange their gradients twice over in one batch, and sum them."""

    async def strategy(rank: Rank) -> None:
        other = 1 - rank.index
        rank.weights[0], rank.opt_states[0] = rank.load_weights(0)
        rank.activations[0] = rank.load_batch([rank.index])
        grad = rank.loss(rank.forward(0, rank.activations[0], rank.weights[0]))
        rank.grad_weights[0], _ = rank.backward(0, rank.activations.pop(0), grad, rank.weights[0])
        with rank.batch_p2p():
            rank.send(rank.grad_weights[0], to=other)
            first = rank.recv(source=other)
            rank.send(rank.grad_weights[0], to=other)
            call(rank)
            second = rank.recv(source=other)
        await second
        total = rank.grad_weights[0] + await first
        rank.weights[0], rank.opt_states[0] = rank.update(0, total, rank.weights[0], rank.opt_states[0])

    return strategy


def test_awaiting_one_of_a_batch_waits_for_all_in_their_order() -> None:
    program = trace(swap(), 2, 1, 2)
    messages = [op for op in program.tapes[0] if op.kind in (OpKind.SEND, OpKind.RECV, OpKind.WAIT)]
    assert [op.batch for op in messages] == [0, 0, 0, 0, -1, -1, -1, -1]
    assert [op.handle for op in messages[4:]] == [0, 1, 2, 3]
    assert check(program).backends() == ["gloo", "nccl"]
    assert judge(program).right


def test_other_ops_of_the_block_come_before_its_messages() -> None:
    program = trace(swap(lambda rank: rank.slice(rank.weights[0], 0, 2)), 2, 1, 2)
    kinds = [op.kind for op in program.tapes[0]]
    assert kinds[kinds.index(OpKind.SLICE) :][:5] == [OpKind.SLICE, *[OpKind.SEND, OpKind.RECV] * 2]
    assert judge(program).right


def swallow(rank: Rank) -> None:
    """Let go of what is being sent."""
    del rank.grad_weights[0]


REFUSED: list[tuple[Callable[[Rank], object], ExpectedRefusal]] = [
    (swallow, refusal_by("batch of messages")),
    (lambda rank: rank.all_reduce(rank.grad_weights[0]), refusal_by("batch of messages")),
    (lambda rank: rank.batch_p2p().__enter__(), refusal_by("batch of messages")),
    (lambda rank: rank.exchange(rank.weights[0], to=1, source=1), refusal_by("batch of messages")),
]


@pytest.mark.parametrize(("call", "words"), REFUSED)
def test_a_batch_has_sends_and_receives_alone(call: Callable[[Rank], object], words: ExpectedRefusal) -> None:
    with pytest.raises(Refused) as refusal:
        trace(swap(call), 2, 1, 2)
    require_refusal(refusal.value, words)


def waits_for_one_half() -> Program:
    """Rank 0 waits for the receive of its batch, then meets rank 2, which only then takes the batch's other message.

    With queues the receive does not end before the whole batch does, and that hangs.
    """

    async def strategy(rank: Rank) -> None:
        rank.weights[0], rank.opt_states[0] = rank.load_weights(0)
        rank.activations[0] = rank.load_batch([rank.index])
        grad = rank.loss(rank.forward(0, rank.activations[0], rank.weights[0]))
        grad_weight = rank.grad_weights[0] = rank.backward(0, rank.activations.pop(0), grad, rank.weights[0])[0]
        if rank.index == 0:
            with rank.batch_p2p():
                rank.send(grad_weight, to=2)
                message = rank.recv(source=1)
            await message
        if rank.index == 1:
            with rank.batch_p2p():
                rank.send(grad_weight, to=0)
        if rank.index != 1:
            await rank.all_reduce(rank.weights[0], among=[0, 2], reduction="mean")
        if rank.index == 2:
            with rank.batch_p2p():
                received = rank.recv(source=0)
            await received
        total = await rank.all_reduce(grad_weight)
        rank.weights[0], rank.opt_states[0] = rank.update(0, total, rank.weights[0], rank.opt_states[0])

    program = trace(strategy, 3, 1, 3)
    tape = program.tapes[0]
    send = next(op for op in tape if op.kind is OpKind.SEND)
    wait = next(at for at, op in enumerate(tape) if op.kind is OpKind.WAIT and op.handle == send.handle)
    tape.insert(len(tape) - 1, tape.pop(wait))  # a file's tape may wait for one of a batch alone
    frees = [at for at, op in enumerate(tape) if op.kind is OpKind.FREE and op.inputs == send.inputs]
    for at in frees:
        tape.insert(len(tape), tape.pop(at))
    return program


def test_nccl_waits_for_a_whole_batch_whichever_handle_is_meant() -> None:
    program = waits_for_one_half()
    models = check(program).models
    assert models[ChannelModel.RENDEZVOUS] is None
    for model in (ChannelModel.QUEUED_PER_PAIR, ChannelModel.QUEUED):
        assert models[model] is not None
        assert all(hangs(program, model, seed) for seed in range(5))
    assert not hangs(program, ChannelModel.RENDEZVOUS, 0)
