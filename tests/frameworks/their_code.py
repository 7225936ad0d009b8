"""Parse written files with a framework's own configuration code, in a process of its own.

`parse(warm, framework, files)` starts this file with the packages of `packages/FRAMEWORK.txt`, which `make frameworks`
installs below .venv/frameworks without their dependencies. There, `main` prints what the framework makes of each file.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import types
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

from tests.support.warm import WarmStarts

INSTALLED = Path(sys.prefix) / "frameworks"
"""Folder with a folder of packages for each framework."""

MARK = "parsed: "
"""Beginning of the line with the result, beside which frameworks print warnings."""


def parse(
    warm: WarmStarts, framework: str, files: Sequence[Path], arguments: Sequence[Sequence[str]] = ()
) -> list[dict[str, Any]]:
    """Return what a framework's own code makes of each file, or the error that it raises under "error".

    Args:
        warm: starts the process, which has torch already.
        framework: name of a list of packages.
        files: the files.
        arguments: words of the training program for each file, for DeepSpeed.
    """
    packages = INSTALLED / framework
    assert packages.is_dir(), f"{packages} does not exist; run make frameworks"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu"}
    words = arguments or [()] * len(files)
    lines = [[str(file), *options] for file, options in zip(files, words, strict=True)]
    result = warm.run([__file__, str(packages), json.dumps(lines)], env=environment)
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(next(line for line in result.stdout.splitlines() if line.startswith(MARK)).removeprefix(MARK))


class _StandIns(MetaPathFinder, Loader):
    """Finder of modules whose every attribute is a class that takes any arguments.

    torchtitan's modules of kernels and data are imported by its configurations, which never call them.
    """

    def __init__(self, names: set[str]) -> None:
        self._names = names

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.partition(".")[0] in self._names else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class _StandIn(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (MagicMock,), {})


def torchtitan_toml(file: str) -> dict[str, Any]:
    """Return the sections of release 0.2.2's `JobConfig`."""
    if "torchtitan" not in sys.modules:
        package = types.ModuleType("torchtitan")  # without its __init__, which imports triton
        package.__path__ = [str(INSTALLED / "torchtitan-0.2" / "torchtitan")]
        sys.modules["torchtitan"] = package
    manager = importlib.import_module("torchtitan.config").ConfigManager()
    return manager.parse_args(["--job.config_file", file]).to_dict()


def torchtitan_python(file: str) -> dict[str, Any]:
    """Return the fields of release 0.3.0's `Trainer.Config`, which its `ConfigManager` finds by module and function."""
    importlib.import_module("torch._inductor.compile_fx")  # asks for the real triton
    importlib.import_module("torch.nn.attention.flex_attention")
    if not any(isinstance(finder, _StandIns) for finder in sys.meta_path):
        sys.meta_path.insert(0, _StandIns({"triton", "datasets"}))
    path = Path(file)
    sys.path.insert(0, str(path.parent))
    sys.modules.pop(path.stem, None)
    manager = importlib.import_module("torchtitan.config").ConfigManager()
    config = manager.parse_args(["--module", path.stem, "--config", "train"])
    sys.path.pop(0)
    fields = {section: _fields(getattr(config, section)) for section in ("training", "parallelism", "compile")}
    return fields | {
        "model": [config.model_spec.name, config.model_spec.flavor],
        "layers": len(config.model_spec.model.layers),
        "loss": type(config.loss).__qualname__,
        "activation_checkpoint": type(config.activation_checkpoint).__qualname__,
    }


def _fields(config: Any) -> dict[str, Any]:
    dataclasses = importlib.import_module("dataclasses")
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}


def deepspeed_json(file: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Return DeepSpeed's configuration, after transformers has compared it with the Trainer's arguments."""
    transformers = importlib.import_module("transformers")
    parser = transformers.HfArgumentParser(transformers.TrainingArguments)
    words = [*arguments, "--use_cpu", "--output_dir", str(Path(file).parent / "out")]
    trainer, rest = parser.parse_args_into_dataclasses(words, return_remaining_strings=True)
    module = importlib.import_module("transformers.integrations.deepspeed")
    document = json.loads(Path(file).read_text())
    sequences = document.pop("train_batch_size")  # of all processes, and one is started here
    compared = module.HfTrainerDeepSpeedConfig({**document})
    compared.trainer_config_process(trainer)
    module.unset_hf_deepspeed_config()
    config = importlib.import_module("deepspeed.runtime.config").DeepSpeedConfig(document)
    return {
        "stage": config.zero_config.stage,
        "bf16": config.bfloat16_config.enabled,
        "micro_batch": config.train_micro_batch_size_per_gpu,
        "accumulation": config.gradient_accumulation_steps,
        "sequences": sequences,
        "mismatches": compared.mismatches,
        "checkpointing": trainer.gradient_checkpointing,
        "rest": rest,
    }


def accelerate_yaml(file: str) -> dict[str, Any]:
    """Return the fields of accelerate's configuration."""
    config: Any = importlib.import_module("accelerate.commands.config.config_args").load_config_from_file(file)
    names = ("num_processes", "num_machines", "mixed_precision", "distributed_type", "fsdp_config")
    return {name: getattr(config, name) for name in names}


def main(packages: str, lines: str) -> None:
    """Print the result for each file, which its arguments follow."""
    sys.path.insert(0, packages)
    results: list[dict[str, Any]] = []
    for file, *arguments in json.loads(lines):
        try:
            if file.endswith(".toml"):
                results.append(torchtitan_toml(file))
            elif file.endswith(".py"):
                results.append(torchtitan_python(file))
            elif file.endswith(".yaml"):
                results.append(accelerate_yaml(file))
            else:
                with contextlib.redirect_stdout(sys.stderr):
                    results.append(deepspeed_json(file, arguments))
        except (Exception, SystemExit) as error:  # whatever the framework raises, or says and exits
            results.append({"error": f"{type(error).__name__}: {error}"})
    print(MARK + json.dumps(results, default=str))


if __name__ == "__main__":
    main(*sys.argv[1:])
