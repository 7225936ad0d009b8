"""`shardlab explain CONFIG`: predict the step of another framework's configuration, and the changes that would help."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import tyro

from shardlab.cli.options import Flag, Name
from shardlab.cli.plan_options import DeviceMemory, cluster_called, limit_memory
from shardlab.language import UserError

if TYPE_CHECKING:
    from shardlab.frameworks.settings import Config
    from shardlab.simulate.hardware import Cluster


@dataclass(frozen=True)
class Explain:
    """Say what a configuration of another framework will do: time, memory, and the smallest changes that would help.

    The file may be a torchtitan TOML or the script that starts it, a shell script or list of Megatron-LM arguments, a
    YAML of NeMo, nanotron or accelerate, or a JSON of DeepSpeed, with the arguments of the training program after --.
    Keys that are not understood are listed. Each change concerns one key of the file, and its effect is predicted.
    """

    config: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CONFIG", help_behavior_hint="")]
    """The file, or the name of a framework (torchtitan, megatron) whose arguments all follow after --."""

    overrides: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="-- OVERRIDE ...", help_behavior_hint="")
    ] = ()
    """Arguments that replace those of the file, and NAME=VALUE for variables of a script."""

    cluster: Annotated[Name, tyro.conf.arg(help_behavior_hint="(default: the number that the file gives)")] = None
    """Type and number of devices, such as h100x64, or path/to/cluster.toml. The type alone (h100) is enough if the file
    gives the number."""

    framework: Annotated[Name, tyro.conf.arg(help_behavior_hint="(default: as the contents show)")] = None
    """Framework of the file: torchtitan, megatron, nemo, nanotron, deepspeed or accelerate."""

    model: Name = None
    """Model in place of the configuration's, such as llama3-8b or path/to/model.toml."""

    memory: DeviceMemory = None
    """Memory of each device that the step may use, such as 72GiB."""

    measured: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME=VALUE|LOG", help_behavior_hint="")] = ()
    """Figures of the measured run: step=2.4s, tokens/s=52000, tokens/s/device=6500, memory=71GiB (nvidia-smi's),
    reserved=70GiB, allocated=62GiB or mfu=38%; or a log of torchtitan, Megatron-LM or nanotron. The report then says
    what could explain the difference."""

    changes: Annotated[int, tyro.conf.arg(metavar="N")] = 6
    """Largest number of changes that are shown. 0 tries none."""

    verbose: Flag = False
    """Also list every key with its meaning, and the keys that do not matter."""

    json: Flag = False
    """Print only JSON."""

    def run(self) -> int:
        from shardlab.cli.explain.report import ExplainReport
        from shardlab.frameworks.changes import best_changes, predict, try_changes
        from shardlab.frameworks.find import read_config, read_run
        from shardlab.frameworks.logs import read_measured
        from shardlab.frameworks.measured import explain_difference
        from shardlab.simulate.predict.confidence import step_confidence

        if self.changes < 0:
            raise UserError(f"--changes is {self.changes}; give 0 or more")
        config = replace(read_config(self.config, self.overrides, self.framework), model=self.model or "")
        step = read_run(config, self._cluster(config))
        forecast = predict(step)
        trials = try_changes(step, forecast) if self.changes or self.measured else []
        confidences = step_confidence(step.workload)
        comparison = None
        if self.measured:
            figures = read_measured(self.measured)
            errors = {confidence.figure: confidence.error for confidence in confidences}
            time, memory = errors["time"], errors.get("memory", errors["time"])
            comparison = explain_difference(figures, step, forecast, trials, time, memory)
        best = best_changes(trials, forecast) if self.changes else []
        report = ExplainReport(step, forecast, confidences, best, self.changes, comparison)
        report.report(verbose=self.verbose).show(json=self.json)
        return 0

    def _cluster(self, config: Config) -> Cluster:
        """Return the cluster of the option. If the option names only a device, the file gives the number of devices.

        Raises:
            UserError: if the devices or their number are not known.
        """
        from shardlab.simulate.hardware import DEVICES
        from shardlab.simulate.hardware.device import ALIASES

        devices = config.devices
        if self.cluster is None:
            example = f"--cluster h100 (its number of devices is {devices:,})" if devices else "--cluster h100x64"
            missing_facts = "the type of its devices" if devices else "the type and the number of its devices"
            raise UserError(f"{config.file} does not say {missing_facts}; give {example}")
        name = self.cluster.strip().lower()
        if name not in DEVICES and name not in ALIASES:
            return limit_memory(cluster_called(self.cluster, other_machine=False), self.memory)
        if devices is None:
            raise UserError(f"{config.file} does not say the number of its devices; give --cluster {name}x64")
        cluster = limit_memory(cluster_called(f"{name}x{devices}", other_machine=False), self.memory)
        per_node = config.fact("per_node")
        if per_node is not None and per_node < cluster.per_node and devices % per_node == 0:
            nics = max(1, cluster.nics * per_node // cluster.per_node)
            cluster = replace(cluster, per_node=per_node, nodes=devices // per_node, nics=nics)
        return cluster
