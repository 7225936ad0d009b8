"""The folder that a training run leaves behind."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# matplotlib and safetensors leave some of their annotations out.

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from safetensors.torch import save_file
from torch import Tensor

from shardlab.check import Checked
from shardlab.draw import save_timeline
from shardlab.models import Model
from shardlab.models.tensors import views
from shardlab.program import UserError
from shardlab.simulate import simulate


class OutputFolder:
    """metrics.jsonl (a line a step, written at once), loss.svg, strategy.svg, weights.safetensors, model.json."""

    def __init__(self, path: Path) -> None:
        """Make the folder.

        Raises:
            UserError: when it exists, or cannot be made.
        """
        self.path = path
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            raise UserError(f"{path} exists; name a new folder with --out, so that nothing is overwritten") from None
        except OSError as error:
            raise UserError(f"the folder {path} cannot be made ({error.strerror}); name another with --out") from error
        self._metrics = (path / "metrics.jsonl").open("a")
        self._history: list[dict[str, Any]] = []

    def write_metrics(self, metrics: dict[str, Any]) -> None:
        """Append a step's figures; they are on disk when this returns."""
        self._history.append(metrics)
        self._metrics.write(json.dumps(metrics) + "\n")
        self._metrics.flush()

    def write_strategy(self, checked: Checked, name: str) -> None:
        """Draw the program that runs, in unit costs."""
        save_timeline(simulate(checked), self.path / "strategy.svg", f"{name}: one optimizer step")

    def write_weights(self, model: Model, flats: Sequence[Tensor]) -> None:
        """All parameters by name, `layers.<l>.<name>`, and the model's settings beside them."""
        tensors: dict[str, Tensor] = {}
        for layer, flat in enumerate(flats):
            layout = model.layout(layer)
            for parameter, view in zip(layout.parameters, views(layout, flat), strict=True):
                tensors[f"layers.{layer}.{parameter.name}"] = view.contiguous()
        save_file(tensors, self.path / "weights.safetensors")
        settings = {"kind": type(model).__name__, **asdict(model)}
        (self.path / "model.json").write_text(json.dumps(settings, indent=1) + "\n")

    def write_plot(self, before: float, after: float) -> None:
        """The training loss over the steps, with the validation loss at both ends."""
        figure = Figure(figsize=(7, 4), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        steps = [metrics["step"] for metrics in self._history]
        axes.plot(steps, [metrics["loss"] for metrics in self._history], linewidth=1.2, label="training")
        axes.plot([0, len(steps)], [before, after], "o", label="validation, before and after")
        axes.set(xlabel="optimizer step", ylabel="loss (nats per token)")
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(self.path / "loss.svg")

    def close(self) -> None:
        self._metrics.close()


def free_folder(parent: Path, name: str) -> Path:
    """`parent/name-1`, or the first number that is not taken."""
    number = 1
    while (parent / f"{name}-{number}").exists():
        number += 1
    return parent / f"{name}-{number}"
