"""Compressed replays: they take as long and hold as much as if every op were traced and replayed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from shardlab.language import Mesh, OpKind, Rank, UserError
from shardlab.language.pass_names import NO_LAG, Lag
from shardlab.language.precision import find_precision
from shardlab.models import GPT, Blocks, Llama, MoE
from shardlab.simulate.hardware import Cluster
from shardlab.simulate.hardware.cluster import find_cluster
from shardlab.simulate.hardware.profile import AlphaBeta, Machine, Profile, Rate
from shardlab.simulate.predict.compressed.rank import CompressedRank
from shardlab.simulate.predict.forecast import CompressedReplay, can_compress
from shardlab.simulate.predict.recipe import recipes
from shardlab.simulate.predict.workload import Workload
from shardlab.strategies.plan.plan import Plan
from shardlab.strategies.plan.rank_plan import PlanRank
from shardlab.strategies.schedules import SCHEDULES
from tests.support.thorough import examples

MODELS: dict[str, Callable[[int], Blocks]] = {
    "llama": lambda layers: Llama(
        layers=layers, hidden_size=512, heads=8, kv_heads=8, ffn_hidden_size=1536, vocab_size=2048, seq_len=512
    ),
    "large head": lambda layers: Llama(
        layers=layers, hidden_size=256, heads=8, kv_heads=8, ffn_hidden_size=512, vocab_size=64000, seq_len=256
    ),
    "gpt": lambda layers: GPT(layers=layers, hidden_size=256, heads=8, vocab_size=1024, seq_len=256, dropout=0.1),
    "tied": lambda layers: GPT(layers=layers, hidden_size=256, heads=8, vocab_size=1024, seq_len=256, tied=True),
    "mixture": lambda layers: MoE(layers=layers, hidden_size=256, heads=8, vocab_size=1024, seq_len=256, experts=8),
    "dense first": lambda layers: MoE(
        layers=layers,
        hidden_size=256,
        heads=8,
        vocab_size=1024,
        seq_len=256,
        experts=8,
        ffn_hidden_size=512,
        dense_layers=2,
        dense_ffn_hidden_size=1024,
        shared_experts=1,
    ),
}

SHARDS = [
    (),
    ("shard_optimizer",),
    ("shard_optimizer", "shard_gradients"),
    ("shard_optimizer", "shard_gradients", "shard_parameters"),
    ("shard_optimizer", "shard_parameters"),
]


def measured(contention: float, lag: Lag = NO_LAG) -> Cluster:
    """A machine on which every op takes some time beside its kernels, each another."""
    machine = Machine("a CPU", 64, "2.0", "gloo")
    verbs = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
    collectives = {(verb, ranks): AlphaBeta(ranks * 1e-5, 1e-10) for verb in verbs for ranks in range(2, 9)}
    families = ("matmul", "attention", "pointwise", "update")
    kernels = {(family, "float32"): Rate(1e-5, 1e12, 1e10) for family in families}
    overheads = {(f"op:{kind.value}", "float32"): Rate(n * 1e-6, 0.0, 0.0) for n, kind in enumerate(OpKind)}
    message, rates = AlphaBeta(2e-5, 1e-10), kernels | overheads
    return Cluster.of_profile(Profile(machine, collectives, message, rates, 1e12, contention=contention, lag=lag))


CLUSTERS = {
    "data sheets": (find_cluster("h100x64"), "bf16"),
    "measured": (measured(0.0), "fp32"),
    "contending": (measured(0.5), "fp32"),
    "lagging": (measured(0.5, Lag(0.5, 2e-4, 0.4)), "fp32"),
}


@st.composite
def workloads(draw: st.DrawFn, depth: st.SearchStrategy[int], most_microbatches: int = 9) -> Workload:
    """Small models on few ranks, with everything that a plan can say."""
    model = MODELS[draw(st.sampled_from(sorted(MODELS)))](draw(depth))
    small = st.sampled_from((1, 1, 2))
    mesh = Mesh(
        pp=draw(st.sampled_from((1, 2, 3, 4))),
        dp_replicate=draw(small),
        dp_shard=draw(small),
        cp=draw(small),
        tp=draw(small),
        ep=draw(small) if isinstance(model, MoE) else 1,
    )
    axes = draw(st.sampled_from([("dp_shard",), ("dp_shard", "dp_replicate"), ("dp_shard", "cp"), ("cp",)]))
    shards = draw(st.sampled_from(SHARDS))
    recompute = draw(st.sampled_from(["none", "none", "selective", "full", "some"]))
    some = tuple(sorted(draw(st.sets(st.integers(0, model.layers - 1)))))
    schedule = draw(st.sampled_from(sorted(SCHEDULES)))
    cluster, precision = CLUSTERS[draw(st.sampled_from(sorted(CLUSTERS)))]
    try:
        words: dict[str, Any] = {
            "mesh": mesh.used,
            "schedule": schedule,
            "stages_per_rank": draw(st.sampled_from([None, None, 1, 3])) if "-" in schedule else None,
            "reduce_at": draw(st.sampled_from(["layer", "step"])),
            "reshard_after": draw(st.sampled_from(["layer", "stage", "step"])),
            "sequence_parallel": mesh.tp > 1 and draw(st.booleans()),
            "recompute": some if recompute == "some" else recompute,
            "context": draw(st.sampled_from(["ring", "all_gather", "ulysses"])),
        }
        plan = Plan.from_dict(words | dict.fromkeys(shards, axes))
        workload = Workload(
            plan,
            model,
            cluster,
            plan.data_ranks * draw(st.integers(1, most_microbatches)),
            draw(st.integers(1, 2)),
            find_precision(precision),
            recipe=recipes()[draw(st.sampled_from(sorted(recipes())))],
            optimizer=draw(st.sampled_from(["adamw", "muon"])),
        )
        layers = draw(st.lists(st.integers(1, 6), min_size=2, max_size=4))
        units = sum(layers)
        if draw(st.booleans()) and len(layers) == mesh.pp and schedule in ("1f1b", "gpipe", "zb-h1"):
            assume(not workload.sizes.blocks or units % 2)
            blocks = units // 2 if workload.sizes.blocks else units
            imported_plan = Plan.from_dict(plan.as_dict() | {"layers_per_stage": layers, "recompute": "full"})
            workload = replace(workload, plan=imported_plan, model=replace(model, layers=max(1, blocks)))
        assume(can_compress(workload))
        if workload.model.layers < 10:
            workload.traced  # noqa: B018  # whatever is refused is refused here
    except UserError:
        assume(False)
        raise
    return workload


def compare(workload: Workload) -> None:
    """Compare the compressed replay of a workload with the replay of every op."""
    plan, whole = workload.plan, workload.estimate()
    assert isinstance(plan, Plan)
    count = workload.microbatches // plan.data_ranks
    replay = CompressedReplay(workload, count)
    seconds, peaks = replay(count)
    assert seconds == pytest.approx(whole.step, rel=1e-9)
    parts, expected = replay.parts(count), whole.parts
    assert max(abs(parts.get(name, 0.0) - expected.get(name, 0.0)) for name in {*parts, *expected}) < 1e-9 * whole.step
    assert [asdict(replace(peak, microbatches=0)) for peak in whole.peaks] == list(map(asdict, peaks))


@settings(
    max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow]
)
@given(workloads(st.integers(1, 9)))
def test_a_compressed_replay_equals_the_replay_of_every_op(workload: Workload) -> None:
    compare(workload)


@settings(
    max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow]
)
@given(workloads(st.integers(10, 60), most_microbatches=6))
def test_a_short_model_tells_the_step_of_the_whole_model(workload: Workload) -> None:
    plan = workload.plan
    assert isinstance(plan, Plan)
    count = workload.microbatches // plan.data_ranks
    try:
        seconds, peaks = CompressedReplay(workload, count)(count)
    except UserError:
        assume(False)
        raise
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardlab.simulate.predict.forecast.EXTRA_BLOCKS", (None,))
        whole = CompressedReplay(workload, count)(count)
    assert seconds == pytest.approx(whole[0], rel=1e-9)
    assert peaks == whole[1]


def test_the_layers_of_three_blocks_have_the_sizes_of_all() -> None:
    for name, model in MODELS.items():
        meshes = [Mesh(), Mesh(tp=2), Mesh(cp=2), Mesh(cp=2, tp=2), Mesh(dp_shard=2)]
        for mesh in [*meshes, *[Mesh(ep=2), Mesh(ep=2, tp=2)][: 2 * isinstance(model(7), MoE)]]:
            workload = Workload(Plan(mesh), model(7), find_cluster("h100x64"), 8, 2, find_precision("bf16"))
            whole = workload.precision.sizes(workload.cut.sizes(2, 2))
            assert workload.sizes == whole, name
            layers = range(whole.layers)
            assert list(map(workload.repeated.place, layers)) == list(map(workload.cut.place, layers))


def test_ranks_of_one_kind_share_their_compressed_steps() -> None:
    """All ranks of a deep pipeline but the first and last are of one kind, and their steps repeat once it is full."""
    shards = dict.fromkeys(("shard_optimizer", "shard_gradients", "shard_parameters"), ("dp_shard",))
    plan = Plan.from_dict({"mesh": {"pp": 8, "dp_shard": 8}, "schedule": "1f1b"} | shards)
    model = MODELS["llama"](23)
    workload = Workload(plan, model, find_cluster("h100x64"), 8 * 40, 1, find_precision("bf16"))
    replay = CompressedReplay(workload, 40)
    replay(40)
    steps = sum(len(kind.transitions) for kind in replay.kinds.values())
    replay(80)
    assert sum(len(kind.transitions) for kind in replay.kinds.values()) == steps < 80
    compare(workload)


def test_a_compressed_rank_has_every_verb_that_plans_use() -> None:
    """The type checker verifies this too: the code that follows a plan takes a `PlanRank`."""
    verbs = {name for name, method in vars(PlanRank).items() if inspect.isfunction(method) and not name.startswith("_")}
    assert {"all_gather", "update", "direction"} <= verbs
    assert verbs <= set(dir(CompressedRank))
    assert verbs <= set(dir(Rank))
