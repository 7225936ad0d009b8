"""A job in words and numbers, for a file, and the job again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, cast

import torch

import shardlab.models
from shardlab.models import Blocks
from shardlab.program import Mesh, UserError
from shardlab.strategies.plan import Plan
from shardlab.train.job import Job


def described(job: Job) -> dict[str, Any]:
    """All that a job is."""
    return {
        "strategy": job.strategy if isinstance(job.strategy, str) else _plan_described(job.strategy),
        "ranks": job.ranks,
        "microbatches": job.microbatches,
        "model": {"kind": type(job.model).__name__, **asdict(job.model)},
        "rows": job.rows,
        "dtype": str(job.dtype).removeprefix("torch."),
        "seed": job.seed,
        "name": job.name,
    }


def job_of(words: Mapping[str, Any]) -> Job:
    """The job that was described.

    Raises:
        UserError: when this version of Shardlab has no such model, plan or dtype.
    """
    try:
        strategy, model = words["strategy"], dict(words["model"])
        kind = getattr(shardlab.models, model.pop("kind"))
        return Job(
            strategy if isinstance(strategy, str) else _plan_of(strategy),
            words["ranks"],
            words["microbatches"],
            cast(Blocks, kind(**model)),
            words["rows"],
            getattr(torch, words["dtype"]),
            words["seed"],
            words["name"],
        )
    except (KeyError, AttributeError, TypeError) as error:
        raise UserError(
            f"the job in this trace is none that this version of Shardlab knows ({type(error).__name__}: {error}); "
            "compare it with the version that recorded it"
        ) from None


def _plan_described(plan: Plan) -> dict[str, Any]:
    """The fields that are not as they are if nobody says."""
    plain = Plan()
    words = {field.name: getattr(plan, field.name) for field in fields(plan)}
    words = {name: value for name, value in words.items() if value != getattr(plain, name)}
    words["mesh"] = plan.mesh.sizes()
    if "schedule" in words and not isinstance(plan.schedule, str):
        words["schedule"] = plan.schedule.name
    return words


def _plan_of(words: Mapping[str, Any]) -> Plan:
    values = {name: _tuple_or_word(value) for name, value in words.items() if name != "mesh"}
    return Plan(mesh=Mesh(**words["mesh"]), **values)


def _tuple_or_word(value: Any) -> Any:
    return tuple(cast(list[Any], value)) if isinstance(value, list) else value
