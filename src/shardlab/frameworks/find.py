"""Which framework a configuration is for, and its settings.

`read_config` takes a file, or the name of a framework whose arguments are on the command line, and returns a `Config`.
`read_run` returns the step that a `Config` describes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

from shardlab.common.errors import UserError, naming, unknown_name, why_unreadable
from shardlab.common.files import require_regular_file
from shardlab.frameworks import deepspeed, megatron, nanotron, nemo, torchtitan
from shardlab.frameworks.python_config import read_python
from shardlab.frameworks.run import FrameworkRun
from shardlab.frameworks.settings import UNSET, Config, Setting, key_table
from shardlab.frameworks.shell import FLAG, Script, Word, flags_of, run_script
from shardlab.frameworks.yaml_file import read_json, read_yaml
from shardlab.simulate.hardware import Cluster

MOST_BYTES = 2**21
"""Largest size of a configuration, in bytes."""

FACTS: dict[str, tuple[str, ...]] = {
    "nodes": ("--nnodes", "--num_nodes", "--nodes", "-N", "--num_machines", "NNODES", "NUM_NODES", "SLURM_NNODES"),
    "per_node": (
        *("--nproc_per_node", "--nproc-per-node", "--num_gpus", "--gpus-per-node", "--ntasks-per-node"),
        *("GPUS_PER_NODE", "NPROC_PER_NODE", "NGPU", "NGPUS", "N_GPUS", "NUM_GPUS"),
    ),
    "devices": ("--num_processes", "WORLD_SIZE"),
}
"""Flags of launchers and usual variables that say on how many devices a script runs, by key of `Config.facts`."""


class Framework(NamedTuple):
    """Module of a framework.

    Attributes:
        run: function that returns the step of a configuration.
        changes: function that yields changes of a configuration that may help.
    """

    run: Callable[[Config, Cluster], FrameworkRun]
    changes: Callable[[Config, FrameworkRun], Any]


FRAMEWORKS: dict[str, Framework] = {
    torchtitan.NAME: Framework(torchtitan.run, torchtitan.changes),
    megatron.NAME: Framework(megatron.run, megatron.changes),
    nemo.NAME: Framework(nemo.run, nemo.changes),
    nanotron.NAME: Framework(nanotron.run, nanotron.changes),
    deepspeed.NAME: Framework(deepspeed.run, deepspeed.changes),
    deepspeed.ACCELERATE: Framework(deepspeed.run_accelerate, deepspeed.changes_accelerate),
}
"""Every framework that is read."""


@dataclass(frozen=True)
class Overrides:
    """Words after `--`: NAME=VALUE for variables of a script, and flags for settings."""

    variables: Mapping[str, str]
    words: tuple[Word, ...]

    @classmethod
    def of(cls, words: Sequence[str]) -> Overrides:
        """Divide words into variables and other words. NAME=VALUE sets a variable only before all other words."""
        variables: dict[str, str] = {}
        flags: list[Word] = []
        for word in words:
            assignment = None if flags else re.fullmatch(r"([A-Za-z_]\w*)=(.*)", word, re.DOTALL)
            if assignment:
                variables[assignment[1]] = assignment[2]
            else:
                flags.append(Word(word, 0))
        return cls(variables, tuple(flags))

    def require_flags(self, *, assignments: bool) -> None:
        """Refuse a word before the first flag, which would be ignored.

        Args:
            assignments: whether the framework takes KEY=VALUE as well.
        """
        first = self.words[0].text if self.words else ""
        if first and not FLAG.fullmatch(first) and not (assignments and "=" in first):
            raise UserError(f"{first!r:.100} is no setting; give --KEY VALUE" + " or KEY=VALUE" * assignments)


def read_config(name: str, overrides: Sequence[str] = (), framework: str | None = None) -> Config:
    """Return the settings of a configuration.

    Args:
        name: path of a file, or the name of a framework whose arguments are all in `overrides`.
        overrides: words that change the file's settings.
        framework: name of the framework (None: it is recognized by the contents).

    Raises:
        UserError: if the file cannot be read, or no framework is recognized.
    """
    if framework is not None and framework not in FRAMEWORKS:
        raise unknown_name("framework", framework, FRAMEWORKS)
    changed = Overrides.of(overrides)
    if name in FRAMEWORKS and not Path(name).exists():
        if name in READERS:
            raise UserError(f"{name} reads its configuration from a file; name the file")
        if not overrides:
            raise UserError(f"{name} has no arguments; give them after --, as in: explain {name} -- --key value")
        changed.require_flags(assignments=False)
        return _from_script("", "the command line", changed, name, Path())
    path = Path(name)
    require_regular_file(path)
    text = _text_of(path)
    with naming(path):
        config = _from_text(text, path, changed, framework)
        if framework not in (None, config.table.framework):
            raise UserError(f"this file is for {config.table.framework}, not {framework}; leave out --framework")
        takes_settings = config.table.framework in READERS
        if changed.variables and not takes_settings and path.suffix in (".toml", ".py", ".yaml", ".yml"):
            raise UserError(f"{next(iter(changed.variables))}=... is for a script; give settings as --KEY VALUE")
    changed.require_flags(assignments=takes_settings)
    return config


def _text_of(path: Path) -> str:
    """Return the text of a configuration.

    Raises:
        UserError: if it is no text, cannot be read, or is too large.
    """
    try:
        if path.stat().st_size > MOST_BYTES:
            raise UserError(f"{path} has more than {MOST_BYTES:,} bytes, which no configuration has; name another file")
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {why_unreadable(error)}") from None
    if "\0" in text:
        raise UserError(f"{path} is not text; name a configuration")
    return text


def _from_text(text: str, path: Path, changed: Overrides, framework: str | None) -> Config:
    if path.suffix == ".toml":
        settings, _ = torchtitan.read_arguments(flags_of(changed.words))
        file_settings = torchtitan.read_toml(text, path.name)
        if framework is None and not any(setting.key.split(".")[0] in torchtitan.SECTIONS for setting in file_settings):
            raise UserError(
                f"{path} has no section of torchtitan, such as training or parallelism; a plan of shardlab is for "
                "shardlab simulate --plan"
            )
        return Config(key_table(torchtitan.NAME), path.name, (*file_settings, *settings))
    if path.suffix == ".py":
        return _from_python(text, path, changed)
    if path.suffix in (".json", ".yaml", ".yml") or framework in READERS:
        return _from_table(text, path, changed, framework)
    if re.search(r"(^|\s)--[A-Za-z]", text):
        return _from_script(text, path.name, changed, framework, path.parent)
    raise UserError(
        f"{path} is for no known framework; give a torchtitan TOML or Python file, a script or list of "
        "Megatron-LM arguments, a YAML of NeMo, nanotron or accelerate, or a JSON of DeepSpeed"
    )


def _from_python(text: str, path: Path, changed: Overrides) -> Config:
    settings, selected = torchtitan.read_arguments(flags_of(changed.words))
    config = read_python(text, path.name, selected.get("config"))
    return Config(key_table(torchtitan.NAME), path.name, (*config.settings, *settings), notes=config.notes)


READERS: dict[str, Callable[[str, str, Sequence[Setting]], Config]] = {
    nemo.NAME: nemo.config_of,
    nanotron.NAME: nanotron.config_of,
    deepspeed.NAME: deepspeed.config_of,
    deepspeed.ACCELERATE: deepspeed.accelerate_config_of,
}
"""Readers of YAML and JSON files, by framework."""


def _from_table(text: str, path: Path, changed: Overrides, framework: str | None) -> Config:
    """Return the configuration of a YAML or JSON file."""
    read = read_json if path.suffix == ".json" else read_yaml
    document, settings = read(text, path.name)
    if framework is None and isinstance(document.get("MODEL_ARGS"), dict):  # a file of Megatron-LM's tests
        prefix = "MODEL_ARGS."
        model_settings = [
            setting._replace(key=setting.key.removeprefix(prefix))
            for setting in settings
            if setting.key.startswith(prefix)
        ]
        arguments = [setting for setting in model_settings if setting.value is not False and setting.value is not None]
        return Config(key_table(megatron.NAME), path.name, (*arguments, *flags_of(changed.words)))
    if (name := framework or _shape(document)) is None:
        raise UserError(f"{path.name} is for no known framework; --framework names it ({', '.join(FRAMEWORKS)})")
    if name not in READERS:
        raise UserError(f"{path.name} is YAML or JSON, which {name} does not read; leave out --framework")
    overrides = flags_of(changed.words)
    overrides += [Setting(key, value) for key, value in changed.variables.items()]
    overrides += [Setting(*pair) for word in changed.words if (pair := _assignment(word.text)) is not None]
    return READERS[name](text, path.name, overrides)


def _assignment(text: str) -> tuple[str, str] | None:
    """Return key and value of an override of Hydra, such as `model.x=1` or `+model.x=1`; None for other text."""
    match = re.fullmatch(r"\+{0,2}([a-z_][\w.]*)=(.*)", text, re.DOTALL)
    return None if match is None else (match[1], match[2])


def _shape(document: Mapping[str, Any]) -> str | None:
    """Return the framework whose sections a document has (None: they are of no known framework)."""
    model = document.get("model")
    if "parallelism" in document and ("tokens" in document or "optimizer" in document):
        return nanotron.NAME
    if {"distributed_type", "compute_environment", "fsdp_config", "deepspeed_config"} & document.keys():
        return deepspeed.ACCELERATE
    if {"zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size", "bf16", "fp16"} & document.keys():
        return deepspeed.NAME
    if isinstance(model, dict) and ("trainer" in document or "train" in document):
        return nemo.NAME
    if isinstance(model, dict) and any("parallel_size" in str(key) for key in cast(dict[Any, Any], model)):
        return nemo.NAME
    return None


def _from_script(text: str, file: str, changed: Overrides, framework: str | None, folder: Path) -> Config:
    script = run_script(text, changed.variables)
    launch, words = _training_command(script)
    arguments = flags_of([*words, *changed.words])
    dotted = [setting for setting in arguments if setting.key.removeprefix("--").split(".")[0] in torchtitan.SECTIONS]
    modules = {setting.key for setting in arguments} & {"--module", "--config", "--job.config_file"}
    variables = {name: word.text for name in ("CONFIG_FILE", "CONFIG", "MODULE") if (word := script.value(name))}
    facts = _facts(script, launch)
    notes = tuple(script.notes)
    if framework == torchtitan.NAME or (framework is None and (dotted or modules or "CONFIG_FILE" in variables)):
        settings, selected = torchtitan.read_arguments(arguments)
        settings = [setting for setting in settings if "." in setting.key] if framework is None else settings
        inner = selected.get("job.config_file") or variables.get("CONFIG_FILE", "")
        if inner and UNSET not in inner:
            settings = [*_inner_file(folder, inner, file), *settings]
        config = selected.get("config") or variables.get("CONFIG", "")
        module = selected.get("module") or variables.get("MODULE", "")
        path = folder / (module.replace(".", "/") + ".py")
        if config and module and path.is_file():
            read = read_python(_text_of(path), path.name, config)
            settings = [*(setting._replace(line=0) for setting in read.settings), *settings]
            notes = (*notes, *read.notes)
        elif config:
            settings = [*torchtitan.registry_settings(module, config), *settings]
        return Config(key_table(torchtitan.NAME), file, tuple(settings), facts, notes)
    settings = tuple(setting for setting in arguments if setting.line == 0 or setting.key.startswith("--"))
    config = Config(key_table(megatron.NAME), file, settings, facts, notes)
    if framework is None and not config.by_meaning:
        raise UserError(f"{file} has no argument of a known framework; --framework names it ({', '.join(FRAMEWORKS)})")
    return config


def _inner_file(folder: Path, inner: str, file: str) -> list[Setting]:
    for path in (folder / inner, folder / Path(inner).name):
        if path.is_file():
            settings = torchtitan.read_toml(_text_of(path), str(path))
            return [setting._replace(line=0) for setting in settings]  # a line of another file
    raise UserError(f"{file} starts torchtitan with {inner}, which is not beside it; name that file, or put it there")


def _training_command(script: Script) -> tuple[list[Word], list[Word]]:
    """Return the words of the launcher, and those of the arguments of the training program.

    If no command has a program with flags, the arguments are all words of the script's variables, arrays and commands.
    """
    best: tuple[list[Word], list[Word]] | None = None
    for words in _commands(script):
        texts = [word.text for word in words]
        programs = (
            [place for place, text in enumerate(texts) if text.endswith(".py")]
            or [place + 1 for place, text in enumerate(texts) if text in ("-m", "--module")]
            or [place for place, text in enumerate(texts) if text.endswith("run_train.sh")]
        )
        if programs and (best is None or len(words) - programs[0] > len(best[1])):
            best = words[: programs[0]], words[programs[0] + 1 :]
    if best is not None and any(word.text.startswith("--") for word in best[1]):
        return best
    all_words = [word for words in (*script.variables.values(), *script.commands) for word in words]
    pieces = [Word(piece, word.line) for word in all_words for piece in word.text.split()]
    flags = [piece for piece in pieces if piece.text.startswith("-")]
    return (best[0] if best else []), pieces if flags else []


def _commands(script: Script) -> list[list[Word]]:
    """Return the commands of a script, including those in texts that a shell runs (`bash -c`, `srun ... "..."`)."""
    commands: list[list[Word]] = []
    for words in script.commands:
        inner = next((word for word in words if " --" in word.text and re.search(r"\.py\b|run_train", word.text)), None)
        if inner is not None:
            program = run_script(inner.text, {name: value[0].text for name, value in script.variables.items() if value})
            for command in program.commands:
                commands.append([*words, *(word._replace(line=word.line + inner.line - 1) for word in command)])
        else:
            commands.append(words)
    return commands


def _facts(script: Script, launch: Sequence[Word]) -> dict[str, Setting]:
    """Return what a script says about its devices, by flags of the launcher, variables, and the scheduler's options."""
    facts: dict[str, Setting] = {}
    flags = {flag.key: flag for flag in flags_of([*script.directives, *launch])}
    if gres := flags.get("--gres"):
        count = re.search(r"gpu(?::\w+)?:(\d+)", str(gres.value))
        flags |= {"--gpus-per-node": Setting("--gres", count[1], gres.line)} if count else {}
    if "deepspeed" not in " ".join(word.text for word in launch):
        flags.pop("--num_gpus", None)
    for fact, names in FACTS.items():
        for name in names:
            value = script.value(name)
            setting = flags.get(name) or (value and Setting(name, value.text, value.line))
            if setting and (str(setting.value).isdecimal() or fact not in facts):
                facts[fact] = setting
                if str(setting.value).isdecimal():
                    break
    return facts


def read_run(config: Config, cluster: Cluster) -> FrameworkRun:
    """Return the step of a configuration on a cluster.

    Raises:
        UserError: if a required setting is missing, or numbers do not fit together.
    """
    return FRAMEWORKS[config.table.framework].run(config, cluster)
