"""Report of `shardlab explain`: what was understood, the prediction, and the changes that would help, on one screen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from shardlab.cli.console import Report
from shardlab.cli.simulate.priced import add_network
from shardlab.common.text import byte_unit, bytes_text, counted, memory_text, percent_text, seconds_text
from shardlab.frameworks.changes import Trial
from shardlab.frameworks.measured import Comparison, Hypothesis
from shardlab.frameworks.run import FrameworkRun
from shardlab.frameworks.settings import Config, change_text
from shardlab.planner.describe import UNTRACED, StepShares, describe, shares_seconds, step_shares
from shardlab.planner.problem import Candidate, Problem
from shardlab.simulate.predict.confidence import Confidence, may_not_fit, sure_as_json
from shardlab.simulate.predict.forecast import Forecast
from shardlab.simulate.predict.memory import DeviceMemory
from shardlab.simulate.predict.memory_advice import broken_limit

MOST_TRACE_SECONDS = 20.0
"""Time limit in seconds for the trace that divides the step's time into its causes."""

NAMED_KEYS = 6
"""Largest number of keys that are named without --verbose. Further keys are only counted."""


@dataclass(frozen=True)
class ExplainReport:
    """Report of a configuration.

    Attributes:
        step, forecast: step of the configuration, and its prediction.
        confidences: expected errors of the predicted time and memory.
        trials: changes that help, best first.
        max_changes: largest number of changes that are shown.
        comparison: comparison of the measured step with the prediction (None: no measurement is given).
    """

    step: FrameworkRun
    forecast: Forecast
    confidences: Sequence[Confidence]
    trials: Sequence[Trial]
    max_changes: int
    comparison: Comparison | None = None

    def report(self, *, verbose: bool = False) -> Report:
        """Return the report.

        Args:
            verbose: whether the console also lists every key.
        """
        step, config = self.step, self.step.config
        report = Report(framework=config.table.framework, file=config.file, version=config.version or None)
        head = Text.assemble((f"{step.model_name}", "bold cyan"), f" on {step.cluster}, from {config.file}")
        report.line(head, wrap=False)
        self._add_keys(report, config, verbose=verbose)
        self._add_plan(report)
        report.line()
        self._add_prediction(report)
        if self.comparison is not None:
            _add_comparison(report, self.comparison)
        self._add_changes(report)
        return report

    def _add_keys(self, report: Report, config: Config, *, verbose: bool) -> None:
        version = f" of {config.version}" if config.version else ""
        ignored_text = f"{len(config.ignored)} that change neither time nor memory"
        counts = f"{counted(len(config.understood), 'key')}, and {ignored_text}"
        report.fact("understood", f"{config.table.framework}{version}: {counts}")
        report.data["understood"] = [
            {"key": key.key, "value": key.value, "line": key.line or None} for key in config.understood
        ]
        report.data["ignored"] = [
            {"key": key, "value": value, "line": line or None, "reason": reason}
            for (key, value, line), reason in config.ignored
        ]
        report.data["unpredicted"] = [
            {"key": key, "value": value, "line": line or None, "reason": reason}
            for (key, value, line), reason in config.unpredicted
        ]
        report.data["not_understood"] = [
            {"key": setting.key, "value": setting.value, "line": setting.line or None} for setting in config.unknown
        ]
        if verbose:
            for setting in config.understood:
                report.fact("", f"{setting.text} ({setting.place})")
            for reason in config.ignored:
                report.fact("", f"{reason.setting.key} ({reason.setting.place}): {reason.reason}", style="dim")
        if config.unknown:
            names = [f"{setting.key} ({setting.place})" for setting in config.unknown]
            report.fact("not understood", _join_texts(names, verbose=verbose), style="bold yellow")
        if config.unpredicted:
            texts = [f"{item.setting.key} ({item.reason})" for item in config.unpredicted]
            report.fact("not predicted", _join_texts(texts, "; ", verbose=verbose))
        notes = [*config.notes, *self.step.notes]
        if (limit := broken_limit(self.step.workload)) != "":
            notes.insert(0, limit)
        if (devices := config.devices) is not None and devices != self.step.cluster.size:
            notes.append(f"the file starts {devices:,} devices; the prediction is for {self.step.cluster.size:,}")
        report.data["notes"] = notes
        for number, note in enumerate(notes):
            report.fact("assumed" if not number else "", note)

    @property
    def _problem(self) -> tuple[Problem, Candidate]:
        step = self.step
        candidate = Candidate(step.plan, step.micro_batch_size, step.precision)
        problem = Problem(step.model, step.cluster, step.sequences, (step.precision,), step.recipe, step.optimizer)
        return problem, candidate

    def _add_plan(self, report: Report) -> None:
        step = self.step
        lines = describe(*self._problem)
        for number, line in enumerate(lines):
            report.fact("plan" if not number else "", line)
        batch = f"{step.sequences:,} sequences of {step.model.seq_len:,} tokens a step"
        report.fact("", f"{batch}, as {step.recipe.title} runs it")
        report.data |= {
            "plan": step.plan.as_dict(),
            "model": step.model_name,
            "cluster": str(step.cluster),
            "recipe": step.recipe.name,
            "precision": step.precision.name,
            "micro_batch_size": step.micro_batch_size,
            "global_batch": step.sequences,
            "tokens": step.workload.tokens,
        }

    def _add_prediction(self, report: Report) -> None:
        workload, forecast, device = self.step.workload, self.forecast, self.step.cluster.device
        world, speed, mfu = workload.mesh.world, workload.tokens / forecast.seconds, workload.mfu(forecast.seconds)
        step, device_speed = seconds_text(forecast.seconds), f"{speed / world:,.0f} on each device"
        report.fact("step time", f"{speed:,.0f} tokens/s, {device_speed}", step, step_seconds=forecast.seconds)
        report.data["tokens_per_second"] = speed
        report.fact("MFU", f"of {device.name}'s {workload.precision.compute} peak", percent_text(mfu), mfu=mfu)
        shares = self._shares()
        report.data["time"] = shares.parts if shares else None
        report.fact("time goes to", str(shares) if shares else UNTRACED, "")
        memory, peak = forecast.memory, max(forecast.peaks, key=lambda peak: peak.bytes)
        total, capacity = memory.unlimited, memory.capacity
        doubt = may_not_fit(self.confidences, memory.total, memory.capacity) if memory.fits else ""
        report.data["how_sure"] = sure_as_json(self.confidences, doubt)
        excess = f", {bytes_text(memory.needed - capacity, 1)} too much" if not memory.fits else ""
        verdict = f"of {memory_text(capacity)} on rank {peak.rank}: {'fits' if memory.fits else 'does not fit'}{excess}"
        report.fact("memory", verdict, bytes_text(total, 1), style="" if memory.fits else "bold red")
        parts = {**peak.by_category, "beyond tensors": max(0.0, total - peak.bytes)}
        report.fact("", _parts(total, parts), "")
        report.facts("how sure", [*map(str, self.confidences), doubt])
        add_network(report, self.step.cluster)
        report.data |= {
            "memory": total,
            "memory_needed": memory.needed,
            "device_memory": capacity,
            "fits": memory.fits,
            "safe": memory.safe,
            "rank": peak.rank,
            "memory_by_part": parts,
        }

    def _other_batch(self, trial: Trial) -> str:
        """Return the global batch of a change in words, if it differs from the batch of the configuration."""
        sequences = trial.step.sequences
        return "" if sequences == self.step.sequences else f", a global batch of {sequences:,}"

    def _shares(self) -> StepShares | None:
        workload = self.step.workload
        return step_shares(workload) if shares_seconds(workload) <= MOST_TRACE_SECONDS else None

    def _add_changes(self, report: Report) -> None:
        report.data["changes"] = [
            {
                "settings": [{"key": key, "value": value, "line": line or None} for key, value, line in trial.settings],
                "text": change_text(trial.settings),
                "time": trial.seconds,
                "memory": trial.bytes,
                "fits": trial.forecast.memory.fits,
                "safe": trial.forecast.memory.safe,
                "step_seconds": trial.forecast.seconds,
            }
            for trial in self.trials
        ]
        if not self.max_changes:
            return
        report.line()
        trials = self.trials[: self.max_changes if self.comparison is None else min(self.max_changes, BESIDE_MEASURED)]
        if not trials:
            text = (
                "no single key that was tried makes a token faster"
                if self.forecast.memory.fits
                else ("no single key that was tried saves memory: take more devices")
            )
            report.fact("changes", text)
            return
        columns: dict[str, Callable[[Any], str | Text]] = {
            "change": lambda trial: change_text(trial.settings) + self._other_batch(trial),
            "time/token": lambda trial: f"{trial.seconds:+.1%}",
            "memory": lambda trial: f"{trial.bytes / 2**30:+,.1f} GiB",
            "": lambda trial: _verdict(trial.forecast.memory),
        }
        report.table(columns, trials, wrapped=0)


def _verdict(memory: DeviceMemory) -> str:
    return "fits" if memory.safe else "may not fit" if memory.fits else "does not fit"


def _add_comparison(report: Report, result: Comparison) -> None:
    """Add the measured figures, their differences from the prediction, and possible explanations."""
    report.line()
    time, memory = result.time_difference, result.memory_difference
    if result.seconds is not None and time is not None:
        error_note = ", inside the mean error of predictions" if abs(time) <= result.error else ""
        text = f"{time:+.1%}: {seconds_text(abs(result.seconds - result.predicted_seconds))} "
        text += f"{'more' if time > 0 else 'less'} than predicted{error_note}"
        report.fact("measured step", text, seconds_text(result.seconds))
    if result.memory is not None and memory is not None:
        text = f"{memory:+.1%}, {result.kind}: predicted {bytes_text(result.predicted_memory, 1)}"
        report.fact("memory", text, bytes_text(result.memory, 1))
    for note in result.notes:
        report.fact("", note)
    report.data["measured"] = {
        "step_seconds": result.seconds,
        "memory": result.memory,
        "memory_kind": result.kind,
        "predicted_memory": result.predicted_memory,
        "time_difference": time,
        "memory_difference": memory,
        "notes": list(result.notes),
        "could_be": [cause._asdict() for cause in result.hypotheses],
    }
    for number, cause in enumerate(result.hypotheses[:MOST_HYPOTHESES]):
        step = "" if result.seconds is None else f" would take {seconds_text(cause.seconds)}{_explain(result, cause)}"
        size = "" if result.memory is None else f", {bytes_text(cause.memory, 1)}"
        report.fact(
            "could be" if not number else "", f"{cause.weight:.0%}: {cause.what};{step}{size}. Next: {cause.next}"
        )
    if not result.hypotheses:
        report.fact("could be", "nothing that was tried brings the prediction closer to the measurement")


def _explain(result: Comparison, hypothesis: Hypothesis) -> str:
    """Return in words how much of the difference in time a hypothesis explains ("": nothing)."""
    whole = (result.seconds or 0.0) - result.predicted_seconds
    part = hypothesis.seconds - result.predicted_seconds
    if part * whole <= 0:
        return ""
    return f" ({seconds_text(abs(part))} of the {seconds_text(abs(whole))})"


BESIDE_MEASURED = 2
"""Largest number of changes that are shown below a comparison with a measured step."""

MOST_HYPOTHESES = 3
"""Largest number of explanations that are shown. --json has all."""


def _join_texts(texts: Sequence[str], separator: str = ", ", *, verbose: bool) -> str:
    """Return the first texts and the number of the remaining ones, or with `verbose` all texts."""
    hidden_count = 0 if verbose else len(texts) - NAMED_KEYS
    note = [f"{hidden_count} more (--verbose lists all)"] if hidden_count > 0 else []
    return separator.join([*(texts[:NAMED_KEYS] if note else texts), *note])


def _parts(all: float, parts: dict[str, float]) -> str:
    _, size = byte_unit(all)
    shares = sorted(parts.items(), key=lambda item: -item[1])
    return ", ".join(f"{part} {bytes / size:,.1f}" for part, bytes in shares if bytes >= 0.005 * all)
