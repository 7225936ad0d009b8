"""Descriptions of a plan: in words, as flags, as a picture of its ranks, and by the parts of its step time."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, fields
from typing import Any

from shardlab.common.fields import as_flags
from shardlab.common.text import counted
from shardlab.language import AXES, Mesh
from shardlab.language.recompute_names import POLICIES, modules_of
from shardlab.language.world import gc_paused
from shardlab.planner.problem import Candidate, Problem, model_kinds, sharding_name
from shardlab.simulate.hardware import Cluster
from shardlab.simulate.predict.estimate import COMPUTE
from shardlab.simulate.predict.forecast import (
    can_compress,
    extrapolate_parts,
    microbatches_to_replay,
    step_parts,
    with_microbatches,
)
from shardlab.simulate.predict.workload import Workload
from shardlab.simulate.timeline.critical_path import critical_path, path_parts
from shardlab.simulate.timeline.run import Clocks
from shardlab.strategies.plan.plan import Plan

SHOWN_NODES = 4
"""Largest number of nodes in a picture: the first ones and the last."""

SHOWN_DEVICES = 16
"""Largest number of devices of a node that a picture shows one by one."""


def describe(problem: Problem, candidate: Candidate) -> list[str]:
    """Return the choices of a plan, one in each line."""
    plan, cluster = candidate.plan, problem.cluster
    mesh = plan.mesh
    lines = [_data_parallel_text(plan)]
    if mesh.tp > 1:
        sequence = ", with sequence parallelism" if plan.sequence_parallel else ""
        lines.append(f"tensor parallelism over {mesh.tp} ranks{_nodes_text(mesh, 'tp', cluster)}{sequence}")
    if mesh.cp > 1:
        context = f"{plan.context}" + (f", exchanged among {plan.ulysses_degree}" if plan.ulysses_degree else "")
        context += f", in {plan.stripes} stripes" if plan.stripes else ""
        lines.append(f"context parallelism over {mesh.cp} ranks{_nodes_text(mesh, 'cp', cluster)}, {context}")
    if mesh.ep > 1:
        lines.append(f"experts over {mesh.ep} ranks{_nodes_text(mesh, 'ep', cluster)}")
    if mesh.pp > 1:
        stages = f", {plan.stages_per_rank} stages on each" if plan.stages_per_rank else ""
        lines.append(f"pipeline of {mesh.pp} ranks{_nodes_text(mesh, 'pp', cluster)}{stages}, {plan.schedule}")
    number = problem.sequences // plan.data_ranks // candidate.micro_batch_size
    sequences = counted(candidate.micro_batch_size, "sequence")
    lines.append(
        f"{counted(number, 'microbatch')} of {sequences} on each data-parallel rank, in {candidate.precision.name}"
    )
    lines.append(_recompute_text(plan, problem.model.layers))
    return lines


def _data_parallel_text(plan: Plan) -> str:
    mesh, shards = plan.mesh, plan.shard_optimizer
    if plan.data_ranks == 1 and not shards:
        return "one data-parallel rank"
    name = sharding_name(plan)
    text = (
        f"{name} over {counted(plan.data_ranks, 'data-parallel rank')}"
        if plan.zero_stage
        else f"data parallelism over {counted(plan.data_ranks, 'rank')}"
    )
    if mesh.dp_replicate > 1 and shards:
        text += f": {mesh.dp_replicate} replicas of {mesh.dp_shard} shards"
    if plan.data_ranks == 1:
        text = f"{name} over the {mesh.cp} ranks of cp"
    elif "cp" in shards:
        text += ", shared along cp too"
    if plan.shard_parameters:
        gather_times = {
            "layer": "for each use",
            "forward": "once a microbatch",
            "stage": "for each visit of their stage",
            "step": "once a step",
        }
        text += f", weights gathered {gather_times[plan.reshard_after]}"
    if plan.shard_parameters and not plan.shard_gradients:
        text += ", gradients reduced once a step"
    return text


def _recompute_text(plan: Plan, blocks: int) -> str:
    if offload := re.search(r"\boffload=[^,]*activations:(\w+)", plan.passes or ""):
        return f"every block computed again in the backward pass, from an input that is kept on the {offload[1]}"
    if isinstance(plan.recompute, tuple):
        return f"{len(plan.recompute)} of {blocks} blocks computed again in the backward pass"
    if modules := modules_of(plan.recompute):
        return f"{', '.join(modules)} of every block computed again in the backward pass"
    if plan.recompute in POLICIES:
        return f"all of a block but {', '.join(sorted(POLICIES[plan.recompute]))} computed again in the backward pass"
    if plan.counted_recompute is not None:
        word, number = plan.counted_recompute
        blocks_text = counted(number, "block")
        return {
            "every": f"one of {blocks_text} computed again in the backward pass",
            "first": f"the first {blocks_text} of each stage computed again in the backward pass",
            "uniform": f"every block computed again in the backward pass, from one input of {blocks_text}",
        }[word]
    return {
        "none": "nothing computed again",
        "selective": "attention's scores computed again",
        "per-op": "everything recomputed but attention's result and every second matrix product",
        "full": "every block computed again in the backward pass",
    }[plan.recompute]


def _nodes_text(mesh: Mesh, axis: str, cluster: Cluster) -> str:
    """Return a clause that says whether the ranks of an axis share a node ("": the cluster has only one node)."""
    if cluster.nodes == 1:
        return ""
    ranks = mesh.group(0, axis).ranks
    nodes = len({rank // cluster.per_node for rank in ranks})
    return " of a node" if nodes == 1 else f" of {nodes} nodes"


def draw_mesh(mesh: Mesh, cluster: Cluster) -> list[str]:
    """Draw a mesh, with a line for each node and the coordinate of each device on the innermost axis.

    Brackets enclose the ranks of one group along that axis.
    """
    inner = next((axis for axis in reversed(AXES) if getattr(mesh, axis) > 1), None)
    if inner is None:
        return []
    outer = [axis for axis in mesh.used if axis != inner]
    lines: list[str] = []
    for node in range(cluster.nodes):
        ranks = range(node * cluster.per_node, min((node + 1) * cluster.per_node, mesh.world))
        places = {axis: sorted({mesh.coordinate(rank, axis) for rank in ranks}) for axis in outer}
        coordinates = ", ".join(f"{axis} {_span(numbers)}" for axis, numbers in places.items())
        groups: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        for rank in ranks:
            groups[tuple(mesh.coordinate(rank, axis) for axis in outer)].append(mesh.coordinate(rank, inner))
        boxes = " ".join(f"[{inner} {_devices(numbers)}]" for numbers in groups.values())
        lines.append(f"node {node:<4} {boxes}  {coordinates}".rstrip())
    return lines if len(lines) <= SHOWN_NODES else [*lines[: SHOWN_NODES - 1], "...", lines[-1]]


def _devices(numbers: list[int]) -> str:
    return " ".join(map(str, numbers)) if len(numbers) <= SHOWN_DEVICES else _span(numbers)


def _span(numbers: list[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"


def chosen_fields(plan: Plan) -> dict[str, Any]:
    """Return the fields of a plan that differ from their defaults, and the sizes of its axes by name."""
    values = {field.name: getattr(plan, field.name) for field in fields(plan)[1:]}
    return {**plan.mesh.used, **{name: value for name, value in values.items() if value != getattr(Plan, name)}}


def simulate_flags(problem: Problem, candidate: Candidate) -> str:
    """Return the flags with which `shardlab simulate` simulates a step of a candidate."""
    return (
        f"{layout_flags(problem, candidate.plan)} --micro-batch-size {candidate.micro_batch_size} "
        f"--global-batch {problem.sequences} --precision {candidate.precision.name}"
    )


def train_command(
    problem: Problem, candidate: Candidate, model_options: str, job: str | None = None, *, run: str = "", name: str = ""
) -> str:
    """Return the command that trains with a candidate's plan: on this machine, or as a job on several nodes.

    Args:
        problem: the problem.
        candidate: the plan.
        model_options: options that name the model.
        job: job file with the model, the plan and the batch, if there is one.
        run: options of the run.
        name: name of the job on several nodes ("": no name).
    """
    size, cluster = candidate.micro_batch_size, problem.cluster
    batch = f"--microbatches {problem.sequences // size} --micro-batch-size {size}"
    flags = f"{model_options} {layout_flags(problem, candidate.plan)} {batch} --precision {candidate.precision.name}"
    train = f"train {f'--config {job}' if job else flags} {run}".rstrip()
    if cluster.nodes == 1:
        return f"shardlab {train}"
    ranks = cluster.per_node
    job = f"--nodes {cluster.nodes} --ranks-per-node {ranks} --gpus-per-node {ranks}{f' --name {name}' if name else ''}"
    return f"shardlab submit {job} -- {train}"


def layout_flags(problem: Problem, plan: Plan) -> str:
    """Return the flags of a plan, including choices that are defaults of `Plan` but not of the recipe."""
    fields, defaults = chosen_fields(plan), problem.recipe.defaults
    if plan.reduce_at != defaults.reduction(plan.zero_stage):
        fields["reduce_at"] = plan.reduce_at
    if plan.recompute == "none" != defaults.recompute:
        fields["recompute"] = plan.recompute
    return as_flags(fields) or "--dp-shard 1"


def summary(candidate: Candidate) -> str:
    """Return a candidate in a few words: the choices in which candidates of one family may differ."""
    plan, mesh = candidate.plan, candidate.plan.mesh
    used = {axis.removeprefix("dp_"): size for axis, size in mesh.used.items()}
    if "shard" in used and not plan.shard_optimizer:  # its ranks are replicas
        used = {"replicate": used.get("replicate", 1) * used.pop("shard"), **used}
    words = [f"{axis} {size}" for axis, size in used.items()]
    if model_kinds(mesh) and plan.zero_stage:
        words.append(f"ZeRO-{plan.zero_stage}")
    words += [word for word, applies in _particulars(plan).items() if applies]
    if mesh.pp > 1:
        words.append(f"{plan.schedule}{f' v{plan.stages_per_rank}' if plan.stages_per_rank else ''}")
    words.append(f"mb {candidate.micro_batch_size}")
    if plan.recompute != "none":
        words.append(f"recompute {len(plan.recompute) if isinstance(plan.recompute, tuple) else plan.recompute}")
    return ", ".join(words)


def _particulars(plan: Plan) -> dict[str, bool]:
    """Return whether a plan makes each of some unusual choices, which the keys describe in two or three words."""
    mesh, shards = plan.mesh, plan.shard_optimizer
    return {
        "state along cp": "cp" in shards,
        "state over replicas": "dp_replicate" in shards,
        "gradients whole": bool(plan.shard_parameters and not plan.shard_gradients),
        f"gathered once a {plan.reshard_after.replace('forward', 'microbatch')}": bool(plan.shard_parameters)
        and plan.reshard_after != "layer",
        "no sequence parallelism": mesh.tp > 1 and not plan.sequence_parallel,
        plan.context: mesh.cp > 1 and plan.context != "ring",
        f"ulysses {plan.ulysses_degree}": plan.ulysses_degree is not None,
        f"stripes {plan.stripes}": plan.stripes is not None,
    }


UNTRACED = "the step has more ops than are traced"
"""Reason why a step with a forecast has no shares."""

PASSES_A_SECOND = 1000
"""Number of passes of layers that a slow core traces and times in a second."""


@dataclass(frozen=True)
class StepShares:
    """Shares of a step's time, as means over ranks. Their sum is 1.

    Attributes:
        parts: share of each part, such as "compute", "idle" or "all-gather on tp", the largest first.
    """

    parts: dict[str, float]

    def __str__(self) -> str:
        """Return the parts of at least 0.05 %: `compute 88.6%, all-gather on tp 5.5%`."""
        return ", ".join(f"{name} {share:.1%}" for name, share in self.parts.items() if share >= 0.0005)

    @property
    def compute(self) -> float:
        return self.parts.get(COMPUTE, 0.0)

    @property
    def limit(self) -> tuple[str, float]:
        """Largest part other than compute, and its share."""
        others = [(name, share) for name, share in self.parts.items() if name != COMPUTE]
        return max(others, key=lambda part: part[1], default=(COMPUTE, self.compute))


def step_shares(workload: Workload) -> StepShares:
    """Return the shares of a step's time, as means over ranks.

    Raises:
        UserError, Refused: as in `forecast`.
    """
    seconds = step_parts(workload)
    step = sum(seconds.values())
    return StepShares({name: part / step for name, part in seconds.items()})


def path_seconds(workload: Workload) -> dict[str, float]:
    """Return the seconds of each part of a step's critical path, the largest first."""

    def parts(microbatches: int) -> dict[str, float]:
        step = with_microbatches(workload, microbatches)
        links = critical_path(step.traced, Clocks(step.traced, step.prices).run())
        return path_parts(step.traced, links, step.cut.place)

    workload.require()
    with gc_paused():
        return extrapolate_parts(workload, parts)


def shares_seconds(workload: Workload) -> float:
    """Return the approximate seconds that it takes to compute the shares of a step (0: a few milliseconds)."""
    return 0.0 if can_compress(workload) else trace_seconds(workload)


def trace_seconds(workload: Workload) -> float:
    """Return the approximate seconds that it takes to trace and replay a step."""
    plan = workload.plan
    assert isinstance(plan, Plan), "programs of their own are not planned"
    microbatches = workload.microbatches // plan.data_ranks
    replayed, additional = microbatches_to_replay(plan, microbatches)
    layers = 2 * workload.model.layers + 2
    return 2 * layers * (replayed if replayed == microbatches else 2 * replayed + additional) / PASSES_A_SECOND
