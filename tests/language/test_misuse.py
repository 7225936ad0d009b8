"""Refusals of expressions that torch has and a rank does not."""

from __future__ import annotations

import asyncio
import copy
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

import shardlab
from shardlab.common.errors import Refused
from shardlab.language import Rank
from shardlab.language.misuse import NAME_OF
from tests.language.tapes import alone, refusal, refused

MISUSES: list[tuple[Callable[[Any], object], str]] = [
    (lambda gradient: gradient * 0.5, r"rank\.scale\(value, Fraction\(1, 2\)\)"),
    (lambda gradient: 2 * gradient, r"rank\.scale\(value, 2\)"),
    (lambda gradient: gradient / 4, r"rank\.scale\(value, Fraction\(1, 4\)\)"),
    (lambda gradient: gradient / 0, r"rank\.scale\(value, by\)"),
    (operator.neg, r"rank\.scale\(value, -1\)"),
    (lambda gradient: gradient * gradient, r"rank\.scale\(value, by\)"),
    (lambda gradient: gradient - gradient, r"a \+ b"),
    (lambda gradient: gradient @ gradient, r"rank\.forward"),
    (lambda gradient: gradient**2, r"rank\.norm"),
    (abs, r"rank\.norm"),
    (lambda gradient: gradient[0], r"rank\.slice"),
    (list, r"rank\.slice"),
    (len, "value.elements"),
    (bool, "`value is not None` tells whether there is a value"),
    (lambda gradient: gradient and 1, "`value is not None` tells whether there is a value"),
    (lambda gradient: 0 in gradient, r"rank\.slice"),
    (float, "traced once, without numbers"),
    (lambda gradient: gradient > 0, "traced once, without numbers"),
    (lambda gradient: gradient == 0, "traced once, without numbers"),
    (lambda gradient: gradient != 0.5, "traced once, without numbers"),
    (lambda gradient: gradient.item(), "traced once, without numbers"),
    (lambda gradient: gradient.mul_(2), r"rank\.scale"),
    (lambda gradient: gradient.cuda(), r"rank\.reload"),
    (lambda gradient: gradient.spam, "`elements`, `bytes` and `spec`"),
]


@pytest.mark.parametrize(("misuse", "verb"), MISUSES)
def test_an_expression_of_torch_names_the_verb_to_write(misuse: Callable[[Any], object], verb: str) -> None:
    async def strategy(rank: Rank) -> None:
        misuse(rank.zero_gradient(0))

    with pytest.raises(Refused, match=verb):
        shardlab.trace(strategy, ranks=1)


def test_sum_adds_a_list_of_gradients() -> None:
    def lines(rank: Rank) -> None:
        assert sum([rank.zero_gradient(0), rank.zero_gradient(0)]) is not None

    assert "add 0 1 -> 2" in alone(lines)


def test_values_are_compared_by_identity() -> None:
    def lines(rank: Rank) -> None:
        one, other = rank.zero_gradient(0), rank.zero_gradient(0)
        assert one in [other, one]
        assert one != other
        assert one != None  # noqa: E711
        assert len({one, other}) == 2

    alone(lines)


def test_python_and_notebooks_may_look_for_attributes_that_do_not_exist() -> None:
    def lines(rank: Rank) -> None:
        for thing in (rank, rank.zero_gradient(0), rank.all_reduce(rank.zero_gradient(0))):
            assert not hasattr(thing, "_repr_png_")
            assert not hasattr(thing, "__array__")
        assert getattr(rank, "step", None) is None
        assert copy.copy(rank.load_batch([0])) is not None

    alone(lines)


def test_an_unknown_verb_lists_the_nearest_name_first_and_the_others_of_its_family() -> None:
    error = refused(lambda rank: cast(Any, rank).allreduce, "unknown verb")
    assert error.remedy.startswith("did you mean rank.all_reduce? Other verbs are ")
    assert {"forward", "all_gather", "accumulate"} <= set(error.remedy.replace("?", "").replace(",", "").split())
    error = refused(lambda rank: cast(Any, rank).world_size, "unknown verb")
    assert error.remedy.startswith("did you mean rank.world? Other attributes are index, mesh")
    assert refused(lambda rank: cast(Any, rank).xyzzy, "unknown verb").remedy.startswith("the verbs are ")


def test_every_suggested_name_exists() -> None:
    def lines(rank: Rank) -> None:
        assert all(hasattr(rank, name) for name in NAME_OF.values())
        assert not any(hasattr(rank, name) for name in NAME_OF)

    alone(lines)


RESULTS: list[Callable[[Any], object]] = [
    lambda handle: handle + handle,
    lambda handle: handle[0],
    list,
    lambda handle: handle.wait(),
]


@pytest.mark.parametrize("misuse", RESULTS)
def test_a_handle_used_as_its_result_is_to_be_awaited(misuse: Callable[[Any], object]) -> None:
    async def strategy(rank: Rank) -> None:
        misuse(rank.all_reduce(rank.zero_gradient(0)))

    with pytest.raises(Refused, match="await it first"):
        shardlab.trace(strategy, ranks=2)


async def awaits_a_value(rank: Rank) -> None:
    await cast(Any, rank.load_batch([0]))


async def awaits_a_sum(rank: Rank) -> None:
    await cast(Any, rank.accumulate(rank.zero_gradient(0)))


async def awaits_a_pair(rank: Rank) -> None:
    await cast(Any, rank.load_weights(0))


async def gathers_with_asyncio(rank: Rank) -> None:
    await asyncio.gather(rank.all_reduce(rank.zero_gradient(0)))


@pytest.mark.parametrize("strategy", [awaits_a_value, awaits_a_sum, awaits_a_pair])
def test_an_await_of_a_plain_call_is_to_be_left_out(strategy: Any) -> None:
    error = refusal(strategy)
    assert error.rule == "awaited something else"
    assert error.remedy.startswith("leave out `await`")


def test_wrong_arguments_are_those_of_the_ranks_verb() -> None:
    error = refused(lambda rank: cast(Any, rank).forward(0), "the program raised")
    assert "TypeError: rank.forward() missing 2 required positional arguments" in error.given
    assert error.remedy == "write rank.forward(layer, inputs, weight), and it also takes save, part"


def test_arguments_that_must_be_named_are_refused_with_their_names() -> None:
    error = refused(lambda rank: cast(Any, rank).recv(0), "the program raised")
    assert error.remedy == "write rank.recv(source=...), and it also takes expect"
    error = refused(lambda rank: cast(Any, rank).send(rank.load_batch([0]), 1), "the program raised")
    assert error.remedy == "write rank.send(value, to=...)"


WRONG_CALLS: list[tuple[Callable[[Any], object], str, str]] = [
    (
        lambda rank: rank.exchange(rank.load_batch([0]), dst=1, src=1),
        "got an unexpected keyword argument 'dst'",
        "dst is called to here: write rank.exchange(value, to=..., source=...), and it also takes expect",
    ),
    (
        lambda rank: rank.reduce_scatter(rank.zero_gradient(0), op="mean"),
        "got an unexpected keyword argument 'op'",
        "it always sums, and gradients are shares of the step's mean already: write rank.reduce_scatter(value), and it "
        "also takes axis, among",
    ),
    (
        lambda rank: rank.accumulate(0, rank.load_batch([0])),
        "takes 1 positional argument but 2 were given",
        "write rank.accumulate(gradient)",
    ),
    (
        lambda rank: rank.load_weights(0, 0, 1, 2, 3),
        "takes 1 to 3 positional arguments but 5 were given",
        "write rank.load_weights(layer), and it also takes shard, of",
    ),
    (
        lambda rank: rank.slice(rank.load_weight(0), 0),
        "missing 1 required positional argument: 'of'",
        "write rank.slice(value, index, of)",
    ),
]


@pytest.mark.parametrize(("call", "fault", "remedy"), WRONG_CALLS)
def test_wrong_arguments_name_those_that_the_verb_takes(call: Callable[[Any], object], fault: str, remedy: str) -> None:
    error = refused(call, "the program raised")
    assert fault in error.given
    assert error.remedy.startswith(remedy)


WRONG_TYPES: list[tuple[Callable[[Any], object], str]] = [
    (lambda rank: rank.world(), "'int' object is not callable; an attribute such as rank.index or rank.world is read "),
    (lambda rank: rank.mesh(), "an attribute such as rank.mesh is read without parentheses"),
    (lambda rank: rank.layers(), "an attribute such as rank.layers or rank.microbatches is read without parentheses"),
    (lambda rank: rank.weights(0), "a store takes its key in brackets, as in rank.weights[0]"),
    (lambda rank: rank.share[0], "a verb is called with parentheses, as in rank.share()"),
    (lambda rank: range(rank.stage_layers), "a verb is called with parentheses, as in rank.share()"),
    (lambda rank: rank.load_batch([0]) // 2, "verbs of the rank compute with values"),
    (lambda rank: f"{rank.load_batch([0]):.2f}", "verbs of the rank compute with values"),
    (lambda rank: rank.load_batch([0])[0:1], "activations[0] (microbatch 0) [slice(0, 1, None)] is no operation"),
    (lambda rank: rank.barrier() < 1, "await the handle first: its result is the value"),
    (lambda rank: rank.load_batch(rank.share), "rank.load_batch(rank.share) raised TypeError: 'method' object is not "),
    (lambda rank: rank.load_batch(rank.share), "not iterable; write rank.share(), with parentheses."),
    (lambda rank: rank.load_batch([0.0]), "rank.load_batch([0.0]) raised TypeError: "),
    (lambda rank: rank.load_batch(rank.load_batch([0])), "rank.load_batch(activations[0] (microbatch 0)) was called; "),
    (lambda rank: rank.tokens(0), "'int' object is not iterable; give microbatches as Iterable[int] | None."),
    (
        lambda rank: rank.group([0]),
        "rank.group([0]) raised TypeError: unhashable type: 'list'; give axis as str | None.",
    ),
    (
        lambda rank: rank.broadcast(rank.load_weight(0), root="0"),
        "rank.broadcast(weights[0], root='0') raised TypeError: "
        "'>=' not supported between instances of 'str' and 'int'; give root as int.",
    ),
    (lambda rank: rank.load_weight("0"), "layer '0' does not exist"),
    (lambda rank: rank.load_weight(0, rank.share), "shard rank.share of 1 was asked for; give whole numbers"),
    (lambda rank: rank.norm(0, rank.grad_weights), "name the key of one value, rank.grad_weights[key]"),
    (lambda rank: rank.norm(0, rank.grad_weights.pop), "write rank.grad_weights.pop(...), with parentheses"),
    (lambda rank: rank.norm(0, [rank.zero_gradient(0)]), "[grad_weights[0] (zero)] was given where a value is wanted"),
    (lambda rank: rank.norm(0, rank), "<rank 0 of 1> was given where a value is wanted"),
    (lambda rank: rank.index + "a", "unsupported operand type(s) for +: 'int' and 'str'; fix it there"),
    (lambda rank: rank.load_batch(rank.index + "a" for _ in "a"), "the program raised TypeError: unsupported operand"),
]


@pytest.mark.parametrize(("call", "sentence"), WRONG_TYPES)
def test_operands_and_arguments_of_a_wrong_type_say_what_to_write(call: Callable[[Any], object], sentence: str) -> None:
    async def strategy(rank: Rank) -> None:
        call(rank)

    assert sentence in str(refusal(strategy, 1))


def test_a_store_is_not_replaced() -> None:
    async def replaces(rank: Rank) -> None:
        cast(Any, rank).weights = {}
        rank.weights[0], rank.opt_states[0] = rank.load_weights(0)

    async def replaces_and_fails(rank: Rank) -> None:
        cast(Any, rank).weights = {}
        rank.forward(0, rank.load_batch([0]), rank.weights[0])

    for strategy in (replaces, replaces_and_fails):
        error = refusal(strategy)
        assert error.rule == "wrong store"
        assert error.given == "the program replaced rank.weights by an object of type dict"
        assert error.remedy == "a store stays, write rank.weights[key] = value"


def test_torchs_name_of_the_ranks_number_is_known() -> None:
    assert "did you mean rank.index?" in str(refused(lambda rank: cast(Any, rank).rank, "unknown verb"))


def test_a_key_that_a_communication_in_flight_would_fill_names_it() -> None:
    async def forgets_the_last(rank: Rank) -> None:
        for l in rank.layers:
            rank.grad_weights[l] = rank.zero_gradient(l)
        sums = [rank.all_reduce(rank.grad_weights.pop(l)) for l in rank.layers]
        rank.grad_weights[0] = await sums[0]
        rank.grad_weights[1]

    error = refusal(forgets_the_last)
    assert error.rule == "unknown key"
    assert "all_reduce(layer 1) on world (op 3) brings such a value, await its handle" in error.remedy


MISSING: list[tuple[Callable[[Rank], object], str]] = [
    (lambda rank: rank.weights["w0"], "the store has the keys 0-1. Correct the key, or write"),
    (lambda rank: rank.weights["w", 9], "the store has the keys 0-1. Correct the key, or write"),
    (lambda rank: rank.weights[()], "the store has the keys 0-1. Correct the key, or write"),
    (lambda rank: rank.activations[7, 1], "the store has the keys (0, 0), (0, 1). Correct the key, or write"),
    (lambda rank: rank.opt_states["s"], "the store is empty, first write rank.opt_states['s'] = value"),
    (lambda rank: rank.grad_weights[0], "begin the sum with rank.accumulate(gradient)"),
    (
        lambda rank: rank.activations[1, 0],
        "activations[1] (microbatch 0) was freed on this rank, keep it under this key",
    ),
    (lambda rank: rank.activations[1, 1], "the store has the keys (0, 0), (0, 1). Correct the key, or write"),
]


@pytest.mark.parametrize(("reads", "remedy"), MISSING)
def test_a_missing_key_gets_the_likeliest_remedy(reads: Callable[[Rank], object], remedy: str) -> None:
    def lines(rank: Rank) -> None:
        for l in rank.layers:
            rank.weights[l] = rank.load_weight(l)
        for mb in rank.microbatches:
            rank.activations[0, mb] = rank.load_batch([mb])
        rank.activations[1, 0] = rank.forward(0, rank.activations[0, 0], rank.weights[0])
        del rank.activations[1, 0]
        reads(rank)

    assert f" does not exist; {remedy}" in str(refused(lines, "unknown key"))


def test_a_value_under_a_wrong_key_is_named_before_a_freed_one() -> None:
    def lines(rank: Rank) -> None:
        rank.activations[0] = rank.load_batch([0])
        rank.weights[0] = rank.load_weight(0)
        rank.activations[1] = rank.forward(0, rank.activations[0], rank.weights[0])
        del rank.activations[1]
        rank.activations[0] = rank.forward(0, rank.activations[0], rank.weights[0])
        rank.activations[1]

    sentence = "activations[1] does not exist; activations[1] (microbatch 0) is under the key 0. Correct one of the two"
    assert sentence in str(refused(lines, "unknown key"))


def test_a_missing_key_names_a_few_keys_of_a_large_store() -> None:
    def lines(rank: Rank) -> None:
        for name in "abcdefgh":
            rank.activations[name] = rank.load_batch([0])
        rank.activations["x"]

    sentence = "the store has the keys 'a', 'b', 'c', 'd', 'e', 'f' and 2 more. Correct the key, or write"
    assert sentence in str(refused(lines, "unknown key"))


def test_handles_are_awaited_one_by_one() -> None:
    assert "one by one" in refusal(gathers_with_asyncio).remedy


FORGETS = """
async def load(rank, layer):
    rank.weights[layer], rank.opt_states[layer] = rank.load_weights(layer)

async def never_loads(rank):
    load(rank, 0)
    rank.forward(0, rank.load_batch([0]), rank.weights[0])

async def gives_it_on(rank):
    rank.forward(0, rank.load_batch([0]), load(rank, 0))

async def never_waits(rank):
    weight, state = rank.load_weights(0)
    batch = rank.load_batch(rank.share())
    loss = rank.loss(rank.forward(0, batch, weight))
    gradient, _ = rank.backward(0, batch, loss, weight)
    rank.all_reduce(gradient)
    rank.update(0, gradient, weight, state)

async def drops_the_weight(rank):
    weight = rank.load_weight(0, shard=rank.index, of=rank.world)
    await rank.all_gather(weight)
    rank.forward(0, rank.load_batch(rank.share()), weight)
"""


@pytest.mark.parametrize(
    ("name", "at", "says"),
    [
        ("never_loads", "    load(rank, 0)", r"`await load\(\.\.\.\)`"),
        ("gives_it_on", "load(rank, 0))", r"await load\(\.\.\.\)"),
        ("never_waits", "    rank.all_reduce(gradient)", "an `await` is missing here"),
        ("drops_the_weight", "    await rank.all_gather(weight)", r"`x = await rank\.all_gather\(x\)`"),
    ],
)
def test_a_forgotten_await_is_named_at_the_line_of_the_call(tmp_path: Path, name: str, at: str, says: str) -> None:
    file = tmp_path / "forgets.py"
    file.write_text(FORGETS)
    (line,) = (number for number, text in enumerate(FORGETS.splitlines(), 1) if text.endswith(at))
    with pytest.raises(Refused, match=says) as refused:
        shardlab.check(f"{file}:{name}", ranks=2, layers=1, microbatches=2)
    assert refused.value.line.endswith(f"forgets.py:{line}")
    sentence, source = refused.value._render_traceback_()
    assert "\n" not in sentence
    assert source.endswith(at.strip())
