"""Report of `shardlab plan`: the chosen plan on one screen, or with all reasons.

`PlanReport.report` shows the plan, its figures, the runners-up and the commands that run it. With `explain`, it also
shows the mesh, the best plan of each family (the plans with the same kinds of parallelism), the critical path, and the
reason for each decision. `PlanReport.fields` has the same content as JSON, in seconds, bytes and shares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from shardlab.cli.console import INDENT, Report, print_path, table_of
from shardlab.cli.plan.measure import add_measured, measured_as_json, time_error_text
from shardlab.cli.simulate.priced import add_network, slower_with_few_nics
from shardlab.common.text import byte_unit, bytes_text, counted, memory_text, percent_text, seconds_text
from shardlab.planner.alternatives import TELLING, alternative_text
from shardlab.planner.choose import NOTABLE
from shardlab.planner.describe import describe, draw_mesh, summary
from shardlab.planner.explain import explain_choice
from shardlab.planner.problem import family
from shardlab.simulate.predict.confidence import sure_as_json
from shardlab.simulate.predict.memory import uncounted_memory
from shardlab.simulate.predict.memory_advice import assumed_figures

if TYPE_CHECKING:
    from shardlab.planner.choose import PlanChoice
    from shardlab.planner.problem import Candidate, Problem
    from shardlab.planner.results import PlanOutcome
    from shardlab.planner.schedule_search.for_plans import ScheduledPlan
    from shardlab.planner.workers import Answer, Change


PATH_NOTE = "ops and waits that add up to the step; if a message overlaps compute, only the one that ends last counts"
"""Note below the critical path. It explains why compute has a smaller share of the path than of the step."""

NODE_WIDTH = 10
"""Number of characters of a node's name at the beginning of a line of the drawn mesh."""

CHANGE_TEXTS: dict[Change, str] = {
    "memory": "twice the memory",
    "links": "twice the bandwidth between nodes",
    "batch": "twice the batch",
}
"""Text for each change of the problem whose gain is reported."""

WIDE = 100
"""Smallest terminal width at which a family and its limit fit into one line."""

BAR = 40
"""Width of the memory bar in characters."""

SIGNS = {
    "parameters": "P",
    "gradients": "G",
    "optimizer": "O",
    "activations": "A",
    "gathered": "g",
    "communication": "c",
}
"""Letter of each category of memory in the memory bar. Other categories are shown as `+`."""


@dataclass(frozen=True)
class PlanReport:
    """Report of a chosen plan.

    Attributes:
        choice: chosen plan, with the results of the search.
        model, cluster: names of the model and the cluster.
        commands: commands that run the plan, by their purpose.
        top: number of runners-up.
        out: file with the plan, if one was written.
    """

    choice: PlanChoice
    model: str
    cluster: str
    commands: Mapping[str, str]
    top: int
    out: Path | None = None

    def report(self, *, explain: bool = False) -> Report:
        """Return the plan with its figures, the runners-up, and the commands that run it.

        Args:
            explain: whether the console also shows the mesh, the best plan of each family, the critical path, and the
                reason for each choice.
        """
        report = Report(**self.fields())
        self._add_plan(report)
        if explain:
            self._add_mesh(report)
            report.draw(partial(print_families, self.choice))
            self._add_misses(report)
        if self.choice.error_model is not None and self.choice.error_model.measured:
            add_measured(report, self.choice.error_model, self.top)
        else:
            self._add_runners_up(report)
        if explain:
            self._add_reasons(report)
        self._add_end(report)
        if not explain:
            report.fact("reasons", "--explain gives the best plan of each family and the reason for each choice")
        return report

    def fields(self) -> dict[str, Any]:
        """Return the choice and its reasons for --json."""
        problem, results, errors = self.choice.problem, self.choice.results, self.choice.error_model
        tokens, workload = problem.tokens, problem.workload(self.choice.best.candidate)
        return {
            "model": self.model,
            "cluster": self.cluster,
            "recipe": problem.recipe.name,
            "switches": dict(problem.recipe.changed_switches),
            "global_batch": problem.sequences,
            "tokens": tokens,
            "device_memory": problem.cluster.device.memory,
            "chosen": {**_outcome(problem, self.choice.best), **_shares(self.choice.answer)},
            "commands": dict(self.commands),
            "families": [
                {**_outcome(problem, outcome), **_shares(answer), "searched": outcome.family in results.searched}
                for outcome, answer in self.choice.families
            ],
            "decisions": [{"question": text, "lines": lines} for text, lines in explain_choice(self.choice).items()],
            "runners_up": [_outcome(problem, outcome) for outcome in results.fitting[1 : self.top + 1]],
            "how_sure": sure_as_json(self.choice.confidence, self.choice.may_not_fit),
            "assumed": {name: asdict(figure) for name, figure in assumed_figures(workload).items()},
            "measured": measured_as_json(errors) if errors and errors.measured else None,
            "critical_path": self.choice.path,
            "alternatives": [
                {
                    "choice": alternative.choice,
                    **_candidate(problem, alternative.candidate),
                    **_forecast(problem, alternative.answer),
                    "text": alternative_text(alternative, self.choice.answer, problem),
                }
                for alternative in self.choice.alternatives
            ],
            "does_not_fit": [
                {
                    "family": name,
                    "smallest_bytes": bytes,
                    "bytes_too_many": bytes - problem.usable_bytes,
                    **_candidate(problem, candidate),
                }
                for name, (bytes, candidate) in results.misses().items()
            ],
            "would_help": self.choice.helps,
            "searched": {
                "estimated": results.lines,
                "simulated": len(results.outcomes),
                "refused": len(results.refused),
                "seconds": results.seconds,
                "unimproved_seconds": results.unimproved_seconds,
                "complete": results.complete,
                "least_seconds": workload.mfu(1.0),
                "left_out": self.choice.missed,
            },
        }

    def _add_plan(self, report: Report) -> None:
        """Add the problem, the chosen plan and its figures."""
        problem, best = self.choice.problem, self.choice.best
        report.line(Text.assemble(("plan", "bold cyan"), f" of {self.model} on {self.cluster}"), wrap=False)
        batch = f"{counted(problem.sequences, 'sequence')} of {problem.model.seq_len:,} tokens"
        report.line(f"{batch}, {problem.tokens:,} tokens a step; recipe {problem.recipe.title}\n", "dim")
        for number, line in enumerate(describe(problem, best.candidate)):
            report.fact("" if number else "plan", line)
        report.line()
        for label, figure, text in figures(self.choice):
            report.fact(label, text, figure)
        report.fact("", memory_bar(self.choice))
        add_network(report, problem.cluster, slower_with_few_nics(problem.workload(best.candidate)))
        texts = [time_error_text(self.choice), *map(str, self.choice.confidence[1:]), self.choice.may_not_fit]
        report.facts("how sure", texts)

    def _add_mesh(self, report: Report) -> None:
        problem, best = self.choice.problem, self.choice.best
        if assumed := assumed_figures(problem.workload(best.candidate)):
            report.fact("assumed", ", ".join(assumed))
        report.line()
        for line in draw_mesh(best.candidate.plan.mesh, problem.cluster):
            report.fact(line[:NODE_WIDTH], line[NODE_WIDTH:], indent=NODE_WIDTH)

    def _add_misses(self, report: Report) -> None:
        """Add the families in which no plan fits, with the excess memory of their smallest plan."""
        if misses := self.choice.results.misses():
            report.line("\nno plan found that fits", "dim")
        for name, (bytes, _) in misses.items():
            excess = bytes_text(bytes - self.choice.problem.usable_bytes, 1)
            report.line(Text(f"  {name}: the smallest one takes {excess} too many"), wrap=False)

    def _add_runners_up(self, report: Report) -> None:
        """Add the fastest plans after the chosen one."""
        best, runners_up = self.choice.best.seconds, self.choice.results.fitting[1 : self.top + 1]
        if not runners_up:
            return

        def slower(outcome: PlanOutcome) -> str:
            share = outcome.seconds / best - 1
            return f"{share:.1%}{' (tie)' if share < self.choice.expected_error else ''}"

        columns: dict[str, Callable[[Any], str]] = {
            "": lambda outcome: outcome.family,
            "runners-up": lambda outcome: summary(outcome.candidate),
            "step": lambda outcome: seconds_text(outcome.seconds),
            "slower by": slower,
            "memory": lambda outcome: bytes_text(outcome.forecast.memory.total, 1),
        }
        report.line()
        report.table(columns, runners_up, words=2, wrapped=1)

    def _add_reasons(self, report: Report) -> None:
        """Add the critical path, the reason for each choice, and the gains of changes to the problem."""
        choice = self.choice
        report.line()
        report.fact("critical path", path_text(choice.path) if choice.path else choice.unknown)
        if choice.path:
            report.fact("", PATH_NOTE, style="dim")
        for question, lines in explain_choice(choice).items():
            report.line(f"\n{question}", "bold")
            for line in lines:
                report.fact("  -", line, indent=4)
        report.line()
        report.fact("would help", helps_text(choice))

    def _add_end(self, report: Report) -> None:
        """Add the commands that run the plan, the extent of the search, and the file that was written."""
        report.line()
        for verb, command in self.commands.items():
            report.line(Text.assemble((f"{verb} it".ljust(INDENT), "dim"), command), wrap=False)
        report.fact("searched", search_text(self.choice))
        if self.choice.missed:
            report.fact("left out", f"as time was up: {self.choice.missed}; give more --seconds")
        if self.out is not None:
            report.draw(partial(print_path, label="written to", path=self.out))


def add_schedules(report: Report, plans: Sequence[ScheduledPlan]) -> None:
    """Add the schedules that were found for the best pipeline plans, with their gains."""
    report.data["schedules"] = [
        {
            "plan": summary(plan.candidate),
            "seconds": plan.seconds or None,
            "published_seconds": plan.published_seconds or None,
            "tensors": plan.tensors or None,
            "placement": plan.schedule.problem.placement if plan.schedule else None,
            "lower_bound": plan.schedule.lower_bound if plan.schedule else None,
            "gain": plan.gain,
            "reason": plan.reason or None,
        }
        for plan in plans
    ]
    texts = [f"{summary(plan.candidate)}: {_schedule_text(plan)}" for plan in plans]
    report.facts("schedule", texts or ["no pipeline plan fits, so no schedule was searched"])


def _schedule_text(plan: ScheduledPlan) -> str:
    if plan.schedule is None:
        return f"no schedule was searched ({plan.reason})"
    if plan.gain < 0.001:
        return f"no schedule was found that is faster than {plan.candidate.plan.schedule_name}"
    shape = "a V" if plan.schedule.problem.placement == "vee" else "a loop"
    return (
        f"a searched schedule in {shape} takes {seconds_text(plan.seconds)}, {percent_text(plan.gain)} faster than "
        f"{plan.candidate.plan.schedule_name}, with {bytes_text(plan.tensors)} of tensors on the fullest rank"
    )


def search_text(choice: PlanChoice) -> str:
    """Return text about the extent of the search, with a lower bound of the step time of all plans."""
    results, problem = choice.results, choice.problem
    lower_bound = problem.workload(choice.best.candidate).mfu(1.0)
    note = "" if results.complete else "; the time was up: more --seconds may find a faster one"
    return (
        f"best of {counted(len(results.outcomes), 'simulated plan')}, after {counted(results.lines, 'estimate')}, in "
        f"{results.seconds:.1f} s, of which the last {results.unimproved_seconds:.1f} s brought no improvement{note}; "
        f"no plan can be faster than {seconds_text(lower_bound)}, the model's matrix products at the peak"
    )


def print_families(choice: PlanChoice, console: Console) -> None:
    """Print the best plan of each family, and the largest part of its step other than compute."""
    table = table_of("", "best of each family", "step", "memory", "what limits it", words=2)
    table.columns[1].no_wrap = False
    table.columns[0].no_wrap = table.columns[4].no_wrap = console.width >= WIDE
    table.columns[4].justify = "left"
    for outcome, answer in choice.families:
        if outcome.family not in choice.results.searched and outcome is not choice.best:
            table.add_row(outcome.family, "", "", "", "not searched: the time was up")
            continue
        limit = ""
        if answer.shares is not None:
            name, share = answer.shares.limit
            name, share = (name, share) if share >= 0.02 else ("compute", answer.shares.compute)
            limit = f"{name.replace(' on', '')} {share:.0%}"
        table.add_row(
            outcome.family,
            summary(outcome.candidate),
            seconds_text(outcome.seconds),
            bytes_text(outcome.forecast.memory.total, 1),
            limit,
            style="bold" if outcome.candidate == choice.best.candidate else "",
        )
    console.print()
    console.print(table)


def figures(choice: PlanChoice) -> list[tuple[str, str, str]]:
    """List the figures of the chosen plan as label, value and remark."""
    problem, best = choice.problem, choice.best
    workload, memory = problem.workload(best.candidate), best.forecast.memory
    device_memory, shares = problem.cluster.device.memory, choice.answer.shares
    free = f"{bytes_text(memory.capacity - memory.total, 1)} free"
    speed, remark = problem.tokens / best.seconds, f"of {memory_text(device_memory)} on the fullest device, {free}"
    return [
        ("step time", seconds_text(best.seconds), str(shares or f"its causes are unknown: {choice.unknown}")),
        ("tokens/s", f"{speed:,.0f}", f"{speed / problem.cluster.size:,.0f} on each device"),
        ("MFU", percent_text(workload.mfu(best.seconds)), f"of {problem.cluster.device.name}'s peak"),
        ("memory", bytes_text(memory.total), "; ".join(filter(None, (remark, uncounted_memory(workload))))),
    ]


def memory_bar(choice: PlanChoice) -> str:
    """Return a bar with the memory of the fullest device by category, and the amounts."""
    memory, device_memory = choice.best.forecast.memory, choice.problem.cluster.device.memory
    peak = max(choice.best.forecast.peaks, key=lambda peak: peak.bytes)
    shares = sorted(peak.by_category.items(), key=lambda item: -item[1])
    shares.append(("beyond tensors", max(0, int(memory.total - peak.bytes))))
    bar = "".join(SIGNS.get(name, "+") * round(bytes / device_memory * BAR) for name, bytes in shares)[:BAR]
    _, size = byte_unit(peak.bytes)
    words = [f"{SIGNS.get(name, '+')} {name} {bytes / size:,.1f}" for name, bytes in shares if bytes >= 0.05 * size]
    return f"[{bar:·<{BAR}}] {', '.join(words)}"


def path_text(path: dict[str, float]) -> str:
    """Return the parts of a critical path with their shares of the step."""
    step = sum(path.values())
    large_parts = [f"{name} {seconds / step:.1%}" for name, seconds in path.items() if seconds >= TELLING * step]
    rest = 1 - sum(seconds for seconds in path.values() if seconds >= TELLING * step) / step
    return ", ".join([*large_parts, *([f"others {rest:.1%}"] if rest >= 0.0005 else [])])


def helps_text(choice: PlanChoice) -> str:
    """Return the gains of more memory, faster links and a larger batch as text."""
    gains = [f"{CHANGE_TEXTS[change]} {gain:+.1%}" for change, gain in choice.helps.items() if change != "memory"]
    words = [f"{' and '.join(gains)} tokens/s with this very plan"] if gains else []
    gain = choice.helps.get("memory")
    gain_text = "was not searched to the end" if gain is None else f"less than +{NOTABLE:.0%}" if gain < NOTABLE else ""
    words.append(f"{CHANGE_TEXTS['memory']}, planned anew, {gain_text or f'{gain:+.1%}'}")
    return "; ".join(words)


def _outcome(problem: Problem, outcome: PlanOutcome) -> dict[str, Any]:
    forecast, seconds = outcome.forecast, outcome.seconds
    peak = max(forecast.peaks, key=lambda peak: peak.bytes)
    return {
        "family": outcome.family,
        **_candidate(problem, outcome.candidate),
        "step_seconds": seconds,
        "tokens_per_second": problem.tokens / seconds,
        "tokens_per_second_per_device": problem.tokens / seconds / problem.cluster.size,
        "mfu": problem.workload(outcome.candidate).mfu(seconds),
        "memory": forecast.memory.total,
        "peak_memory": peak.bytes,
        "peak_memory_by_category": peak.by_category,
        "fits": outcome.fits,
    }


def _candidate(problem: Problem, candidate: Candidate) -> dict[str, Any]:
    return {
        "family": family(candidate.plan),
        "plan": candidate.plan.as_dict(),
        "micro_batch_size": candidate.micro_batch_size,
        "microbatches": problem.sequences // candidate.micro_batch_size,
        "precision": candidate.precision.name,
    }


def _forecast(problem: Problem, answer: Answer) -> dict[str, Any]:
    forecast = answer.forecast
    return {"step_seconds": forecast.seconds, "memory": forecast.memory.total, "fits": forecast.memory.fits}


def _shares(answer: Answer) -> dict[str, Any]:
    return {"shares": answer.shares.parts if answer.shares else {}}
