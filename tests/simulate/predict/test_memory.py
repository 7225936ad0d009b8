"""What a device holds beyond tensors counts wherever "fits" is said, for plans and for pages of strategies alike."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardlab.check import Checked, check
from shardlab.language import Kind, Mesh, OpKind, Sizes, UserError, trace
from shardlab.language.precision import PRECISIONS, find_precision
from shardlab.models import GPT
from shardlab.simulate.hardware import Cluster, Machine, Profile, Rate, find_cluster
from shardlab.simulate.predict.folding import fold
from shardlab.simulate.predict.memory import (
    DeviceMemory,
    ModelState,
    device_memory,
    model_state,
    tensor_budget,
    zero_plan,
)
from shardlab.simulate.predict.memory_advice import require_memory
from shardlab.simulate.predict.recipe import OWN, MemoryUse, Recipe, find_recipe
from shardlab.simulate.predict.workload import Workload
from shardlab.simulate.timeline.memory import CATEGORIES, Category, memory_in_bytes
from shardlab.strategies.load import load
from shardlab.strategies.plan.plan import Plan

MODEL = GPT(layers=4, hidden_size=256, heads=4, seq_len=256, vocab_size=1024)
SHARD = ("dp_shard",)
CPU = Profile(Machine("a CPU", 4, "2.8", "gloo"), {}, None, {("matmul", "float32"): Rate(0.0, 1e9, 1e9)}, 2.0**32)


def of(name: str, recipe: Recipe) -> Workload:
    """A page of the strategies, on four devices."""
    entry = load(name)

    def traced(mesh: Mesh, sizes: Sizes, microbatches: int) -> Checked:
        return check(trace(entry.program, mesh, sizes, microbatches))

    numbers, devices = find_precision("bf16"), find_cluster("h100x4")
    return Workload(entry.grid(4), MODEL, devices, 4, 1, numbers, traced, entry.columns, recipe)


def standing(name: str, memory: MemoryUse) -> float:
    """Bytes that a framework of such memory holds beyond the tensors of a page."""
    return device_memory(of(name, Recipe(memory=memory))).total - device_memory(of(name, Recipe())).total


def test_a_buffer_of_gradients_stands_where_a_page_keeps_whole_gradients() -> None:
    assert standing("ddp", MemoryUse(gradient_buffer=True)) > 0
    assert standing("fsdp", MemoryUse(gradient_buffer=True)) == 0


def test_streams_hold_memory_where_a_page_gathers_parameters() -> None:
    assert standing("fsdp", MemoryUse(stream_memory=True)) > 0
    assert standing("ddp", MemoryUse(stream_memory=True)) == 0


def test_a_page_holds_as_much_as_the_plan_that_is_named_like_it() -> None:
    recipe = find_recipe("fsdp2")
    plan = Plan(Mesh(dp_shard=4), shard_parameters=SHARD, shard_gradients=SHARD, shard_optimizer=SHARD)
    page = of("fsdp", recipe)
    assert device_memory(page).total == pytest.approx(
        device_memory(replace(page, plan=plan, trace=None)).total, rel=0.1
    )


def test_what_only_fits_without_the_allocators_reserve_is_refused() -> None:
    step = of("ddp", OWN)
    peaks = step.estimate().peaks
    tensors = max(peak.bytes for peak in peaks)
    capacity = tensors + 2.0**30
    tight = replace(step, cluster=replace(step.cluster, device=replace(step.cluster.device, memory=capacity)))
    assert not device_memory(tight, peaks).fits
    with pytest.raises(UserError, match=r"would need 1\.\d+ GiB \(1\.0 GiB of it not tensors\) but has 1\.\d+ GiB"):
        require_memory(tight, tight.estimate().peaks)
    require_memory(replace(tight, recipe=Recipe()), tight.estimate().peaks)


def test_where_room_lacks_the_allocator_gives_up_what_it_need_not_keep() -> None:
    all, half = (
        device_memory(of("ddp", Recipe(memory=MemoryUse(reserved=1.5, kept_when_full=share)))) for share in (1.0, 0.5)
    )
    assert half.total == all.total == all.needed == 1.5 * all.allocated
    assert half.needed == 1.25 * all.allocated


def test_on_cpus_nothing_is_added_to_what_was_counted() -> None:
    step = of("ddp", OWN)
    peaks = step.estimate().peaks
    cpu = device_memory(replace(step, cluster=Cluster.of_profile(CPU)), peaks)
    tensors = max(peak.bytes for peak in peaks)
    assert cpu == DeviceMemory(tensors, tensors, tensors, tensors, tensors, cpu.capacity, True, tensors, tensors)
    assert device_memory(step, peaks).total > tensors


NANOTRON = Plan(Mesh(pp=2, tp=2), sequence_parallel=True)


def of_plan(memory: MemoryUse, plan: Plan = NANOTRON) -> DeviceMemory:
    """A plan's memory, on four devices, by a framework of such memory."""
    numbers, devices = find_precision("bf16"), find_cluster("h100x4")
    return device_memory(Workload(plan, MODEL, devices, 4, 1, numbers, recipe=Recipe(memory=memory)))


def test_gathers_that_are_held_back_are_reserved_and_given_up_where_room_lacks() -> None:
    none, two = of_plan(MemoryUse()), of_plan(MemoryUse(gathers_held_back=2.0))
    gathered = 256 * 256 / 2 * 2  # the other half of a sequence, in two bytes
    assert two.reserved - none.reserved == 2 * 2 * 2 * gathered  # of two blocks, for two microbatches
    assert (two.allocated, two.needed) == (none.allocated, none.needed)
    apart = replace(NANOTRON, sequence_parallel=False)
    assert of_plan(MemoryUse(gathers_held_back=2.0), apart).reserved == of_plan(MemoryUse(), apart).reserved


def test_a_plan_is_chosen_with_a_margin_and_fits_without() -> None:
    none, wide = of_plan(MemoryUse()), of_plan(MemoryUse(margin_bytes=80 * 2.0**30))
    assert none.safe
    assert none.fits
    assert not wide.safe
    assert wide.fits


def test_a_log_of_the_first_rank_tells_less_than_the_fullest_holds() -> None:
    shallow = Plan(Mesh(pp=4), layers_per_stage=(1, 1, 1, 1))
    memory = MemoryUse(logit_bytes=1000.0)  # so that the last stage is the fullest
    fullest, first = of_plan(memory, shallow), of_plan(replace(memory, logs_first_rank=True), shallow)
    assert fullest.logged == fullest.reserved == first.reserved
    assert first.logged < first.reserved
    assert fullest.logged_allocated == fullest.allocated == first.allocated
    assert first.logged_allocated < first.allocated


@pytest.mark.parametrize("recipe", ["shardlab", "fsdp2", "nanotron"])
@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_the_room_of_tensors_is_what_fills_the_device(name: str, recipe: str) -> None:
    """With all that is held beyond them, and no more."""
    step = of(name, find_recipe(recipe))
    (*_, peak) = sorted(step.estimate().peaks, key=lambda peak: peak.bytes)
    full = replace(peak, bytes=int(tensor_budget(step)))
    assert full.bytes > peak.bytes
    assert device_memory(step, [full]).needed == pytest.approx(step.cluster.device.memory, rel=1e-9)


def state_of_a_replay(plan: Plan, parameters: int, recipe: Recipe, precision: str) -> ModelState:
    """The state that the ledger counts before the update, with the gradients that are kept between microbatches."""
    layers = 16
    layer_parameters = parameters // layers
    sizes = Sizes((layer_parameters,) * layers, (2 * layer_parameters,) * layers, (0,) * (layers + 1), (0,) * layers)
    numbers = recipe.memory.state_precision(PRECISIONS[precision], plan)
    folded = fold(plan, numbers.sizes(sizes), 2 * plan.data_ranks)
    (memory,) = memory_in_bytes(folded, counters=True)
    kinds = [op.kind for op in folded.program.tapes[0]]
    updated, second = kinds.index(OpKind.UPDATE) - 1, kinds.index(OpKind.LOAD_BATCH, kinds.index(OpKind.LOSS))
    sharded = bool(plan.shard_gradients)
    bytes = {category: memory.counters[updated][number] for number, category in enumerate(CATEGORIES)}
    gradients = memory.counters[updated if sharded else second][CATEGORIES.index(Category.GRADIENTS)]
    return ModelState(bytes[Category.PARAMETERS], gradients, bytes[Category.OPTIMIZER])


@pytest.mark.parametrize("recipe", ["shardlab", "fsdp2"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-fp32-grads"])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("ranks", [1, 8])
def test_the_formula_of_a_ranks_state_is_what_the_ledger_counts(
    ranks: int, stage: int, precision: str, recipe: str
) -> None:
    plan, framework = zero_plan(ranks, stage), find_recipe(recipe)
    counted = state_of_a_replay(plan, 2**20, framework, precision)
    assert counted == model_state(plan, 2**20, PRECISIONS[precision], framework)


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_the_memory_of_zero_is_the_papers(stage: int, gigabytes: float) -> None:
    """Rajbhandari et al. 2020, arXiv 1910.02054, figure 1: 7.5 B parameters on 64 GPUs."""
    state = model_state(zero_plan(64, stage), 7.5e9, find_precision("fp16"))
    assert sum(state) / 1e9 == pytest.approx(gigabytes, rel=0.02)


@pytest.mark.parametrize(("stage", "expected"), [(0, 18), (1, 18), (2, 18), (3, 16)])
def test_fsdp_keeps_no_half_precision_copy_of_sharded_parameters(stage: int, expected: int) -> None:
    """Float32 parameters, gradients and two moments: 16 bytes. Parameters that stay whole are half precision beside."""
    precision, recipe = find_precision("bf16-fp32-grads"), find_recipe("torchtitan")
    numbers = recipe.memory.state_precision(precision, zero_plan(8, stage))
    assert numbers.bytes(Kind.WEIGHT) + numbers.bytes(Kind.GRAD_WEIGHT) + numbers.optimizer == expected
