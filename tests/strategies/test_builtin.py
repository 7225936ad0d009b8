"""Every built-in strategy: right for all sizes that fit, refused in a sentence for others, and as its paper says."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlab.check import check
from shardlab.language import Kind, OpKind, Program, UserError, trace
from shardlab.simulate.timeline import simulate
from shardlab.strategies import STRATEGIES, find
from shardlab.strategies.registry import DECLARED
from tests.support.thorough import examples

WEIGHT_HALF = OpKind.BACKWARD_WEIGHT


def traced(name: str, ranks: int, layers: int, microbatches: int) -> Program:
    entry = STRATEGIES[name]
    return trace(entry.program, entry.mesh(ranks), entry.puzzle(ranks, layers), microbatches)


def test_every_declaration_has_a_name_of_its_own() -> None:
    assert len(DECLARED) == len(STRATEGIES)


def count(program: Program, kind: OpKind) -> int:
    return sum(op.kind is kind for tape in program.tapes for op in tape)


@st.composite
def fitting(draw: st.DrawFn) -> tuple[str, int, int, int]:
    """A strategy with ranks, layers and microbatches that fit it."""
    name = draw(st.sampled_from(list(STRATEGIES)))
    entry = STRATEGIES[name]
    most = 5 if name == "context-parallel" else 9  # each rank's queries meet every other's keys: the square of ops
    ranks = 1 if entry.ranks == 1 else draw(st.integers(1 + (name == "expert-parallel"), most))
    multiple = {"hsdp": 2, "partially-sharded": 2, "tensor-parallel": 2, "column-parallel": 2, "3d": 4, "4d": 4}.get(
        name, 1
    )
    ranks = -(-ranks // multiple) * multiple
    sizes = entry.mesh(ranks).sizes()
    if name == "pipeline":
        layers = ranks * draw(st.integers(1, 4))
    else:
        layers = entry.default_layers(ranks, at_least=1) + draw(st.integers(0, 3))
    data_ranks = sizes["dp_shard"] * sizes["dp_replicate"] * sizes["ep"] if entry.ranks > 1 else 1
    return name, ranks, layers, data_ranks * draw(st.integers(1, 4))


@settings(deadline=None, max_examples=examples(150))
@given(fitting())
def test_every_strategy_passes_all_four_channel_models(case: tuple[str, int, int, int]) -> None:
    name, ranks, layers, microbatches = case
    checked = check(traced(name, ranks, layers, microbatches))
    assert set(checked.models.values()) == {None}
    assert checked.backends() == ["gloo", "nccl"]
    assert simulate(checked).end > 0


@pytest.mark.parametrize(
    ("name", "ranks", "layers", "microbatches", "divides"),
    [
        ("ddp", 4, 4, 6, "6 microbatches do not divide among 4 ranks"),
        ("wsdp", 4, 4, 2, "2 microbatches do not divide among 4 ranks"),
        ("fsdp", 3, 4, 4, "4 microbatches do not divide among 3 ranks"),
        ("pipeline", 4, 6, 4, "6 layers do not divide among 4 ranks"),
        ("gpipe", 4, 3, 4, "3 layers do not reach 4 pipeline stages; give at most 3 stages, or more layers"),
        ("zb-v", 4, 7, 4, "7 layers do not reach 8 pipeline stages"),
        ("pipeline-fsdp", 16, 4, 6, "6 microbatches do not divide among 4 data-parallel ranks; give a multiple of 4"),
        ("hsdp", 3, 4, 6, "3 ranks do not make two replicas; give an even number, or a mesh by --dp-replicate"),
        ("single", 2, 4, 4, "2 ranks were asked for; give 1"),
        ("grad-accum", 4, 4, 4, "4 ranks were asked for; give 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(name: str, ranks: int, layers: int, microbatches: int, divides: str) -> None:
    with pytest.raises(UserError, match=divides):
        traced(name, ranks, layers, microbatches)


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("ranks", [0, -1])
def test_no_strategy_runs_on_less_than_one_rank(name: str, ranks: int) -> None:
    with pytest.raises(UserError):
        traced(name, ranks, 4, 4)


def test_fsdp_gathers_each_layer_twice() -> None:
    program = traced("fsdp", 4, 6, 4)
    gathered = Counter(op.layer for op in program.tapes[0] if op.kind is OpKind.ALL_GATHER)
    assert gathered == dict.fromkeys(range(6), 2)


@pytest.mark.parametrize(
    ("name", "ranks", "layers", "microbatches", "expected"),
    [
        ("single", 1, 5, 4, {}),
        ("grad-accum", 1, 5, 4, {}),
        ("ddp", 4, 5, 8, {OpKind.ALL_REDUCE: 4 * 5}),
        ("wsdp", 4, 5, 8, {OpKind.ALL_GATHER: 4 * 5 * 2, OpKind.ALL_REDUCE: 4 * 5}),
        ("fsdp", 4, 5, 8, {OpKind.ALL_GATHER: 4 * 5 * 2, OpKind.REDUCE_SCATTER: 4 * 5}),
        ("pipeline", 4, 8, 3, {OpKind.SEND: 3 * 2, OpKind.RECV: 3 * 2}),
        # a plan also reduces the gradient's norm over the pipeline, and over what shards the optimizer's state
        ("gpipe", 4, 8, 3, {OpKind.SEND: 3 * 2 * 3, OpKind.RECV: 3 * 2 * 3, OpKind.ALL_REDUCE: 4}),
        ("zero-1", 4, 5, 8, {OpKind.REDUCE_SCATTER: 4 * 5, OpKind.ALL_GATHER: 4 * 5, OpKind.ALL_REDUCE: 4}),
        ("zero-2", 4, 5, 8, {OpKind.REDUCE_SCATTER: 4 * 5 * 2, OpKind.ALL_GATHER: 4 * 5, OpKind.ALL_REDUCE: 4}),
        # 2 x 2 ranks, 3 microbatches each: the replicas meet once for each layer, not for each microbatch, and a weight
        # that is used twice in a row (at the top three times, at the bottom twice) is gathered once
        (
            "hsdp",
            4,
            5,
            12,
            {OpKind.ALL_GATHER: 4 * (2 * 5 * 3 - 5), OpKind.REDUCE_SCATTER: 4 * 5 * 3, OpKind.ALL_REDUCE: 4 * (5 + 1)},
        ),
        # 2 x 2 ranks, 2 layers a stage, 3 microbatches a column; a rank stays on its stage and gathers it once
        (
            "pipeline-fsdp",
            4,
            4,
            6,
            {
                OpKind.ALL_GATHER: 4 * 2,
                OpKind.REDUCE_SCATTER: 4 * 2 * 3,
                OpKind.ALL_REDUCE: 4 * 2,
                OpKind.SEND: 2 * 3 * 2,
                OpKind.RECV: 2 * 3 * 2,
            },
        ),
    ],
)
def test_each_strategy_communicates_as_often_as_it_should(
    name: str, ranks: int, layers: int, microbatches: int, expected: dict[OpKind, int]
) -> None:
    program = traced(name, ranks, layers, microbatches)
    kinds = (OpKind.ALL_REDUCE, OpKind.ALL_GATHER, OpKind.REDUCE_SCATTER, OpKind.SEND, OpKind.RECV)
    assert {kind: count(program, kind) for kind in kinds if count(program, kind)} == expected


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_layer_computes_every_microbatch_once_in_each_direction(name: str) -> None:
    """Experts on each of 4 ranks compute their part of it."""
    program = traced(name, STRATEGIES[name].ranks, 8, 4)
    checked = check(program)
    for kinds in ((OpKind.FORWARD,), (OpKind.BACKWARD, OpKind.BACKWARD_INPUT), (OpKind.BACKWARD, WEIGHT_HALF)):
        done: Counter[tuple[int, int]] = Counter()
        for rank, (tape, specs) in enumerate(zip(program.tapes, checked.specs, strict=True)):
            for op in tape:
                if op.kind in kinds and all(program.mesh.coordinate(rank, axis) == 0 for axis in ("cp", "tp")):
                    mask = specs[op.inputs[0]].microbatches
                    done.update((op.layer, m) for m in range(4) if mask >> m & 1)
        experts = ["expert" in layer.cut for layer in program.sizes.signatures]
        assert done == {(layer, m): 4 if its else 1 for layer, its in enumerate(experts) for m in range(4)}


def test_a_ddp_rank_holds_every_weight_whole_and_an_fsdp_rank_its_slice() -> None:
    for name, share in (("ddp", 1), ("fsdp", 4)):
        program = traced(name, 4, 2, 4)
        loads = [op for op in program.tapes[1] if op.kind is OpKind.LOAD_WEIGHT]
        assert [op.holds.of for op in loads if op.holds] == [share, share]


def test_pipelines_send_activations_up_and_gradients_down() -> None:
    program = traced("gpipe", 3, 3, 2)
    expected = [op.expect for op in program.tapes[1] if op.kind is OpKind.RECV]
    kinds = [message.kind for message in expected if message]
    assert kinds == [Kind.ACTIVATION, Kind.ACTIVATION, Kind.GRAD_ACTIVATION, Kind.GRAD_ACTIVATION]


@pytest.mark.parametrize(("typed", "meant"), [("fdsp", "fsdp"), ("gpip", "gpipe"), ("pipelin", "pipeline")])
def test_an_unknown_name_suggests_the_nearest(typed: str, meant: str) -> None:
    with pytest.raises(UserError, match=f"no strategy '{typed}'; did you mean {meant}"):
        find(typed)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_name_has_hyphens_as_options_have_and_may_be_typed_with_underscores(name: str) -> None:
    assert "_" not in name
    assert find(name) is find(name.replace("-", "_")) is STRATEGIES[name]


def test_a_name_like_no_other_lists_all() -> None:
    with pytest.raises(UserError, match="there are single, grad-accum, ddp"):
        find("zzz")


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_is_traced_to_the_same_tapes_every_time(name: str) -> None:
    ranks = STRATEGIES[name].ranks
    assert traced(name, ranks, 8, 4).fingerprint() == traced(name, ranks, 8, 4).fingerprint()
