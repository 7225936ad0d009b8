"""Which checkpoint a run goes on from, and what of its configuration may then differ."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

from shardlab.checkpoint import CONFIG, Checkpoint, Disk, folder_of, steps_in
from shardlab.errors import UserError
from shardlab.exchange.initial import want_same
from shardlab.exchange.source import recorded_model
from shardlab.models import Blocks
from shardlab.models.weight_files import weights_at
from shardlab.program.nesting import read_file
from shardlab.rules.pieces import listed
from shardlab.train.config import TrainingConfig
from shardlab.train.config_sources import ConfigSource, config_file, merged, model_of, preset
from shardlab.train.described import model_in
from shardlab.train.heartbeat import say
from shardlab.train.history import has_finished
from shardlab.train.lock import require_free
from shardlab.train.saved import CHECKPOINTS, RECORD, WEIGHTS
from shardlab.train.stores import Together


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
    raise UserError(f"{run} {what}; name the folder of a run that was interrupted, or that had --save-every")


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
        want_same(model_in(found.state["model"]), own, folder)
    return found


@dataclass(frozen=True)
class Resumed:
    """A run that goes on.

    Attributes:
        out: its folder.
        checkpoint: from which it does.
    """

    out: Path
    checkpoint: Checkpoint

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
        return None if found is None else cls(out, found)

    def source(self, launched: int | None) -> ConfigSource:
        """Its settings, which a launcher's world lays over as many ranks as there are now."""
        saved = self._saved
        plan = saved.sections["plan"]
        train = {name: value for name, value in saved.sections["train"].items() if name != "init"}
        if launched is not None and "strategy" in plan:
            plan = {name: value for name, value in plan.items() if name != "ranks"}
        if "strategy" in plan:  # an older version, which ran programs as they were written, said nothing of passes
            plan = {"passes": "none", **plan}
        return ConfigSource(str(self.checkpoint.folder), {**saved.sections, "plan": plan, "train": train})

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

    def has_ended(self, steps: int) -> bool:
        """Whether nothing is left to do: a run that was killed after its last step has its weights to write."""
        taken = self.checkpoint.step
        return steps < taken or (steps == taken and has_finished(self.out))

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
        return config_file(self.checkpoint.folder / CONFIG)
