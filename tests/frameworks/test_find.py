"""Which framework a configuration is for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.common.errors import UserError
from shardlab.frameworks.find import read_config, read_run
from shardlab.simulate.hardware import find_cluster

EXAMPLES = Path(__file__).parents[2] / "examples" / "frameworks"


def test_a_script_says_on_how_many_devices_it_runs() -> None:
    config = read_config(str(EXAMPLES / "train_70b.sh"))
    assert config.table.framework == "megatron"
    assert (config.fact("nodes"), config.fact("per_node"), config.devices) == (8, 8, 64)
    assert config.unknown == []


def test_a_number_of_nodes_that_python_cannot_read_is_not_known(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text("torchrun --nnodes \u00b2 --nproc_per_node 8 pretrain_gpt.py --num-layers 2\n")
    config = read_config(str(path))
    assert (config.fact("nodes"), config.fact("per_node"), config.devices) == (None, 8, None)


def test_variables_and_arguments_after_the_dashes_replace_those_of_the_script() -> None:
    config = read_config(str(EXAMPLES / "train_70b.sh"), ["PP=8", "--micro-batch-size", "2"])
    assert (config.values["pp"], config.values["micro_batch_size"]) == (8, 2)


def test_half_a_script_gives_what_it_has(tmp_path: Path) -> None:
    half = tmp_path / "half.sh"
    half.write_text("\n".join((EXAMPLES / "train_70b.sh").read_text().splitlines()[:38]))
    config = read_config(str(half))
    assert config.values["layers"] == 80
    with pytest.raises(UserError, match="gives no --micro-batch-size"):
        read_run(config, find_cluster("h100x64"))


def test_a_list_of_arguments_is_read(tmp_path: Path) -> None:
    path = tmp_path / "arguments.txt"
    path.write_text("--num-layers 24\n--hidden-size 2048\n--num-attention-heads 16\n--tensor-model-parallel-size 2\n")
    config = read_config(str(path))
    assert config.values["tp"] == 2
    assert config.by_meaning["hidden_size"].line == 2


def test_a_variable_without_a_value_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text("python pretrain_gpt.py --num-layers $LAYERS --hidden-size 2048\n")
    with pytest.raises(UserError, match=r"--num-layers \(line 1: \$\{LAYERS\}\)"):
        _ = read_config(str(path)).values
    assert read_config(str(path), ["LAYERS=4"]).values["layers"] == 4


def test_a_script_of_torchtitan_names_its_file(tmp_path: Path) -> None:
    (tmp_path / "llama3_8b.toml").write_text((EXAMPLES / "llama3_8b.toml").read_text())
    script = tmp_path / "run.sh"
    script.write_text('NGPU=8 \nCONFIG_FILE="./llama3_8b.toml"\n./run_train.sh --training.local_batch_size 1\n')
    config = read_config(str(script))
    assert (config.table.framework, config.devices) == ("torchtitan", 8)
    assert (config.values["local_batch"], config.values["seq_len"]) == (1, 8192)


def test_a_file_that_a_script_names_and_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "llama3_8b.toml").write_bytes(b"\xff")
    script = tmp_path / "run.sh"
    script.write_text("CONFIG_FILE=./llama3_8b.toml\n./run_train.sh --training.local_batch_size 1\n")
    with pytest.raises(UserError, match=r"llama3_8b\.toml cannot be read: it is not text"):
        read_config(str(script))


@pytest.mark.parametrize("text", ["", "hello", "\0", "[plan]\ntp = 2\n", "x: 1\n"])
def test_other_files_are_refused_in_a_sentence(text: str, tmp_path: Path) -> None:
    for name in ("train.toml", "train.sh", "train.txt"):
        path = tmp_path / name
        path.write_text(text)
        with pytest.raises(UserError, match=name):
            read_config(str(path))


def test_a_missing_file_and_an_unknown_framework_are_refused() -> None:
    with pytest.raises(UserError, match="does not exist"):
        read_config("no.toml")
    with pytest.raises(UserError, match="did you mean megatron"):
        read_config("no.toml", framework="megatorn")
    with pytest.raises(UserError, match="give them after --"):
        read_config("megatron")
    with pytest.raises(UserError, match="name the file"):
        read_config("nanotron")


@pytest.mark.parametrize(
    ("overrides", "framework", "sentence"),
    [
        ([], "megatron", "this file is for torchtitan, not megatron; leave out --framework"),
        (["STEPS=3"], None, "STEPS=... is for a script; give settings as --KEY VALUE"),
        (["4096"], None, "'4096' is no setting; give --KEY VALUE"),
        (["training.seq_len=4096"], None, "'training.seq_len=4096' is no setting; give --KEY VALUE"),
    ],
)
def test_words_without_effect_are_refused(
    overrides: list[str], framework: str | None, sentence: str, tmp_path: Path
) -> None:
    path = tmp_path / "train.toml"
    path.write_text("[training]\nseq_len = 2048\n")
    with pytest.raises(UserError, match=re.escape(sentence)):
        read_config(str(path), overrides, framework)


@given(st.lists(st.text(st.sampled_from("-=abc 1.\n$'\""), min_size=1, max_size=12), min_size=1, max_size=6))
def test_any_words_are_read_or_refused(words: list[str]) -> None:
    try:
        config = read_config("megatron", words)
        _ = config.values, config.unknown, config.version
    except UserError:
        pass
