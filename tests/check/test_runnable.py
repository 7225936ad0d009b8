"""Right programs that no backend can run are reported so, with the reason."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from random import Random

import pytest

from shardlab.check import Checked, check, check_forward, forward_only
from shardlab.check.runnable import why_not_runnable
from shardlab.language import Holds, Kind, Mesh, OpKind, Program, Rank, Refused, Sizes, Strategy, Value, trace
from shardlab.language.rules.layer_rules import GRADIENT_OF
from shardlab.models import GPT, MoE, cut_for
from shardlab.strategies import Plan
from shardlab.train.job import Job
from shardlab.train.verification.cases import ALONE, CASES, PIPELINES, SHARDINGS, Case
from tests.check.programs import PLACE
from tests.check.sliced_programs import gathered_matrices, gathers, microbatches_together, microbatches_together_mesh
from tests.support.interpreter import judge
from tests.support.mutations import MUTATIONS, changed
from tests.support.random_plans import Plan as Plan_imported
from tests.support.random_programs import Shape, random_program
from tests.support.refused_tapes import TAPES
from tests.support.refusing import (
    ExpectedRefusal,
    matches,
    refusal,
    refusal_by,
    refusal_of,
    require_refusal,
    sentence_of,
)
from tests.support.thorough import sampled
from tests.train.rooted_programs import by_root, by_root_mesh, parameter_server, replicas


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
    reason = check(program).not_runnable
    require_refusal(reason, "not runnable", layer=0)
    assert "no update steps opt_states[0] as it is" in str(reason)


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
def test_values_that_cannot_be_communicated_run_on_no_backend(strategy: Strategy, remedy: str) -> None:
    checked = check(trace(strategy, 2, 1, 4))
    assert checked.backends() == []
    for backend in ("gloo", "nccl"):
        require_refusal(checked.why_not(backend), "not runnable", rank=0, remedy=remedy)


def test_values_that_can_be_communicated_run_on_both_backends() -> None:
    checked = check(trace(sends("activations"), 2, 1, 4))
    assert checked.why_not("gloo") is None
    assert checked.backends() == ["gloo", "nccl"]


def sliced(strategy: Strategy, ranks: int) -> Program:
    mesh = microbatches_together_mesh(ranks)
    return trace(strategy, mesh, Sizes.of_puzzle(1, mesh), 4)


def test_a_device_computes_one_slice_of_a_layer_at_a_time() -> None:
    program = sliced(gathered_matrices, 2)
    assert judge(program).right
    remedy = "compute with one slice on each rank"
    require_refusal(check(program).not_runnable, "not runnable", rank=0, op=23, layer=0, remedy=remedy)


def test_microbatches_that_were_gathered_are_dealt_back() -> None:
    program = sliced(microbatches_together, 2)
    assert judge(program).right
    assert check(program).backends() == ["gloo", "nccl"]


def test_slices_of_other_microbatches_are_not_gathered_at_once() -> None:
    program = sliced(gathers([([0], [0, 1]), ([0], [2, 3]), ([1], [0, 1]), ([1], [2, 3])]), 4)
    assert judge(program).right
    remedy = "gather those of one kind, then those of the other"
    require_refusal(check(program).not_runnable, "not runnable", layer=0, remedy=remedy)


def test_a_batch_has_the_same_slices_of_each_microbatch() -> None:
    """No verb loads another; a tape may."""
    program = sliced(gathers([([0, 1], [0]), ([0, 1], [1])]), 2)
    for rank, holds in enumerate((Holds(0b1001, 8), Holds(0b0110, 8))):
        load = next(op for op in program.tapes[rank] if op.kind is OpKind.LOAD_BATCH)
        program = changed(program, rank, program.tapes[rank].index(load), load._replace(holds=holds))
    remedy = "load and compute them apart"
    require_refusal(check(program).not_runnable, "not runnable", rank=0, op=0, layer=0, remedy=remedy)


def test_the_loss_is_of_one_slice_of_the_logits_or_of_all() -> None:
    checked = check(sliced(microbatches_together, 4))
    tapes = checked.program.tapes
    loss = next(op for op in tapes[0] if op.kind is OpKind.LOSS_STATS)
    logits = checked.specs[0][loss.inputs[0]]
    checked.specs[0][loss.inputs[0]] = logits._replace(form=logits.form.but(slices=(("vocab", 0b11),)))
    reason = why_not_runnable(
        checked.program, checked.specs, checked.communications, [range(len(tape)) for tape in tapes]
    )
    require_refusal(reason, "not runnable", remedy="compute the loss of one slice, or of all")


def cuts_into(*numbers: int) -> Strategy:
    """Looks at slices of a gradient, and frees them at once."""

    async def strategy(rank: Rank) -> None:
        rank.weights[0], rank.opt_states[0] = rank.load_weights(0)
        rank.activations[0] = rank.load_batch(rank.microbatches)
        gradient = rank.loss(rank.forward(0, rank.activations[0], rank.weights[0]))
        grad_weight = rank.grad_weights[0] = rank.backward(0, rank.activations.pop(0), gradient, rank.weights[0])[0]
        for number in numbers:
            rank.slice(grad_weight, 0, number)
        rank.weights[0], rank.opt_states[0] = rank.update(0, grad_weight, rank.weights[0], rank.opt_states[0])
        del rank.grad_weights[0]

    return strategy


@pytest.mark.parametrize("numbers", [(1021, 1019, 1013), (999_983, 999_979)])
def test_slices_of_which_a_buffer_is_mostly_padding_run_nowhere(numbers: tuple[int, ...]) -> None:
    reason = check(trace(cuts_into(*numbers), 1, 1, 1)).not_runnable
    require_refusal(reason, "not runnable", layer=0)
    assert "cut by numbers of which one divides the other" in str(reason)


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
        outputs = rank.forward(l, (xs[l], *[carried.pop(port.kind) for port in layer.inputs[1:]]), rank.weights[l])
        for port, value in zip(layer.outputs[1:], outputs[1:], strict=True):
            carried[port.kind] = rank.store(port.kind)[l] = value
        xs[l + 1] = await rank.all_reduce(outputs[0], axis="tp") if layer.sliced and l + 1 < last else outputs[0]
    gradient = rank.loss(xs[last], await rank.all_gather(rank.loss_stats(xs[last]), axis="tp"))
    for l, layer in reversed(list(enumerate(rank.signatures))):
        gradients = gradient, *[carried.pop(GRADIENT_OF[port.kind]) for port in layer.outputs[1:]]
        total, gradient, *others = rank.backward(l, xs[l], gradients, rank.weights[l])
        for port, value in zip(layer.inputs[1:], others, strict=True):
            kind = GRADIENT_OF[port.kind]
            carried[kind] = rank.store(kind)[l] = value
        if layer.sliced and l:
            gradient = await rank.all_reduce(gradient, axis="tp")
        rank.weights[l], rank.opt_states[l] = rank.update(l, total, rank.weights[l], rank.opt_states[l])


def test_buffers_of_experts_have_no_part_for_a_part_of_a_sequence() -> None:
    mesh = Mesh(tp=2)
    sizes = cut_for(MoE(layers=1, hidden_size=8, heads=2, seq_len=8), mesh).sizes(1, 4)
    reason = check(trace(cuts_sequences_of_buffers, mesh, sizes, 2)).not_runnable
    assert reason is not None
    assert "slice" in str(reason)
    assert "in experts' buffers, whose places have tokens of any part of a sequence" in str(reason)


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
    rows, columns = list(PIPELINES), list(SHARDINGS)
    for some in zip(pairs[::3], pairs[1::3], pairs[2::3], strict=True):
        yield some[(rows.index(some[0].row) + columns.index(some[0].column)) % 3]


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


@pytest.mark.parametrize("case", sampled(by_turns(), [*by_turns()][::5].__contains__), ids=str)
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
    with pytest.raises(Refused, match="no rank computes the loss of microbatch 1"):
        check_forward(replace(program, tapes=tapes))


def test_training_is_no_forward_half_and_a_forward_half_is_no_training() -> None:
    whole = Job("fsdp", 2, 2, GPT(layers=2, hidden_size=16, heads=2, seq_len=8), 2).checked()
    with pytest.raises(Refused):
        check_forward(whole.program)
    with pytest.raises(Refused, match="makes no gradient, but the program trains"):
        check(half().program)


# Programs with roots are right, and every mistake put into them is refused.


SAMPLE = {
    "another root": 10,
    "another reduction": 10,
    "another value from the root": 8,
    "root left out": 15,
    "reduced on the root again": 15,
}
"""Mutants tried of the kinds that roots alone have; one of each other kind and program."""

RANDOM_SHAPES = [Shape(1, 2, 2, 2, 5, 4), Shape(2, 1, 2, 2, 4, 5), Shape(2, 2, 1, 3, 5, 8)]


@cache
def subjects() -> dict[str, Program]:
    programs = {
        "parameter server": trace(parameter_server, 2, 2, 2),
        "by root": trace(by_root, by_root_mesh(4), 2, 4),
        "replicas": trace(replicas, 2, 2, 4),
    }
    return programs | {str(shape): random_program(shape) for shape in RANDOM_SHAPES}


@pytest.mark.parametrize(
    ("program", "mesh", "layers", "microbatches"),
    [
        (parameter_server, 1, 1, 1),
        (parameter_server, 3, 2, 6),
        (by_root, by_root_mesh(2), 3, 4),
        (by_root, by_root_mesh(8), 2, 8),
        (replicas, 3, 2, 3),
    ],
)
def test_collectives_with_a_root_are_right_on_every_backend(
    program: Strategy, mesh: Mesh | int, layers: int, microbatches: int
) -> None:
    tapes = trace(program, mesh, layers, microbatches)
    assert check(tapes).backends() == ["gloo", "nccl"]
    assert judge(tapes).right


def test_the_random_programs_use_collectives_with_a_root() -> None:
    assert all(Plan_imported(shape).by_root for shape in RANDOM_SHAPES)


@pytest.mark.parametrize("kind", [kind for kind in MUTATIONS if kind != "another world"])
def test_each_mistake_that_matters_is_refused_and_the_place_is_named(kind: str) -> None:
    wrong = False
    for name, program in subjects().items():
        mutants = list(MUTATIONS[kind](program))
        size = SAMPLE.get(kind, 1)
        for mutant in mutants if len(mutants) <= size else Random(f"{kind} {name}").sample(mutants, size):
            sentence = refusal(mutant)
            if sentence is None:
                verdict = judge(mutant)
                assert verdict.right, f"{kind} of {name} passes, but: {verdict.reason}"
            else:
                assert re.match(PLACE, str(sentence)), str(sentence)
                wrong = wrong or not judge(mutant).right
    assert wrong or kind not in SAMPLE or kind == "another value from the root", "what it expects changes no numbers"


@pytest.mark.parametrize(
    ("kind", "name", "expected"),
    [
        ("another root", "by root", refusal_by("malformed tape", layer=0)),
        ("another root", "by root", refusal_by("wrong root")),
        ("another root", "replicas", refusal_by("wrong root")),
        ("another reduction", "parameter server", refusal_by("scaled gradient", layer=1)),
        ("another reduction", "parameter server", refusal_by("replicas differ", layer=1)),
        ("another reduction", "parameter server", refusal_by("no reduction")),
        ("another reduction", "by root", refusal_by("no sum of squares", layer=0)),
        ("another reduction", "replicas", refusal_by("counted twice", layer=0, doubled=(0, 1, 2, 3))),
        ("another value from the root", "parameter server", refusal_by("other message", layer=1)),
        ("root left out", "parameter server", refusal_by("other order", layer=1)),
        ("reduced on the root again", "replicas", refusal_by("counted twice", layer=0, doubled=(0, 1, 2, 3))),
        ("malformed op", "parameter server", refusal_by("malformed tape", layer=0)),
    ],
)
def test_the_refusal_says_what_the_mistake_is(kind: str, name: str, expected: ExpectedRefusal) -> None:
    refusals = [refusal(mutant) for mutant in MUTATIONS[kind](subjects()[name])]
    assert any(refused and matches(refused, expected) for refused in refusals), sorted(
        {str(refused) for refused in refusals}
    )


# Each sentence of the check about a tape, once; all other tests ask for a refusal's fields.


SENTENCES = {
    "the layer's own": (
        "rank 0, op 4 free(value 4): a layer keeps value 4 for itself; leave it to the backward of its activation."
    ),
    "freed, not made": "rank 0, op 3 forward(layer 0): value 77 has not been made yet; make it before.",
    "freed, on a tape": (
        "rank 0, op 11 update(layer 0): value 0, weights[0], was freed or replaced before this op; free it after "
        "its last use."
    ),
    "in flight": (
        "rank 0, op 11 free(value 6): grad_weights[0] (microbatch 0) is still read by a communication in flight; "
        "wait for it first."
    ),
    "left over": (
        "rank 0, op 13: the step ends with value 70, activations[0] (microbatch 0), still live; a step leaves "
        "only the slices it loaded. Free it."
    ),
    "loaded twice, on a tape": (
        "rank 0, op 1 load_weight(layer 0): the same slice was loaded by op 0 already; load each slice once."
    ),
    "malformed tape": (
        "rank 0, op 4 loss(layer 1): has 0 inputs and 1 output, numbers that this op never has; give the "
        "values that it reads and makes."
    ),
    "malformed tape, a handle": (
        "rank 0, op 4 loss(layer 1): has handle 3, but only a collective or a message has one; leave it out."
    ),
    "unknown group, none": "rank 0, op 10 all_reduce(layer 0): no group is given for this collective; give one.",
    "number in use": "rank 0, op 4 loss(layer 1): makes value 0, which must be a new one; number values from 0.",
    "number in use, of a handle": (
        "rank 0, op 10 all_reduce(layer 0) on world: issues handle -1, which must be a new one; number handles from 0."
    ),
    "nothing to wait for": "rank 0, op 11 wait(handle 9): handle 9 is not in flight; wait for each communication once.",
    "never updated": (
        "rank 0, op 0 load_weight(layer 0): weights[0] is loaded here and never updated; "
        "update every slice that is loaded, once."
    ),
    "not kept": (
        "rank 0, op 10 update(layer 0): the step ends without the updated weights[0], which is made here and not "
        "kept; keep it in its store."
    ),
    "no forward, on a tape": (
        "rank 0, op 6 backward(layer 0): value 0 is not the value that the layer saved in this activation's forward; "
        "read the value that it saved, once."
    ),
    "unknown layer, on a tape": (
        "rank 0, op 3 forward(layer 5): layer 5 does not exist; the model has layers 0-0, name one of these."
    ),
    "unknown microbatch, on a tape": (
        "rank 0, op 2 load_batch(batch): None is not a set of the step's 2 microbatches; name some of them."
    ),
    "unknown slice, on a tape": (
        "rank 0, op 0 load_weight(layer 0): there is no slice None of layer 0; name slices that it has."
    ),
    "wrong layer, on a tape": (
        "rank 0, op 2 load_batch(batch): the op says layer 3, but it acts on layer 0; name that layer."
    ),
    "unknown group, made by hand": (
        "rank 0, op 10 all_reduce(layer 0) on world: the group world was not made by group_of, so its members "
        "would not find each other; make it by group_of."
    ),
    "malformed tape, another world": "the mesh has 1 rank, but the program has 2 tapes; give one for each rank.",
    "malformed tape, a layer's outputs": (
        "rank 0, op 3 forward(layer 0): has 3 outputs, but this layer makes 1 value; number these outputs, and "
        "the saved value."
    ),
    "malformed tape, a gradient's outputs": (
        "rank 0, op 40 backward_input(layer 6): numbers 2 values, but makes 1 beside what the layer keeps; number "
        "all its outputs."
    ),
    "malformed tape, a wait": (
        "rank 0, op 11 wait(handle 0): a wait reads and makes no value; number the received value in its communication."
    ),
    "malformed tape, nothing expected": (
        "rank 0, op 0 recv from rank 1: the op does not name its message; give the expected value."
    ),
    "malformed tape, nothing expected of a root": (
        "rank 0, op 0 broadcast(layer 0) on world: the op does not name the value from the root; give the expected "
        "value."
    ),
    "malformed tape, a root's part": (
        "rank 0, op 0 broadcast(layer 0) on world: has 0 inputs and 0 outputs; the part of rank 0 reads 0 and "
        "makes 1, give these."
    ),
    "malformed tape, no set of microbatches": (
        "rank 0, op 0 recv from rank 1: no set of microbatches is the number -1; expect a bit set."
    ),
    "unknown group, a rank twice": (
        "rank 0, op 10 all_reduce(layer 0) on world: the group has the ranks (0, 0); give rank 0 itself and others"
        " of 0-1, each once."
    ),
    "unknown rank, on a tape": (
        "rank 0, op 0 recv from rank 7 of weights[0]: there is no other rank 7; the world has "
        "ranks 0-1, name another of these."
    ),
    "batch of messages, apart": (
        "rank 0, op 2 recv from rank 1 of weights[0]: is of batch 0, but other ops stand between it and the rest "
        "of its batch; put them before or after the batch."
    ),
    "batch of collectives": (
        "rank 0, op 0 barrier on world: is issued together with ops of another kind, group or dtype; "
        "give it a batch of its own."
    ),
    "batch of collectives, on one rank": (
        "rank 1, op 16 all_reduce(layer 0) on world: is issued alone, and as one of 2 on another rank; issue the same "
        "together on all ranks."
    ),
    "in flight, not arrived": "rank 0, op 1 free(value 0): value 0 is still in flight; wait for handle 0 first.",
    "in flight, updated": (
        "rank 0, op 11 update(layer 0): weights[0] is still read by a communication in flight; wait for it first."
    ),
    "in flight, at the end": "rank 0, op 0 barrier on world: is still in flight when the step ends; wait for it.",
    "left over, twice": (
        "rank 0, op 13: the step ends with value 70, weights[0] (step 1), which is live already; a step leaves "
        "each slice once. Free one of them."
    ),
    "unknown slice, of a value on a tape": (
        "rank 0, op 1 slice(layer 0): None is not one of the equal parts of a value; name one of them."
    ),
    "wrong factor, on a tape": (
        "rank 0, op 5 scale(layer 1): None is not a rational times counts of tokens of the step's microbatches; "
        "give such a factor."
    ),
    "tied weight, on a tape": (
        "rank 0, op 0 load_weight(layer 6): the head is tied to the embedding and has no weight of its own; it "
        "computes with weights[0], load layer 0."
    ),
    "other forward, on a tape": (
        "rank 0, op 46 backward_input(layer 4): the forward pass was by other slices of the layer than the weight"
        " and the gradient; give the slices of the forward pass."
    ),
    "no forward, recomputed": (
        "rank 0, op 16 recompute(layer 1): this norm layer takes or makes several values, and is not recomputed; "
        "save what its forward makes."
    ),
    "no forward, second half on a tape": (
        "rank 0, op 59 backward_weight(layer 6): value 0 is not the value that the first half of this activation's "
        "backward left for it; read the value that it left, once."
    ),
    "wrong offset, no room": (
        "rank 0, op 3 forward(layer 0): has an offset in the arena, but the executor does not choose where its result "
        "lies; leave it out."
    ),
    "wrong offset, no beginning": (
        "rank 0, op 6 backward(layer 0): has offset 1, but buffers begin at multiples of 64 bytes, with adjacent "
        "values; leave offsets to the pass arena."
    ),
    "room taken": (
        "rank 0, op 13 backward(layer 0): bytes 0-1048575 of the arena are to hold grad_weights[0] (microbatch 1), "
        "but grad_weights[0] (microbatch 0) lies in 0-1048575 until op 26; give it another offset."
    ),
}
"""Of a tape, by its rule and what is special, the whole sentence."""


@pytest.mark.parametrize("case", SENTENCES)
def test_a_wrong_tape_is_refused_in_a_sentence(case: str) -> None:
    assert sentence_of(TAPES[case]) == SENTENCES[case]
    assert refusal_of(TAPES[case]).rule == case.split(", ")[0]
