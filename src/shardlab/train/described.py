"""A job in words and numbers, for a file, and the job again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from shardlab.models import Blocks
from shardlab.models.named import find_model, name_of, with_fields
from shardlab.program import UserError
from shardlab.program.user_file import file_and_name
from shardlab.strategies.plan import Plan
from shardlab.train.job import Job


def described(job: Job) -> dict[str, Any]:
    """Describe a job in words and numbers, from which `job_of` makes it again."""
    return {field.name: getattr(job, field.name) for field in fields(job)} | {
        "strategy": job.strategy if isinstance(job.strategy, str) else job.strategy.as_dict(),
        "model": {"kind": name_of(type(job.model)), **asdict(job.model)},
    }


def model_in(words: Mapping[str, Any]) -> Blocks:
    """The model that was described, as that of a job."""
    changes = dict(words)
    kind = changes.pop("kind")
    return with_fields(find_model(kind), changes, kind)


def job_of(words: Mapping[str, Any]) -> Job:
    """The job that was described.

    Raises:
        UserError: when this version of Shardlab has no such model, plan or precision, or a model's file is not here.
    """
    if (path := file_and_name(str(words.get("model", {}).get("kind")))[0]) is not None and not path.is_file():
        raise UserError(
            f"the model of this trace is in {path}, which is not here; give the command in the run's folder"
        )
    try:
        words = {"passes": None, **words}  # which a trace of an older version does not have
        strategy = words["strategy"]
        found: dict[str, Any] = {
            "strategy": strategy if isinstance(strategy, str) else Plan.from_dict(strategy),
            "model": model_in(words["model"]),
        }
        return Job(**({field.name: words[field.name] for field in fields(Job)} | found))
    except (KeyError, AttributeError, TypeError, UserError) as error:
        raise UserError(
            f"the job in this trace is none that this version of Shardlab knows ({type(error).__name__}: {error}); "
            "compare it with the version that recorded it"
        ) from None
