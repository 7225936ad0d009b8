"""Which checkpoint a run goes on from, and what of its configuration may then differ."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from shardlab.checkpoint import CONFIG, STATE, Checkpoint, Disk, folder_of, steps_in
from shardlab.errors import UserError
from shardlab.exchange.initial import want_same
from shardlab.exchange.source import recorded_model
from shardlab.models import Blocks
from shardlab.models.weight_files import weights_at
from shardlab.optimizers import OptimizerConfig
from shardlab.program.files import anchored
from shardlab.program.nesting import read_file
from shardlab.program.user_file import file_and_name
from shardlab.rules.pieces import counted, listed
from shardlab.train.config import TrainingConfig, by_rule
from shardlab.train.config_sources import ConfigSource, config_file, merged, model_of, preset
from shardlab.train.heartbeat import say
from shardlab.train.history import has_finished
from shardlab.train.lock import require_free
from shardlab.train.saved import CHECKPOINTS, METRICS, RECORD, WEIGHTS, last_figures
from shardlab.train.stores import Together

SCHEDULE = {"learning_rate_schedule", "schedule_steps", "warmup_steps"}
"""Settings from which the steps of the learning rate's decay follow."""

RATE = "schedule", "learning_rate", "min_learning_rate_ratio"
"""What the learning rate of a step follows from."""


def find_checkpoint(
    run: Path, step: int | None = None, *, auto: bool = False, together: Together | None = None
) -> Checkpoint | None:
    """A run's newest checkpoint, or the one after so many steps, with every checksum compared.

    Ranks of a launcher deal the files among them, and none goes on before all are read: what is wrong with a file that
    one of them has read, all of them know.

    Args:
        run: the run's folder.
        auto: pass over checkpoints that cannot be read; a run that has none yet begins anew.
        together: the ranks that do this together; without them this process is alone. Rank 0 says what is passed over.

    Raises:
        UserError: when there is none, or it cannot be read; the newest one that can is named.
    """
    checkpoints, together = run / CHECKPOINTS, together or Together()
    seen = together.exchange(json.dumps(steps_in(Disk(), checkpoints)))  # hosts may see a folder's names late
    steps: list[int] = json.loads(seen[0])
    if step is not None and step not in steps:
        there = f"those after steps {listed(steps)}" if steps else "none"
        raise UserError(f"{run} has no checkpoint after step {step}; it has {there}")
    own, broken = together.all(partial(_own_model, run)) if steps else None, None
    for each in [step] if step is not None else reversed(steps):
        try:
            found = together.all(partial(_verified, own, folder_of(checkpoints, each), together))
        except UserError as error:
            broken = broken or error
            if auto and together.rank == 0:
                say(f"shardlab: {error}; trying the checkpoint before")
            continue
        if broken is None or auto:
            return found
        raise UserError(f"{broken}; the checkpoint before is whole: shardlab train --resume {run} --from-step {each}")
    if broken is not None and not auto:
        raise UserError(f"{broken}; there is no whole checkpoint before")
    if auto and not steps:
        if weights_at(run / WEIGHTS):
            raise UserError(f"{run} has weights and no checkpoint, so it would be overwritten; name another with --out")
        return None
    if broken is not None:
        raise UserError(f"{run} has no checkpoint that can be read, and is left as it is; name another with --out")
    what = "does not exist" if not run.is_dir() else "has no complete checkpoint"
    raise UserError(f"{run} {what}; name the folder of a run")


def _own_model(run: Path) -> Blocks | None:
    """The model that a run's record says it has; None where that is gone or torn.

    Raises:
        UserError: when the record says of no model, or of one that is no longer there.
    """
    try:
        record = read_file(run / RECORD, "JSON")
    except UserError:
        return None
    try:
        return recorded_model(record, run / RECORD)
    except UserError as error:
        raise UserError(f"the model of {run} cannot be made again: {error}") from None


def _verified(own: Blocks | None, folder: Path, together: Together) -> Checkpoint:
    """A checkpoint that is whole, and of the run's own model, if that is known.

    Raises:
        UserError: naming what is wrong.
    """
    found = Checkpoint.open(folder).verify(together.rank, together.world)
    if own is not None:
        want_same(recorded_model(dict(found.state), folder / STATE), own, folder)
    return found


@dataclass(frozen=True)
class Resumed:
    """A run that goes on.

    Attributes:
        out: its folder.
        checkpoint: from which it does.
        chosen: whether the user has named the checkpoint.
    """

    out: Path
    checkpoint: Checkpoint
    chosen: bool = False

    @classmethod
    def find(
        cls, out: Path, step: int | None = None, *, auto: bool = False, together: Together | None = None
    ) -> Resumed | None:
        """The run in a folder, from its newest checkpoint or the one after so many steps; None: it is to begin.

        Args:
            out, step, auto, together: see `find_checkpoint`; rank 0 asks whether the folder is free.

        Raises:
            UserError: when another process is at work in the folder, or nothing in it can be gone on from.
        """
        together = together or Together()
        together.all(partial(require_free, out) if together.rank == 0 else lambda: None)
        found = find_checkpoint(out, step, auto=auto, together=together)
        return None if found is None else cls(out, found, step is not None)

    def source(self, launched: int | None, given: Mapping[str, Any] | None = None) -> ConfigSource:
        """Its settings, which a launcher's world lays over as many ranks as there are now.

        Paths are those of the folder where the run began. What followed from its steps stays, also with other steps:
        how the learning rate goes up and down.

        Args:
            given: settings of the optimizer that flags change. Another schedule, or warm-up, has a decay of its own.
        """
        saved = self._saved
        plan = saved.sections["plan"]
        train = {name: value for name, value in saved.sections["train"].items() if name != "init"}
        optimizer = by_rule(merged([preset("default"), saved], "optimizer"), train["steps"])
        if SCHEDULE & set(given or ()) and "decay_steps" not in saved.sections["optimizer"]:
            optimizer.pop("decay_steps", None)
        if launched is not None and "strategy" in plan:
            plan = {name: value for name, value in plan.items() if name != "ranks"}
        if "strategy" in plan:  # an older version, which ran programs as they were written, said nothing of passes
            plan = {"passes": "none", **plan}
        found = {**saved.sections, "plan": plan, "train": train, "optimizer": optimizer}
        return ConfigSource(str(self.checkpoint.folder), found)

    def config(self, wanted: TrainingConfig) -> TrainingConfig:
        """Its configuration again, with what flags have changed.

        Raises:
            UserError: when it would not be the same run: another model, optimizer, seed, batch or sequence.
        """
        saved = merged([preset("default"), self._saved], "train")
        model = model_of([self.source(None)], 0)
        want_same(model, wanted.model, self.checkpoint.folder)
        step = self.checkpoint.step
        fixed = {
            "--optimizer": (self._saved.sections["optimizer"]["optimizer"], wanted.optimizer.optimizer),
            "--seed": (saved["seed"], wanted.train.seed),
            "--seq-len": (model.seq_len, wanted.model.seq_len),
            "--freeze": (_frozen(self._saved.sections["plan"]), _frozen(wanted.plan.as_dict())),
            "--ema": (self._saved.sections["optimizer"].get("ema"), wanted.optimizer.ema),
            f"sequences of the first {step} steps": (
                self.checkpoint.state["data"]["sequence"],
                wanted.train.ramp.before(step) * wanted.train.micro_batch_size,
            ),
        }
        wrong = [f"{name}: {before} before, {now} now" for name, (before, now) in fixed.items() if before != now]
        if wrong:
            raise UserError(
                f"{'; '.join(wrong)}; a run goes on as it has begun, so leave that out, or begin another with --init"
            )
        return replace(wanted, train=replace(wanted.train, init=saved.get("init")))

    @property
    def taken(self) -> int:
        """Optimizer steps that the run has taken by its last weights, or by the checkpoint that the user has named."""
        return self.checkpoint.step if self.chosen else max(self.checkpoint.step, self._finished)

    @property
    def _finished(self) -> int:
        """Steps of the weights that the run left when it finished; 0 if it has not."""
        return int(last_figures(self.out / METRICS).get("step") or 0) + 1 if has_finished(self.out) else 0

    def has_ended(self, steps: int) -> bool:
        """Whether nothing is left to do: a run that was killed after its last step has its weights to write.

        Raises:
            UserError: if the run has finished with weights that are newer than the checkpoint, which would be lost.
        """
        taken, finished = self.checkpoint.step, self._finished
        if self.chosen or finished <= taken:
            return steps < taken or (steps == taken and finished == taken)
        if steps <= finished:
            return True
        raise UserError(
            f"{self.out} has the weights after {counted(finished, 'step')}, but its newest checkpoint that can be read "
            f"is the one after step {taken}, so training on would begin there and overwrite them; give --from-step "
            f"{taken} if that is meant, or begin a new run with --init {self.out}"
        )

    def schedule_change(self, config: TrainingConfig) -> str:
        """A sentence on the learning rate from here on, if the run has other steps or another schedule than before."""
        saved = merged([preset("default"), self._saved], "train")["steps"]
        before = OptimizerConfig(**by_rule(merged([preset("default"), self._saved], "optimizer"), saved))
        now, step = config.optimizer, self.checkpoint.step
        same = all(getattr(before, name) == getattr(now, name) for name in RATE)
        if config.train.steps == saved and same:
            return ""
        rates = f"{before.rate(max(0, step - 1)):.3g} in step {step}, {now.rate(step):.3g} in step {step + 1}"
        if not same:
            return f"learning rate: {before.schedule} before, {now.schedule} now ({rates})"
        steps, end = config.train.steps, now.schedule_steps
        stays = (
            f"; after {counted(end, 'step')} it stays at {now.rate(end):.3g} (--schedule-steps {steps} stretches it)"
        )
        return f"learning rate: {now.schedule} as before ({rates}){stays if end < steps else ''}"

    def want_same_data(self, identity: str) -> None:
        """Refuse a text that has changed.

        Raises:
            UserError: with what to do.
        """
        if self.checkpoint.state["data"]["identity"] != identity:
            raise UserError(
                f"the data are no longer those that {self.out} was trained on; go on with them all the same by naming "
                "them with --data"
            )

    @cached_property
    def _saved(self) -> ConfigSource:
        """Its configuration file, with paths that are found from here."""
        saved = config_file(self.checkpoint.folder / CONFIG)
        folder, sections = self.checkpoint.state.get("folder"), {**saved.sections}
        sections["data"] = {
            name: tuple(anchored(each, folder) for each in value) if name == "data" else value
            for name, value in saved.sections["data"].items()
        }
        for section, name in (("model", "model"), ("plan", "strategy")):
            word = saved.sections[section].get(name)
            if word is not None and (file_and_name(word)[0] is not None or word.endswith(".toml")):
                sections[section] = {**saved.sections[section], name: anchored(word, folder)}
        if (init := saved.sections["train"].get("init")) is not None:
            sections["train"] = {**saved.sections["train"], "init": Path(anchored(str(init), folder))}
        return ConfigSource(saved.name, sections)


def _frozen(plan: Mapping[str, Any]) -> str:
    """Return the numbers of a plan's frozen blocks, as its flag takes them."""
    return " ".join(map(str, sorted(plan.get("freeze", ())))) or "none"
