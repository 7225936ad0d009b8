"""`--model` and the flags beside it: which model they make."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import tyro

from shardlab.cli import main
from shardlab.cli.model_options import ModelOptions, SizeOptions
from shardlab.language import UserError
from shardlab.models import GPT, MLP, Blocks, Llama, Mixtral, MoE, find_model

Captured = pytest.CaptureFixture[str]


def make(line: str, **small: Any) -> Blocks:
    return tyro.cli(ModelOptions, args=line.split()).make(7, **small)


@pytest.mark.parametrize(
    ("line", "model"),
    [
        ("", GPT(layers=7)),
        ("--model gpt --layers 3 --no-bias --tied --dropout 0.1", GPT(layers=3, bias=False, tied=True, dropout=0.1)),
        ("--model LLAMA --kv-heads 2 --ffn-hidden-size 96", Llama(layers=7, kv_heads=2, ffn_hidden_size=96)),
        ("--model mlp --vocab-size 300 --seq-len 8", MLP(layers=7, vocab_size=300, seq_len=8)),
        ("--model moe --experts 8 --top-k 1 --auxiliary 0.1", MoE(layers=7, experts=8, top_k=1, auxiliary=0.1)),
        ("--model moe --auxiliary 0 --dropout 0", MoE(layers=7, auxiliary=0.0)),
        ("--model mixtral --capacity-factor none", Mixtral(layers=7, capacity_factor=None)),
        ("--model mixtral --capacity-factor 2", Mixtral(layers=7, capacity_factor=2.0)),
    ],
)
def test_flags_change_an_architecture(line: str, model: Blocks) -> None:
    assert make(line) == model


def test_a_published_model_keeps_its_sizes_unless_a_flag_changes_them() -> None:
    assert make("--model llama3-8b", hidden_size=16) == find_model("llama3-8b")
    small = make("--model gpt2-xl --layers 2 --untied")
    assert (small.layers, small.hidden_size) == (2, 1600)
    assert not small.borrowed(1)


def test_a_command_may_want_its_architectures_smaller() -> None:
    assert make("--heads 2", hidden_size=16, experts=8) == GPT(layers=7, hidden_size=16, heads=2)
    assert make("--model mlp", hidden_size=16, heads=2) == MLP(layers=7, hidden_size=16)


def test_a_file_is_a_model_too(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('model = "gpt2"\nlayers = 2\n')
    assert (make(f"--model {file} --seq-len 32").layers, make(f"--model {file} --seq-len 32").seq_len) == (2, 32)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--model lama", "there is no model 'lama'; did you mean llama?"),
        ("--model mlp --heads 2", "a model of this kind (MLP) has no heads"),
        ("--model gpt --experts 2", "a model of this kind (GPT) has no experts"),
        ("--model llama --heads 3", "hidden_size 64 does not divide by 3 heads"),
        ("--tied --untied", "both --tied and --untied were given"),
    ],
)
def test_what_does_not_go_together_is_refused(line: str, said: str) -> None:
    with pytest.raises(UserError) as refusal:
        make(line)
    assert said in str(refusal.value)


def test_text_is_bytes_so_that_a_small_vocabulary_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--vocab-size", "100"]) == 2
    said = capsys.readouterr().err
    assert "(bytes), but the model's vocabulary is 100; give --vocab-size 256" in said
    assert "the source of Python's standard library: tokens go up to" in said


def test_a_word_is_no_capacity_factor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--model", "moe", "--capacity-factor", "full"]) == 2
    assert "'full' is not a number; give one, or none" in " ".join(capsys.readouterr().err.split())


def test_simulate_and_plan_take_the_flags_of_a_models_sizes(capsys: Captured) -> None:
    words = ["--model", "llama", "--layers", "2", "--hidden-size", "512", "--heads", "4", "--head-dim", "64"]
    cluster = ["--cluster", "h100x2", "--ffn-hidden-size", "1024", "--vocab-size", "1024", "--json"]
    assert main(["simulate", "--dp-shard", "2", *words, *cluster]) == 0
    flops = json.loads(capsys.readouterr().out)["model_flops"]
    assert main(["simulate", "--dp-shard", "2", *words[:-2], *cluster]) == 0
    assert json.loads(capsys.readouterr().out)["model_flops"] > flops
    assert main(["plan", *words, *cluster, "--seconds", "1"]) == 0
    commands = json.loads(capsys.readouterr().out)["commands"]
    assert all("--hidden-size 512 --heads 4 --head-dim 64" in command for command in commands.values())


def test_sizes_without_a_model_are_refused(capsys: Captured) -> None:
    assert main(["simulate", "fsdp", "--hidden-size", "512"]) == 2
    assert "--hidden-size needs a model and a cluster" in capsys.readouterr().err


def test_words_of_sizes_say_the_given_flags() -> None:
    sizes = SizeOptions(hidden_size=64, capacity_factor=math.inf, no_bias=True, tied=True)
    assert sizes.words() == ["--hidden-size", "64", "--capacity-factor", "none", "--no-bias", "--tied"]


def test_what_a_configuration_leaves_out_is_said_on_stderr(tmp_path: Path, capsys: Captured) -> None:
    config = {"model_type": "gpt_neox", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    config |= {"intermediate_size": 128, "max_position_embeddings": 64, "vocab_size": 128, "rotary_pct": 0.25}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["simulate", "--dp-shard", "2", "--model", str(tmp_path), "--cluster", "h100x2", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["model"] == str(tmp_path)
    assert "rotary_pct is 0.25, not 1.0" in err
