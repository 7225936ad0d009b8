"""A right program that no backend can carry out is said to run on none, with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest

from shardlab.check import Checked, check, check_forward, forward_only
from shardlab.check.runnable import why_not_runnable
from shardlab.language import Holds, Kind, Mesh, OpKind, Program, Rank, Refused, Sizes, Strategy, Value, trace
from shardlab.language.rules.layer_rules import GRADIENT_OF
from shardlab.models import GPT, MoE, cut_for
from shardlab.strategies import Plan
from shardlab.train.job import Job
from shardlab.train.verification.cases import ALONE, CASES, PIPELINES, SHARDINGS, Case
from tests.check.sliced_programs import gathered_matrices, gathers, microbatches_together, microbatches_together_mesh
from tests.support.interpreter import judge
from tests.support.mutations import changed
from tests.support.refusing import tells


async def train(rank: Rank) -> None:
    """One layer, data parallel."""
    rank.weights[0], rank.opt_states[0] = rank.load_weights(0)
    rank.activations[0] = rank.load_batch(rank.share())
    rank.activations[1] = rank.forward(0, rank.activations[0], rank.weights[0])
    gradient = rank.loss(rank.activations.pop(1))
    grad_weight, rank.grad_activations[0] = rank.backward(0, rank.activations[0], gradient, rank.weights[0])
    total = await rank.all_reduce(grad_weight)
    rank.weights[0], rank.opt_states[0] = rank.update(0, total, rank.weights[0], rank.opt_states[0])


def sends(store: str) -> Strategy:
    async def strategy(rank: Rank) -> None:
        await train(rank)
        if rank.index == 0:
            await rank.send(getattr(rank, store)[0], to=1)
        else:
            await rank.recv(source=0)

    return strategy


async def turns_as_a_whole_and_steps_in_halves(rank: Rank) -> None:
    """One layer, whose direction is that of one state, of which each half is then updated."""
    rank.weights[0], rank.opt_states[0] = rank.load_weights(0)
    rank.activations[0] = rank.load_batch(rank.microbatches)
    rank.activations[1] = rank.forward(0, rank.activations[0], rank.weights[0])
    gradient = rank.loss(rank.activations.pop(1))
    rank.grad_weights[0], _ = rank.backward(0, rank.activations.pop(0), gradient, rank.weights[0])
    rank.directions[0] = rank.direction(0, rank.grad_weights[0], rank.opt_states[0])
    for half in range(2):
        weight, state = rank.slice(rank.weights[0], half, 2), rank.slice(rank.opt_states[0], half, 2)
        rank.weights[0, half], rank.opt_states[0, half] = rank.update(
            0, rank.grad_weights[0], weight, state, direction=rank.directions[0]
        )
    rank.weights[0] = rank.concatenate(rank.weights.pop((0, half)) for half in range(2))
    rank.opt_states[0] = rank.concatenate(rank.opt_states.pop((0, half)) for half in range(2))


def test_a_state_that_is_stepped_in_other_slices_than_its_direction_s_runs_nowhere() -> None:
    program = trace(turns_as_a_whole_and_steps_in_halves, 1, replace(Sizes.puzzle(1), whole_matrices=True), 1)
    assert judge(program).right
    found = check(program).not_runnable
    tells(found, "not runnable", layer=0)
    assert "no update steps opt_states[0] as it is" in str(found)


async def gathers_uneven_batches(rank: Rank) -> None:
    await train(rank)
    await rank.all_gather(rank.load_batch([0, 1, 2] if rank.index else [3]))


@pytest.mark.parametrize(
    ("strategy", "remedy"),
    [
        (sends("opt_states"), "load it where it is updated"),
        (sends("grad_activations"), "do not communicate grad_activations[0] (microbatches 0-1)"),
        (gathers_uneven_batches, "gather equal pieces"),
    ],
)
def test_what_cannot_be_communicated_runs_on_no_backend(strategy: Strategy, remedy: str) -> None:
    checked = check(trace(strategy, 2, 1, 4))
    assert checked.backends() == []
    for backend in ("gloo", "nccl"):
        tells(checked.why_not(backend), "not runnable", rank=0, remedy=remedy)


def test_what_can_be_communicated_runs_on_both() -> None:
    checked = check(trace(sends("activations"), 2, 1, 4))
    assert checked.why_not("gloo") is None
    assert checked.backends() == ["gloo", "nccl"]


def sliced(strategy: Strategy, ranks: int) -> Program:
    mesh = microbatches_together_mesh(ranks)
    return trace(strategy, mesh, Sizes.of_puzzle(1, mesh), 4)


def test_what_is_cut_is_computed_one_slice_at_a_time() -> None:
    program = sliced(gathered_matrices, 2)
    assert judge(program).right
    remedy = "compute with one slice on each rank"
    tells(check(program).not_runnable, "not runnable", rank=0, op=23, layer=0, remedy=remedy)


def test_microbatches_that_were_gathered_are_dealt_back() -> None:
    program = sliced(microbatches_together, 2)
    assert judge(program).right
    assert check(program).backends() == ["gloo", "nccl"]


def test_slices_of_other_microbatches_are_not_gathered_at_once() -> None:
    program = sliced(gathers([([0], [0, 1]), ([0], [2, 3]), ([1], [0, 1]), ([1], [2, 3])]), 4)
    assert judge(program).right
    remedy = "gather those of one kind, then those of the other"
    tells(check(program).not_runnable, "not runnable", layer=0, remedy=remedy)


def test_a_batch_has_the_same_slices_of_each_microbatch() -> None:
    """No verb loads another; a tape may."""
    program = sliced(gathers([([0, 1], [0]), ([0, 1], [1])]), 2)
    for rank, holds in enumerate((Holds(0b1001, 8), Holds(0b0110, 8))):
        load = next(op for op in program.tapes[rank] if op.kind is OpKind.LOAD_BATCH)
        program = changed(program, rank, program.tapes[rank].index(load), load._replace(holds=holds))
    remedy = "load and compute them apart"
    tells(check(program).not_runnable, "not runnable", rank=0, op=0, layer=0, remedy=remedy)


def test_the_loss_is_of_one_slice_of_the_logits_or_of_all() -> None:
    checked = check(sliced(microbatches_together, 4))
    tapes = checked.program.tapes
    loss = next(op for op in tapes[0] if op.kind is OpKind.LOSS_STATS)
    logits = checked.specs[0][loss.inputs[0]]
    checked.specs[0][loss.inputs[0]] = logits._replace(form=logits.form.but(slices=(("vocab", 0b11),)))
    why = why_not_runnable(checked.program, checked.specs, checked.communications, [range(len(tape)) for tape in tapes])
    tells(why, "not runnable", remedy="compute the loss of one slice, or of all")


def cuts_into(*numbers: int) -> Strategy:
    """Looks at slices of a gradient, and frees them at once."""

    async def strategy(rank: Rank) -> None:
        rank.weights[0], rank.opt_states[0] = rank.load_weights(0)
        rank.activations[0] = rank.load_batch(rank.microbatches)
        gradient = rank.loss(rank.forward(0, rank.activations[0], rank.weights[0]))
        made = rank.grad_weights[0] = rank.backward(0, rank.activations.pop(0), gradient, rank.weights[0])[0]
        for number in numbers:
            rank.slice(made, 0, number)
        rank.weights[0], rank.opt_states[0] = rank.update(0, made, rank.weights[0], rank.opt_states[0])
        del rank.grad_weights[0]

    return strategy


@pytest.mark.parametrize("numbers", [(1021, 1019, 1013), (999_983, 999_979)])
def test_slices_of_which_a_buffer_is_mostly_padding_run_nowhere(numbers: tuple[int, ...]) -> None:
    found = check(trace(cuts_into(*numbers), 1, 1, 1)).not_runnable
    tells(found, "not runnable", layer=0)
    assert "cut by numbers of which one divides the other" in str(found)


@pytest.mark.parametrize("numbers", [(7, 11, 13), (1 << 20,), (3, 1 << 14), (1 << 10, 1 << 20)])
def test_slices_of_which_padding_is_short_or_cannot_be_shorter_run(numbers: tuple[int, ...]) -> None:
    assert check(trace(cuts_into(*numbers), 1, 1, 1)).not_runnable is None


async def cuts_sequences_of_buffers(rank: Rank) -> None:
    """Tensor parallelism of a mixture; what the experts take is cut by sequences, and put together again."""
    xs, last, carried = rank.activations, len(rank.layers), dict[Kind, Value]()
    for l in rank.layers:
        cut = (rank.index, rank.world) if rank.signatures[l].sliced else (0, 1)
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l, *cut)
    xs[0] = rank.load_batch(rank.microbatches)
    for l, layer in enumerate(rank.signatures):
        if layer.name == "experts":
            xs[l] = rank.concatenate([rank.slice(xs[l], at, 2) for at in range(2)])
        made = rank.forward(l, (xs[l], *[carried.pop(port.kind) for port in layer.inputs[1:]]), rank.weights[l])
        for port, value in zip(layer.outputs[1:], made[1:], strict=True):
            carried[port.kind] = rank.store(port.kind)[l] = value
        xs[l + 1] = await rank.all_reduce(made[0], axis="tp") if layer.sliced and l + 1 < last else made[0]
    gradient = rank.loss(xs[last], await rank.all_gather(rank.loss_stats(xs[last]), axis="tp"))
    for l, layer in reversed(list(enumerate(rank.signatures))):
        given = gradient, *[carried.pop(GRADIENT_OF[port.kind]) for port in layer.outputs[1:]]
        total, gradient, *others = rank.backward(l, xs[l], given, rank.weights[l])
        for port, value in zip(layer.inputs[1:], others, strict=True):
            kind = GRADIENT_OF[port.kind]
            carried[kind] = rank.store(kind)[l] = value
        if layer.sliced and l:
            gradient = await rank.all_reduce(gradient, axis="tp")
        rank.weights[l], rank.opt_states[l] = rank.update(l, total, rank.weights[l], rank.opt_states[l])


def test_buffers_of_experts_have_no_part_for_a_part_of_a_sequence() -> None:
    mesh = Mesh(tp=2)
    sizes = cut_for(MoE(layers=1, hidden_size=8, heads=2, seq_len=8), mesh).sizes(1, 4)
    found = check(trace(cuts_sequences_of_buffers, mesh, sizes, 2)).not_runnable
    assert found is not None
    assert "slice" in str(found)
    assert "in experts' buffers, whose places have tokens of any part of a sequence" in str(found)


# The forward half of every program is a program of its own, proved like any other.


KINDS = {
    OpKind.LOAD_BATCH, OpKind.LOAD_WEIGHT, OpKind.FORWARD, OpKind.LOSS, OpKind.LOSS_STATS, OpKind.ATTEND, OpKind.ADD,
    OpKind.SLICE, OpKind.CONCATENATE, OpKind.CAST, OpKind.ALL_GATHER, OpKind.ALL_REDUCE, OpKind.REDUCE_SCATTER,
    OpKind.ALL_TO_ALL, OpKind.BROADCAST, OpKind.SEND, OpKind.RECV, OpKind.WAIT, OpKind.FREE,
}  # fmt: skip


def by_turns() -> Iterator[Case]:
    """Every strategy, and every sharding on every pipeline: with two, three and four microbatches a rank by turns."""
    yield from (case for case in CASES if case.column == ALONE)
    pairs = [case for case in CASES if case.column != ALONE]
    for at, some in enumerate(zip(pairs[::3], pairs[1::3], pairs[2::3], strict=True)):
        yield some[(at + at // len(PIPELINES)) % 3]


def test_every_pair_is_there_and_each_of_both_meets_every_number_of_microbatches() -> None:
    once = list(by_turns())
    pairs = {(case.row, case.column) for case in CASES}
    assert {(case.row, case.column) for case in once} == pairs
    assert len(once) == len(pairs)
    met = {
        (name, case.microbatches // case.strategy.data_ranks)
        for case in once
        for name in (case.row, case.column)
        if isinstance(case.strategy, Plan)
    }
    assert met == set(product((*PIPELINES, *SHARDINGS), (2, 3, 4)))


@pytest.mark.parametrize("case", [*by_turns()], ids=str)
def test_the_forward_half_of_every_strategy_computes_every_loss_and_runs_where_all_of_it_does(case: Case) -> None:
    whole = case.job().checked()
    half = check_forward(forward_only(whole))
    assert {op.kind for tape in half.program.tapes for op in tape} <= KINDS
    assert set(whole.backends()) <= set(half.backends())
    assert len(half.frozen) == sum(map(bool, half.program.sizes.weights))


def half() -> Checked:
    return check_forward(
        forward_only(Job("fsdp", 2, 2, GPT(layers=2, hidden_size=16, heads=2, seq_len=8), 2).checked())
    )


def test_a_half_whose_loss_is_missing_is_refused() -> None:
    program = half().program
    tapes = [[op for op in tape if rank == 0 or op.kind is not OpKind.LOSS] for rank, tape in enumerate(program.tapes)]
    with pytest.raises(Refused, match="nobody computes the loss of microbatch 1"):
        check_forward(replace(program, tapes=tapes))


def test_training_is_no_forward_half_and_a_forward_half_is_no_training() -> None:
    whole = Job("fsdp", 2, 2, GPT(layers=2, hidden_size=16, heads=2, seq_len=8), 2).checked()
    with pytest.raises(Refused):
        check_forward(whole.program)
    with pytest.raises(Refused, match="makes no gradient, but the program trains"):
        check(half().program)
