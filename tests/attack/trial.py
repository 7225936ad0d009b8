"""What is asked of a program: that it is refused in a sentence, or timed, drawn and run, with one device's numbers."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import faulthandler
import io
import pickle
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from shardlab.check import Checked
from shardlab.check.replicas import replicas_of
from shardlab.language import Refused, UserError
from shardlab.language.precision import find_precision
from shardlab.simulate.hardware import find_cluster
from shardlab.simulate.predict.workload import Workload
from shardlab.simulate.timeline import TEACHING_COSTS, bubble, simulate
from shardlab.train.job import Job
from tests.attack.script import SOURCE
from tests.attack.subjects import Subject
from tests.support.interpreter import judge

if TYPE_CHECKING:
    from shardlab.execute.state import State


STEPS = 2
"""Optimizer steps: the second begins with what the first has left."""

HANG = 300.0
"""Seconds after which a program that runs is taken to hang."""


@dataclass(frozen=True)
class Outcome:
    """What came of a program.

    Attributes:
        subject: the program.
        what: "accepted", "refused", or a failure in a few words.
        detail: the sentence of a refusal, or all that is known of a failure.
        rule: of a refusal, the rule's name.
        checked: the program that was accepted.
    """

    subject: Subject
    what: str
    detail: str = ""
    rule: str = ""
    checked: Checked | None = field(default=None, repr=False, compare=False)

    @property
    def failed(self) -> bool:
        return self.what not in ("accepted", "refused")


def ask(subject: Subject, *, interpreted: bool, drawn: bool) -> Outcome:
    """Check a program, and time and draw it if it is accepted.

    Args:
        interpreted: whether the independent interpreter of the tests runs it as well.
        drawn: whether a picture is made too.
    """
    try:
        subject.job  # noqa: B018
    except UserError as error:  # a plan that its model cannot follow
        return Outcome(subject, "refused", str(error), "sizes")
    except Exception:
        return Outcome(subject, "the generator raised", traceback.format_exc())
    try:
        checked = subject.checked()
    except Refused as error:
        if (inner := _inside(error)) is not None:
            return Outcome(subject, "tracing raised", inner)
        what = "refused" if subject.wild else "a right program is refused"
        return Outcome(subject, what, str(error), error.rule)
    except UserError as error:
        right = not subject.wild and subject.family == "script"
        return Outcome(subject, "a right program is refused" if right else "refused", str(error), "user error")
    except Exception:
        return Outcome(subject, "the check raised", traceback.format_exc())
    if (why_not := checked.why_not("gloo")) is not None:  # said before any rank is started
        return Outcome(subject, "refused", str(why_not), why_not.rule)
    for name, question in QUESTIONS.items():
        if (name == "the judge" and not interpreted) or (name == "the picture" and not drawn):
            continue
        try:
            said = question(subject, checked)
        except UserError as error:
            said = "" if name == "the prediction" else str(error)
        except Exception:
            said = traceback.format_exc()
        if said:
            return Outcome(subject, f"{name} fails", said)
    return Outcome(subject, "accepted", checked=checked)


def job_of(outcome: Outcome) -> Job:
    """The training job of an accepted program, which can be sent to other processes: they need not trace it again."""
    made, checked = outcome.subject.job, outcome.checked
    assert checked is not None
    job = Job("", made.ranks, made.microbatches, made.model, made.micro_batch_size, "fp64", optimizer=made.optimizer)
    job.set_checked(checked)
    job.__dict__["cut"] = made.cut
    return job


def _inside(error: Refused) -> str | None:
    """The traceback of an exception of Shardlab's own that tracing took for the program's (None: it is not one)."""
    cause = error.__cause__
    if cause is None or isinstance(cause, Refused | UserError):
        return None
    frames = traceback.extract_tb(cause.__traceback__)
    if frames[-1].filename == SOURCE:
        return None
    return "".join(traceback.format_exception(cause))


def _interpret(subject: Subject, checked: Checked) -> str:
    verdict = judge(checked.program)
    return "" if verdict.right else f"{verdict.outcome.value}: {verdict.reason}"


def _time(subject: Subject, checked: Checked) -> str:
    bubble(simulate(checked))
    return ""


def _draw(subject: Subject, checked: Checked) -> str:
    """A picture and a report; their imports take seconds."""
    from rich.console import Console

    from shardlab.cli.console import Report
    from shardlab.cli.simulate.command import add_step
    from shardlab.draw import timeline_svg

    timeline = simulate(checked)
    timeline_svg(timeline, "program")
    report = Report()
    add_step(report, "program", checked, timeline, TEACHING_COSTS)
    report.print(Console(file=io.StringIO()))
    return ""


def _predict(subject: Subject, checked: Checked) -> str:
    """Seconds and bytes on a cluster, and the step as it is drawn."""
    if "nccl" not in checked.backends():
        return ""
    job = subject.job
    mesh = job.mesh if job.entry.plan is None else job.entry.plan(job.ranks)
    cluster, numbers = find_cluster("h100x4"), find_precision("fp32")

    def program(*_: object) -> Checked:
        return checked

    made = Workload(
        mesh,
        job.model,
        cluster,
        job.microbatches,
        1,
        numbers,
        program,
        optimizer=job.optimizer,
        passes="none",
    )
    estimate = made.estimate()
    str(estimate.peak)
    estimate.timeline()
    return ""


QUESTIONS: dict[str, Callable[[Subject, Checked], str]] = {
    "the judge": _interpret,
    "the timeline": _time,
    "the picture": _draw,
    "the prediction": _predict,
}
"""Each says what is wrong (nothing: all is well)."""


def run_jobs(rank: int, jobs: Sequence[Job], folder: str) -> None:
    """Run one rank's part of some programs for real; the results lie in the folder, also those before a rank's end.

    Numbers must be one device's, and copies of a weight of which the check does not say that they may drift apart must
    be equal to the last bit.
    """
    import torch

    from shardlab.train.verification import verify

    cpu, groups = torch.device("cpu"), dict[Any, Any]()
    remembered = patch.object(verify, "train_reference", _remembered(verify.train_reference))
    results, stacks = Path(folder, f"results-{rank}"), Path(folder, f"stacks-{rank}")
    with results.open("ab") as file, stacks.open("w") as hanging, remembered:
        for number, job in enumerate(jobs):
            faulthandler.dump_traceback_later(HANG, exit=True, file=hanging)
            apart: list[str] = []
            verdict = verify.verify_rank(
                rank,
                cpu,
                job,
                STEPS,
                groups,
                trained=lambda state: apart.extend(copies_apart(state)),  # noqa: B023
            )
            pickle.dump((number, verdict.ok and not apart, "\n".join([str(verdict), *apart])), file)
            file.flush()
        faulthandler.cancel_dump_traceback_later()


def copies_apart(state: State) -> list[str]:
    """The copies of a weight that the check takes for equal to the last bit, and that are not; all ranks call this."""
    import torch.distributed as dist

    from shardlab.train.audit import copy_of, hash_of

    replicas = replicas_of(state.checked)
    mine = [hash_of(copy_of(state, each)) if state.rank in each.ranks else 0 for each in replicas]
    of_ranks: list[Any] = [None] * state.checked.program.mesh.world
    dist.all_gather_object(of_ranks, mine)
    return [
        f"copies of weights[{each.layer}] {each.holds} on ranks {each.ranks} are not equal to the last bit"
        for number, each in enumerate(replicas)
        if len({of_ranks[rank][number] for rank in each.ranks}) > 1
    ]


_KNOWN: dict[Any, Any] = {}
"""What one device computed, by all of a job that its numbers depend on."""


def _remembered(train: Callable[..., Any]) -> Callable[..., Any]:
    """Training on one device, done once for each model and step."""

    def trained(
        model: Any, batches: Any, microbatches: Any, seed: Any, numbers: Any, config: Any, moves: Any, device: Any
    ) -> Any:
        frozen = tuple([bool(each.all()) or each.numpy().tobytes() for each in moves])
        key = model, tuple(microbatches), seed, str(config), frozen
        if key not in _KNOWN:
            _KNOWN[key] = train(model, batches, microbatches, seed, numbers, config, moves, device)
        return _KNOWN[key]

    return trained


def results_in(folder: Path, ranks: int) -> tuple[dict[int, str], int]:
    """What came of programs that have been run: by number, what is wrong ("": nothing); and the first that has no
    result of all ranks."""
    found: list[dict[int, str]] = []
    for rank in range(ranks):
        mine: dict[int, str] = {}
        path = folder / f"results-{rank}"
        data = io.BytesIO(path.read_bytes() if path.exists() else b"")
        while True:
            try:
                number, ok, text = pickle.load(data)
            except (EOFError, pickle.UnpicklingError):
                break
            mine[number] = "" if ok else text
        found.append(mine)
    done = set(found[0]).intersection(*found[1:])
    ended = min((len(mine) for mine in found), default=0)
    return {number: "".join(dict.fromkeys(mine[number] for mine in found)) for number in done}, ended
