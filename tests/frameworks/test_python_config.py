"""torchtitan's configurations in Python, which are read and not run."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardlab.common.errors import UserError
from shardlab.frameworks.find import read_config, read_run
from shardlab.frameworks.python_config import read_python
from shardlab.simulate.hardware import find_cluster

BASE = '''
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.qwen3 import model_registry
from torchtitan.trainer import Trainer

SEQUENCE = 4096


def ours() -> Trainer.Config:
    """A model on 64 devices."""
    model_spec = model_registry("8B", attn_backend="flex")
    return Trainer.Config(
        model_spec=model_spec,
        loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config()),
        training=TrainingConfig(local_batch_size=2, seq_len=2 * SEQUENCE, steps=100),
        parallelism=ParallelismConfig(tensor_parallel_degree=4),
        activation_checkpoint=FullAC.Config(),
    )
'''


def write_config(folder: Path, text: str) -> str:
    (folder / "ours.py").write_text(text)
    return str(folder / "ours.py")


def values_of(text: str, name: str | None = None) -> dict[str, object]:
    return {setting.key: setting.value for setting in read_python(text, "ours.py", name).settings}


def test_a_function_is_read_with_lines_and_its_step_predicted(tmp_path: Path) -> None:
    config = read_config(write_config(tmp_path, BASE))
    assert config.unknown == []
    assert (
        config.by_meaning["tp"].line
        == BASE.splitlines().index("        parallelism=ParallelismConfig(tensor_parallel_degree=4),") + 1
    )
    step = read_run(config, find_cluster("h100x64"))
    assert (step.model_name, step.model.seq_len, step.micro_batch_size) == ("qwen3 8B", 8192, 2)
    assert (step.plan.mesh.tp, step.plan.mesh.dp_shard, step.plan.recompute) == (4, 16, "full")
    assert step.recipe.switches["loss"].value == "chunked"


def test_words_after_it_change_it_and_choose_a_function(tmp_path: Path) -> None:
    other = BASE + "\n\ndef longer() -> Trainer.Config:\n    config = ours()\n    config.training.seq_len = 16384\n"
    other += "    config.activation_checkpoint = None\n    return config\n"
    with pytest.raises(UserError, match=r"ours\.py has 2 configurations; give one of them .* --config ours"):
        read_config(write_config(tmp_path, other))
    config = read_config(
        write_config(tmp_path, other), ["--config", "longer", "--parallelism.tensor_parallel_degree=8"]
    )
    assert (config.values["seq_len"], config.values["tp"], config.values["recompute"]) == (16384, 8, "none")
    assert config.values["local_batch"] == 2
    with pytest.raises(UserError, match="has no configuration 'shorter'; it has ours and longer"):
        read_config(write_config(tmp_path, other), ["--config", "shorter"])


def test_a_function_of_the_registry_is_the_beginning() -> None:
    text = """
from torchtitan.models.llama3.config_registry import llama3_70b

def run() -> Trainer.Config:
    config = llama3_70b()
    config.parallelism.tensor_parallel_degree = 2 * 2
    config.activation_checkpoint = SelectiveAC.Config()
    return config
"""
    values = values_of(text)
    assert (values["model.flavor"], values["training.max_context_length"]) == ("70B", 8192)
    assert (values["parallelism.tensor_parallel_degree"], values["activation_checkpoint.mode"]) == (4, "selective")


def test_a_value_that_is_not_followed_is_asked_for(tmp_path: Path) -> None:
    unknown = BASE.replace("tensor_parallel_degree=4", "tensor_parallel_degree=int(os.environ['TP'])")
    with pytest.raises(UserError, match=r"does not set the variables of parallelism\.tensor_parallel_degree"):
        _ = read_config(write_config(tmp_path, unknown)).values
    config = read_config(write_config(tmp_path, unknown), ["--parallelism.tensor_parallel_degree=2"])
    assert config.values["tp"] == 2


def test_lines_that_are_not_followed_are_notes(tmp_path: Path) -> None:
    text = BASE.replace("    return Trainer", "    for each in range(3):\n        print(each)\n    return Trainer")
    config = read_config(write_config(tmp_path, text))
    assert config.notes == ("line 15 is not followed: for each in range(3):",)
    assert config.values["tp"] == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def train(:\n", "is no Python: line 1: "),
        ("x = 1\n", "has no function that returns a Trainer.Config of torchtitan"),
        ("def f() -> Trainer.Config:\n    return f()\n", "f calls itself"),
        ("def f() -> Trainer.Config:\n    return load('x')\n", "what f returns is not followed"),
        ("def f() -> Trainer.Config:\n    return " + "-" * 5000 + "1\n", "ours.py"),
    ],
)
def test_what_is_no_configuration_is_refused_in_a_sentence(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        read_config(write_config(tmp_path, text))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_code_is_not_run(tmp_path: Path) -> None:
    text = f"open({str(tmp_path / 'made')!r}, 'w')\n" + BASE
    read_config(write_config(tmp_path, text))
    assert not (tmp_path / "made").exists()


def test_a_script_that_starts_a_function_of_a_file_beside_it_is_read_with_it(tmp_path: Path) -> None:
    write_config(tmp_path, BASE)
    (tmp_path / "run.sh").write_text(
        "torchrun --nproc_per_node 8 --nnodes 8 -m torchtitan.train \\\n"
        "    --module ours --config ours --training.seq_len=2048\n"
    )
    config = read_config(str(tmp_path / "run.sh"))
    assert (config.values["seq_len"], config.values["tp"], config.devices) == (2048, 4, 64)
    assert config.version == "2026, in Python (loss.class)"


def test_recomputation_is_per_op_where_a_configuration_names_none(tmp_path: Path) -> None:
    text = BASE.replace("        activation_checkpoint=FullAC.Config(),\n", "")
    assert read_run(read_config(write_config(tmp_path, text)), find_cluster("h100x64")).plan.recompute == "per-op"


@pytest.mark.parametrize(
    ("module", "name", "cluster", "words"),
    [
        ("qwen3", "qwen3_32b", "h100x64", ("qwen3 32B", "full", 1)),
        ("qwen3", "qwen3_30b_a3b", "h100x64", ("qwen3 30B-A3B", "full", 1)),
        ("deepseek_v3", "deepseek_v3_16b", "h100x64", ("deepseek_v3 16B", "per-op", 8)),
    ],
)
def test_functions_of_other_models_registries_are_known(
    module: str, name: str, cluster: str, words: tuple[str, str, int]
) -> None:
    step = read_run(read_config("torchtitan", ["--module", module, "--config", name]), find_cluster(cluster))
    assert (step.model_name, step.plan.recompute, step.plan.mesh.ep) == words
    assert step.model.seq_len == 4096
    assert step.recipe.switches["compile"].value == "off", "deepseek compiles its loss alone"
